"""Base and new classes: CoOp's halves, renumbered labels, and what the log says."""

from __future__ import annotations

from pathlib import Path

import pytest

from datasets.base_new import describe, halves, subsample
from datasets.splits import read_split


@pytest.mark.parametrize("classes, base, new", [(2, 1, 1), (3, 2, 1), (37, 19, 18), (10, 5, 5)])
def test_halves(classes, base, new):
    first, second = halves([label for label in reversed(range(classes)) for _ in range(2)])
    assert (first, second) == (list(range(base)), list(range(base, base + new)))


def test_one_class_is_refused(split_of):
    with pytest.raises(ValueError, match="need at least 2 classes, got 1: set DATASET.SUBSAMPLE_CLASSES all"):
        subsample(split_of([4]), "base")
    assert len(subsample(split_of([4]), "all").train) == 4


@pytest.mark.parametrize("choice, names", [("base", ["name 0", "name 1"]), ("new", ["name 2"])])
def test_labels_count_from_zero_in_every_part(split_of, choice, names):
    half = subsample(split_of([2, 3, 4], [1, 1, 1]), choice)
    assert half.class_names() == names
    for items in half.parts().values():
        assert sorted({item.label for item in items}) == list(range(len(names)))
        assert {item.name for item in items} == set(names)


def test_val_stays_the_test_list(split_of):
    split = split_of([2, 2])
    half = subsample(type(split)(split.train, split.test, split.test, folder=split.folder), "new")
    assert half.val is half.test and len(half.test) == 1


def test_unknown_choice_is_refused_before_anything_is_read(load, tmp_path):
    with pytest.raises(ValueError, match="DATASET.SUBSAMPLE_CLASSES is 'old', wanted one of all, base, new"):
        load("EuroSAT", tmp_path / "nowhere", SUBSAMPLE_CLASSES="old")


def test_base_picks_are_the_base_part_of_all_picks(eurosat, load):
    root, _ = eurosat({name: 9 for name in "abcde"})
    everything = load("EuroSAT", root, shots=2, output="")
    base = load("EuroSAT", root, shots=2, SUBSAMPLE_CLASSES="base", output="")
    new = load("EuroSAT", root, shots=2, SUBSAMPLE_CLASSES="new", output="")
    assert [d.impath for d in base.train_x + new.train_x] == [d.impath for d in everything.train_x]
    assert base.classnames == ["a", "b", "c"] and new.classnames == ["d", "e"] and new.num_classes == 2
    assert (
        base.facts["split_sha256"] == new.facts["split_sha256"]
        and base.facts["picks_sha256"] == new.facts["picks_sha256"]
    )
    assert base.facts["classnames_sha256"] == new.facts["classnames_sha256"]  # of all classes: one list, two halves
    assert (base.facts["counts"]["test"], new.facts["counts"]["test"]) == (6, 4)


def test_both_halves_are_logged(eurosat, load, capsys):
    root, _ = eurosat({"a": 2, "b": 2, "c": 2})
    load("EuroSAT", root, SUBSAMPLE_CLASSES="new")
    assert (
        "EuroSAT: 3 classes in label order: base 2 (a, b), new 1 (c); base has one more, since the number is odd; "
        "this run takes new"
    ) in capsys.readouterr().out


def test_long_halves_are_shortened():
    text = describe([f"n{i}" for i in range(40)], "base")
    assert (
        "base 20 (n0, n1, n2, n3, n4, ..., n19), new 20 (n20, n21, n22, n23, n24, ..., n39); this run takes base"
        in text
    )


# Test images of the base and new classes in run logs that others published on the same split files.
@pytest.mark.parametrize(
    "name, base, new",
    [
        ("Caltech101", 1549, 916),
        ("OxfordPets", 1881, 1788),
        ("StanfordCars", 4002, 4039),
        ("OxfordFlowers", 1053, 1410),
        ("DescribableTextures", 864, 828),
        ("EuroSAT", 4200, 3900),
        ("UCF101", 1934, 1849),
    ],
)
def test_published_test_counts(shared_data, name, base, new):
    split = read_split(shared_data / "splits" / f"split_zhou_{name}.json", Path("."))
    assert [len(subsample(split, choice).test) for choice in ("base", "new")] == [base, new]
