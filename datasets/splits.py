"""A split, i.e. which image is in train, val and test under which label and class name: files, hashes and checks."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("train", "val", "test")
SHOWN = 5  # names listed in a message before the rest is only counted
_ID_PATTERN = re.compile(
    r"n\d{8}|[a-z]?\d+|(class|classe|cls|label|category|cat|id|type|group|folder)[ _-]?\d+", re.I
)


class Item(NamedTuple):
    """One image: path relative to the split's folder with `/` separators, label from 0, raw class name."""

    path: str
    label: int
    name: str


@dataclass(frozen=True)
class Split:
    """The three lists in file order, which decides the few-shot draw; their paths are relative to `folder`."""

    train: list[Item]
    val: list[Item]
    test: list[Item]
    folder: Path
    generated: dict[str, Any] | None = None  # how it was made, when we made it; None for a published one
    listed: bool = False  # made from a listing of the disk just now, so no image can be missing
    notes: list[str] = field(default_factory=list)  # what a user should read once

    def parts(self) -> dict[str, list[Item]]:
        """{"train": [...], "val": [...], "test": [...]}"""
        return {part: getattr(self, part) for part in PARTS}

    def map(self, change) -> Split:
        """The same split with `change(list of items) -> list of items` applied to each part."""
        test = change(self.test)
        return replace(
            self, train=change(self.train), val=test if self.val_is_test else change(self.val), test=test
        )

    @property
    def val_is_test(self) -> bool:
        """Whether val is the test list itself (ImageNet): such a val takes no few-shot draw."""
        return self.val is self.test

    def class_names(self) -> list[str]:
        """Class names in label order, from train, as CoOp takes them."""
        names = {item.label: item.name for item in self.train}
        return [names[label] for label in sorted(names)]

    @cached_property
    def sha256(self) -> str:
        """Hash of what the split says (paths, labels, names, order), whatever the white space of its file."""
        digest = hashlib.sha256()
        for part, items in self.parts().items():
            digest.update(f"[{part}]".encode())
            for item in items:
                digest.update(f"{item.path}\t{item.label}\t{item.name}\n".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def lines_hash(lines: Iterable[str]) -> str:
    """sha256 of the lines joined by a newline."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def some(names: Iterable[Any]) -> str:
    """`a, b, c, d, e and 7 more`"""
    names = [str(name) for name in names]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def write_json(path: Path, content: dict[str, Any], *, indent: int | None = None) -> None:
    """Write in one step: another process sees the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(3).hex()}.partial")  # machines may share a folder
    try:
        partial.write_text(json.dumps(content, indent=indent, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The file's content; ValueError that names the file where it is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # json's own error and a wrong encoding
        raise ValueError(f"{path} is no JSON file ({error}): fetch or make it again") from error


def read_split(path: Path, folder: Path) -> Split:
    """Read a split file in CoOp's layout; list order is kept. `folder`: what its paths are relative to."""
    content = read_json(path)
    if not isinstance(content, dict) or not all(isinstance(content.get(part), list) for part in PARTS):
        found = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} holds {found or 'nothing'}, wanted one object with the lists train, val and test")
    lists = {part: [_item(path, part, i, raw) for i, raw in enumerate(content[part])] for part in PARTS}
    return Split(**lists, folder=folder, generated=content.get("generated"))


def _item(path: Path, part: str, position: int, raw: Any) -> Item:
    try:
        image, label, name = raw
        item = Item(str(image), int(label), str(name))
    except (TypeError, ValueError):
        raise ValueError(
            f"{path}, {part}, item {position} is {str(raw)[:80]}, wanted [image path, label, class name]"
        ) from None
    if item.path.startswith(("/", "\\")) or ".." in Path(item.path).parts:
        raise ValueError(
            f"{path}, {part}, item {position}: the path {item.path} must be relative and stay in its folder"
        )
    return item


def write_split(path: Path, split: Split) -> None:
    """Store a split in CoOp's layout, with a fourth key `generated` where we made it."""
    content: dict[str, Any] = {part: [list(item) for item in items] for part, items in split.parts().items()}
    if split.generated is not None:
        content = {"generated": split.generated} | content
    write_json(path, content)


def check_labels(split: Split, source: Path | str) -> None:
    """Refuse a split whose labels are not 0..C-1, or where one label has two names, or an empty train or test list."""
    for part in ("train", "test"):
        if not split.parts()[part]:
            raise ValueError(f"{source}: {part} is empty, it needs at least one image a class")
    train_labels = {item.label for item in split.train}
    missing = sorted(set(range(max(train_labels) + 1)) - train_labels)
    if missing or min(train_labels) < 0:
        wrong = f"missing {some(missing)}" if missing else f"negative {min(train_labels)}"
        raise ValueError(
            f"{source}: the labels of train must be 0..{max(train_labels)} without gaps, {wrong}: "
            "number the classes anew from 0, or add train images of the missing ones"
        )
    for part in ("val", "test"):
        unknown = {item.label: item.name for item in split.parts()[part] if item.label not in train_labels}
        if unknown:
            classes = some(f"{label} ({name})" for label, name in sorted(unknown.items()))
            raise ValueError(f"{source}: {part} has classes that train has not: {classes}")
    names: dict[int, set[str]] = {}
    for item in split.train + split.val + split.test:
        names.setdefault(item.label, set()).add(item.name)
    twice = {label: sorted(found) for label, found in names.items() if len(found) > 1}
    if twice:
        label, found = next(iter(sorted(twice.items())))
        raise ValueError(
            f"{source}: label {label} has {len(found)} class names, {some(found)}; one label has one name"
        )


def repeated_images(split: Split) -> list[str]:
    """Notes about an image under two labels, and about an image that is in train or val and also in test."""
    first: dict[str, Item] = {}
    notes = []
    for item in split.train + split.val + split.test:
        other = first.setdefault(item.path, item)
        if other.label != item.label:
            names = some([other.name, item.name])
            notes.append(f"{item.path} is in 2 classes: {names} (several labels an image are not supported)")
    if split.val_is_test or split.train is split.test:
        return notes
    tested = {item.path for item in split.test}
    leaked = list(dict.fromkeys(item.path for item in split.train + split.val if item.path in tested))
    if leaked:
        notes.append(f"{len(leaked)} images are in test and also in train or val: {some(leaked)}")
    return notes


def repeated_names(names: list[str]) -> list[str]:
    """Class names that stand for more than one label; classes are counted by label, so this is a note, no error."""
    return [f"{count} classes have the name {name}" for name, count in Counter(names).items() if count > 1]


def missing_images(items: Iterable[Item], folder: Path) -> list[str]:
    """Paths that are not on the disk, in order; listing each folder once is faster than a look at each file."""
    listed: dict[str, set[str]] = {}
    missing: dict[str, None] = {}
    for item in items:
        parent, _, file = item.path.rpartition("/")
        if parent not in listed:
            try:
                listed[parent] = set(os.listdir(folder / parent))
            except (FileNotFoundError, NotADirectoryError):
                listed[parent] = set()
        if file not in listed[parent]:
            missing[item.path] = None
    return list(missing)


def looks_like_id(names: Iterable[str]) -> bool:
    """Whether at least half of the class names say nothing to a text encoder: `n01440764`, `0`, `class_3`."""
    names = list(names)
    return bool(names) and 2 * sum(bool(_ID_PATTERN.fullmatch(name.strip())) for name in names) >= len(names)


def rename_classes(split: Split, file: Path) -> Split:
    """The split with the class names of `file`, see `read_class_names`."""
    old = split.class_names()
    new = read_class_names(file, old)
    return split.map(lambda items: [item._replace(name=new[item.label]) for item in items])


def read_class_names(file: Path, old: list[str]) -> list[str]:
    """New class names in label order.

    The file is one of: JSON, an object from old name to new, or a list in label order; text with `old<TAB>new` lines;
    text with CoOp's `n01440764 tench` lines where the old names look like ids; else one name a line in label order.
    """
    if not file.is_file():
        raise FileNotFoundError(f"class names {file} not found: set DATASET.CLASSNAMES to a text or JSON file")
    table: dict[str, str] | None = None
    if file.suffix.lower() == ".json":
        content = read_json(file)
        if isinstance(content, dict):
            table = {str(key): str(value) for key, value in content.items()}
        names = [str(value) for value in content]
    else:
        names = [line.strip("\r\n ") for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        separator = "\t" if all("\t" in name for name in names) else " "
        if separator == "\t" or (looks_like_id(old) and set(old) <= {name.partition(" ")[0] for name in names}):
            table = {name.partition(separator)[0].strip(): name.partition(separator)[2].strip() for name in names}
    if table is not None:
        unnamed = [name for name in old if not table.get(name)]
        if unnamed:
            raise ValueError(f"{file} (DATASET.CLASSNAMES) has no name for the classes {some(unnamed)}")
        return [table[name] for name in old]
    if len(names) != len(old):
        raise ValueError(
            f"{file} (DATASET.CLASSNAMES) holds {len(names)} names for {len(old)} classes: write one a line in "
            "the order of the labels, or lines of old name, tab, new name"
        )
    return names
