"""Reading images so that a missing or broken one is named, and the check of all lists before training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

_ADVICE = "replace it, or set DATASET.SKIP_BROKEN True to leave such images out"
LISTED_FROM = 32  # images of one folder; fewer are looked at one by one
SPLITS = ("train_x", "train_u", "val", "test")


class BrokenImageError(ValueError):
    """An image file that cannot be decoded."""


def read_image(path: str | Path) -> Image.Image:
    """The image as RGB, fully decoded."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError as error:
        raise FileNotFoundError(f"image {path} is missing: {_ADVICE}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        reason = "not an image" if isinstance(error, UnidentifiedImageError) else error
        raise BrokenImageError(f"image {path} cannot be read ({reason}): {_ADVICE}") from error


def is_broken(path: str | Path) -> bool:
    """Whether decoding fails; JPEG is decoded at an eighth of its size, which still reads the file to its end."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (image.width // 8 or 1, image.height // 8 or 1))
            image.load()
    except (OSError, SyntaxError, Image.DecompressionBombError):
        return True
    return False


def check_images(dataset: Any, *, skip_broken: bool) -> None:
    """Every listed file exists, else FileNotFoundError with the first five.

    With `skip_broken` the lists lose missing and undecodable files and `dataset.skipped_images` names them; without it,
    undecodable files are found when they are read.
    """
    decodes: dict[str, bool] = {}  # one list may serve as val and test: decoded once, counted once
    for split in SPLITS:
        items = getattr(dataset, split, None)
        if not items:
            continue
        missing = missing_files(item.impath for item in items)
        if missing and not skip_broken:
            raise FileNotFoundError(
                f"{len(missing):,} of {len(items):,} images of {split} are missing: {some(sorted(missing))}; "
                "check DATASET.ROOT, or set DATASET.SKIP_BROKEN True to leave them out"
            )
        if skip_broken:
            decodes |= dict.fromkeys(missing, False)
            unknown = [path for path in dict.fromkeys(item.impath for item in items) if path not in decodes]
            broken = _broken(unknown)
            decodes |= {path: path not in broken for path in unknown}
            _keep(dataset, split, [item for item in items if decodes[item.impath]])
    dataset.skipped_images = sorted(path for path, good in decodes.items() if not good)
    if dataset.skipped_images:
        print(
            f"Left out {len(dataset.skipped_images):,} missing or broken images (DATASET.SKIP_BROKEN): "
            f"{some(dataset.skipped_images)}"
        )
    for split in ("train_x", "test"):
        if not getattr(dataset, split):
            raise ValueError(f"the {split} list has no images: check DATASET.ROOT and DATASET.NAME")
    emptied = dataset.lab2cname.keys() - {item.label for item in dataset.train_x}
    if emptied:
        raise ValueError(
            "DATASET.SKIP_BROKEN leaves no training image of the classes "
            f"{some(dataset.lab2cname[label] for label in sorted(emptied))}: replace some of their images"
        )


def missing_files(paths: Iterable[str]) -> set[str]:
    """Those that are no files. A folder with many of them is listed once, which a network disk answers much faster."""
    by_folder: dict[str, list[str]] = {}
    for path in paths:
        by_folder.setdefault(os.path.dirname(path), []).append(path)
    missing = set()
    for folder, wanted in by_folder.items():
        there: set[str] = set()
        if len(wanted) >= LISTED_FROM and os.path.isdir(folder):
            with os.scandir(folder) as entries:
                there = {entry.name for entry in entries if entry.is_file()}
        missing |= {path for path in wanted if os.path.basename(path) not in there and not os.path.isfile(path)}
    return missing


def _broken(paths: Sequence[str]) -> set[str]:
    with ThreadPoolExecutor(max_workers=8) as pool:  # decoding releases the interpreter lock
        return {path for path, broken in zip(paths, pool.map(is_broken, paths), strict=True) if broken}


def _keep(dataset: Any, split: str, items: list) -> None:
    setattr(dataset, f"_{split}", items)  # the field behind the contract's read-only property


def some(names: Iterable[str], limit: int = 5) -> str:
    """The first names, and how many more there are."""
    names = list(names)
    rest = len(names) - limit
    return ", ".join(map(str, names[:limit])) + (f" and {rest:,} more" if rest > 0 else "")
