"""Test sets beside `shapes`: the same classes in other domains, and one set for each attribute of the pictures.

Domains (domain generalisation, as ImageNet's V2, -Sketch, -A, -R): the 48 classes of `shapes` drawn anew, as lightly
washed-in outlines, hidden and cluttered, or in a duller, blurred palette. Targets (cross-dataset): the classes are the
values of one attribute, on scenes that are random in all others. All are for tests only; style and counts are ours.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from datasets import shapes_benchmark
from datasets.shapes import ATTRIBUTES, LOCATIONS, SIZES, Scene, Style, random_scene, render
from datasets.splits import read_json, write_json

VERSION = 1  # raised whenever a picture changes; shapes_benchmark's own counts too, since domains share its style
DOMAIN_COUNT, TARGET_COUNT = 20, 40  # pictures a class
LIST_FILE = "images.json"


@dataclass(frozen=True)
class Variant:
    """`attribute` "" means the classes of `shapes`; `changes` are fields of Style on top of that of `shapes`."""

    folder: str
    seed: int
    attribute: str = ""
    changes: tuple[tuple[str, float], ...] = ()

    @property
    def style(self) -> Style:
        return replace(shapes_benchmark.STYLE, **dict(self.changes))


# A bare outline (1.0) leaves no room for a texture, so most of the 48 classes could not be told apart (`tiny` zero-shot
# 9.9 %); at 0.6 the rim is drawn in full and the inside washed in at 40 %, and all three attributes can be seen.
SKETCH_OUTLINE = 0.6

VARIANTS = {
    "ShapesResampled": Variant("shapes-resampled", 11),
    "ShapesSketch": Variant("shapes-sketch", 12, changes=(("outline", SKETCH_OUTLINE), ("clutter", 0))),
    "ShapesHard": Variant("shapes-hard", 13, changes=(("clutter", 8), ("occlusion", 0.25), ("noise", 0.08))),
    "ShapesRendition": Variant("shapes-rendition", 14, changes=(("palette_shift", 0.4), ("blur", 0.8))),
    "ShapesColor": Variant("shapes-color", 21, "color"),
    "ShapesEntity": Variant("shapes-entity", 22, "entity"),
    "ShapesTexture": Variant("shapes-texture", 23, "texture"),
    "ShapesLocation": Variant("shapes-location", 24, "location"),
}


def class_names(variant: Variant) -> list[str]:
    """In label order; several words joined by `_`."""
    if variant.attribute:
        return [value.replace(" ", "_") for value in ATTRIBUTES[variant.attribute]]
    return [shapes_benchmark.class_name(triple) for triple in shapes_benchmark.classes()]


def scenes(variant: Variant, label: int, rng: np.random.Generator) -> Iterator[Scene]:
    """The scenes of one class, one after the other, since drawing uses the generator too."""
    if variant.attribute:
        for _ in range(TARGET_COUNT):
            yield replace(random_scene(rng), **{variant.attribute: ATTRIBUTES[variant.attribute][label]})
        return
    texture, color, entity = shapes_benchmark.classes()[label]
    for _ in range(DOMAIN_COUNT):
        yield Scene(color, entity, texture, str(rng.choice(LOCATIONS)), str(rng.choice(SIZES)))


def facts_of(variant: Variant) -> dict[str, object]:
    """What the pictures on the disk must have been made from."""
    return {"version": [VERSION, shapes_benchmark.VERSION], "classes": class_names(variant), "seed": variant.seed,
            "style": json.loads(json.dumps(asdict(variant.style)))}  # fmt: skip


def ensure_variant(root: Path, name: str) -> Path:
    """Write the set below `root` unless it is there, in place in one step; returns its folder."""
    variant = VARIANTS[name]
    folder, facts = Path(root) / variant.folder, facts_of(variant)
    if (folder / LIST_FILE).is_file():
        if read_json(folder / LIST_FILE).get("facts") == facts:
            return folder
        raise ValueError(f"{folder} was written by another version of this code: move it away and it is written again")
    if folder.exists():
        raise ValueError(f"{folder} has no {LIST_FILE}, so it is not the data set that this code writes: move it away "
                         "or set another --root")
    partial = folder.with_name(f".{variant.folder}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    print(f"Writing the {name} data set to {folder} (once)")
    try:
        write_json(partial / LIST_FILE, {"facts": facts, "test": _write_images(variant, partial)})
        try:
            partial.rename(folder)
        except OSError:
            if not (folder / LIST_FILE).is_file():  # another process was first: its copy is the same
                raise
    except PermissionError as error:
        raise PermissionError(f"{folder} cannot be written ({error.strerror}): it is drawn on first use, so run once "
                              "with a --root that can be written, or copy the folder there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write_images(variant: Variant, folder: Path) -> list[list]:
    items = []
    for label, name in enumerate(class_names(variant)):
        (folder / "images" / name).mkdir(parents=True)
        rng = np.random.default_rng([VERSION, variant.seed, label])
        for i, scene in enumerate(scenes(variant, label, rng)):
            path = f"{name}/{i:04d}.png"
            Image.fromarray(render(scene, rng, style=variant.style)).save(folder / "images" / path)
            items.append([path, label, name])
    return items
