"""`shapes`: a few-shot data set of the procedural world in a style that `tiny` never saw, as files in CoOp's layout.

A class is a (texture, color, entity) triple; location and size vary freely. The 24 base classes and the 24 new ones are
full grids over disjoint attribute values, so every class has neighbours that differ from it in one attribute only. What
is learnt on the base half helps the new half only as far as it is about the style and not about the base values.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
from PIL import Image

from datasets.shapes import LOCATIONS, SIZES, Scene, Style, render

FOLDER, IMAGE_FOLDER, SPLIT_FILE, FACTS_FILE = "shapes", "images", "split_zhou_Shapes.json", "shapes.json"
VERSION = 1  # raised whenever a pixel, a class or a split changes
COUNTS = {"train": 20, "val": 4, "test": 60}  # pictures a class
STYLE = Style(noise=0.03, palette_shift=0.1, clutter=3, rotation=15.0, ground_contrast=0.15, tint=(1.0, 0.76, 0.52))
HALVES = (  # (textures, colors, entities) of the base half and of the new half
    (("striped", "dotted"), ("red", "orange", "pink"), ("cup", "house", "hexagon", "circle")),
    (("wavy", "checkered"), ("blue", "green", "cyan"), ("boat", "tree", "star", "crescent")),
)


def classes() -> list[tuple[str, str, str]]:
    """(texture, color, entity) of the 48 classes in label order, base half first."""
    return [triple for half in HALVES for triple in itertools.product(*half)]


def class_name(triple: tuple[str, str, str]) -> str:
    """`("striped", "red", "cup")` to `striped_red_cup`; trainers turn underscores into spaces."""
    return "_".join(triple)


def _write_class(folder: Path, label: int, triple: tuple[str, str, str], style: Style) -> dict[str, list[list]]:
    """Render one class into `folder`; items of each split as [path, label, name]."""
    texture, color, entity = triple
    name = class_name(triple)
    (folder / IMAGE_FOLDER / name).mkdir(parents=True)
    rng = np.random.default_rng([VERSION, label])
    items: dict[str, list[list]] = {}
    for split, count in COUNTS.items():
        items[split] = []
        for i in range(count):
            scene = Scene(color, entity, texture, str(rng.choice(LOCATIONS)), str(rng.choice(SIZES)))
            path = f"{name}/{split}_{i:04d}.png"
            Image.fromarray(render(scene, rng, style=style)).save(folder / IMAGE_FOLDER / path)
            items[split].append([path, label, name])
    return items


def ensure_shapes(root: Path) -> Path:
    """Write the data set below `root` unless this version is there, in place in one step; returns its folder.

    Raises ValueError where the folder holds another version, OSError where `root` cannot be written.
    """
    folder = Path(root) / FOLDER
    facts_file = folder / FACTS_FILE
    if facts_file.is_file():
        found = json.loads(facts_file.read_text(encoding="utf-8")).get("version")
        if found == VERSION:
            return folder
        raise ValueError(f"{folder} holds version {found} of shapes, this code needs version {VERSION}: move it away "
                         "and it is written again")
    if folder.exists():
        raise ValueError(f"{folder} exists but has no {FACTS_FILE}, so it is not the data set that this code writes: "
                         "move it away or set another --root")
    partial = folder.with_name(f".{FOLDER}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    splits: dict[str, list[list]] = {split: [] for split in COUNTS}
    print(f"Writing the shapes data set to {folder} (once)")
    try:
        partial.mkdir(parents=True)
        for label, triple in enumerate(classes()):
            for split, items in _write_class(partial, label, triple, STYLE).items():
                splits[split] += items
        (partial / SPLIT_FILE).write_text(json.dumps(splits, indent=4, separators=(",", ": ")), encoding="utf-8")
        facts = {"version": VERSION, "classes": len(classes()), "images_a_class": COUNTS, "style": asdict(STYLE)}
        (partial / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            if not facts_file.is_file():  # another process was first: its copy is the same
                raise
    except PermissionError as error:
        raise PermissionError(f"{folder} cannot be written ({error.strerror}): it is drawn on first use, so run once "
                              "with a --root that can be written, or copy the folder there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
