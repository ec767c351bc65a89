"""Splits made where the published file is missing: by class folders, or from the official train and test lists."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets.folder import VAL_SHARE, list_classes, make_split, origin
from datasets.readers import read_lines
from datasets.splits import Item, Split

EUROSAT_NAMES = {
    "AnnualCrop": "Annual Crop Land",
    "HerbaceousVegetation": "Herbaceous Vegetation Land",
    "Highway": "Highway or Road",
    "Industrial": "Industrial Buildings",
    "Pasture": "Pasture Land",
    "PermanentCrop": "Permanent Crop Land",
    "Residential": "Residential Buildings",
    "SeaLake": "Sea or Lake",
}
CALTECH_NAMES = {"airplanes": "airplane", "Faces": "face", "Leopards": "leopard", "Motorbikes": "motorbike"}
CALTECH_IGNORED = ("BACKGROUND_Google", "Faces_easy")
Maker = Callable[[Path, int], Split]


def by_folders(images: str, *, names: dict[str, str] | None = None, ignored: tuple[str, ...] = ()) -> Maker:
    """A maker for trees of class folders: half train, a fifth val, the rest test of each class."""

    def make(folder: Path, seed: int) -> Split:
        return make_split(list_classes(folder / images, ignored=ignored), folder / images, seed=seed, names=names)

    return make


def from_lists(trainval: list[Item], test: list[Item], folder: Path, seed: int) -> Split:
    """The official test list as it is, and a fifth of each class of the official training list as val."""
    generator = random.Random(seed)
    groups: dict[int, list[Item]] = {}
    for item in trainval:
        groups.setdefault(item.label, []).append(item)
    train, val = [], []
    for group in groups.values():
        count = min(round(VAL_SHARE * len(group)), len(group) - 1)
        shuffled = generator.sample(group, len(group))
        val += shuffled[:count]
        train += shuffled[count:]
    listing = {"trainval": [item.path for item in trainval], "test": [item.path for item in test]}
    return Split(train, val, test, folder=folder, generated=origin(listing, seed))


def make_pets(folder: Path, seed: int) -> Split:
    """annotations/{trainval,test}.txt: stem, class id from 1, species, breed id."""

    def items(part: str) -> list[Item]:
        fields = [
            line.split() for line in read_lines(folder / "annotations" / f"{part}.txt") if not line.startswith("#")
        ]
        return [
            Item(f"{stem}.jpg", int(number) - 1, stem.rpartition("_")[0].lower()) for stem, number, *_ in fields
        ]

    return from_lists(items("trainval"), items("test"), folder / "images", seed)


def make_sun397(folder: Path, seed: int) -> Split:
    """ClassName.txt, {Training,Testing}_01.txt; `/a/building/outdoor` is called `outdoor building`."""
    classes = [line.strip().lstrip("/") for line in read_lines(folder / "ClassName.txt")]
    label_of = {name: label for label, name in enumerate(classes)}

    def items(part: str) -> list[Item]:
        paths = [line.strip().lstrip("/") for line in read_lines(folder / f"{part}_01.txt")]
        return [
            Item(path, label_of[path.rpartition("/")[0]], " ".join(reversed(path.split("/")[1:-1])))
            for path in paths
        ]

    return from_lists(items("Training"), items("Testing"), folder / "SUN397", seed)


def make_ucf101(folder: Path, seed: int) -> Split:
    """ucfTrainTestlist: `ApplyEyeMakeup/v_x.avi` is the middle frame `Apply_Eye_Makeup/v_x.jpg`."""
    lists = folder / "ucfTrainTestlist"
    numbered = [line.split()[:2] for line in read_lines(lists / "classInd.txt")]
    label_of = {action: int(number) - 1 for number, action in numbered}

    def items(part: str) -> list[Item]:
        found = []
        for line in read_lines(lists / f"{part}list01.txt"):
            action, _, film = line.split()[0].partition("/")
            name = "_".join(re.findall("[A-Z][^A-Z]*", action))
            found.append(Item(f"{name}/{Path(film).stem}.jpg", label_of[action], name))
        return found

    return from_lists(items("train"), items("test"), folder / "UCF-101-midframes", seed)


def make_cars(folder: Path, seed: int) -> Split:
    """devkit/*.mat; the year, the last word of a class name, comes to the front."""
    names = [_year_first(str(name)) for name in _mat(folder / "devkit" / "cars_meta.mat", "class_names")]

    def items(file: Path, images: str) -> list[Item]:
        labels = [(str(a["fname"].item()), int(a["class"].item()) - 1) for a in _mat_records(file, "annotations")]
        return [Item(f"{images}/{image}", label, names[label]) for image, label in labels]

    return from_lists(
        items(folder / "devkit" / "cars_train_annos.mat", "cars_train"),
        items(folder / "cars_test_annos_withlabels.mat", "cars_test"),
        folder,
        seed,
    )


def _year_first(name: str) -> str:
    *words, year = name.split(" ")
    return " ".join([year, *words])


def make_flowers(folder: Path, seed: int) -> Split:
    """imagelabels.mat and cat_to_name.json, both counted from 1."""
    read_lines(folder / "cat_to_name.json")
    names = json.loads((folder / "cat_to_name.json").read_text(encoding="utf-8"))
    groups: dict[int, list[str]] = {}
    for i, label in enumerate(_mat(folder / "imagelabels.mat", "labels"), 1):
        groups.setdefault(int(label), []).append(f"image_{i:05d}.jpg")
    made = make_split(
        {str(label): groups[label] for label in sorted(groups)}, folder / "jpg", seed=seed, names=names
    )
    flat = made.map(lambda items: [item._replace(path=item.path.partition("/")[2]) for item in items])
    return Split(
        **flat.parts(), folder=folder / "jpg", generated=made.generated
    )  # a list, not a listing: images may be missing


def _mat(file: Path, key: str) -> list[Any]:
    """A variable of a MATLAB file as a flat list of plain values."""
    return [
        value.item() if hasattr(value, "item") and value.size == 1 else value for value in _mat_records(file, key)
    ]


def _mat_records(file: Path, key: str) -> list[Any]:
    if not file.is_file():
        read_lines(file)  # says where the file is to be had
    try:
        from scipy.io import loadmat  # comes with scikit-learn; needed for two data sets without a split file only
    except ImportError as error:
        raise ImportError(
            f"reading {file} needs scipy: pip install scipy, or put the published split file in place"
        ) from error
    return list(loadmat(file)[key].ravel())
