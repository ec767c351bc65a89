"""What the published code takes for granted and this machine lacks, stood in for from outside: no checkout is edited.

Each shim says which line of theirs needs it. All act on torch, on sys.modules or on an imported module of theirs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from unittest.mock import MagicMock

import torch
from torch import nn

# Dassl imports these packages when it is imported; CLIP work calls only the writer of TensorBoard and the table.
DASSL_NEEDS = ("gdown", "tabulate", "wilds", "tensorboard")


def missing_packages() -> list[str]:
    """Stand-ins for what Dassl imports and is not installed; their names."""
    import torchvision  # noqa: F401 - before the stand-ins, since it looks for optional packages

    missing = [name for name in DASSL_NEEDS if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = MagicMock(__spec__=None, __all__=[])
    if "tabulate" in missing:
        sys.modules["tabulate"].tabulate = lambda rows, *_, **__: "\n".join("  ".join(map(str, row)) for row in rows)
    if "tensorboard" in missing:
        sys.modules["torch.utils.tensorboard"] = MagicMock(__spec__=None, __all__=[])
    if "wilds" in missing:  # its data sets want pandas too
        sys.modules["dassl.data.datasets.dg.wilds"] = MagicMock(__spec__=None, __all__=[])
    return missing


def cpu_in_float32() -> None:
    """`.cuda()` (PromptSRC, MMRL), `.half()` and `.type(float16)` (their CLIPs) do nothing to the values."""
    for owner in (torch.Tensor, nn.Module):
        owner.cuda = lambda self, *_, **__: self
        owner.half = lambda self: self
    to_type = torch.Tensor.type
    torch.Tensor.type = lambda self, dtype=None, **options: (
        to_type(self, torch.float32 if dtype is torch.float16 else dtype, **options) if dtype else to_type(self))


def scheduler_of_older_torch() -> None:
    """torch < 2.7 took `verbose`, which Dassl's warm-up passes on by position."""
    base = torch.optim.lr_scheduler.LRScheduler
    made = base.__init__
    base.__init__ = lambda self, optimizer, last_epoch=-1, verbose=None: made(self, optimizer, last_epoch)


def objects_in_checkpoints() -> None:
    """torch < 2.6 unpickled whatever a checkpoint held, which reading back one with a warm-up schedule needs."""
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"


def weights_from(clip_file: str) -> None:
    """`clip._download` fetches a file and checks its sha256: here it names a file, a state dict in OpenAI's keys."""
    importlib.import_module("clip.clip")._download = lambda *_: clip_file
