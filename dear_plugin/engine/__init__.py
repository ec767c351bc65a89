"""The harness contract under one roof: its names come from an installed Dassl, else from the built-in implementation.

`DEAR_ENGINE=builtin` or `dassl` forces one; unset, an importable `dassl` is taken. `ENGINE` says which it is,
`engine_line()` also from where and what was repaired in it: the first line of a log.
"""

from __future__ import annotations

import importlib.util
import os
import sys

from dear_plugin.engine.checkpoints import load_checkpoint, load_pretrained_weights, save_checkpoint
from dear_plugin.engine.evaluation import compute_accuracy
from dear_plugin.engine.system import (
    check_isfile,
    collect_env_info,
    listdir_nohidden,
    mkdir_if_missing,
    read_json,
    set_random_seed,
    setup_logger,
    write_json,
)
from dear_plugin.engine.transforms import INTERPOLATION

CHOICES = ("", "builtin", "dassl")


def _dassl_wanted() -> bool:
    """Whether to use Dassl; says on standard error when one is installed but not usable."""
    choice = os.environ.get("DEAR_ENGINE", "")
    if choice not in CHOICES:
        raise ValueError(f"DEAR_ENGINE is {choice!r}; allowed: builtin, dassl, or unset")
    if choice == "builtin" or (not choice and importlib.util.find_spec("dassl") is None):
        return False
    try:
        import dassl.engine  # noqa: F401
    except ImportError as error:
        if choice == "dassl":
            raise ImportError(
                f"DEAR_ENGINE is dassl, but importing it failed ({error}); install what is missing, or unset "
                "DEAR_ENGINE for the built-in engine"
            ) from error
        print(f"dassl is installed but not importable ({error}): using the built-in engine", file=sys.stderr)
        return False
    return True


if _dassl_wanted():
    from dear_plugin.engine.dassl_bridge import (
        DATASET_REGISTRY,
        DETAILS,
        ENGINE,
        EVALUATOR_REGISTRY,
        TRAINER_REGISTRY,
        DataManager,
        DatasetBase,
        DatasetWrapper,
        Datum,
        TrainerX,
        build_dataset,
        build_evaluator,
        build_lr_scheduler,
        build_optimizer,
        build_trainer,
        build_transform,
        get_cfg_default,
    )
else:
    from dear_plugin.engine.config import get_cfg_default
    from dear_plugin.engine.data import DataManager, DatasetBase, DatasetWrapper, Datum
    from dear_plugin.engine.optim import build_optimizer
    from dear_plugin.engine.registry import (
        DATASET_REGISTRY,
        EVALUATOR_REGISTRY,
        TRAINER_REGISTRY,
        build_dataset,
        build_evaluator,
        build_trainer,
    )
    from dear_plugin.engine.schedules import build_lr_scheduler
    from dear_plugin.engine.trainer import TrainerX
    from dear_plugin.engine.transforms import build_transform

    ENGINE, DETAILS = "builtin", "dear_plugin.engine"


def engine_line() -> str:
    """Which engine runs, whether DEAR_ENGINE chose it, where it is and what was repaired in it."""
    chosen = ", by DEAR_ENGINE" if os.environ.get("DEAR_ENGINE") else ""
    return f"Engine: {ENGINE}{chosen} ({DETAILS})"


__all__ = [
    "DATASET_REGISTRY",
    "ENGINE",
    "EVALUATOR_REGISTRY",
    "INTERPOLATION",
    "TRAINER_REGISTRY",
    "DataManager",
    "DatasetBase",
    "DatasetWrapper",
    "Datum",
    "TrainerX",
    "build_dataset",
    "build_evaluator",
    "build_lr_scheduler",
    "build_optimizer",
    "build_trainer",
    "build_transform",
    "check_isfile",
    "collect_env_info",
    "compute_accuracy",
    "engine_line",
    "get_cfg_default",
    "listdir_nohidden",
    "load_checkpoint",
    "load_pretrained_weights",
    "mkdir_if_missing",
    "read_json",
    "save_checkpoint",
    "set_random_seed",
    "setup_logger",
    "write_json",
]
