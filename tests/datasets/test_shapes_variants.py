"""The domains and targets beside shapes: classes, sizes, repeatability, and that domains do differ."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from PIL import Image

from datasets import shapes_variants
from datasets.shapes import ATTRIBUTES
from datasets.shapes_benchmark import classes
from datasets.shapes_variants import VARIANTS, ensure_variant


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


def test_domains_differ_in_what_they_are_named_for(few, tmp_path):
    def edges(name: str) -> float:
        folder = ensure_variant(tmp_path, name) / "images"
        pictures = [np.asarray(Image.open(path), np.float32) for path in sorted(folder.rglob("*.png"))[:40]]
        return float(np.mean([np.abs(np.diff(picture, axis=1)).mean() for picture in pictures]))

    plain = edges("ShapesResampled")
    assert edges("ShapesHard") > 1.2 * plain > 1.2 * edges("ShapesRendition")
