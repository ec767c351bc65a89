"""Readers: CoOp's layouts, one sentence for what is missing, and splits made on request."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from datasets.row import COOP_DATA_PAGE
from datasets.table import row_for

WNIDS = ("n01", "n02", "n03", "n04")


def records(items) -> list[tuple[str, int, str]]:
    return [(os.path.basename(d.impath), d.label, d.classname) for d in items]


def test_missing_folder(load, tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"eurosat not found: DATASET.ROOT \(--root\) is .* and EuroSAT is looked for in its folder "
        r"eurosat; how to get the data: https://github.com/KaiyangZhou/CoOp/",
    ):
        load("EuroSAT", tmp_path)


def test_missing_split_file_and_the_way_out(eurosat, load, tmp_path, capsys):
    root, split = eurosat({"Forest": 10, "SeaLake": 10}, val=0, test=0)
    (root / "eurosat" / "split_zhou_EuroSAT.json").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        load("EuroSAT", root)
    assert str(caught.value) == (
        f"split_zhou_EuroSAT.json not found in {root / 'eurosat'}: {COOP_DATA_PAGE} links the published file; "
        "DATASET.MAKE_SPLIT True makes a split of its own instead, marked as generated"
    )
    data = load("EuroSAT", root, MAKE_SPLIT=True)
    assert data.classnames == ["Forest", "Sea or Lake"]
    assert (len(data.train_x), len(data.val), len(data.test)) == (10, 4, 6)
    assert data.facts["split_generated"] is True and (tmp_path / "out" / "split.json").is_file()
    assert not (root / "eurosat" / "split_zhou_EuroSAT.json").exists()
    assert (
        "a split by seed 1 was made, marked as generated; its numbers do not compare with published ones"
        in capsys.readouterr().out
    )


def test_the_published_file_wins_over_make_split(eurosat, load):
    root, split = eurosat({"Forest": 10, "SeaLake": 10})
    data = load("EuroSAT", root, MAKE_SPLIT=True)
    assert data.classnames == ["Forest", "SeaLake"] and data.facts["split_generated"] is False


def test_a_part_of_the_data_is_said_to_be_one(eurosat, load):
    root, _ = eurosat({"Forest": 3, "River": 3})
    data = load("EuroSAT", root)
    assert data.facts["published_split"] is False and data.facts["published_classnames"] is False
    assert (
        "not the whole published data set: train/val/test/classes 6/2/4/2, published 13500/5400/8100/10"
        in data.facts["notes"]
    )
    assert "class names differ from the list that CoOp uses" in data.facts["notes"]


def test_caltech_drops_two_folders_and_renames_four(tmp_path, touch, load):
    for name in ("BACKGROUND_Google", "Faces_easy", "Faces", "airplanes", "Motorbikes", "ant"):
        touch(tmp_path / "caltech-101" / "101_ObjectCategories" / name, *[f"{i}.jpg" for i in range(4)])
    assert load("Caltech101", tmp_path, MAKE_SPLIT=True).classnames == ["face", "motorbike", "airplane", "ant"]


def test_cars_paths_begin_at_the_data_set_folder(tmp_path, touch, load):
    touch(tmp_path / "stanford_cars", "cars_train/1.jpg", "cars_train/2.jpg", "cars_test/1.jpg")
    split = {
        "train": [["cars_train/1.jpg", 0, "A"], ["cars_train/2.jpg", 1, "B"]],
        "val": [],
        "test": [["cars_test/1.jpg", 0, "A"]],
    }
    (tmp_path / "stanford_cars" / "split_zhou_StanfordCars.json").write_text(json.dumps(split))
    assert load("StanfordCars", tmp_path).train_x[0].impath == str(
        tmp_path / "stanford_cars" / "cars_train" / "1.jpg"
    )


@pytest.fixture
def imagenet(tmp_path, touch):
    """A four-class ImageNet in CoOp's layout; `flat`: val is not sorted into folders."""

    def make(flat: bool = False) -> Path:
        folder = tmp_path / "data" / "imagenet"
        for wnid in WNIDS:
            touch(folder / "images" / "train" / wnid, *[f"{wnid}_{i}.JPEG" for i in (10, 2, 1)])
            touch(folder / "images" / "val" / ("" if flat else wnid), f"val_{wnid}.JPEG")
        names = ("tench", "kite (bird of prey)", "crane", "crane", "unused")
        (folder / "classnames.txt").write_text(
            "".join(f"{wnid} {name}\n" for wnid, name in zip((*WNIDS, "n99"), names, strict=True))
        )
        return tmp_path / "data"

    return make


def test_imagenet(imagenet, load, capsys):
    data = load("ImageNet", imagenet())
    assert data.classnames == ["tench", "kite (bird of prey)", "crane", "crane"] and data.num_classes == 4
    assert records(data.train_x)[:3] == [
        ("n01_1.JPEG", 0, "tench"),
        ("n01_10.JPEG", 0, "tench"),
        ("n01_2.JPEG", 0, "tench"),
    ]
    assert records(data.val) == records(data.test) and records(data.test)[1] == (
        "val_n02.JPEG",
        1,
        "kite (bird of prey)",
    )
    assert "2 classes have the name crane" in capsys.readouterr().out
    few = load("ImageNet", imagenet(), shots=2, SUBSAMPLE_CLASSES="new")
    assert len(few.train_x) == 4 and len(few.test) == len(few.val) == 2 and few.classnames == ["crane", "crane"]


def test_flat_val_is_explained(imagenet, load):
    root = imagenet(flat=True)
    with pytest.raises(
        ValueError,
        match=r"images/val is flat \(4 images directly in it\), wanted one folder a class: sort it with the "
        r"valprep.sh that \S+ points to, or leave it and write .*val_wnids.txt with lines `file WordNet-id`",
    ):
        load("ImageNet", root)


def test_flat_val_with_a_file_of_ids(imagenet, load):
    root = imagenet(flat=True)
    mapping = root / "imagenet" / "val_wnids.txt"
    mapping.write_text("".join(f"val_{wnid}.JPEG {wnid}\n" for wnid in WNIDS))
    data = load("ImageNet", root)
    assert records(data.test)[3] == ("val_n04.JPEG", 3, "crane") and all(Path(d.impath).is_file() for d in data.test)
    mapping.write_text("val_n01.JPEG n01\n")
    with pytest.raises(
        ValueError,
        match=r"val_wnids\.txt has no line for 3 images of .*: val_n02\.JPEG, val_n03\.JPEG, val_n04\.JPEG",
    ):
        load("ImageNet", root)


def test_imagenet_refusals(imagenet, load, touch):
    root = imagenet()
    folder = root / "imagenet"
    touch(folder / "images" / "train" / "n99", "x.JPEG")
    with pytest.raises(
        ValueError,
        match=r"1 class folders are in train only \(n99\), so labels would not agree: complete the other part",
    ):
        load("ImageNet", root)
    for part in ("train", "val"):
        touch(folder / "images" / part / "n98", "x.JPEG")
        touch(folder / "images" / part / "n99", "x.JPEG")
    with pytest.raises(ValueError, match=r"classnames\.txt has no name for 1 class folders: n98"):
        load("ImageNet", root)
    (folder / "classnames.txt").write_text("n01\n")
    with pytest.raises(ValueError, match="wanted lines of WordNet id, space, name, got n01"):
        load("ImageNet", root)
    (folder / "classnames.txt").unlink()
    with pytest.raises(
        FileNotFoundError, match="classnames.txt not found in .*imagenet: ImageNet needs a copy of CoOp's file there"
    ):
        load("ImageNet", root)


def test_imagenet_without_train_or_with_an_empty_val(imagenet, load):
    root = imagenet(flat=True)
    for file in (root / "imagenet" / "images" / "val").iterdir():
        file.unlink()
    with pytest.raises(
        ValueError, match="images/val is empty: it must hold the validation images, one folder a class"
    ):
        load("ImageNet", root)
    (root / "imagenet" / "images" / "val").rmdir()
    with pytest.raises(FileNotFoundError, match="images/val not found: ImageNet needs images/train and images/val"):
        load("ImageNet", root)


@pytest.mark.parametrize("name", ["ImageNetSketch", "ImageNetA", "ImageNetR"])
def test_variants_rank_the_folders_that_are_there(tmp_path, touch, load, name, capsys):
    row = row_for(name)
    folder = tmp_path / row.folder
    touch(folder / row.images, "n02/a.jpg", "n04/b.jpg", "n04/c.jpg")
    (folder / row.images / "README.txt").write_text("not a class")
    (folder / "classnames.txt").write_text("n01 tench\nn02 kite\nn03 crane\nn04 crane bird\n")
    data = load(name, tmp_path, shots=1, seed=3, SUBSAMPLE_CLASSES="new")
    assert records(data.test) == [("a.jpg", 0, "kite"), ("b.jpg", 1, "crane bird"), ("c.jpg", 1, "crane bird")]
    assert records(data.train_x) == records(data.test) and not data.val
    said = capsys.readouterr().out
    assert "DATASET.SUBSAMPLE_CLASSES new has no effect" in said and "in test and also in train" not in said
    assert data.facts["classes"] == "all" and data.facts["shots"] is None


def test_v2_folders_are_numbers_and_names_go_by_line(tmp_path, touch, load):
    folder = tmp_path / "imagenetv2"
    images = folder / "imagenetv2-matched-frequency-format-val"
    touch(images, *[f"{i}/x.jpeg" for i in range(11)])
    (folder / "classnames.txt").write_text("".join(f"n{i:02d} name {i}\n" for i in range(11)))
    data = load("ImageNetV2", tmp_path)
    assert [d.label for d in data.test] == list(range(11)) and data.classnames[10] == "name 10"
    touch(images, "11/x.jpeg")
    with pytest.raises(ValueError, match="class folders must be numbers below 11, got 11"):
        load("ImageNetV2", tmp_path)


def test_aircraft(tmp_path, touch, load):
    folder = tmp_path / "fgvc_aircraft"
    touch(folder / "images", "001.jpg", "002.jpg", "003.jpg", "004.jpg")
    (folder / "variants.txt").write_text("Boeing 717\nF-16A/B\n")
    lists = {"train": "002 F-16A/B\n001 Boeing 717\n", "val": "003 Boeing 717\n", "test": "004 F-16A/B\n"}
    for part, text in lists.items():
        (folder / f"images_variant_{part}.txt").write_text(text)
    data = load("FGVCAircraft", tmp_path)
    assert records(data.train_x) == [("002.jpg", 1, "F-16A/B"), ("001.jpg", 0, "Boeing 717")] and records(
        data.test
    ) == [("004.jpg", 1, "F-16A/B")]
    (folder / "images_variant_val.txt").write_text("003 Boeing 718\n")
    with pytest.raises(
        ValueError, match=r"images_variant_val\.txt names variants that variants\.txt has not: Boeing 718"
    ):
        load("FGVCAircraft", tmp_path)
    (folder / "images_variant_val.txt").unlink()
    with pytest.raises(
        FileNotFoundError, match="images_variant_val.txt not found in .*fgvc_aircraft: it comes with the data set"
    ):
        load("FGVCAircraft", tmp_path)


# Splits made from the official lists: val is a fifth of each class of the training list, test is the official one.


def test_pets_from_its_annotations(tmp_path, touch, load):
    folder = tmp_path / "oxford_pets"
    stems = [f"{breed}_{i}" for breed in ("Abyssinian", "Great_Dane") for i in range(7)]
    touch(folder / "images", *[f"{stem}.jpg" for stem in stems])
    lines = [f"{stem} {1 + stem.startswith('Great')} 1 1\n" for stem in stems]
    (folder / "annotations").mkdir()
    (folder / "annotations" / "trainval.txt").write_text("".join(lines[:5] + lines[7:12]))
    (folder / "annotations" / "test.txt").write_text("".join(lines[5:7] + lines[12:]))
    data = load("OxfordPets", tmp_path, MAKE_SPLIT=True)
    assert data.classnames == ["abyssinian", "great_dane"]
    assert (len(data.train_x), len(data.val)) == (8, 2)
    assert records(data.test)[0] == ("Abyssinian_5.jpg", 0, "abyssinian") and data.facts["split_generated"]
    with pytest.raises(FileNotFoundError, match="test.txt not found in .*annotations: it comes with the data set"):
        (folder / "annotations" / "test.txt").unlink()
        load("OxfordPets", tmp_path, MAKE_SPLIT=True, output="")


def test_ucf101_and_sun397_from_their_lists(tmp_path, touch, load):
    folder = tmp_path / "ucf101"
    lists = folder / "ucfTrainTestlist"
    lists.mkdir(parents=True)
    (lists / "classInd.txt").write_text("1 ApplyEyeMakeup\n2 YoYo\n")
    (lists / "trainlist01.txt").write_text("ApplyEyeMakeup/v_1.avi 1\nApplyEyeMakeup/v_2.avi 1\nYoYo/v_1.avi 2\n")
    (lists / "testlist01.txt").write_text("YoYo/v_3.avi\n")
    touch(
        folder / "UCF-101-midframes",
        "Apply_Eye_Makeup/v_1.jpg",
        "Apply_Eye_Makeup/v_2.jpg",
        "Yo_Yo/v_1.jpg",
        "Yo_Yo/v_3.jpg",
    )
    data = load("UCF101", tmp_path, MAKE_SPLIT=True, output="")
    assert data.classnames == ["Apply_Eye_Makeup", "Yo_Yo"] and records(data.test) == [("v_3.jpg", 1, "Yo_Yo")]

    folder = tmp_path / "sun397"
    folder.mkdir()
    (folder / "ClassName.txt").write_text("/a/abbey\n/a/apartment_building/outdoor\n")
    (folder / "Training_01.txt").write_text("/a/abbey/1.jpg\n/a/apartment_building/outdoor/1.jpg\n")
    (folder / "Testing_01.txt").write_text("/a/abbey/2.jpg\n")
    touch(folder / "SUN397", "a/abbey/1.jpg", "a/abbey/2.jpg", "a/apartment_building/outdoor/1.jpg")
    data = load("SUN397", tmp_path, MAKE_SPLIT=True, output="")
    assert data.classnames == ["abbey", "outdoor apartment_building"]


def test_cars_and_flowers_from_their_matlab_files(tmp_path, touch, load):
    scipy_io = pytest.importorskip("scipy.io", reason="scipy reads the MATLAB files of two data sets")
    folder = tmp_path / "stanford_cars"
    (folder / "devkit").mkdir(parents=True)
    names = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012"], dtype=object)
    scipy_io.savemat(folder / "devkit" / "cars_meta.mat", {"class_names": names})

    def annotations(file: Path, pairs) -> None:
        made = np.zeros((1, len(pairs)), dtype=[("fname", object), ("class", object)])
        for i, (name, label) in enumerate(pairs):
            made[0, i] = (name, label)
        scipy_io.savemat(file, {"annotations": made})

    annotations(folder / "devkit" / "cars_train_annos.mat", [("1.jpg", 1), ("2.jpg", 2), ("3.jpg", 1)])
    annotations(folder / "cars_test_annos_withlabels.mat", [("1.jpg", 2)])
    touch(folder, "cars_train/1.jpg", "cars_train/2.jpg", "cars_train/3.jpg", "cars_test/1.jpg")
    data = load("StanfordCars", tmp_path, MAKE_SPLIT=True, output="")
    assert data.classnames == ["2000 AM General Hummer SUV", "2012 Acura RL Sedan"]
    assert records(data.test) == [("1.jpg", 1, "2012 Acura RL Sedan")] and len(data.train_x) == 3

    folder = tmp_path / "oxford_flowers"
    labels = [2, 2, 1, 1, 2, 1, 1, 2]
    touch(folder / "jpg", *[f"image_{i:05d}.jpg" for i in range(1, 9)])
    (folder / "cat_to_name.json").write_text('{"1": "pink primrose", "2": "rose"}')
    with pytest.raises(FileNotFoundError, match="imagelabels.mat not found in .*oxford_flowers"):
        load("OxfordFlowers", tmp_path, MAKE_SPLIT=True, output="")
    scipy_io.savemat(folder / "imagelabels.mat", {"labels": np.array([labels])})
    data = load("OxfordFlowers", tmp_path, MAKE_SPLIT=True, output="")
    assert data.classnames == ["pink primrose", "rose"]
    for d in data.train_x + data.val + data.test:
        assert labels[int(d.impath[-9:-4]) - 1] == d.label + 1


# Real images, where the machine has them.


@pytest.mark.parametrize(
    "name, expected",
    [
        ("EuroSAT", (160, 40, 200, 10)),
        ("Caltech101", (160, 80, 120, 20)),
        ("DescribableTextures", (40, 20, 40, 10)),
        ("OxfordPets", (12, 6, 12, 3)),
    ],
)
def test_real_folders_load(shared_data, load, name, expected):
    data = load(name, shared_data)
    assert tuple(data.facts["counts"].values()) == expected and all(Path(d.impath).is_file() for d in data.test)
    assert data.facts["split_generated"] is False and data.facts["missing_images"] == 0


def test_real_eurosat_gives_coops_sixteen_shots(shared_data, load):
    reference = json.loads((shared_data / "splits" / "fewshot_reference.json").read_text())["EuroSAT/shot_16-seed_1"]
    data = load("EuroSAT", shared_data, shots=16, seed=1)
    prefix = shared_data / "eurosat" / "2750"
    ours = {Path(d.impath).relative_to(prefix).as_posix() for d in data.train_x}
    paths = next(value for value in reference.values() if isinstance(value, list) and len(value) == 160)
    assert ours == set(paths)


@pytest.mark.parametrize(
    "name", ["Caltech101", "DescribableTextures", "EuroSAT", "OxfordFlowers", "OxfordPets", "StanfordCars", "UCF101"]
)
def test_published_splits_are_what_the_table_says(shared_data, name):
    from datasets.dataset import published
    from datasets.splits import check_labels, lines_hash, read_split, repeated_images

    split = read_split(shared_data / "splits" / f"split_zhou_{name}.json", Path("."))
    check_labels(split, name)
    assert published(split, row_for(name)) is True and repeated_images(split) == []
    assert lines_hash(split.class_names())[:16] == row_for(name).names_hash


def test_published_class_lists_are_what_the_table_says(shared_data):
    from datasets.readers import class_names_by_id
    from datasets.splits import lines_hash

    for name, file in (("Food101", "food101"), ("SUN397", "sun397"), ("FGVCAircraft", "fgvc_aircraft")):
        names = json.loads((shared_data / "splits" / f"classnames_{file}.json").read_text())
        assert lines_hash(names)[:16] == row_for(name).names_hash
    by_id = class_names_by_id(shared_data / "imagenet", row_for("ImageNet"))
    assert lines_hash(by_id.values())[:16] == row_for("ImageNet").names_hash == row_for("ImageNetV2").names_hash
    for name, letter in (("ImageNetA", "a"), ("ImageNetR", "r")):
        wnids = sorted(
            line.split()[0]
            for line in (shared_data / "imagenet" / f"imagenet_{letter}_wnids.txt").read_text().splitlines()
        )
        assert lines_hash(by_id[wnid] for wnid in wnids)[:16] == row_for(name).names_hash
