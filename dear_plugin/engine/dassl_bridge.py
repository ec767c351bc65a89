"""The contract's names from a real Dassl, repaired for the installed torch and numpy."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import dassl
from dassl.config import get_cfg_default as dassl_defaults
from dassl.data import DataManager, DatasetWrapper
from dassl.data.datasets import DATASET_REGISTRY, DatasetBase, Datum, build_dataset
from dassl.data.transforms import build_transform
from dassl.engine import TRAINER_REGISTRY, TrainerX, build_trainer
from dassl.evaluation import EVALUATOR_REGISTRY, build_evaluator
from dassl.optim import build_lr_scheduler, build_optimizer

from dear_plugin.engine.config import ConfigNode, own_tree
from dear_plugin.engine.dassl_repairs import apply_repairs

APPLIED = apply_repairs()


def _version() -> str:
    try:
        return importlib.metadata.version("dassl")
    except importlib.metadata.PackageNotFoundError:
        return getattr(dassl, "__version__", "of unknown version")


def get_cfg_default() -> ConfigNode:
    """Dassl's defaults in a tree whose merges accept whole numbers for fractions and name the nearest key."""
    return own_tree(dassl_defaults())


ENGINE = f"dassl {_version()}"
DETAILS = f"{Path(dassl.__file__).parent}; repaired: {', '.join(APPLIED) or 'nothing'}"

__all__ = [
    "DATASET_REGISTRY",
    "DETAILS",
    "ENGINE",
    "EVALUATOR_REGISTRY",
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
    "get_cfg_default",
]
