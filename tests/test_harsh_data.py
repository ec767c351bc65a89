"""Data as users have it: read-only, named in any script, with a broken file; and images decoded in the workers."""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.shapes import Scene, render
from dear_plugin.engine import data as engine_data
from dear_plugin.engine import get_cfg_default

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("rote Tasse ä", "赤い花", "красный дом", "tasse à café’")  # each folder name is a class name
WITHOUT_ROOT = ["setpriv", "--bounding-set=-dac_override,-dac_read_search,-fowner"]  # file modes count for root too


@pytest.fixture
def pictures(tmp_path) -> Path:
    root, rng = tmp_path / "Daten ü 数据", np.random.default_rng(0)
    for name, color in zip(NAMES, ("red", "green", "blue", "white"), strict=True):
        (root / name).mkdir(parents=True)
        for i in range(6):
            picture = render(Scene(color, "cup", "plain", "center", "large"), rng)
            Image.fromarray(picture).save(root / name / f"Bild {i} é.png")
    return root


def command(root: Path, out: Path, *words: str, trainer: str = "DeAR", dataset: str = "folder") -> list[str]:
    return [sys.executable, "scripts/train.py", "--root", str(root), "--seed", "1", "--trainer", trainer,
            "--output-dir", str(out), "--dataset-config-file", f"configs/datasets/{dataset}.yaml", "--config-file",
            f"configs/trainers/{trainer}/tiny.yaml", *(["--eval-only"] if trainer == "ZeroshotCLIP" else []),
            "DATASET.NUM_SHOTS", "2", "OPTIM.MAX_EPOCH", "1", *words]  # fmt: skip


def run(call: list[str], *, as_user: bool = False, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([*(as_ordinary_user() if as_user else []), *call], cwd=ROOT, capture_output=True,
                          env=os.environ | environment)  # fmt: skip


def as_ordinary_user() -> list[str]:
    """What to put before a command so that file modes hold for it; skips where root cannot give its powers up."""
    if os.geteuid():
        return []
    if not shutil.which("setpriv") or subprocess.run([*WITHOUT_ROOT, "true"], capture_output=True).returncode:
        pytest.skip("runs as root, which may write anywhere, and setpriv cannot take that away here")
    return WITHOUT_ROOT


def lock_tree(root: Path, *, locked: bool = True) -> None:
    for path in [root, *root.rglob("*")]:
        path.chmod((0o555 if path.is_dir() else 0o444) if locked else (0o755 if path.is_dir() else 0o644))


def seen(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}


def test_read_only_data_is_trained_on_and_left_as_it_is(pictures, tmp_path):
    lock_tree(pictures)
    before = seen(pictures)
    try:
        refused = run([sys.executable, "-c", "import sys; open(sys.argv[1], 'w')", str(pictures / "x")], as_user=True)
        assert b"PermissionError" in refused.stderr  # else this test could not fail
        # ... and with a home that nothing can be written to
        done = run(command(pictures, tmp_path / "out"), as_user=True, HOME="/proc", DEAR_CACHE="/proc/no/cache")
    finally:
        lock_tree(pictures, locked=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))["steps"] == 2
    lock_tree(pictures)
    assert seen(pictures).keys() == before.keys() and seen(pictures) == before
    lock_tree(pictures, locked=False)


DRAW = "import sys; from pathlib import Path; from datasets.{0} import {1}; {1}(Path(sys.argv[1]){2})"


@pytest.mark.parametrize("call", [("shapes_benchmark", "ensure_shapes", ""),
                                  ("shapes_variants", "ensure_variant", ", 'ShapesTexture'")])  # fmt: skip
def test_a_set_that_must_be_drawn_first_says_so_where_it_cannot_be(call, tmp_path):
    (tmp_path / "data").mkdir()
    lock_tree(tmp_path / "data")
    done = run([sys.executable, "-c", DRAW.format(*call), str(tmp_path / "data")], as_user=True)
    said = done.stderr.decode()
    assert "PermissionError: " in said and "cannot be written (Permission denied)" in said
    assert "run once with a --root that can be written" in said


def test_names_in_any_script_on_a_console_that_has_only_ascii(pictures, tmp_path):
    done = run(command(pictures, tmp_path / "Ausgabe ß"), LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    result = json.loads((tmp_path / "Ausgabe ß" / "result.json").read_text(encoding="utf-8"))
    assert result["classnames"] == sorted(NAMES)
    with open(tmp_path / "Ausgabe ß" / "predictions.csv", newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    assert {row["true"] for row in rows} == set(NAMES) and len(rows) == result["total"]
    assert all((pictures / row["path"]).is_file() for row in rows)
    assert f"Prompt: a photo of a {sorted(NAMES)[-1]}." in (tmp_path / "Ausgabe ß" / "log.txt").read_text("utf-8")


def test_a_broken_image_stops_with_its_path_or_is_counted(pictures, tmp_path):
    bad = pictures / NAMES[1] / "Bild 3 é.png"
    bad.write_bytes(bad.read_bytes()[:150])
    setting = ("DATALOADER.NUM_WORKERS", "2", "DATASET.NUM_SHOTS", "-1")
    done = run(command(pictures, tmp_path / "a", *setting))
    lines = [line for line in done.stderr.decode().splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1
    assert f"image {bad} cannot be read" in lines[0] and "DATASET.SKIP_BROKEN True" in lines[0]
    assert not (tmp_path / "a" / "result.json").exists()
    done = run(command(pictures, tmp_path / "b", *setting, "DATASET.SKIP_BROKEN", "True"))
    assert done.returncode == 0, done.stderr.decode()
    result = json.loads((tmp_path / "b" / "result.json").read_text(encoding="utf-8"))
    assert [Path(path) for path in result["skipped_images"]] == [bad]
    assert "Left out 1 missing or broken images" in done.stdout.decode()


@pytest.mark.parametrize("workers", [0, 2])
def test_images_are_decoded_in_the_worker_processes(workers, pictures, monkeypatch):
    paths = sorted(pictures.rglob("*.png"))
    real = engine_data.read_image

    def read_here(path: str) -> Image.Image:
        image = real(path)
        image.info["pid"] = os.getpid()
        return image

    monkeypatch.setattr(engine_data, "read_image", read_here)
    cfg = get_cfg_default()
    cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.TEST.BATCH_SIZE = workers, 4
    items = [engine_data.Datum(str(path), 0, 0, "x") for path in paths]
    loader = engine_data.build_data_loader(cfg, items, cfg.DATALOADER.TEST, is_train=False,
                                           transform=lambda image: torch.tensor(image.info["pid"]))  # fmt: skip
    where = {int(pid) for batch in loader for pid in batch["img"]}
    assert where == {os.getpid()} if workers == 0 else len(where) == workers and os.getpid() not in where
