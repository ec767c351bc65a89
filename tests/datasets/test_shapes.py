"""The procedural world: same seed, same pixels; captions are true; the data set is written once and whole."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from datasets import shapes_benchmark
from datasets.shapes import ATTRIBUTES, ENTITIES, TEXTURES, TRAIN_STYLE, Scene, entity_mask, random_scene, render
from datasets.shapes_benchmark import HALVES, class_name, classes, ensure_shapes
from datasets.shapes_captions import SYNONYMS, caption


def test_attributes_have_the_promised_number_of_values():
    assert {key: len(values) for key, values in ATTRIBUTES.items()} == {
        "color": 11, "entity": 20, "texture": 6, "location": 9, "size": 2}


def test_same_generator_state_gives_the_same_pixels_and_another_gives_others():
    scene = Scene("red", "star", "striped", "center", "large")
    first, again, other = (render(scene, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first.dtype == np.uint8 and first.shape == (64, 64, 3)
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("entity", ENTITIES)
def test_every_entity_has_a_silhouette_of_its_own(entity):
    mask = entity_mask(entity, 38.0, 0.0)
    others = [entity_mask(name, 38.0, 0.0) for name in ENTITIES if name != entity]
    assert 0.1 < mask.mean() < 0.9
    assert min(np.abs(mask - other).mean() for other in others) > 0.03


def test_location_and_color_are_where_the_scene_says():
    scene = Scene("red", "circle", "plain", "bottom right", "small")
    pixels = render(scene, np.random.default_rng(0), style=replace(TRAIN_STYLE, noise=0.0)).astype(int)
    y, x = np.nonzero((pixels[..., 0] > 180) & (pixels[..., 1] < 60))
    assert abs(y.mean() - 48) < 4 and abs(x.mean() - 48) < 4 and len(y) > 200


@pytest.mark.parametrize("texture", TEXTURES[1:])
def test_textures_differ_from_plain(texture):
    rng = np.random.default_rng
    plain, textured = (render(Scene("blue", "square", t, "center", "large"), rng(3)) for t in ("plain", texture))
    assert np.abs(plain[24:40, 24:40].astype(int) - textured[24:40, 24:40]).mean() > 10


def test_captions_are_true_and_name_what_they_say_they_name():
    rng = np.random.default_rng(0)
    words = {key: {value: {value, *SYNONYMS.get(value, ())} for value in values} for key, values in ATTRIBUTES.items()}
    for _ in range(500):
        scene = random_scene(rng)
        made = caption(scene, rng)
        for key, index, truth in zip(ATTRIBUTES, made.named, scene.indices, strict=True):
            said = any(word in made.text for word in words[key][getattr(scene, key)])
            assert index in (-1, truth)
            assert said or index == -1, (made, scene)
        assert any(index >= 0 for index in made.named)


def test_classes_are_two_full_grids_over_disjoint_values():
    triples = classes()
    assert len(triples) == len(set(triples)) == 48
    base, new = HALVES
    for of_base, of_new in zip(base, new, strict=True):
        assert not set(of_base) & set(of_new)
    assert {t[0] for t in triples[:24]} == set(base[0]) and {t[0] for t in triples[24:]} == set(new[0])


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shapes_benchmark, "COUNTS", {"train": 2, "val": 1, "test": 1})
    monkeypatch.setattr(shapes_benchmark, "classes", lambda: classes()[:3])


def test_the_data_set_is_written_once_and_is_the_same_each_time(small, tmp_path):
    first = ensure_shapes(tmp_path / "a b")
    second = ensure_shapes(tmp_path / "ö")
    split = json.loads((first / "split_zhou_Shapes.json").read_text())
    assert {name: len(items) for name, items in split.items()} == {"train": 6, "val": 3, "test": 3}
    path, label, name = split["test"][2]
    assert (label, name) == (2, class_name(classes()[2]))
    one, two = (np.asarray(Image.open(folder / "images" / path)) for folder in (first, second))
    assert np.array_equal(one, two)
    before = (first / "shapes.json").stat().st_mtime_ns
    assert ensure_shapes(tmp_path / "a b") == first and (first / "shapes.json").stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*/.*partial"))


def test_another_version_or_a_foreign_folder_is_refused(small, tmp_path):
    folder = ensure_shapes(tmp_path)
    (folder / "shapes.json").write_text('{"version": 0}')
    with pytest.raises(ValueError, match="holds version 0 of shapes, this code needs version 1: move it away"):
        ensure_shapes(tmp_path)
    (tmp_path / "other" / "shapes").mkdir(parents=True)
    with pytest.raises(ValueError, match="exists but has no shapes.json"):
        ensure_shapes(tmp_path / "other")
