"""Few-shot curves and the base-new scatter as PNG or SVG; matplotlib is asked for only here."""

from __future__ import annotations

import statistics
from pathlib import Path

from reports.results import ORDER, Seeds, rank, values


def _pyplot():
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("--plots needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def few_shot_curves(cells: dict[tuple, Seeds], folder: Path, suffix: str) -> list[Path]:
    """One picture a data set: accuracy by shots, a line a trainer, with the seeds' standard deviation."""
    plt, written = _pyplot(), []
    of_protocol = {key[1:]: seeds for key, seeds in cells.items() if key[0] == "fewshot"}
    for backbone, dataset in sorted({(key[0], key[3]) for key in of_protocol}):
        figure, axes = plt.subplots(figsize=(4.5, 3.4))
        mine = {key: seeds for key, seeds in of_protocol.items() if (key[0], key[3]) == (backbone, dataset)}
        for trainer in sorted({key[2] for key in mine}, key=lambda name: rank(ORDER, name)):
            points = {key[1]: values(seeds) for key, seeds in sorted(mine.items()) if key[2] == trainer}
            spread = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in points.values()]
            axes.errorbar(list(points), [statistics.mean(v) for v in points.values()], spread, marker="o", capsize=2,
                          label=trainer)  # fmt: skip
        axes.set(xlabel="images a class", ylabel="accuracy (%)", title=f"{dataset}, {backbone}", xscale="log")
        shots = sorted({key[1] for key in mine})
        axes.set_xticks(shots, [str(k) for k in shots])
        axes.minorticks_off()
        axes.legend()
        written.append(_save(plt, figure, folder / f"fewshot_{dataset}_{backbone.replace('/', '-')}.{suffix}"))
    return written


def base_new_scatter(cells: dict[tuple, Seeds], folder: Path, suffix: str) -> list[Path]:
    """Base accuracy against new accuracy: a mark a run, a color a trainer; a picture for each data set."""
    plt, written = _pyplot(), []
    halves = {key[1:]: seeds for key, seeds in cells.items() if key[0] == "base2new"}
    for backbone, shots, dataset in sorted({(key[0], key[1], key[3]) for key in halves}, key=str):
        figure, axes = plt.subplots(figsize=(4.0, 3.6))
        trainers = sorted({key[2] for key in halves if key[3] == dataset}, key=lambda name: rank(ORDER, name))
        for trainer in trainers:
            base, new = (halves.get((backbone, shots, trainer, dataset, half), {}) for half in ("base", "new"))
            both = sorted(base.keys() & new.keys())
            if both:
                axes.scatter([base[s]["accuracy_pct"] for s in both], [new[s]["accuracy_pct"] for s in both],
                             label=trainer)  # fmt: skip
        axes.set(xlabel="base accuracy (%)", ylabel="new accuracy (%)", title=f"{dataset}, {backbone}, {shots} shots")
        axes.legend()
        name = f"base2new_{dataset}_{backbone.replace('/', '-')}_{shots}.{suffix}"
        written.append(_save(plt, figure, folder / name))
    return written


def _save(plt, figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=160)
    plt.close(figure)
    return path
