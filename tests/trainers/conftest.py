"""Fixtures of the trainers' tests: one backbone file and one data set for all of them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from tiny_world import METHODS, build, config, random_openai_state, write_data  # noqa: E402


@pytest.fixture(scope="session")
def world(tmp_path_factory) -> SimpleNamespace:
    """.root (data), .backbone (file) and .cfg(trainer, out, ...)"""
    folder = tmp_path_factory.mktemp("world")
    torch.save(random_openai_state(), folder / "clip.pt")
    root, backbone = write_data(folder / "data"), folder / "clip.pt"

    def cfg(trainer: str, out: Path, **options):
        return config(trainer, root=root, backbone=backbone, out=out, **options)

    return SimpleNamespace(root=root, backbone=backbone, cfg=cfg)


@pytest.fixture(scope="module", params=sorted(METHODS))
def finished(request, world, tmp_path_factory) -> SimpleNamespace:
    """A finished two-epoch training on the base classes of each method."""
    out = tmp_path_factory.mktemp("run") / "train"
    trainer = build(world.cfg(request.param, out))
    before = {key: value.clone() for key, value in trainer.clip.state_dict().items()}
    trained = [pair for model in trainer._models.values() for pair in model.named_parameters()]
    start = {key: value.detach().clone() for key, value in trained}
    trainer.train()
    return SimpleNamespace(name=request.param, trainer=trainer, out=out, clip_before=before, start=start)
