"""What an installed Dassl (0.6.3, c61a1b5) needs to run today, each repair with the version that needs it.

A repair is applied only where its `needed` says so by trying the thing itself: a Dassl that is fixed one day, or an
older torch or numpy, is left as it is. Names inside Dassl's modules are replaced; its files are not touched.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import pickle
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from dear_plugin.engine.checkpoints import load_checkpoint
from dear_plugin.engine.config import has_key
from dear_plugin.engine.images import check_images, read_image
from dear_plugin.engine.schedules import ConstantWarmupScheduler, LinearWarmupScheduler


@dataclass(frozen=True)
class Repair:
    """One thing that does not work: its name, the versions that need the repair, whether these do, and the repair."""

    name: str
    needed_by: str
    needed: Callable[[], bool]
    apply: Callable[[], None]


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"dassl.{name}")


# Every published config has a warm-up; its class passes `verbose`, which torch 2.7 dropped, on to torch's. Any torch:
# its state holds the inner scheduler with the optimizer, so a resumed run steps that one and its rate is frozen.
def _warmup_fails() -> bool:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    inner = CosineAnnealingLR(optimizer, 2)
    try:
        made = _module("optim.lr_scheduler").ConstantWarmupScheduler(optimizer, inner, 1, 0.1)
    except TypeError:
        return True
    return any(isinstance(value, LRScheduler) for value in made.state_dict().values())


def _repair_warmup() -> None:
    schedules = _module("optim.lr_scheduler")
    schedules.ConstantWarmupScheduler = ConstantWarmupScheduler
    schedules.LinearWarmupScheduler = LinearWarmupScheduler


# torch.load reads tensors and plain data alone since 2.6, unless told otherwise, which Dassl does not; checkpoints that
# a Dassl wrote hold its scheduler. Ours reads those too, by an allow-list.
def _load_refuses_objects() -> bool:
    read = _module("utils.torchtools").load_checkpoint
    if read is load_checkpoint:
        return False
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):  # it prints first
        torch.save({"scheduler": CosineAnnealingLR.__new__(CosineAnnealingLR)}, f"{folder}/checkpoint")
        try:
            read(f"{folder}/checkpoint")
        except pickle.UnpicklingError:
            return True
    return False


def _repair_loading() -> None:
    for name in ("utils", "utils.torchtools", "engine.trainer"):
        _module(name).load_checkpoint = load_checkpoint


# np.int went with numpy 1.24; the automatic augmentations use it.
class _NumpyWithInt(ModuleType):
    """numpy as Dassl's augmentation modules expect it."""

    int = int

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


_AUGMENTATIONS = ("data.transforms.autoaugment", "data.transforms.randaugment")


def _numpy_lacks_int() -> bool:
    return not all(hasattr(_module(name).np, "int") for name in _AUGMENTATIONS)


def _repair_numpy() -> None:
    for name in _AUGMENTATIONS:
        _module(name).np = _NumpyWithInt("numpy")


# No fault of a version: DATASET.SKIP_BROKEN is ours, and a broken image is named before training instead of without
# its path in the middle of it.
def _images_unchecked() -> bool:
    return not getattr(_module("data.data_manager").build_dataset, "checks_images", False)


def _check_images_first() -> None:
    manager = _module("data.data_manager")
    manager.read_image = read_image
    build = manager.build_dataset

    def build_and_check(cfg: Any) -> Any:
        dataset = build(cfg)
        check_images(dataset, skip_broken=has_key(cfg, "DATASET.SKIP_BROKEN") and cfg.DATASET.SKIP_BROKEN)
        return dataset

    build_and_check.checks_images = True
    manager.build_dataset = build_and_check


REPAIRS = (
    Repair("warm-up schedules", "torch >= 2.7; resuming: any torch", _warmup_fails, _repair_warmup),
    Repair("reading checkpoints", "torch >= 2.6", _load_refuses_objects, _repair_loading),
    Repair("np.int in augmentations", "numpy >= 1.24", _numpy_lacks_int, _repair_numpy),
    Repair("images checked first", "DATASET.SKIP_BROKEN", _images_unchecked, _check_images_first),
)
_applied: list[str] = []


def apply_repairs() -> list[str]:
    """Apply what is needed; may be called again. Returns "name (needed by)" of all that were applied so far."""
    for repair in REPAIRS:
        if repair.needed():
            repair.apply()
            _applied.append(f"{repair.name} ({repair.needed_by})")
    return list(_applied)
