"""The domains and targets beside shapes: classes, sizes, repeatability, and that domains do differ."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from datasets import shapes_variants
from datasets.shapes import ATTRIBUTES, Scene, Style, render
from datasets.shapes_benchmark import classes
from datasets.shapes_variants import SKETCH_OUTLINE, VARIANTS, ensure_variant


@pytest.fixture
def few(monkeypatch):
    """Two pictures a class."""
    monkeypatch.setattr(shapes_variants, "DOMAIN_COUNT", 2)
    monkeypatch.setattr(shapes_variants, "TARGET_COUNT", 2)


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_classes_and_lists(name, few, load, tmp_path):
    data = load(name, tmp_path)
    attribute = VARIANTS[name].attribute
    assert len(data.classnames) == (len(ATTRIBUTES[attribute]) if attribute else len(classes()))
    assert len(data.test) == 2 * len(data.classnames) and data.train_x == data.test and not data.val


def test_written_once_and_the_same_everywhere(few, tmp_path):
    folders = [ensure_variant(tmp_path / place, "ShapesTexture") for place in ("a", "b")]
    first, second = ([hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*.png"))]
                     for folder in folders)  # fmt: skip
    assert first == second and len(set(first)) == len(first)
    assert ensure_variant(tmp_path / "a", "ShapesTexture") == folders[0]


def test_another_version_or_a_foreign_folder_is_refused(few, tmp_path, monkeypatch):
    ensure_variant(tmp_path, "ShapesTexture")
    monkeypatch.setattr(shapes_variants, "VERSION", 99)
    with pytest.raises(ValueError, match="another version of this code: move it away"):
        ensure_variant(tmp_path, "ShapesTexture")
    (tmp_path / "shapes-hard").mkdir()
    with pytest.raises(ValueError, match="has no images.json"):
        ensure_variant(tmp_path, "ShapesHard")


def test_a_sketch_of_another_style_is_refused_and_the_other_sets_are_kept(few, tmp_path, monkeypatch):
    bare = replace(VARIANTS["ShapesSketch"], changes=(("outline", 1.0), ("clutter", 0)))
    with monkeypatch.context() as before:
        before.setitem(VARIANTS, "ShapesSketch", bare)
        ensure_variant(tmp_path, "ShapesSketch")
        hard = ensure_variant(tmp_path, "ShapesHard")
    with pytest.raises(ValueError, match="shapes-sketch was written by another version of this code: move it away"):
        ensure_variant(tmp_path, "ShapesSketch")
    assert ensure_variant(tmp_path, "ShapesHard") == hard


def test_a_sketch_is_a_full_rim_around_a_faint_inside():
    scene = Scene("red", "square", "plain", "center", "large")

    def paint(outline: float) -> np.ndarray:
        style = Style(noise=0.0, rotation=0.0, ground_contrast=0.0, outline=outline)
        return render(scene, np.random.default_rng(0), style=style).astype(float)

    full, sketch, ground = paint(0.0)[32], paint(SKETCH_OUTLINE)[32], paint(1.0)[32, 32]  # a bare outline's inside
    inside = np.flatnonzero(np.abs(full - ground).max(1) > 0.9 * np.abs(full[32] - ground).max())
    np.testing.assert_allclose(sketch[inside[0]], full[inside[0]], atol=1.5)  # the rim
    np.testing.assert_allclose(sketch[32], SKETCH_OUTLINE * ground + (1 - SKETCH_OUTLINE) * full[32], atol=1.5)


def test_domains_differ_in_what_they_are_named_for(few, tmp_path):
    def edges(name: str) -> float:
        folder = ensure_variant(tmp_path, name) / "images"
        pictures = [np.asarray(Image.open(path), np.float32) for path in sorted(folder.rglob("*.png"))[:40]]
        return float(np.mean([np.abs(np.diff(picture, axis=1)).mean() for picture in pictures]))

    plain = edges("ShapesResampled")
    assert edges("ShapesHard") > 1.2 * plain > 1.2 * edges("ShapesRendition")
