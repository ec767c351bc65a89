"""Readers: from a data set's folder in CoOp's layout to a split."""

from __future__ import annotations

from pathlib import Path

from datasets.folder import keep_generated, list_classes, read_folder
from datasets.listed import read_list
from datasets.listing import LOOSE, list_tree
from datasets.row import COOP_DATA_PAGE, Row, Source
from datasets.splits import Item, Split, read_json, read_split, some

VAL_IDS_FILE = "val_wnids.txt"  # ours: lets a flat ImageNet val stay as it is


def read_published(row: Row, source: Source) -> Split:
    """The published split file; without it, on request, a split of our own that is marked as generated."""
    folder = row.data_folder(source.root)
    file = folder / row.split_file
    if source.split_file:
        return read_given(source.split_file, folder / row.images)
    if file.is_file():
        return read_split(file, folder / row.images)
    if not source.make_split or row.make is None:
        raise FileNotFoundError(
            f"{row.split_file} not found in {folder}: {COOP_DATA_PAGE} links the published file; "
            "DATASET.MAKE_SPLIT True makes a split of its own instead, marked as generated"
        )
    made = keep_generated(row.make(folder, source.split_seed), source.output)
    made.notes.append(
        f"{row.split_file} not found: a split by seed {source.split_seed} was made, marked as generated; "
        "its numbers do not compare with published ones"
    )
    return made


def read_given(file: str, folder: Path) -> Split:
    """A split file that the user names, in CoOp's layout."""
    path = Path(file).expanduser()
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} (DATASET.SPLIT_FILE) not found: wanted a JSON file with the lists train, val and test"
        )
    return read_split(path, folder)


def read_tree(row: Row, source: Source) -> Split:
    """`Folder`: DATASET.ROOT itself is the tree."""
    if source.split_file:
        return read_given(source.split_file, source.root)
    return read_folder(source.root, seed=source.split_seed, output=source.output)


def read_listed(row: Row, source: Source) -> Split:
    """`List`: DATASET.LIST, or the one list.csv or list.jsonl in DATASET.ROOT."""
    if source.split_file:
        return read_given(source.split_file, source.root)
    names = [source.list_file] if source.list_file else ["list.csv", "list.jsonl"]
    files = [path for path in (source.root / Path(name).expanduser() for name in names) if path.is_file()]
    return read_list(files[0] if files else source.root / names[0], seed=source.split_seed, output=source.output)


def read_shapes(row: Row, source: Source) -> Split:
    """The procedural data set, written below the root the first time."""
    from datasets.shapes_benchmark import ensure_shapes  # only this row needs the renderer

    ensure_shapes(source.root)
    return read_published(row, source)


def read_shapes_variant(row: Row, source: Source) -> Split:
    """A test set of the procedural world, written below the root the first time; the one list is train and test."""
    from datasets.shapes_variants import LIST_FILE, ensure_variant  # only these rows need the renderer

    folder = ensure_variant(source.root, row.name)
    items = [Item(*item) for item in read_json(folder / LIST_FILE)["test"]]
    return Split(items, [], items, folder=folder / row.images)


def read_imagenet(row: Row, source: Source) -> Split:
    """ImageNet: images/train and images/val by class; val is the test list; files sorted (CoOp: the disk's order)."""
    folder = row.data_folder(source.root)
    names = class_names_by_id(folder, row)
    images = folder / row.images
    train = list_classes(_part(images, "train"))
    test, flat = _listed_val(_part(images, "val"), folder)
    _same_classes(images, train, test)
    _check_named(folder, list(train), names)
    label_of = {wnid: label for label, wnid in enumerate(train)}

    def items(part: str, listed: dict[str, list[str]], flat: bool) -> list[Item]:
        return [
            Item(f"{part}/{file}" if flat else f"{part}/{wnid}/{file}", label_of[wnid], names[wnid])
            for wnid, files in sorted(listed.items())
            for file in files
        ]

    tested = items("val", test, flat)
    return Split(items("train", train, flat=False), tested, tested, folder=images, listed=True)


def _part(images: Path, name: str) -> Path:
    if not (images / name).is_dir():
        raise FileNotFoundError(
            f"{images / name} not found: ImageNet needs images/train and images/val, see {COOP_DATA_PAGE}"
        )
    return images / name


def _listed_val(val: Path, folder: Path) -> tuple[dict[str, list[str]], bool]:
    """{WordNet id: image names} of val, sorted into folders or flat with the ids in a file; and whether it is flat."""
    files = list_tree(val).get(LOOSE)
    if files is None:
        return list_classes(val), False
    if not files:
        raise ValueError(f"{val} is empty: it must hold the validation images, one folder a class")
    mapping = folder / VAL_IDS_FILE
    if not mapping.is_file():
        raise ValueError(
            f"{val} is flat ({len(files)} images directly in it), wanted one folder a class: sort it with the "
            f"valprep.sh that {COOP_DATA_PAGE} points to, or leave it and write {mapping} with lines `file WordNet-id`"
        )
    id_of = dict(
        line.split()[:2] for line in mapping.read_text(encoding="utf-8").splitlines() if len(line.split()) >= 2
    )
    unknown = [file for file in files if file not in id_of]
    if unknown:
        raise ValueError(f"{mapping} has no line for {len(unknown)} images of {val}: {some(unknown)}")
    listed: dict[str, list[str]] = {}
    for file in files:
        listed.setdefault(id_of[file], []).append(file)
    return listed, True


def _same_classes(images: Path, train: dict[str, list[str]], test: dict[str, list[str]]) -> None:
    only = {"train": sorted(set(train) - set(test)), "val": sorted(set(test) - set(train))}
    for part, wnids in only.items():
        if wnids:
            raise ValueError(
                f"{images}: {len(wnids)} class folders are in {part} only ({some(wnids)}), "
                "so labels would not agree: complete the other part"
            )


def class_names_by_id(folder: Path, row: Row) -> dict[str, str]:
    """{WordNet id: class name} in the order of `classnames.txt`; the name may hold spaces and brackets."""
    file = folder / "classnames.txt"
    if not file.is_file():
        raise FileNotFoundError(
            f"classnames.txt not found in {folder}: {row.name} needs a copy of CoOp's file there, "
            f"see {COOP_DATA_PAGE}"
        )
    lines = [line.strip() for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    wrong = [line for line in lines if " " not in line]
    if wrong:
        raise ValueError(f"{file}: wanted lines of WordNet id, space, name, got {some(wrong)}")
    return {line.partition(" ")[0]: line.partition(" ")[2].strip() for line in lines}


def _check_named(folder: Path, wnids: list[str], names: dict[str, str]) -> None:
    unnamed = [wnid for wnid in wnids if wnid not in names]
    if unnamed:
        raise ValueError(
            f"{folder / 'classnames.txt'} has no name for {len(unnamed)} class folders: {some(unnamed)}"
        )


def read_imagenet_variant(row: Row, source: Source) -> Split:
    """ImageNet-Sketch, -A, -R: the label is the rank among the present folders; the one list is train and test."""
    folder = row.data_folder(source.root)
    names = class_names_by_id(folder, row)
    listed = list_classes(folder / row.images)
    _check_named(folder, list(listed), names)
    items = [
        Item(f"{wnid}/{file}", label, names[wnid])
        for label, (wnid, files) in enumerate(listed.items())
        for file in files
    ]
    return Split(items, [], items, folder=folder / row.images, listed=True)


def read_imagenet_v2(row: Row, source: Source) -> Split:
    """ImageNetV2: folders are named by label, and the name is on that line (from 0) of classnames.txt."""
    folder = row.data_folder(source.root)
    names = list(class_names_by_id(folder, row).values())
    listed = list_classes(folder / row.images)
    strange = [name for name in listed if not name.isdigit() or int(name) >= len(names)]
    if strange:
        raise ValueError(
            f"{folder / row.images}: class folders must be numbers below {len(names)}, got {some(strange)}"
        )
    items = [
        Item(f"{name}/{file}", int(name), names[int(name)])
        for name in sorted(listed, key=int)
        for file in listed[name]
    ]
    return Split(items, [], items, folder=folder / row.images, listed=True)


def read_aircraft(row: Row, source: Source) -> Split:
    """FGVC-Aircraft: official lists; the label is the line number in variants.txt, from 0."""
    folder = row.data_folder(source.root)
    if source.split_file:
        return read_given(source.split_file, folder / row.images)
    variants = [line.strip() for line in read_lines(folder / "variants.txt")]
    label_of = {name: label for label, name in enumerate(variants)}
    parts: dict[str, list[Item]] = {}
    for part in ("train", "val", "test"):
        file = folder / f"images_variant_{part}.txt"
        pairs = [line.strip().partition(" ") for line in read_lines(file)]
        unknown = [variant for _, _, variant in pairs if variant not in label_of]
        if unknown:
            raise ValueError(f"{file} names variants that variants.txt has not: {some(dict.fromkeys(unknown))}")
        parts[part] = [Item(f"{stem}.jpg", label_of[variant], variant) for stem, _, variant in pairs]
    return Split(**parts, folder=folder / row.images)


def read_lines(file: Path) -> list[str]:
    """Non-empty lines of a data set's own list; FileNotFoundError with the place to get it."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file.name} not found in {file.parent}: it comes with the data set, see {COOP_DATA_PAGE}"
        )
    return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
