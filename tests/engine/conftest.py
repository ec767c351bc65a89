"""Fixtures of the engine's tests: toy images, toy configs, and scripts/train.py with the toys as its only methods."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path

import pytest
from engine_toys import TOY_YAML, extend_toy, make_images

from dear_plugin.engine import ENGINE, get_cfg_default
from dear_plugin.engine.system import close_logger


def pytest_collection_modifyitems(items) -> None:
    """Tests of the built-in implementation alone are left out when the same tests run on a real Dassl."""
    for item in items:
        if ENGINE != "builtin" and item.get_closest_marker("builtin"):
            item.add_marker(pytest.mark.skip(reason=f"engine is {ENGINE}"))


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "builtin: tests the built-in implementation, not the contract")


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> Path:
    return make_images(tmp_path_factory.mktemp("data"))


@pytest.fixture
def own_root(tmp_path) -> Path:
    """A copy of the images that a test may damage."""
    return make_images(tmp_path / "data")


@pytest.fixture
def make_cfg(tmp_path, data_root):
    """make_cfg("KEY", value, ...) -> a frozen toy config."""

    def make(*overrides, root: Path = data_root, out: str = "out"):
        cfg = get_cfg_default()
        extend_toy(cfg)
        defaults = {
            "DATASET.NAME": "Toy",
            "DATASET.ROOT": str(root),
            "OUTPUT_DIR": str(tmp_path / out),
            "TRAINER.NAME": "ToyMethod",
            "SEED": 1,
            "USE_CUDA": False,
            "VERBOSE": False,
            "DATALOADER.NUM_WORKERS": 0,
            "INPUT.SIZE": (8, 8),
            "INPUT.TRANSFORMS": ("random_flip", "random_resized_crop", "normalize"),
            "DATALOADER.TRAIN_X.BATCH_SIZE": 5,
            "DATALOADER.TEST.BATCH_SIZE": 5,
            "OPTIM.NAME": "sgd",
            "OPTIM.LR": 0.1,
            "OPTIM.MAX_EPOCH": 4,
            "OPTIM.LR_SCHEDULER": "cosine",
            "OPTIM.WARMUP_EPOCH": 1,
            "OPTIM.WARMUP_TYPE": "constant",
        }
        for key, value in defaults.items():
            cfg.merge_from_list([key, value])
        cfg.merge_from_list(list(overrides))
        cfg.freeze()
        return cfg

    return make


@pytest.fixture
def train_script(monkeypatch, data_root):
    """scripts/train.py as a module whose only trainers and data sets are the toys; returns (module, call)."""
    path = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
    spec = importlib.util.spec_from_file_location("train_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    table = types.ModuleType("datasets.table")
    table.register_all = lambda: None
    table.extend_cfg = lambda cfg: None
    package = types.ModuleType("datasets")
    package.table = table
    monkeypatch.setitem(sys.modules, "datasets", package)
    monkeypatch.setitem(sys.modules, "datasets.table", table)
    toys = types.ModuleType("toys_module")
    toys.extend_cfg = extend_toy
    monkeypatch.setattr(module, "import_trainers", lambda: [toys])
    monkeypatch.setattr(module, "available_modules", lambda: {"ToyMethod": "toy", "ToyZeroShot": "toy_zero_shot"})
    yield module
    close_logger()


@pytest.fixture
def call_train(train_script, tmp_path, data_root):
    """call_train(*flags) -> exit code, with the toy data and method files given unless flags say otherwise."""
    (tmp_path / "toy.yaml").write_text("DATASET:\n  NAME: Toy\n", encoding="utf-8")
    (tmp_path / "method.yaml").write_text(TOY_YAML, encoding="utf-8")

    def call(*flags: str, root: Path = data_root, out: str = "out", trainer: str = "ToyMethod") -> int:
        return train_script.main(
            [
                "--root",
                str(root),
                "--output-dir",
                str(tmp_path / out),
                "--trainer",
                trainer,
                "--dataset-config-file",
                str(tmp_path / "toy.yaml"),
                "--config-file",
                str(tmp_path / "method.yaml"),
                *flags,
            ]
        )

    return call
