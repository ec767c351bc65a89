"""The loader's comparison: both sides read the same images, and what it prints is what was measured."""

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import bench_loader  # noqa: E402


def test_table_and_a_folder_without_images(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for i in range(5):
        place = tmp_path / "images" / f"class {i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (40, 50, 3), np.uint8)).save(place / f"{i}.JPG", format="JPEG")
    flags = ["--size", "32", "--limit", "12", "--repeats", "2", "--batch", "4", "--workers", "0"]
    assert bench_loader.main(["--images", str(tmp_path / "images"), *flags]) == 0
    head, _, row = capsys.readouterr().out.splitlines()[:3]
    cells = dict(zip(*([cell.strip() for cell in line.split("|")[1:-1]] for line in (head, row)), strict=True))
    assert cells["workers"] == "0" and float(cells["ours images/s"]) > 0 and float(cells["ImageFolder images/s"]) > 0
    (tmp_path / "empty").mkdir()
    assert bench_loader.main(["--images", str(tmp_path / "empty"), *flags]) == 2
    assert "empty has no images" in capsys.readouterr().err


def test_both_sides_see_the_same_pixels_in_the_same_order(tmp_path, monkeypatch):
    place = tmp_path / "images" / "a"
    place.mkdir(parents=True)
    for i in range(7):
        Image.new("RGB", (40, 50), (30 * i, 0, 255 - 30 * i)).save(place / f"{i}.png")
    seen: dict[object, list[torch.Tensor]] = {}

    def collect(make, key):
        batches = [batch[key] for batch in make()]
        seen[key] = batches
        return 1.0, 1.0, sum(map(len, batches))

    monkeypatch.setattr(bench_loader, "cost", collect)
    assert bench_loader.main(["--images", str(place), "--size", "32", "--limit", "9", "--repeats", "1", "--batch", "4",
                              "--workers", "0"]) == 0  # fmt: skip
    assert [len(batch) for batch in seen["img"]] == [4, 4, 1]
    assert torch.equal(torch.cat(seen["img"]), torch.cat(seen[0]))
