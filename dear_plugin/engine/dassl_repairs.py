"""What an installed Dassl (0.6.3, c61a1b5) needs to run today; each repair names the version that needs it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np

from dear_plugin.engine.checkpoints import load_checkpoint, save_checkpoint
from dear_plugin.engine.config import has_key
from dear_plugin.engine.images import check_images, read_image
from dear_plugin.engine.schedules import ConstantWarmupScheduler, LinearWarmupScheduler


def apply_repairs() -> None:
    """Replace names inside Dassl's modules; its files are not touched. May be called again."""
    repair_warmup()
    repair_checkpoints()
    repair_images()
    repair_numpy()


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"dassl.{name}")


def repair_warmup() -> None:
    """torch >= 2.7 takes no `verbose`, which Dassl's warm-up passes on: every published config fails.

    Also, its state holds the inner scheduler with the optimizer: torch >= 2.6 does not load it, and (any version) a
    resumed run keeps one frozen rate.
    """
    schedules = _module("optim.lr_scheduler")
    schedules.ConstantWarmupScheduler = ConstantWarmupScheduler
    schedules.LinearWarmupScheduler = LinearWarmupScheduler


def repair_checkpoints() -> None:
    """torch >= 2.6 loads tensors only, unless told otherwise, which Dassl does not. Any version: writing is atomic."""
    for name in ("utils", "utils.torchtools", "engine.trainer"):
        module = _module(name)
        module.load_checkpoint, module.save_checkpoint = load_checkpoint, save_checkpoint


def repair_images() -> None:
    """Any version: a broken image is reported without its path, a missing one only when it is reached."""
    manager = _module("data.data_manager")
    manager.read_image = read_image
    build = manager.build_dataset
    if getattr(build, "checks_images", False):
        return

    def build_and_check(cfg: Any) -> Any:
        dataset = build(cfg)
        check_images(dataset, skip_broken=has_key(cfg, "DATASET.SKIP_BROKEN") and cfg.DATASET.SKIP_BROKEN)
        return dataset

    build_and_check.checks_images = True
    manager.build_dataset = build_and_check


class _NumpyWithInt(ModuleType):
    """numpy as Dassl's augmentation modules expect it."""

    int = int

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def repair_numpy() -> None:
    """numpy >= 1.24 has no `np.int`, which the automatic augmentations use."""
    if hasattr(np, "int"):
        return
    for name in ("data.transforms.autoaugment", "data.transforms.randaugment"):
        _module(name).np = _NumpyWithInt("numpy")
