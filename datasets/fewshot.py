"""Few-shot picks: the same images as CoOp's for the same seed, drawn with a private generator and kept as JSON."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

from datasets.splits import Item, Split, lines_hash, read_json, some, write_json

SCHEMA = 1
MAX_VAL_SHOTS = 4  # CoOp's rule: as many val images a class as train images, but at most four
PICKS_FILE = "picks.json"


@dataclass(frozen=True)
class Picks:
    """Which images of a split are the few-shot set: paths in draw order, and what they were drawn from."""

    dataset: str
    shots: int
    seed: int
    split_sha256: str
    train: list[str]
    val: list[str]

    def content_hash(self) -> str:
        """sha256 over the picked paths, train before val."""
        return lines_hash(["[train]", *self.train, "[val]", *self.val])

    def to_dict(self) -> dict:
        return {
            "schema": SCHEMA,
            "dataset": self.dataset,
            "shots": self.shots,
            "seed": self.seed,
            "split_sha256": self.split_sha256,
            "sha256": self.content_hash(),
            "train": self.train,
            "val": self.val,
        }


def draw(items: list[Item], shots: int, generator: random.Random) -> list[Item]:
    """`shots` images of each label, label by label in order of first appearance; a smaller class is taken whole."""
    groups: dict[int, list[Item]] = {}
    for item in items:
        groups.setdefault(item.label, []).append(item)
    picked: list[Item] = []
    for group in groups.values():
        picked += generator.sample(group, shots) if len(group) >= shots else group
    return picked


def draw_picks(split: Split, *, dataset: str, shots: int, seed: int) -> Picks:
    """The picks of a seed: train first, then val from the same stream; a val that is the test list is not drawn from.

    A negative seed, which means "no seed" to the harness, gives picks that differ from run to run.
    """
    generator = random.Random(seed) if seed >= 0 else random.Random()
    train = draw(split.train, shots, generator)
    val = [] if split.val_is_test else draw(split.val, min(shots, MAX_VAL_SHOTS), generator)
    return Picks(dataset, shots, seed, split.sha256, [item.path for item in train], [item.path for item in val])


def apply_picks(split: Split, picks: Picks) -> Split:
    """The split with train and val cut down to the picks; test stays whole."""

    def choose(items: list[Item], paths: list[str], part: str) -> list[Item]:
        by_path = {item.path: item for item in items}
        unknown = [path for path in paths if path not in by_path]
        if unknown:
            raise ValueError(
                f"the few-shot picks name {len(unknown)} {part} images that the split has not: {some(unknown)}"
            )
        return [by_path[path] for path in paths]

    val = split.val if split.val_is_test else choose(split.val, picks.val, "val")
    return replace(split, train=choose(split.train, picks.train, "train"), val=val)


def read_picks(path: Path) -> Picks:
    """Picks from a file that this module wrote."""
    if not path.is_file():
        raise FileNotFoundError(
            f"few-shot picks {path} not found: DATASET.PICKS takes the {PICKS_FILE} of a run's output folder"
        )
    content = read_json(path)
    wanted = {"schema", "dataset", "shots", "seed", "split_sha256", "train", "val"}
    whole = isinstance(content, dict) and wanted <= set(content) and content["schema"] == SCHEMA
    if not whole or not (isinstance(content["train"], list) and isinstance(content["val"], list)):
        raise ValueError(
            f"{path} is no picks file of schema {SCHEMA}: it needs the fields {', '.join(sorted(wanted))}"
        )
    picks = Picks(
        content["dataset"],
        int(content["shots"]),
        int(content["seed"]),
        content["split_sha256"],
        [str(name) for name in content["train"]],
        [str(name) for name in content["val"]],
    )
    if content.get("sha256", picks.content_hash()) != picks.content_hash():
        raise ValueError(
            f"{path} was edited: its paths do not give the sha256 that it holds; "
            "delete it and it is drawn anew, or take the field sha256 out of it"
        )
    return picks


def picks_for(
    split: Split, *, dataset: str, shots: int, seed: int, replay: str = "", output: Path | None = None
) -> Picks:
    """This run's picks: replayed from the file `replay`, or those in the output folder, or drawn and stored there."""
    stored = output / PICKS_FILE if output is not None else None
    if replay:
        picks = read_picks(Path(replay).expanduser())
        if picks.shots != shots:
            raise ValueError(
                f"{replay} (DATASET.PICKS) holds {picks.shots} shots, but DATASET.NUM_SHOTS is {shots}: "
                f"set DATASET.NUM_SHOTS {picks.shots}"
            )
        _check_origin(picks, split, dataset, replay, "take the picks of a run on this split, or unset DATASET.PICKS")
        if stored is not None and stored.is_file() and read_picks(stored).content_hash() != picks.content_hash():
            raise ValueError(f"{stored} holds other picks than {replay} (DATASET.PICKS): choose another OUTPUT_DIR")
        if output is not None:
            _store(picks, output)
        return picks
    if stored is not None and stored.is_file():
        picks = read_picks(stored)
        if (picks.dataset, picks.shots, picks.seed) != (dataset, shots, seed):
            raise ValueError(
                f"{stored} belongs to another run ({picks.dataset}, {picks.shots} shots, seed {picks.seed}; this one "
                f"is {dataset}, {shots} shots, seed {seed}): choose another OUTPUT_DIR"
            )
        _check_origin(picks, split, dataset, stored, "choose another OUTPUT_DIR, or delete the file to draw again")
        return picks
    picks = draw_picks(split, dataset=dataset, shots=shots, seed=seed)
    if output is not None:
        _store(picks, output)
    return picks


def _check_origin(picks: Picks, split: Split, dataset: str, source: Path | str, advice: str) -> None:
    if picks.dataset != dataset:
        raise ValueError(f"{source} holds picks of {picks.dataset}, but DATASET.NAME is {dataset}: {advice}")
    if picks.split_sha256 != split.sha256:
        raise ValueError(
            f"{source} holds picks of another split of {dataset} (hash {picks.split_sha256[:12]}, the split now has "
            f"{split.sha256[:12]}): {advice}"
        )


def _store(picks: Picks, output: Path) -> None:
    write_json(output / PICKS_FILE, picks.to_dict(), indent=1)


def short_classes(split: Split, shots: int) -> dict[str, int]:
    """Classes with fewer train images than `shots`, with how many they have; they are taken whole."""
    counts: dict[int, int] = {}
    names: dict[int, str] = {}
    for item in split.train:
        counts[item.label] = counts.get(item.label, 0) + 1
        names[item.label] = item.name
    return {names[label]: count for label, count in sorted(counts.items()) if count < shots}
