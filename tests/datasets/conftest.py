"""Fixtures of the data tests: images on disk, configs, and the shared real data where a machine has it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from PIL import Image
from yacs.config import CfgNode

from datasets.splits import Item, Split
from datasets.table import extend_cfg, register_all

SHARED = os.environ.get("DEAR_SHARED_DATA", "")


@pytest.fixture
def shared_data() -> Path:
    if not SHARED:
        pytest.skip("DEAR_SHARED_DATA is not set: it names the folder with the published splits and real images")
    return Path(SHARED)


@pytest.fixture
def touch():
    """touch(folder, path, ...): write small images, each of another color so that no two files are equal."""

    def write(folder: Path, *paths: str) -> None:
        for path in paths:
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            write.count += 1
            Image.new("RGB", (4, 4), (write.count % 256, write.count // 256, 7)).save(file, format="PNG")

    write.count = 0
    return write


@pytest.fixture
def cfg_for(tmp_path):
    """cfg_for(name, root, KEY=value, ...): a config as the harness would hand it over; OUTPUT_DIR is tmp_path/out."""

    def make(
        name: str, root: Path, *, seed: int = 1, shots: int = -1, output: str | Path = "default", **options
    ) -> CfgNode:
        cfg = CfgNode(
            {
                "SEED": seed,
                "VERBOSE": False,
                "OUTPUT_DIR": str(tmp_path / "out" if output == "default" else output),
                "DATASET": {"NAME": name, "ROOT": str(root), "NUM_SHOTS": shots},
            }
        )
        extend_cfg(cfg)
        for key, value in options.items():
            cfg.DATASET[key] = value
        return cfg

    return make


@pytest.fixture
def load(cfg_for):
    """load(name, root, ...): the data set itself, through the harness's registry."""
    from dear_plugin.engine import DATASET_REGISTRY

    register_all()

    def build(name: str, root: Path, **options):
        return DATASET_REGISTRY.get(name)(cfg_for(name, root, **options))

    return build


@pytest.fixture
def eurosat(tmp_path, touch):
    """eurosat(train={name: n}, ...): an EuroSAT in CoOp's layout; returns (data root, content of the split)."""

    def make(
        train: dict[str, int], *, val: int = 1, test: int = 2, labels: dict[str, int] | None = None
    ) -> tuple[Path, dict]:
        root = tmp_path / "data"
        split: dict[str, list] = {"train": [], "val": [], "test": []}
        for position, (name, count) in enumerate(train.items()):
            label = (labels or {}).get(name, position)
            for part, number in (("train", count), ("val", val), ("test", test)):
                split[part] += [[f"{name}/{part}_{i}.jpg", label, name] for i in range(number)]
        touch(root / "eurosat" / "2750", *[item[0] for items in split.values() for item in items])
        (root / "eurosat" / "split_zhou_EuroSAT.json").write_text(json.dumps(split), encoding="utf-8")
        return root, split

    return make


@pytest.fixture
def split_of():
    """split_of([group sizes of train], [of val]): a split without files; paths are part/position."""

    def make(train: list[int], val: list[int] = (), test: int = 1) -> Split:
        def items(part: str, sizes: list[int]) -> list[Item]:
            return [
                Item(f"{part}/{label}/{i}", label, f"name {label}")
                for label, size in enumerate(sizes)
                for i in range(size)
            ]

        return Split(
            items("train", train), items("val", list(val)), items("test", [test] * len(train)), folder=Path(".")
        )

    return make
