"""The data set that a trainer gets: a row's split, checked, cut to the run's few-shot picks and class half."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets.base_new import check_choice, describe, subsample
from datasets.fewshot import Picks, apply_picks, picks_for, short_classes
from datasets.row import Row, Source, option
from datasets.splits import (
    Item,
    Split,
    check_labels,
    lines_hash,
    looks_like_id,
    missing_images,
    rename_classes,
    repeated_images,
    repeated_names,
    some,
)
from dear_plugin.engine import DatasetBase, Datum


class TableDataset(DatasetBase):
    """Base of the registered data sets; each sub-class is one row. `facts` are meant for result.json.
    """

    row: Row

    def __init__(self, cfg) -> None:
        with collector_paused():
            super().__init__(**self.read(cfg))

    def read(self, cfg) -> dict[str, list[Datum]]:
        """The three lists; sets `facts`."""
        row, source = self.row, source_of(cfg)
        choice = option(cfg, "SUBSAMPLE_CLASSES")
        check_choice(choice)
        split = row.reader(row, source)
        check_labels(split, row.name)
        missing = check_images(split, row, skip=option(cfg, "SKIP_BROKEN"))
        picks = None if row.test_only else picks_of(cfg, split, row, source.output)
        cut = apply_picks(split, picks) if picks else split
        if option(cfg, "CLASSNAMES"):
            cut = rename_classes(cut, Path(option(cfg, "CLASSNAMES")).expanduser())
        names = cut.class_names()
        cut = subsample(drop(cut, missing), "all" if row.test_only else choice)
        self.facts = facts_of(row, split, cut, picks, names) | {
            "classes": "all" if row.test_only else choice,
            "missing_images": len(missing),
        }
        self.facts["notes"] = notes(self.facts, split, row, names, choice)
        for note in self.facts["notes"]:
            print(f"{row.name}: {note}")
        test = data(cut.test, split.folder)
        val = test if cut.val_is_test else data(cut.val, split.folder)
        train = test if cut.train is cut.test else data(cut.train, split.folder)
        return {"train_x": train, "val": val, "test": test}


@contextmanager
def collector_paused() -> Iterator[None]:
    """A million records at once (ImageNet), none of them garbage: looking for some takes half as long again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def source_of(cfg) -> Source:
    """The run's folders and split settings as plain values."""
    if not cfg.DATASET.ROOT:
        raise ValueError("DATASET.ROOT is empty: give the data folder with --root")
    return Source(
        root=Path(os.path.abspath(os.path.expanduser(cfg.DATASET.ROOT))),
        output=Path(cfg.OUTPUT_DIR).expanduser() if cfg.OUTPUT_DIR else None,
        make_split=option(cfg, "MAKE_SPLIT"),
        split_file=option(cfg, "SPLIT_FILE"),
        split_seed=option(cfg, "SPLIT_SEED"),
        list_file=option(cfg, "LIST"),
    )


def picks_of(cfg, split: Split, row: Row, output: Path | None) -> Picks | None:
    """The few-shot picks; None for the full train list (DATASET.NUM_SHOTS below 1)."""
    shots, replay = cfg.DATASET.NUM_SHOTS, option(cfg, "PICKS")
    if shots < 1 and replay:
        raise ValueError(f"DATASET.PICKS is {replay}, but DATASET.NUM_SHOTS {shots} asks for all images: set its shots")
    if shots < 1:
        return None
    return picks_for(split, dataset=row.name, shots=shots, seed=cfg.SEED, replay=replay, output=output)


def data(items: list[Item], folder: Path) -> list[Datum]:
    """The harness's records; paths are made absolute here and nowhere else."""
    return [
        Datum(impath=os.path.join(folder, path), label=label, domain=0, classname=name) for path, label, name in items
    ]


def facts_of(row: Row, split: Split, cut: Split, picks: Picks | None, names: list[str]) -> dict[str, Any]:
    """What a result must say about its data. `split`: as read; `cut`: this run's part; `names`: of all classes."""
    return {
        "dataset": row.name,
        "shots": picks.shots if picks else None,
        "split_sha256": split.sha256,
        "split_generated": split.generated is not None,
        "split_origin": split.generated,
        "split_counts": counts(split),
        "published_split": published(split, row),
        "picks_sha256": picks.content_hash() if picks else None,
        "picks_seed": picks.seed if picks else None,
        "classnames_sha256": lines_hash(names),
        "published_classnames": lines_hash(names)[:16] == row.names_hash if row.names_hash else None,
        "counts": counts(cut),
        "short_classes": short_classes(cut, picks.shots) if picks else {},
    }


def counts(split: Split) -> dict[str, int]:
    """Images in each part, and classes."""
    return {part: len(items) for part, items in split.parts().items()} | {
        "classes": len({i.label for i in split.train})
    }


def published(split: Split, row: Row) -> bool | None:
    """Whether the split has the published numbers of images and classes; None where there are none to compare with."""
    return None if row.counts is None else tuple(counts(split).values()) == row.counts


def check_images(split: Split, row: Row, *, skip: bool) -> list[str]:
    """Paths of the split that are not on the disk; refused unless `skip`."""
    everything = split.train + split.val + split.test
    missing = [] if split.listed else missing_images(everything, split.folder)
    if missing and not skip:
        raise FileNotFoundError(
            f"{row.name}: {len(missing)} of {len(everything)} images are missing in {split.folder}: {some(missing)}; "
            "complete the folder, or set DATASET.SKIP_BROKEN True to go on without them"
        )
    return missing


def drop(split: Split, missing: list[str]) -> Split:
    """The split without the missing images. They go after the few-shot draw, so that the other picks stay CoOp's."""
    if not missing:
        return split
    gone = set(missing)
    left = split.map(lambda items: [item for item in items if item.path not in gone])
    kept = {item.label for item in left.train}
    emptied = {item.label: item.name for item in split.train if item.label not in kept}
    if emptied or not left.test:
        what = f"the train images of {some(emptied.values())}" if emptied else "the test images"
        raise FileNotFoundError(
            f"DATASET.SKIP_BROKEN True leaves none of {what}: complete the folder {split.folder}"
        )
    return left


def notes(facts: dict[str, Any], split: Split, row: Row, names: list[str], choice: str) -> list[str]:
    """What the log says about the data, one line each."""
    found = list(split.notes)
    if facts["missing_images"]:
        found.append(
            f"{facts['missing_images']} images of the split are not on the disk and are left out (DATASET.SKIP_BROKEN)"
        )
    if facts["published_split"] is False:
        have, want = facts["split_counts"].values(), row.counts
        found.append(
            "not the whole published data set: train/val/test/classes "
            f"{'/'.join(map(str, have))}, published {'/'.join(map(str, want))}"
        )
    if facts["published_classnames"] is False:
        found.append("class names differ from the list that CoOp uses")
    found += ([] if split.listed else repeated_images(split)) + repeated_names(names)  # a listing has no path twice
    if looks_like_id(names):
        found.append(
            f"class names look like ids ({some(names)}): CLIP reads names, so give a file as DATASET.CLASSNAMES"
        )
    if row.test_only and choice != "all":
        found.append(
            f"DATASET.SUBSAMPLE_CLASSES {choice} has no effect: this data set is for tests on all of its classes"
        )
    elif choice != "all":
        found.append(describe(names, choice))
    if facts["shots"]:
        found.append(f"{facts['shots']} shots, seed {facts['picks_seed']}, picks {facts['picks_sha256'][:12]}")
    if facts["short_classes"]:
        few = some(f"{name} ({count})" for name, count in facts["short_classes"].items())
        found.append(
            f"{len(facts['short_classes'])} classes have fewer train images than {facts['shots']} shots "
            f"and are taken whole: {few}"
        )
    return found
