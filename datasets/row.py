"""What one row of the data-set table holds, the settings a run may add, and what a reader is told about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets.splits import Split

COOP_DATA_PAGE = "https://github.com/KaiyangZhou/CoOp/blob/main/DATASETS.md"

# Settings under DATASET that this package adds to the harness's own.
OPTIONS: dict[str, Any] = {
    "SUBSAMPLE_CLASSES": "all",  # all | base | new
    "TEMPLATE": "",  # a prompt with {} for the class name, in place of the data set's own
    "CLASSNAMES": "",  # a file with other class names, see splits.read_class_names
    "MAKE_SPLIT": False,  # make a split where the published file is missing
    "SPLIT_FILE": "",  # a split file in CoOp's layout in place of the row's
    "LIST": "",  # of the data set List, below DATASET.ROOT or absolute; "": list.csv or list.jsonl there
    "SPLIT_SEED": 1,  # of generated splits; apart from SEED, so that runs of several seeds share one test set
    "SKIP_BROKEN": False,  # leave out images of the split that are not on the disk
    "PICKS": "",  # picks.json of another run: the same few-shot images again
}


def option(cfg, name: str) -> Any:
    """A setting of `OPTIONS`, also from a config that was made without them."""
    return cfg.DATASET.get(name, OPTIONS[name])


@dataclass(frozen=True)
class Source:
    """Where a run reads from and what it may make: plain values taken from the config."""

    root: Path  # DATASET.ROOT
    output: Path | None = None  # OUTPUT_DIR; generated splits are stored here and never beside the data
    make_split: bool = False
    split_file: str = ""  # a split of the user's own in place of the row's
    split_seed: int = 1
    list_file: str = ""  # of the data set List


@dataclass(frozen=True)
class Row:
    """A data set under CoOp's names. `counts` and `names_hash` are published facts that a run is held against."""

    name: str  # DATASET.NAME
    config: str  # stem of configs/datasets/*.yaml
    folder: str  # below DATASET.ROOT
    reader: Callable[[Row, Source], Split]
    images: str = "images"  # below `folder`: what the paths of the split are relative to
    split_file: str = ""  # below `folder`
    make: Callable[[Path, int], Split] | None = (
        None  # (data-set folder, seed) -> a split of our own where the published is missing
    )
    counts: tuple[int, int, int, int] | None = None  # train, val, test, classes
    names_hash: str = ""  # first 16 digits of `splits.lines_hash` of the class names in label order
    test_only: bool = False  # the four ImageNet variants: train is test, no few-shot picks, no halves

    def data_folder(self, root: Path) -> Path:
        """The data set's folder, which must exist."""
        folder = root / self.folder
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} not found: DATASET.ROOT (--root) is {root} and {self.name} is looked for in its folder "
                f"{self.folder}; how to get the data: {COOP_DATA_PAGE}"
            )
        return folder
