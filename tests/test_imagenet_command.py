"""The literal commands of CoOp's users on an ImageNet-layout tree with a ViT-B/16 file in OpenAI's layout."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(Path(__file__).parent / "trainers"))
from tiny_world import random_openai_state  # noqa: E402

pytestmark = pytest.mark.slow
CLASSES = 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("weights") / "ViT-B-16.pt"
    torch.save(random_openai_state(layers=12, width=768, text_width=512, embed=512, size=224), file)
    return file


TRAINERS = ("", "MaPLe", "CoOp", "ZeroshotCLIP", "CoCoOp", "PromptSRC", "MMRL")  # "": no --trainer, which is DeAR
CASES = [("sorted", trainer) for trainer in TRAINERS] + [("flat", trainer) for trainer in TRAINERS[:4]]


@pytest.fixture(scope="module")
def data(request, tmp_path_factory) -> Path:
    """20 classes with 3 train and 2 val images; a flat val has its ids in val_wnids.txt."""
    root = tmp_path_factory.mktemp(request.param) / "my data ä"
    folder, rng, lines = root / "imagenet", np.random.default_rng(0), []
    ids = [f"n{1440764 + 37 * i:08d}" for i in range(CLASSES)]
    for wnid in ids:
        for part, count in (("train", 3), ("val", 2)):
            for i in range(count):
                name = f"{wnid}_{i}.JPEG" if part == "train" else f"ILSVRC2012_val_{wnid}_{i}.JPEG"
                place = folder / "images" / part / ("" if part == "val" and request.param == "flat" else wnid)
                place.mkdir(parents=True, exist_ok=True)
                Image.fromarray(rng.integers(0, 255, (80, 100, 3), np.uint8)).save(place / name, format="JPEG")
                if part == "val":
                    lines.append(f"{name} {wnid}")
    (folder / "classnames.txt").write_text("".join(f"{w} thing {i} (kind)\n" for i, w in enumerate(ids)))
    if request.param == "flat":
        (folder / "val_wnids.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.mark.parametrize(("data", "name"), CASES, indirect=["data"])
def test_base_then_new(name, data, weights, tmp_path):
    trainer, name = ("--trainer", name) if name else (), name or "DeAR"
    environment = os.environ | {"DATA": str(data), "PYTHON": sys.executable}
    short = ["--shots", "1", "--backbone", str(weights), "OPTIM.MAX_EPOCH", "1", "DATALOADER.NUM_WORKERS", "1",
             "DATALOADER.TRAIN_X.BATCH_SIZE", "4"]  # fmt: skip

    def call(script: str, *extra: str) -> dict:
        command = ["bash", "scripts/dear/" + script, "imagenet", "1", *trainer, *extra, *short]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert run.returncode == 0, run.stderr[-2000:]
        return json.loads((Path(extra[extra.index("--output-dir") + 1]) / "result.json").read_text())

    base = call("base2new_train.sh", "--output-dir", str(tmp_path / "base"))
    assert (base["trainer"], base["classes"], base["total"], len(base["classnames"])) == (name, "base", 20, 10)
    assert base["steps"] == (0 if name == "ZeroshotCLIP" else 2)
    if name == "DeAR":  # the YAML names the shipped starting map: no map carries the hash of these weights
        assert base["role_map_method"] == "published-labels"
        assert "Role map: openai_vit_b16 (published-labels" in (tmp_path / "base" / "log.txt").read_text()
        assert "not an entropy map" in (tmp_path / "base" / "log.txt").read_text()
    model = () if name == "ZeroshotCLIP" else ("--model-dir", str(tmp_path / "base"))
    new = call("base2new_test.sh", "--output-dir", str(tmp_path / "new"), *model)
    assert (new["classes"], new["total"], new["classnames"][0]) == ("new", 20, "thing 10 (kind)")
