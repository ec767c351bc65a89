"""A checkpoint that the published code trained and wrote on a real Dassl, read by ours: the same logits on both halves.

DEAR_PEERS as in test_foreign_checkouts.py. The file is the published one to the byte: whole model or prompt learner,
class-bound buffers, and a scheduler entry that holds torch objects, as torch < 2.7 lets Dassl write it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

TRAINERS = Path(__file__).resolve().parents[1] / "trainers"
sys.path.insert(0, str(TRAINERS))

from parity import GEOMETRIES, cases, our_trainer  # noqa: E402
from peers import PEERS, needs_dassl, run_checkout  # noqa: E402
from tiny_world import write_data  # noqa: E402

pytestmark = needs_dassl
# Method -> checkout and its YAML; the settings are those of the small parity case.
PUBLISHED = {
    "CoOp": ("CoOp", "CoOp/vit_b16_ep50.yaml"),
    "CoCoOp": ("CoOp", "CoCoOp/vit_b16_c4_ep10_batch1_ctxv1.yaml"),
    "MaPLe": ("multimodal-prompt-learning", "MaPLe/vit_b16_c2_ep5_batch4_2ctx.yaml"),
    "PromptSRC": ("PromptSRC", "PromptSRC/vit_b16_c2_ep20_batch4_4+4ctx.yaml"),
    "MMRL": ("MMRL", "MMRL/vit_b16.yaml"),
}
SHIMS = "cpu_in_float32,scheduler_of_older_torch,objects_in_checkpoints"


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """clip.pt, random weights in ViT-B/16's widths with 3 layers and 32 pixels; data/dtd with 5 classes."""
    folder = tmp_path_factory.mktemp("world")
    torch.save(GEOMETRIES["small"].state(), folder / "clip.pt")
    write_data(folder / "data")
    return folder


def theirs(method: str, world: Path, checkout: Path, out: Path, classes: str, *more: str) -> torch.Tensor:
    """Logits [test images, classes] of the last evaluation of their train.py."""
    case = cases("small")[method]
    settings = [part for key, value in case.settings.items() for part in (f"TRAINER.{case.node}.{key}", str(value))]
    run = run_checkout(
        checkout, out, "--root", str(world / "data"), "--seed", "1", "--trainer", method,
        "--dataset-config-file", "configs/datasets/dtd.yaml", "--config-file",
        f"configs/trainers/{PUBLISHED[method][1]}", *more, *(["TASK", "B2N"] if method == "MMRL" else []), *settings,
        f"TRAINER.{case.node}.PREC", "fp32", "INPUT.SIZE", "(32, 32)", "DATASET.NUM_SHOTS", "2",
        "DATASET.SUBSAMPLE_CLASSES", classes, "OPTIM.MAX_EPOCH", "2", "OPTIM.LR", "0.01",
        "DATALOADER.NUM_WORKERS", "0", "DATALOADER.TRAIN_X.BATCH_SIZE", "3", clip=world / "clip.pt", shims=SHIMS)
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(out / "logits.pt", weights_only=True)


@torch.no_grad()
def ours(method: str, world: Path, trained: Path, out: Path, classes: str) -> torch.Tensor:
    trainer = our_trainer(cases("small")[method], "small", root=world / "data", backbone=world / "clip.pt", out=out,
                          classes=classes)
    trainer.load_model(trained, epoch=2)
    trainer.set_model_mode("eval")
    return torch.cat([trainer.model_inference(batch["img"]) for batch in trainer.test_loader])


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_file_of_theirs_gives_their_logits(method, world, tmp_path, capsys):
    if not (source := Path(PEERS) / PUBLISHED[method][0]).is_dir():
        pytest.skip(f"DEAR_PEERS has no {source.name}")
    checkout = Path(shutil.copytree(source, tmp_path / "checkout", ignore=shutil.ignore_patterns(".git")))
    trained, found = tmp_path / "trained", {}
    for classes in ("base", "new"):
        if classes == "base":  # trained on these, tested on them at the end
            expected = theirs(method, world, checkout, trained, classes)
        else:
            expected = theirs(method, world, checkout, tmp_path / "new", classes, "--eval-only", "--model-dir",
                              str(trained), "--load-epoch", "2")
        logits = ours(method, world, trained, tmp_path / f"ours-{classes}", classes)
        shown = capsys.readouterr().out
        assert "Published checkpoint: dropped" in shown
        assert "token_suffix" in shown or "prompt_embeddings" in shown
        assert logits.shape == expected.shape and logits.std() > 0
        found[classes] = float((logits - expected).abs().max() / expected.abs().max())
    with capsys.disabled():
        print(f"\n{method}: largest difference of logits, relative: base {found['base']:.1e}, new {found['new']:.1e}")
    assert max(found.values()) < 1e-4
