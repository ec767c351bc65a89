"""Split files: read in order, hashed by content, and refused with the sentence that helps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from datasets.splits import (
    Item,
    Split,
    check_labels,
    looks_like_id,
    missing_images,
    read_class_names,
    read_split,
    repeated_images,
    repeated_names,
    write_split,
)


def split(train, val=(), test=None) -> Split:
    made = [Item(*raw) for raw in train]
    return Split(
        made,
        [Item(*raw) for raw in val],
        [Item(*raw) for raw in test] if test is not None else [item._replace(path=f"t/{item.path}") for item in made],
        folder=Path("."),
    )


def test_list_order_is_kept_and_labels_become_ints(tmp_path):
    file = tmp_path / "s.json"
    file.write_text(
        json.dumps({"train": [["b/2.jpg", "1", "b"], ["a/1.jpg", 0, "a"]], "val": [], "test": [["a/3.jpg", 0, "a"]]})
    )
    read = read_split(file, tmp_path)
    assert read.train == [Item("b/2.jpg", 1, "b"), Item("a/1.jpg", 0, "a")] and read.class_names() == ["a", "b"]
    assert read.generated is None


def test_hash_depends_on_content_and_order_and_not_on_white_space(tmp_path):
    content = {"train": [["a/1.jpg", 0, "ä b"], ["b/2.jpg", 1, "c"]], "val": [], "test": [["a/3.jpg", 0, "ä b"]]}
    texts = [
        json.dumps(content),
        json.dumps(content, indent=4, ensure_ascii=False),
        json.dumps(content | {"train": content["train"][::-1]}),
    ]
    hashes = []
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.json").write_text(text, encoding="utf-8")
        hashes.append(read_split(tmp_path / f"{i}.json", tmp_path).sha256)
    assert hashes[0] == hashes[1] != hashes[2]


def test_written_split_reads_back_with_its_mark(tmp_path):
    made = Split(
        [Item("ä ö/1 2.jpg", 0, "ä ö")], [], [Item("x.jpg", 0, "ä ö")], folder=tmp_path, generated={"seed": 1}
    )
    write_split(tmp_path / "deep" / "s.json", made)
    assert read_split(tmp_path / "deep" / "s.json", tmp_path) == made
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["s.json"]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", r"s\.json is no JSON file \(.*\): fetch or make it again"),
        ("[]", r"s\.json holds list, wanted one object with the lists train, val and test"),
        ('{"train": [], "test": []}', r"s\.json holds train, test, wanted one object"),
        (
            '{"train": [["a.jpg", 0]], "val": [], "test": []}',
            r"s\.json, train, item 0 is \['a.jpg', 0\], wanted \[image path, label, class name\]",
        ),
        ('{"train": [], "val": [["a.jpg", "x", "a"]], "test": []}', r"val, item 0 is \['a.jpg', 'x', 'a'\], wanted"),
        (
            '{"train": [["/a.jpg", 0, "a"]], "val": [], "test": []}',
            r"the path /a.jpg must be relative and stay in its folder",
        ),
        ('{"train": [["../a.jpg", 0, "a"]], "val": [], "test": []}', r"the path \.\./a.jpg must be relative"),
    ],
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_split(tmp_path / "s.json", tmp_path)


@pytest.mark.parametrize(
    "train, val, test, message",
    [
        (
            [("a", 0, "a"), ("b", 1, "b"), ("c", 3, "c"), ("d", 6, "d")],
            [],
            None,
            r"X: the labels of train must be 0\.\.6 without gaps, missing 2, 4, 5: number the classes anew",
        ),
        ([("a", -1, "a"), ("b", 0, "b")], [], None, "without gaps, negative -1"),
        ([], [], [("a", 0, "a")], "X: train is empty, it needs at least one image a class"),
        ([("a", 0, "a")], [], [], "X: test is empty"),
        (
            [("a", 0, "a")],
            [],
            [("b", 1, "b"), ("c", 4, "c")],
            r"X: test has classes that train has not: 1 \(b\), 4 \(c\)",
        ),
        ([("a", 0, "a")], [("b", 1, "b")], None, r"X: val has classes that train has not: 1 \(b\)"),
        ([("a", 0, "a"), ("b", 0, "b")], [], None, "X: label 0 has 2 class names, a, b; one label has one name"),
    ],
)
def test_bad_labels(train, val, test, message):
    with pytest.raises(ValueError, match=message):
        check_labels(split(train, val, test), "X")


def test_equal_names_of_two_labels_are_a_note():
    made = split([("a", 0, "crane"), ("b", 1, "crane"), ("c", 2, "dog")])
    check_labels(made, "X")
    assert repeated_names(made.class_names()) == ["2 classes have the name crane"]


def test_image_in_two_classes_and_in_two_parts_is_reported():
    made = split([("a", 0, "cat"), ("a", 1, "dog"), ("b", 1, "dog")], test=[("b", 1, "dog"), ("c", 0, "cat")])
    assert repeated_images(made) == [
        "a is in 2 classes: cat, dog (several labels an image are not supported)",
        "1 images are in test and also in train or val: b",
    ]
    assert repeated_images(split([("a", 0, "cat")])) == []


def test_missing_images_are_counted_and_the_first_five_named(eurosat, load):
    root, _ = eurosat({"Forest": 8, "River": 8})
    for i in range(7):
        (root / "eurosat" / "2750" / "River" / f"train_{i}.jpg").unlink()
    named = ", ".join(f"River/train_{i}.jpg" for i in range(5))
    with pytest.raises(
        FileNotFoundError,
        match=re.escape(
            f"EuroSAT: 7 of 22 images are missing in {root / 'eurosat' / '2750'}: {named} "
            "and 2 more; complete the folder, or set DATASET.SKIP_BROKEN True"
        ),
    ):
        load("EuroSAT", root)


def test_skip_broken_drops_them_after_the_draw(eurosat, load, capsys):
    root, _ = eurosat({"Forest": 8, "River": 8})
    whole = load("EuroSAT", root, shots=3, output="")
    gone = Path(whole.train_x[0].impath)
    gone.unlink()
    data = load("EuroSAT", root, shots=3, output="", SKIP_BROKEN=True)
    assert [d.impath for d in data.train_x] == [d.impath for d in whole.train_x[1:]]
    assert data.facts["missing_images"] == 1 and data.facts["picks_sha256"] == whole.facts["picks_sha256"]
    assert data.facts["short_classes"] == {"Forest": 2}
    assert (
        "EuroSAT: 1 images of the split are not on the disk and are left out (DATASET.SKIP_BROKEN)"
        in capsys.readouterr().out
    )


def test_skip_broken_never_empties_a_class(eurosat, load):
    root, _ = eurosat({"Forest": 2, "River": 2})
    for i in range(2):
        (root / "eurosat" / "2750" / "River" / f"train_{i}.jpg").unlink()
    with pytest.raises(
        FileNotFoundError,
        match="DATASET.SKIP_BROKEN True leaves none of the train images of River: complete the folder",
    ):
        load("EuroSAT", root, SKIP_BROKEN=True)


def test_missing_folder_counts_all_its_images(tmp_path):
    assert missing_images([Item("a/1", 0, "a"), Item("a/2", 0, "a"), Item("a/1", 0, "a")], tmp_path) == ["a/1", "a/2"]


def test_label_gap_stops_a_load(eurosat, load):
    root, _ = eurosat({"a": 2, "b": 2, "c": 2}, labels={"c": 3})
    with pytest.raises(ValueError, match=r"EuroSAT: the labels of train must be 0\.\.3 without gaps, missing 2"):
        load("EuroSAT", root)


@pytest.mark.parametrize(
    "names, expected",
    [
        (["n01440764", "n01443537"], True),
        (["0", "1", "2"], True),
        (["class_3", "Class 4", "cls5"], True),
        (["c01", "c02"], True),
        (["tench", "goldfish"], False),
        (["707-320", "A310", "DC-3", "Boeing 717"], False),
        (["1", "cat", "dog"], False),
        ([], False),
        (["2000 AM General Hummer SUV", "2012 Acura RL Sedan"], False),
    ],
)
def test_looks_like_id(names, expected):
    assert looks_like_id(names) is expected


@pytest.mark.parametrize("name", ["food101", "sun397", "fgvc_aircraft"])
def test_published_names_do_not_look_like_ids(shared_data, name):
    assert not looks_like_id(json.loads((shared_data / "splits" / f"classnames_{name}.json").read_text()))


@pytest.mark.parametrize(
    "file, text, old",
    [
        ("names.txt", "red car\nblue sky\n", ["red", "blue"]),
        ("names.txt", "blue\tblue sky\nred\tred car\nother\tunused\n", ["red", "blue"]),
        ("names.txt", "\ufeffn02 blue sky\r\nn01 red car\r\n", ["n01", "n02"]),
        ("names.json", '["red car", "blue sky"]', ["red", "blue"]),
        ("names.json", '{"blue": "blue sky", "red": "red car"}', ["red", "blue"]),
    ],
)
def test_class_name_files(tmp_path, file, text, old):
    (tmp_path / file).write_text(text, encoding="utf-8")
    assert read_class_names(tmp_path / file, old) == ["red car", "blue sky"]


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "one\n",
            r"\(DATASET.CLASSNAMES\) holds 1 names for 2 classes: write one a line in the order of the labels, "
            "or lines of old name, tab, new name",
        ),
        ("red\tcrimson\n", r"\(DATASET.CLASSNAMES\) has no name for the classes blue"),
    ],
)
def test_bad_class_name_files(tmp_path, text, message):
    (tmp_path / "n.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_class_names(tmp_path / "n.txt", ["red", "blue"])


def test_missing_class_name_file(eurosat, load):
    root, _ = eurosat({"a": 2, "b": 2})
    with pytest.raises(
        FileNotFoundError, match=r"class names no\.txt not found: set DATASET.CLASSNAMES to a text or JSON file"
    ):
        load("EuroSAT", root, CLASSNAMES="no.txt")


def test_names_file_changes_names_in_both_halves_and_not_the_picks(eurosat, load, tmp_path):
    root, _ = eurosat({"0": 4, "1": 4, "2": 4})
    (tmp_path / "n.txt").write_text("zero\none\ntwo\n")
    plain = load("EuroSAT", root, shots=2, output="")
    assert any("class names look like ids (0, 1, 2)" in note for note in plain.facts["notes"])
    named = load("EuroSAT", root, shots=2, output="", CLASSNAMES=str(tmp_path / "n.txt"))
    assert named.classnames == ["zero", "one", "two"] and not any("like ids" in note for note in named.facts["notes"])
    assert named.facts["picks_sha256"] == plain.facts["picks_sha256"]
    assert named.facts["classnames_sha256"] != plain.facts["classnames_sha256"]
    new = load("EuroSAT", root, shots=2, output="", CLASSNAMES=str(tmp_path / "n.txt"), SUBSAMPLE_CLASSES="new")
    assert new.classnames == ["two"] and {d.classname for d in new.test} == {"two"}
