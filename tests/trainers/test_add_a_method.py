"""docs/add_a_method.md, followed to the letter in a copy of the checkout."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from tiny_world import SIZE


@pytest.fixture
def checkout(root, tmp_path):
    """A copy with the page's two blocks in the files that its text names."""
    copy = tmp_path / "checkout"
    for folder in ("trainers", "datasets", "scripts", "configs"):
        shutil.copytree(root / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "dear_plugin").symlink_to(root / "dear_plugin")
    page = (root / "docs" / "add_a_method.md").read_text(encoding="utf-8")
    for language, name in (("python", "trainers/shift.py"), ("yaml", "configs/trainers/ShiftedCLIP/tiny.yaml")):
        assert f"`{name}`" in page
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(block, encoding="utf-8")
    return copy


def test_the_steps_of_the_page_make_a_method(checkout, world, tmp_path):
    def call(*arguments: str, out: str, classes: str) -> dict:
        run = subprocess.run([
            sys.executable, "scripts/train.py", "--root", str(world.root), "--trainer", "ShiftedCLIP", "--seed", "1",
            "--backbone", str(world.backbone), "--output-dir", str(tmp_path / out), "--dataset-config-file",
            "configs/datasets/dtd.yaml", "--config-file", "configs/trainers/ShiftedCLIP/tiny.yaml", *arguments,
            "INPUT.SIZE", str((SIZE, SIZE)), "OPTIM.MAX_EPOCH", "2", "DATASET.NUM_SHOTS", "2",
            "DATASET.SUBSAMPLE_CLASSES", classes,
        ], cwd=checkout, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stderr
        return json.loads((tmp_path / out / "result.json").read_text())

    trained = call(out="base", classes="base")
    tested = call("--eval-only", "--model-dir", str(tmp_path / "base"), out="new", classes="new")
    assert (trained["total"], tested["total"]) == (9, 6)
    assert tested["loaded"]["shift"]["tensors"] == 1


def test_the_page_is_clean_code(root, checkout):
    ruff = shutil.which("ruff") or str(root / ".venv" / "bin" / "ruff")
    if not shutil.which(ruff):
        pytest.skip("ruff is not installed: pip install -e .[dev]")
    config = ["--config", str(root / "pyproject.toml")]
    run = subprocess.run([ruff, "check", *config, "trainers/shift.py"], cwd=checkout, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
