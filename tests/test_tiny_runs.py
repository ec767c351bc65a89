"""The shipped backbone through the real commands: train, test on new classes, predict, and what is refused."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets.shapes import Scene, render
from dear_plugin import RoleMap, load_backbone, wrap_clip_with_adapter, wrap_clip_with_roles

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import predict  # noqa: E402
import train  # noqa: E402

CLASSES = [("red", "cup"), ("red", "star"), ("blue", "cup"), ("blue", "star"), ("green", "tree"), ("green", "ring")]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    """A tree <root>/<color entity>/*.png of 6 classes with 8 pictures, in a folder with a space and an umlaut."""
    root = tmp_path_factory.mktemp("data") / "my pictures ä"
    rng = np.random.default_rng(0)
    for color, entity in CLASSES:
        folder = root / f"{color} {entity}"
        folder.mkdir(parents=True)
        for i in range(8):
            scene = Scene(color, entity, "plain", "center", "large")
            Image.fromarray(render(scene, rng)).save(folder / f"{i}.png")
    return root


def call(root: Path, out: Path, *arguments: str, trainer: str = "DeAR") -> int:
    """train.main with flags first and KEY VALUE pairs last."""
    first = next((i for i, word in enumerate(arguments) if "." in word and word.isupper()), len(arguments))
    flags, options = arguments[:first], arguments[first:]
    return train.main([
        "--root", str(root), "--seed", "1", "--trainer", trainer, "--output-dir", str(out),
        "--dataset-config-file", "configs/datasets/folder.yaml",
        "--config-file", f"configs/trainers/{trainer}/tiny.yaml", *flags,
        "DATASET.NUM_SHOTS", "2", "OPTIM.MAX_EPOCH", "2", "VERBOSE", "False", *options])


@pytest.fixture(scope="module")
def trained(pictures, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("run") / "base"
    assert call(pictures, out, "DATASET.SUBSAMPLE_CLASSES", "base") == 0
    return out


def test_training_leaves_result_log_and_adapter(trained):
    result = json.loads((trained / "result.json").read_text())
    assert result["trainer"] == "DeAR" and result["classes"] == "base" and result["backbone"] == "tiny"
    assert result["classnames"] == ["blue cup", "blue star", "green ring"]
    assert result["trainable_parameters"] == sum(
        p.numel() for p in wrap_clip_with_roles(load_backbone("tiny").model).trainable_parameters())
    assert result["role_map_method"] == "attribute-probe" and result["steps"] == 2  # 6 pictures, 4 a batch, no rest
    assert result["data"]["split_generated"] is True
    assert sum(result["fusion_weights"].values()) == pytest.approx(1.0)
    log = (trained / "log.txt").read_text()
    assert "Prompt: a photo of a blue cup." in log and "Memory estimate for the activations of a step: text of 3" in log
    assert "Finish training" in log and "* accuracy: " in log.split("Finish training")[1]
    size = (trained / "adapter" / "adapter.safetensors").stat().st_size
    assert size < 1.1e6


def test_new_classes_are_one_flag_and_load_what_was_trained(pictures, trained, tmp_path):
    assert call(pictures, tmp_path / "new", "--eval-only", "--model-dir", str(trained),
                "DATASET.SUBSAMPLE_CLASSES", "new") == 0
    result = json.loads((tmp_path / "new" / "result.json").read_text())
    assert result["classes"] == "new" and result["classnames"] == ["green tree", "red cup", "red star"]
    assert list(result["loaded"]) == ["dear_adapter"] and result["loaded"]["dear_adapter"]["epoch"] == 2


def test_exported_adapter_in_a_new_process_gives_the_trainers_logits(pictures, trained):
    """predictions.csv of the run against a fresh wrap in another interpreter."""
    code = f"""
import csv, sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import predict, torch
from PIL import Image
from dear_plugin import load_backbone, wrap_clip_with_adapter
from dear_plugin.adapter import read_adapter
folder = {str(trained / "adapter")!r}
backbone = load_backbone("tiny")
model = wrap_clip_with_adapter(backbone.model, folder)
transform = predict.make_transform(read_adapter(folder)[0]["preprocessing"])
names = ["blue cup", "blue star", "green ring"]
text = model.encode_text(backbone.tokenize([f"a photo of a {{n}}." for n in names]))
rows = list(csv.DictReader(open({str(trained / "predictions.csv")!r}, encoding="utf-8")))
for row in rows:
    image = transform(Image.open({str(pictures)!r} + "/" + row["path"]).convert("RGB"))[None]
    with torch.no_grad():
        best = model.class_logits(model.image_features(image), text).softmax(-1)[0].max(0)
    assert names[best.indices] == row["predicted"], row
    assert abs(best.values.item() - float(row["probability"])) < 2e-3, (best, row)
print(len(rows))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0


def test_zero_shot_needs_no_training_and_coop_starts_there(pictures, tmp_path):
    assert call(pictures, tmp_path / "zs", "DATASET.SUBSAMPLE_CLASSES", "base", trainer="ZeroshotCLIP") == 0
    assert json.loads((tmp_path / "zs" / "result.json").read_text())["accuracy_pct"] > 60
    assert call(pictures, tmp_path / "coop", "DATASET.SUBSAMPLE_CLASSES", "base", trainer="CoOp") == 0
    result = json.loads((tmp_path / "coop" / "result.json").read_text())
    assert result["trainable_parameters"] == 4 * 128


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["TRAINER.DEAR.ATTRIBUTES", "['color','color']"], "attribute 'color' appears twice"),
        (["TRAINER.DEAR.ATTRIBUTES", "['colour']"], "unknown attribute 'colour'. Did you mean 'color'?"),
        (["TRAINER.DEAR.BETA", "1.5"], "beta must lie in [0, 1], got 1.5"),
        (["TRAINER.DEAR.BETTA", "0.5"], "TRAINER.DEAR.BETA"),
        (["TRAINER.DEAR.ROLES", "no_such_map"], "no_such_map"),
        (["TRAINER.DEAR.START_LAYER", "12"], "first_layer is 11, the vision tower has layers 0-7"),
        (["MODEL.BACKBONE.NAME", "RN50"], "RN50 is a ResNet CLIP: roles need attention heads"),
        (["INPUT.SIZE", "(224, 224)"], "INPUT.SIZE is (224, 224), but tiny takes (64, 64)"),
        (["TRAINER.DEAR.PREC", "fp8"], "TRAINER.DEAR.PREC is 'fp8'; allowed: fp32, amp, fp16"),
        (["OPTIM.LR", "1e9"], "is not finite"),
    ],
)
def test_bad_settings_are_one_sentence(pictures, tmp_path, capfd, arguments, sentence):
    assert call(pictures, tmp_path / "out", *arguments) == 2
    error = capfd.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and sentence in lines[0], error


def test_a_role_map_of_another_model_is_refused(pictures, tmp_path, capfd):
    foreign = RoleMap.uniform("mixed", layers=range(8, 12), heads=12)
    foreign.save(tmp_path / "b16.json")
    assert call(pictures, tmp_path / "out", "TRAINER.DEAR.ROLES", str(tmp_path / "b16.json")) == 2
    error = capfd.readouterr().err
    assert "12 heads a layer, the vision tower has 4" in error and "shipped and fitting: tiny" in error


def test_predict_on_a_picture_a_folder_and_a_broken_file(pictures, trained, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken.png"
    broken.write_bytes((pictures / "red cup" / "0.png").read_bytes()[:200])
    monkeypatch.setattr(sys, "argv", [
        "predict.py", str(pictures / "green tree"), str(broken), "--adapter", str(trained / "adapter"),
        "--classes", "green_tree", "red ring"])
    assert predict.main() == 1
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 8 and sum(": green tree " in line for line in lines) >= 6
    assert f"{broken}: cannot be read as a picture" in error
    monkeypatch.setattr(sys, "argv", ["predict.py", str(broken), "--adapter", str(tmp_path), "--classes", "a", "b"])
    assert predict.main() == 2
    assert f"no adapter in {tmp_path}" in capsys.readouterr().err


def test_the_shell_commands_run_from_any_folder(pictures, tmp_path):
    environment = os.environ | {"DATA": str(pictures), "PYTHON": sys.executable}
    usage = subprocess.run(["bash", str(ROOT / "scripts/dear/base2new_train.sh")], capture_output=True, text=True,
                           cwd=tmp_path, env=environment)
    assert usage.returncode == 2 and "DATASET SEED [--trainer NAME]" in usage.stderr
    out = tmp_path / "o"
    for script, classes in (("base2new_train.sh", "base"), ("base2new_test.sh", "new")):
        run = subprocess.run(
            ["bash", str(ROOT / "scripts/dear" / script), "folder", "1", "--trainer", "ZeroshotCLIP", "--cfg", "tiny",
             "--output-dir", str(out / classes)], capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert run.returncode == 0, run.stderr
        assert json.loads((out / classes / "result.json").read_text())["classes"] == classes


def test_tiny_is_what_its_readme_says():
    backbone = load_backbone("tiny")
    assets = ROOT / "dear_plugin" / "assets"
    assert sum(path.stat().st_size for path in assets.rglob("*") if path.is_file()) < 16 * 2**20
    facts = json.loads((assets / "tiny_clip.json").read_text())
    text = (assets / "README.md").read_text()
    for name, value in facts["zero_shot_accuracy_pct"].items():
        assert f"{value:.1f}" in text, (name, value)
    assert RoleMap.load("tiny").model == backbone.identity


def test_roles_auto_finds_tinys_map_and_the_adapter_is_bit_stable(tmp_path):
    backbone = load_backbone("tiny")
    torch.manual_seed(0)
    model = wrap_clip_with_roles(backbone.model)
    assert model.role_map == RoleMap.load("tiny")
    model.save_adapter(tmp_path)
    again = wrap_clip_with_adapter(load_backbone("tiny").model, tmp_path)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(model.encode_image(images), again.encode_image(images))
