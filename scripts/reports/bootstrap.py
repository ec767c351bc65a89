"""Whether one trainer is better than another on the same test images: paired bootstrap from predictions.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from reports.results import MISSING, Seeds
from reports.tables import Table

RESAMPLES, LEVEL = 10_000, 95


def correct_by_image(folder: Path) -> dict[str, bool]:
    """Image path -> whether it was classified rightly."""
    file = folder / "predictions.csv"
    if not file.is_file():
        raise FileNotFoundError(f"{file} not found: --compare needs the predictions that a run writes; run it again")
    with open(file, newline="", encoding="utf-8") as handle:
        return {row["path"]: row["true_label"] == row["predicted_label"] for row in csv.DictReader(handle)}


def difference(first: Seeds, second: Seeds) -> np.ndarray:
    """Per image the mean over the seeds that both have of (first right) - (second right), float [N]."""
    rows, paths = [], None
    for seed in sorted(first.keys() & second.keys()):
        a, b = (correct_by_image(Path(side[seed]["path"])) for side in (first, second))
        paths = paths or sorted(a)
        if sorted(a) != paths or sorted(b) != paths:
            raise ValueError(f"{first[seed]['path']} and {second[seed]['path']} were tested on different images")
        rows.append([float(a[path]) - float(b[path]) for path in paths])
    return np.mean(rows, axis=0)


def interval(differences: np.ndarray, *, seed: int = 0) -> tuple[float, float, float]:
    """Mean difference in percentage points and the bounds of its interval, resampling images."""
    rng, means = np.random.default_rng(seed), []
    size = max(1, 5_000_000 // len(differences))
    for start in range(0, RESAMPLES, size):
        index = rng.integers(0, len(differences), (min(size, RESAMPLES - start), len(differences)))
        means.append(differences[index].mean(1))
    low, high = np.percentile(np.concatenate(means), [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return 100 * float(differences.mean()), 100 * float(low), 100 * float(high)


def compare(cells: dict[tuple, Seeds], first: str, second: str) -> Table:
    """One row a protocol, data set and part that one of the two trainers has."""
    head = ["protocol", "data set", "classes", f"{first} - {second}", f"{LEVEL}% interval", "images", "seeds"]
    table = Table(f"{first} against {second}", head, [])
    for key in sorted({key[:3] + key[4:] for key in cells if key[3] in (first, second)}, key=str):
        protocol, backbone, shots, dataset, classes = key
        a, b = (cells.get((protocol, backbone, shots, name, dataset, classes), {}) for name in (first, second))
        both = sorted(a.keys() & b.keys())
        where = [f"{protocol or 'no protocol'}, {backbone}, {shots} shots", dataset, classes]
        if not both:
            table.rows.append([*where, MISSING, "", "", ""])
            continue
        differences = difference(a, b)
        mean, low, high = interval(differences)
        table.rows.append([*where, f"{mean:+.2f}", f"{low:+.2f} to {high:+.2f}", str(len(differences)),
                           ", ".join(map(str, both))])
    table.notes.append("The interval is over test images; the seeds that both trainers have are averaged first, so it "
                       "says nothing about other seeds.")
    return table
