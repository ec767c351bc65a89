"""`Folder`: any tree of image folders, in three layouts, with a split that is made once and said to be made."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from datasets.folder import SPLIT_FILE, make_split, read_folder, split_counts


@pytest.fixture
def tree(tmp_path, touch) -> Path:
    """Twelve images of three classes, names with spaces and umlauts, mixed extensions."""
    root = tmp_path / "my data ü"
    for name in ("red fox", "Äpfel", "dog"):
        touch(root / name, "1.jpg", "2.JPEG", "3.png", "4 ß.PNG")
    (root / "dog" / "notes.txt").write_text("no image")
    (root / ".hidden").mkdir()
    (root / "__MACOSX").mkdir()
    return root


def parts(data) -> dict[str, list[str]]:
    return {
        part: [os.path.basename(os.path.dirname(d.impath)) + "/" + os.path.basename(d.impath) for d in items]
        for part, items in (("train", data.train_x), ("val", data.val), ("test", data.test))
    }


def test_one_tree_is_split_by_seed_and_marked(tree, load, tmp_path, capsys):
    data = load("Folder", tree)
    assert data.classnames == ["dog", "red fox", "Äpfel"] and data.num_classes == 3
    assert {part: len(items) for part, items in parts(data).items()} == {"train": 6, "val": 3, "test": 3}
    assert sorted(sum(parts(data).values(), [])) == sorted(
        f"{name}/{file}" for name in data.classnames for file in ("1.jpg", "2.JPEG", "3.png", "4 ß.PNG")
    )
    assert data.facts["split_generated"] is True and data.facts["split_origin"]["seed"] == 1
    stored = json.loads((tmp_path / "out" / SPLIT_FILE).read_text(encoding="utf-8"))
    assert stored["generated"] == data.facts["split_origin"] and len(stored["train"]) == 6
    assert (
        "split by seed 1 (DATASET.SPLIT_SEED) into 6 train, 3 val and 3 test images, marked as generated"
        in capsys.readouterr().out
    )
    assert not any(path.suffix == ".json" for path in tree.rglob("*"))


def test_split_hangs_on_its_own_seed_alone(tree, load):
    first = load("Folder", tree, output="", seed=1)
    assert parts(load("Folder", tree, output="", seed=9)) == parts(first)
    assert parts(load("Folder", tree, output="", seed=1, SPLIT_SEED=2)) != parts(first)


def test_base_and_new_share_the_split(tree, load, tmp_path):
    base = load("Folder", tree, SUBSAMPLE_CLASSES="base", output=tmp_path / "a", shots=1)
    new = load("Folder", tree, SUBSAMPLE_CLASSES="new", output=tmp_path / "b", shots=1)
    assert base.facts["split_sha256"] == new.facts["split_sha256"]
    assert base.classnames == ["dog", "red fox"] and new.classnames == ["Äpfel"]


def test_a_second_run_in_the_folder_takes_the_stored_split(tree, load):
    assert parts(load("Folder", tree)) == parts(load("Folder", tree))


def test_a_changed_tree_is_refused_and_the_old_split_can_be_kept(tree, load, touch, tmp_path):
    first = load("Folder", tree)
    touch(tree / "cat", "1.jpg", "2.jpg")
    with pytest.raises(
        ValueError,
        match=r"split\.json was made from other files or another seed \(12 images, seed 1, .*; now 14 images"
        r".*give that file as DATASET.SPLIT_FILE to keep it, or choose another OUTPUT_DIR",
    ):
        load("Folder", tree)
    kept = load("Folder", tree, SPLIT_FILE=str(tmp_path / "out" / SPLIT_FILE), output=tmp_path / "other")
    assert parts(kept) == parts(first) and kept.facts["split_generated"] is True


def test_split_file_of_ones_own(tree, load, tmp_path):
    own = {
        "train": [["dog/1.jpg", 0, "dog"], ["Äpfel/1.jpg", 1, "apple"]],
        "val": [],
        "test": [["dog/2.JPEG", 0, "dog"]],
    }
    (tmp_path / "own.json").write_text(json.dumps(own))
    data = load("Folder", tree, SPLIT_FILE=str(tmp_path / "own.json"))
    assert data.classnames == ["dog", "apple"] and data.facts["split_generated"] is False
    with pytest.raises(
        FileNotFoundError, match=r"no\.json \(DATASET.SPLIT_FILE\) not found: wanted a JSON file with the lists"
    ):
        load("Folder", tree, SPLIT_FILE="no.json")
    (tree / "dog" / "1.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"Folder: 1 of 3 images are missing in .*: dog/1\.jpg"):
        load("Folder", tree, SPLIT_FILE=str(tmp_path / "own.json"))


@pytest.mark.parametrize(
    "layout, expected",
    [
        ({"train": 3, "test": 2}, {"train": 6, "val": 0, "test": 4}),
        ({"train": 3, "val": 1, "test": 2}, {"train": 6, "val": 2, "test": 4}),
        ({"train": 3, "val": 2}, {"train": 6, "val": 0, "test": 4}),
    ],
)
def test_trees_that_are_split_by_folders(tmp_path, touch, load, layout, expected, capsys):
    for part, count in layout.items():
        for name in ("cat", "dog"):
            touch(tmp_path / "d" / part / name, *[f"{part}{i}.png" for i in range(count)])
    data = load("Folder", tmp_path / "d")
    assert {part: len(items) for part, items in parts(data).items()} == expected
    assert data.facts["split_generated"] is False and not (tmp_path / "out" / SPLIT_FILE).exists()
    said = "train and val but no test: the images of val are the test images" in capsys.readouterr().out
    assert said == ("test" not in layout)


def test_classes_of_the_parts_must_agree(tmp_path, touch, load, capsys):
    touch(tmp_path / "d", "train/cat/1.png", "train/dog/1.png", "test/cat/2.png")
    assert load("Folder", tmp_path / "d").num_classes == 2
    assert "test has no images of dog" in capsys.readouterr().out
    touch(tmp_path / "d", "test/cow/1.png")
    with pytest.raises(ValueError, match="d: test has class folders that train has not: cow"):
        load("Folder", tmp_path / "d")


@pytest.mark.parametrize(
    "files, message",
    [
        ((), "wanted one folder a class with the images in it, but it has no folders"),
        (("1.png", "2.png"), "but 2 images lie directly in it"),
        (("cat/1.png", "cat/2.png", "dog/1.png"), "the classes dog have one image, a split needs 2"),
    ],
)
def test_trees_that_are_no_data_set(tmp_path, touch, load, files, message):
    (tmp_path / "d").mkdir()
    touch(tmp_path / "d", *files)
    with pytest.raises(ValueError, match=message):
        load("Folder", tmp_path / "d")


def test_empty_class_folders_are_named(tree, load):
    (tree / "cow").mkdir()
    (tree / "yak").mkdir()
    with pytest.raises(
        ValueError,
        match=r"no images in the class folders cow, yak \(looked for \.jpg .*\): add images or remove the folders",
    ):
        load("Folder", tree)


def test_missing_root(load, tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"nowhere is no folder: DATASET.ROOT \(--root\) must be the folder that holds the class folders",
    ):
        load("Folder", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="DATASET.ROOT is empty: give the data folder with --root"):
        load("Folder", "")


def test_same_file_in_two_classes_is_reported(tree, load, capsys):
    shutil.copy(tree / "dog" / "1.jpg", tree / "red fox" / "other name.jpg")
    load("Folder", tree)
    assert (
        "Folder: 1 images are in more than one class (several labels an image are not supported): "
        "dog/1.jpg = red fox/other name.jpg"
    ) in capsys.readouterr().out


def test_same_file_in_two_classes_of_a_tree_with_parts(tmp_path, touch, load):
    touch(tmp_path / "d", "train/cat/1.png", "train/dog/1.png", "test/cat/2.png")
    shutil.copy(tmp_path / "d" / "train" / "dog" / "1.png", tmp_path / "d" / "test" / "cat" / "9.png")
    notes = load("Folder", tmp_path / "d").facts["notes"]
    assert any("train/dog/1.png" in note and "test/cat/9.png" in note for note in notes)


def test_read_only_tree_works(tree, load):
    folders = [tree, *[path for path in tree.iterdir() if path.is_dir()]]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert load("Folder", tree, shots=1).num_classes == 3
    finally:
        for folder in folders:
            folder.chmod(0o755)


@pytest.mark.parametrize(
    "total, expected",
    [(2, (1, 0)), (3, (2, 0)), (4, (2, 1)), (5, (2, 1)), (25, (12, 5)), (35, (18, 7)), (45, (22, 9))],
)
def test_split_counts_round_as_coop_does_and_leave_a_test_image(total, expected):
    assert split_counts(total) == expected and total - sum(expected) >= 1


def test_every_image_is_in_one_part(tmp_path):
    images = {name: [f"{i}.png" for i in range(size)] for name, size in (("a", 2), ("b", 7), ("c", 31))}
    made = make_split(images, tmp_path, seed=3)
    paths = [item.path for items in made.parts().values() for item in items]
    assert len(paths) == len(set(paths)) == 40
    assert {item.name: item.label for item in made.train} == {"a": 0, "b": 1, "c": 2}


def test_cifar_folders_load(shared_data):
    read = read_folder(shared_data / "cifar10", seed=1, output=None)
    assert {part: len(items) for part, items in read.parts().items()} == {"train": 160, "val": 0, "test": 80}
    assert read.class_names()[:2] == ["airplane", "automobile"]
