"""A list of images as a data set: CSV or JSONL with `path`, `label` and, if wanted, `split`."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from datasets.folder import keep_generated, make_split
from datasets.splits import PARTS, Item, Split, lines_hash, some

SPLIT_NAMES = {"train": "train", "val": "val", "valid": "val", "validation": "val", "dev": "val", "test": "test"}


def read_list(file: Path, *, seed: int, output: Path | None) -> Split:
    """Labels are class names, numbered in sorted order; relative paths are below the list's folder.

    Without a split column a split is made by seed and marked as generated, as for a folder.
    """
    rows = _rows(file)
    names = sorted({label for _, label, _ in rows}, key=_natural)
    label_of = {name: label for label, name in enumerate(names)}
    _refuse_twice(file, rows)
    if not any(part for _, _, part in rows):
        return _generated(file, rows, names, seed=seed, output=output)
    parts: dict[str, list[Item]] = {part: [] for part in PARTS}
    for path, label, part in rows:
        parts[part].append(Item(path, label_of[label], label))
    notes = []
    if not parts["test"] and parts["val"]:
        parts["test"], parts["val"] = parts["val"], []
        notes.append(f"{file} has train and val but no test: the images of val are the test images")
    return Split(**parts, folder=file.parent, notes=notes)


def _generated(file: Path, rows: list, names: list[str], *, seed: int, output: Path | None) -> Split:
    by_class = {name: [path for path, label, _ in rows if label == name] for name in names}
    made = make_split(by_class, file.parent, seed=seed)
    prefix = {label: f"{name}/" for label, name in enumerate(names)}  # make_split writes folder/file
    made = made.map(lambda items: [item._replace(path=item.path[len(prefix[item.label]) :]) for item in items])
    listing = lines_hash(f"{label}\t{path}" for path, label, _ in rows)
    made = Split(made.train, made.val, made.test, folder=file.parent,
                 generated={"by": "datasets/listed.py", "seed": seed, "images": len(rows), "listing_sha256": listing})
    made = keep_generated(made, output)
    made.notes.append(f"{file} has no split column: split by seed {seed} (DATASET.SPLIT_SEED) into {len(made.train)} "
                      f"train, {len(made.val)} val and {len(made.test)} test images, marked as generated")
    return made


def _natural(name: str) -> tuple[int, int, str]:
    """Numbers by value before words."""
    return (0, int(name), name) if name.isdigit() else (1, 0, name)


def _rows(file: Path) -> list[tuple[str, str, str]]:
    """(path, label, split or "") of every line."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: DATASET.LIST must name a .csv or .jsonl file with path and label")
    suffix = file.suffix.lower()
    if suffix not in (".csv", ".jsonl"):
        raise ValueError(f"{file} (DATASET.LIST) ends in {suffix or 'nothing'}, wanted .csv or .jsonl")
    records = _csv(file) if suffix == ".csv" else _jsonl(file)
    rows = [_row(file, number, record) for number, record in records]
    if not rows:
        raise ValueError(f"{file} (DATASET.LIST) has no images")
    unsplit = [number for (number, _), row in zip(records, rows, strict=True) if not row[2]]
    if unsplit and len(unsplit) < len(rows):
        raise ValueError(f"{file}: lines {some(unsplit)} have no split but others have one: fill all in, or none")
    return rows


def _csv(file: Path) -> list[tuple[int, dict]]:
    with open(file, newline="", encoding="utf-8-sig") as handle:
        reader = csv.DictReader(handle)
        missing = [name for name in ("path", "label") if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{file}, line 1: wanted the columns path,label[,split], {' and '.join(missing)} missing "
                             f"in {','.join(reader.fieldnames or ())}")
        return [(reader.line_num, record) for record in reader]


def _jsonl(file: Path) -> list[tuple[int, dict]]:
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            raise ValueError(f'{file}, line {number}: wanted an object like {{"path": "a.jpg", "label": "cat"}}')
        records.append((number, record))
    return records


def _row(file: Path, number: int, record: dict) -> tuple[str, str, str]:
    path, label = (str(record.get(key) if record.get(key) is not None else "").strip() for key in ("path", "label"))
    part = str(record.get("split") or "").strip().lower()
    if not path or not label:
        raise ValueError(f"{file}, line {number}: path and label must be filled in, got {path!r} and {label!r}")
    if part and part not in SPLIT_NAMES:
        raise ValueError(f"{file}, line {number}: split is {part!r}; wanted train, val or test")
    return path.replace("\\", "/"), label, SPLIT_NAMES.get(part, "")


def _refuse_twice(file: Path, rows: list[tuple[str, str, str]]) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for path, label, part in rows:
        if path in seen:
            raise ValueError(f"{file}: {path} is listed twice (as {seen[path][0]} and {label}): an image has one label "
                             "and is in one split")
        seen[path] = (label, part)
