"""Base and new classes: the first half of the labels and the rest, as CoOp halves them."""

from __future__ import annotations

from datasets.splits import SHOWN, Item, Split

CHOICES = ("all", "base", "new")


def halves(labels: list[int]) -> tuple[list[int], list[int]]:
    """(base, new): sorted labels cut in two; of an odd number base gets one more. One class cannot be cut."""
    ordered = sorted(set(labels))
    if len(ordered) < 2:
        raise ValueError(
            f"base and new classes need at least 2 classes, got {len(ordered)}: set DATASET.SUBSAMPLE_CLASSES all"
        )
    middle = (len(ordered) + 1) // 2
    return ordered[:middle], ordered[middle:]


def check_choice(choice: str) -> None:
    """Refuse a DATASET.SUBSAMPLE_CLASSES that is none of all, base, new."""
    if choice not in CHOICES:
        raise ValueError(f"DATASET.SUBSAMPLE_CLASSES is {choice!r}, wanted one of {', '.join(CHOICES)}")


def subsample(split: Split, choice: str) -> Split:
    """The images of one half, labels counted from 0 again in sorted order; `all` changes nothing."""
    check_choice(choice)
    if choice == "all":
        return split
    base, new = halves([item.label for item in split.train])
    relabel = {label: i for i, label in enumerate(base if choice == "base" else new)}

    def keep(items: list[Item]) -> list[Item]:
        return [item._replace(label=relabel[item.label]) for item in items if item.label in relabel]

    return split.map(keep)


def describe(names: list[str], choice: str) -> str:
    """One line for the log: how many classes each half has, and the names at its ends."""
    base, new = halves(list(range(len(names))))

    def ends(labels: list[int]) -> str:
        half = [names[label] for label in labels]
        listed = half if len(half) <= 2 * SHOWN else [*half[:SHOWN], "...", half[-1]]
        return f"{len(half)} ({', '.join(listed)})"

    extra = "; base has one more, since the number is odd" if len(names) % 2 else ""
    return (
        f"{len(names)} classes in label order: base {ends(base)}, new {ends(new)}{extra}; this run takes {choice}"
    )
