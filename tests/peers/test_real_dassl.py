"""Every trainer of ours on a real Dassl and on the built-in engine: the same numbers, step by step, to the last bit.

DEAR_PEERS names a folder with the checkout Dassl.pytorch (ran at c61a1b5). What Dassl imports and is not installed
(gdown, wilds, tabulate, tensorboard) is stood in for by shims.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peers import DASSL, ROOT, needs_dassl, run_checkout, scalars

pytestmark = needs_dassl
TRAINERS = ("CoOp", "CoCoOp", "MaPLe", "PromptSRC", "MMRL", "DeAR")
# Of result.json: when, how fast, where, and which engine.
RUN_BOUND = {
    "git", "started", "finished", "wall_time_s", "step_time_ms", "peak_memory_mib", "engine", "config", "loaded"}


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """A data root: DEAR_SHAPES, a folder with shapes/, or a new one where the pictures are rendered first."""
    return Path(os.environ.get("DEAR_SHAPES") or tmp_path_factory.mktemp("data"))


def run(trainer: str, shapes: Path, out: Path, engine: str, *flags: str) -> dict:
    """result.json of scripts/train.py: 2 shots of the base classes, 2 epochs, `tiny`."""
    done = run_checkout(
        ROOT, out, "--root", str(shapes), "--seed", "1", "--trainer", trainer,
        "--dataset-config-file", "configs/datasets/shapes.yaml",
        "--config-file", f"configs/trainers/{trainer}/tiny.yaml", *flags,
        "DATASET.NUM_SHOTS", "2", "DATASET.SUBSAMPLE_CLASSES", "base", "OPTIM.MAX_EPOCH", "2", "TRAIN.PRINT_FREQ", "1",
        engine=engine)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def same_values(one, two) -> bool:
    """Equal to the bit, through dicts and lists."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same_values(one[key], two[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same_values, one, two))
    return one == two


def checkpoints(out: Path) -> dict:
    found = {str(path.relative_to(out)): torch.load(path, weights_only=True) for path in out.glob("*/model.pth.tar-*")}
    assert found
    return found


@pytest.mark.parametrize("trainer", TRAINERS)
def test_training_gives_the_same_numbers(trainer, shapes, tmp_path, capsys):
    results = {engine: run(trainer, shapes, tmp_path / engine, engine) for engine in ("builtin", "dassl")}
    ours, theirs = (scalars(tmp_path / engine) for engine in ("builtin", "dassl"))
    losses = [value for tag, value, _ in theirs if tag == "train/loss"]
    assert len(losses) == results["dassl"]["steps"] >= 2 and len(set(losses)) == len(losses)
    assert ours == theirs, "a loss, rate or accuracy differs"
    assert same_values(checkpoints(tmp_path / "builtin"), checkpoints(tmp_path / "dassl"))
    a, b = ({key: value for key, value in result.items() if key not in RUN_BOUND} for result in results.values())
    differing = {key for key in a if a[key] != b[key]}
    assert a.keys() == b.keys() and differing <= {"config_digest"}, differing
    assert (tmp_path / "builtin/predictions.csv").read_bytes() == (tmp_path / "dassl/predictions.csv").read_bytes()
    assert results["builtin"]["engine"] == "builtin" and results["dassl"]["engine"] == "dassl 0.6.3"
    with capsys.disabled():
        print(f"\n{trainer}: {len(losses)} steps equal to the bit, losses {losses[0]:.6f} ... {losses[-1]:.6f}, "
              f"accuracy {results['dassl']['accuracy_pct']:.2f}%")


def test_zero_shot_gives_the_same_numbers(shapes, tmp_path):
    one, two = (run("ZeroshotCLIP", shapes, tmp_path / engine, engine) for engine in ("builtin", "dassl"))
    assert one["correct"] == two["correct"] > 0 and one["total"] == two["total"] > 0
    assert (tmp_path / "builtin/predictions.csv").read_bytes() == (tmp_path / "dassl/predictions.csv").read_bytes()


def test_a_checkpoint_of_one_engine_is_read_on_the_other(shapes, tmp_path):
    run("DeAR", shapes, tmp_path / "trained", "dassl")
    new = ("--eval-only", "--model-dir", str(tmp_path / "trained"))
    one, two = (run("DeAR", shapes, tmp_path / engine, engine, *new) for engine in ("builtin", "dassl"))
    assert one["correct"] == two["correct"] and one["loaded"] == two["loaded"]


def test_the_log_begins_with_the_engine(shapes, tmp_path):
    lines = {"builtin": "Engine: builtin, by DEAR_ENGINE", "dassl": "Engine: dassl 0.6.3, by DEAR_ENGINE",
             "": "Engine: dassl 0.6.3 ("}  # unset: an importable dassl is taken
    for engine, line in lines.items():
        out = tmp_path / (engine or "unset")
        run("ZeroshotCLIP", shapes, out, engine)
        first = (out / "log.txt").read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(line), first
        assert ("repaired: warm-up schedules" in first) == (engine != "builtin")


PROBE = """
import shims; shims.missing_packages()
{before}
from dear_plugin.engine.dassl_repairs import apply_repairs
print([name.split(' (')[0] for name in apply_repairs()])
"""


def applied(before: str = "") -> list[str]:
    path = os.pathsep.join([str(ROOT), str(DASSL), str(Path(__file__).parent)])
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", PROBE.format(before=before)], text=True, timeout=120,
                         env={**os.environ, "PYTHONPATH": path, "DEAR_ENGINE": "builtin"}, capture_output=True)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.strip().splitlines()[-1].replace("'", '"'))


def test_a_repair_is_applied_only_where_it_is_needed():
    everything = ["warm-up schedules", "reading checkpoints", "np.int in augmentations", "images checked first"]
    assert applied() == everything  # torch >= 2.7, numpy >= 1.24
    assert applied("import numpy; numpy.int = int") == [n for n in everything if n != "np.int in augmentations"]
    # torch's older signature alone is not enough: the state still holds the inner scheduler
    assert applied("shims.scheduler_of_older_torch()") == everything
    assert applied("import os; os.environ['TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD'] = '1'") == [
        n for n in everything if n != "reading checkpoints"]
    fixed = ("import dassl.optim.lr_scheduler as s; from dear_plugin.engine import schedules; "
             "s.ConstantWarmupScheduler = schedules.ConstantWarmupScheduler")
    assert applied(fixed) == everything[1:]
