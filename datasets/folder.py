"""Any tree of image folders as a data set: list the classes, and make a split by seed where the tree has none."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path
from typing import Any

from datasets.listing import EXTENSIONS, LOOSE, class_folders, list_tree
from datasets.splits import Item, Split, lines_hash, read_split, some, write_split

TRAIN_SHARE, VAL_SHARE = 0.5, 0.2  # CoOp's shares; the rest is test
SPLIT_FILE = "split.json"  # in the output folder
MAX_COMPARED = 100_000  # images; in larger trees the same file in two classes is not looked for


def list_classes(folder: Path, *, ignored: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """{class folder: its image names}, both sorted; refuses a tree without class folders and a class without images."""
    images = {name: files for name, files in list_tree(folder).items() if name not in ignored}
    if not images or LOOSE in images:
        loose = len(images.get(LOOSE, ()))
        found = f"{loose} images lie directly in it" if loose else "it has no folders"
        raise ValueError(f"{folder}: wanted one folder a class with the images in it, but {found}")
    empty = [name for name, files in images.items() if not files]
    if empty:
        raise ValueError(
            f"{folder}: no images in the class folders {some(empty)} (looked for {' '.join(EXTENSIONS)}): "
            "add images or remove the folders"
        )
    return images


def split_counts(total: int) -> tuple[int, int]:
    """(train, val) of `total` images of a class: half and a fifth, halves to the even number; test gets at least 1."""
    train = min(max(1, round(TRAIN_SHARE * total)), total - 1)
    return train, min(round(VAL_SHARE * total), total - 1 - train)


def make_split(
    images: dict[str, list[str]], folder: Path, *, seed: int, names: dict[str, str] | None = None
) -> Split:
    """A split by seed of {class folder: image names}; labels follow the folders' order, whatever `names` calls them."""
    single = [name for name, files in images.items() if len(files) < 2]
    if single:
        raise ValueError(
            f"{folder}: the classes {some(single)} have one image, a split needs 2 (one for train, one for test)"
        )
    generator = random.Random(seed)
    parts: dict[str, list[Item]] = {"train": [], "val": [], "test": []}
    for label, (name, files) in enumerate(images.items()):
        shuffled = list(files)
        generator.shuffle(shuffled)
        items = [Item(f"{name}/{file}", label, (names or {}).get(name, name)) for file in shuffled]
        train, val = split_counts(len(items))
        parts["train"] += items[:train]
        parts["val"] += items[train : train + val]
        parts["test"] += items[train + val :]
    return Split(**parts, folder=folder, generated=origin(images, seed), listed=True)


def origin(images: dict[str, list[str]], seed: int) -> dict[str, Any]:
    """What a generated split was made from: the seed and a hash of the listing."""
    listing = [f"{name}/{file}" for name, files in images.items() for file in files]
    return {"by": "datasets/folder.py", "seed": seed, "images": len(listing), "listing_sha256": lines_hash(listing)}


def keep_generated(split: Split, output: Path | None) -> Split:
    """Store a generated split in the output folder; one that is already there must have been made from the same files.

    A run that goes on with another split than it began with would test on images that it was trained on.
    """
    if output is None:
        return split
    file = output / SPLIT_FILE
    if not file.is_file():
        write_split(file, split)
        return split
    stored = read_split(file, split.folder)
    if stored.generated != split.generated:
        raise ValueError(
            f"{file} was made from other files or another seed ({_origin_text(stored)}; now {_origin_text(split)}): "
            f"give that file as DATASET.SPLIT_FILE to keep it, or choose another OUTPUT_DIR"
        )
    return stored


def _origin_text(split: Split) -> str:
    made = split.generated or {}
    listing = str(made.get("listing_sha256", "?"))[:12]
    return f"{made.get('images', '?')} images, seed {made.get('seed', '?')}, listing {listing}"


def read_folder(root: Path, *, seed: int, output: Path | None) -> Split:
    """`root` as `<class>/*.jpg`, or as `train/<class>/` and `test/<class>/`, with or without `val/<class>/`."""
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} is no folder: DATASET.ROOT (--root) must be the folder that holds the class folders"
        )
    present = class_folders(root)
    if "train" in present and ("test" in present or "val" in present):
        return _read_parts(root, present)
    images = list_classes(root)
    made = make_split(images, root, seed=seed)
    made = keep_generated(made, output)
    made.notes.append(
        f"{root} has no train and test folders: split by seed {seed} (DATASET.SPLIT_SEED) into {len(made.train)} "
        f"train, {len(made.val)} val and {len(made.test)} test images, marked as generated"
        + (f", stored in {output / SPLIT_FILE}" if output else "")
    )
    made.notes.extend(
        same_files(root, {name: [f"{name}/{file}" for file in files] for name, files in images.items()})
    )
    return made


def _read_parts(root: Path, present: list[str]) -> Split:
    """A tree that is split by its folders. With train and val alone, val is what is tested on."""
    listed = {part: list_classes(root / part) for part in ("train", "val", "test") if part in present}
    label_of = {name: label for label, name in enumerate(listed["train"])}
    for part, images in listed.items():
        unknown = [name for name in images if name not in label_of]
        if unknown:
            raise ValueError(f"{root}: {part} has class folders that train has not: {some(unknown)}")
    items = {
        part: [
            Item(f"{part}/{name}/{file}", label_of[name], name) for name, files in images.items() for file in files
        ]
        for part, images in listed.items()
    }
    notes = []
    if "test" not in items:
        items["test"] = items.pop("val")
        notes.append(f"{root} has train and val but no test: the images of val are the test images")
    for part in ("val", "test"):
        absent = [
            name for name in label_of if items.get(part) and name not in listed.get(part, listed.get("val", {}))
        ]
        if absent:
            notes.append(f"{root}: {part} has no images of {some(absent)}")
    everything: dict[str, list[str]] = {name: [] for name in label_of}
    for item in [item for part in items.values() for item in part]:
        everything[item.name].append(item.path)
    notes.extend(same_files(root, everything))
    return Split(items["train"], items.get("val", []), items["test"], folder=root, listed=True, notes=notes)


def same_files(folder: Path, paths: dict[str, list[str]]) -> list[str]:
    """Notes about the same image in two classes; `paths`: {class: paths}. Only files of equal size are read."""
    if sum(len(files) for files in paths.values()) > MAX_COMPARED:
        return []
    by_size: dict[int, list[tuple[str, str]]] = {}
    for name, files in paths.items():
        for path in files:
            try:
                by_size.setdefault(os.stat(folder / path).st_size, []).append((name, path))
            except OSError:
                continue  # gone since it was listed, or a dangling link: found when the images are checked or opened
    by_content: dict[str, list[tuple[str, str]]] = {}
    for found in by_size.values():
        if len({name for name, _ in found}) > 1:
            for name, path in found:
                by_content.setdefault(hashlib.sha256((folder / path).read_bytes()).hexdigest(), []).append(
                    (name, path)
                )
    twice = [found for found in by_content.values() if len({name for name, _ in found}) > 1]
    if not twice:
        return []
    pairs = [" = ".join(path for _, path in found) for found in twice]
    return [
        f"{len(twice)} images are in more than one class (several labels an image are not supported): {some(pairs)}"
    ]
