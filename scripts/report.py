"""Base-to-new table from the result.json files below a folder: base, new and harmonic mean per data set and trainer.

    python scripts/report.py output/base2new [--markdown FILE] [--incomplete]

Accuracy in percent, mean and sample standard deviation over seeds. HM is the harmonic mean of the mean base and mean
new accuracy (as the field reports it), from unrounded numbers. Seeds that have only one half are named, and left out of
the table with the whole cell unless --incomplete is given.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

ORDER = ("ZeroshotCLIP", "CoOp", "CoCoOp", "MaPLe", "PromptSRC", "MMRL", "DeAR")
Group = tuple[str, str, int, str]  # data set, backbone, shots, trainer


def read_results(folder: Path) -> tuple[list[dict], list[str]]:
    """Finished results with a test accuracy, and a sentence for each file that could not be read."""
    results, broken = [], []
    for path in sorted(folder.rglob("result.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
            if result["accuracy_pct"] is not None and result["split"] == "test":
                results.append(result | {"path": str(path.parent)})
        except (ValueError, KeyError, TypeError) as error:
            broken.append(f"{path} is no result ({type(error).__name__}: {error}): remove its folder and run it again")
    return results, broken


def harmonic_mean(base: float, new: float) -> float:
    """2bn / (b + n), 0 where one of them is 0."""
    return 2 * base * new / (base + new) if base and new else 0.0


def collect(results: list[dict]) -> dict[Group, dict[str, dict[int, dict]]]:
    """Group -> "base" or "new" -> seed -> result. Two results for one cell are an error that names both folders."""
    cells: dict[Group, dict[str, dict[int, dict]]] = defaultdict(lambda: {"base": {}, "new": {}})
    for result in results:
        if result["classes"] not in ("base", "new"):
            continue
        group = (result["dataset"], Path(result["backbone"]).name, result["shots"], result["trainer"])
        row = cells[group][result["classes"]]
        if result["seed"] in row:
            first, second = row[result["seed"]]["path"], result["path"]
            raise ValueError(f"two results for {group}, {result['classes']}, seed {result['seed']}: {first} and "
                             f"{second}; give a folder that holds one of them")
        row[result["seed"]] = result
    return cells


def spread(values: list[float]) -> str:
    """Mean, and the sample standard deviation from two values on."""
    text = f"{statistics.mean(values):.2f}"
    return text if len(values) < 2 else f"{text} ± {statistics.stdev(values):.2f}"


def table(cells: dict[Group, dict[str, dict[int, dict]]], *, incomplete: bool) -> tuple[list[list[str]], list[str]]:
    """Rows of the table, and notes on what is missing."""
    rows, notes = [], []
    for group in sorted(cells, key=lambda g: (g[:3], ORDER.index(g[3]) if g[3] in ORDER else len(ORDER), g[3])):
        base, new = cells[group]["base"], cells[group]["new"]
        both = sorted(set(base) & set(new))
        lone = sorted(set(base) ^ set(new))
        name = " ".join(map(str, group))
        if lone:
            notes.append(f"{name}: seed {', '.join(map(str, lone))} has only one half")
        if not both or (lone and not incomplete):
            rows.append([group[0], group[3], "missing", "missing", "missing", f"{len(both)}", "", ""])
            continue
        b, n = ([part[seed]["accuracy_pct"] for seed in both] for part in (base, new))
        seconds = statistics.mean(base[seed]["wall_time_s"] for seed in both)
        parameters = base[both[0]]["trainable_parameters"]
        rows.append([group[0], group[3], spread(b), spread(n),
                     f"{harmonic_mean(statistics.mean(b), statistics.mean(n)):.2f}",
                     f"{len(both)} ({', '.join(map(str, both))})", f"{parameters:,}", f"{seconds:.0f}"])
    return rows, notes


def as_markdown(rows: list[list[str]]) -> str:
    head = ["data set", "trainer", "base %", "new %", "HM", "n (seeds)", "trained parameters", "run s"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    line = lambda cells: "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"  # noqa: E731
    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--markdown", type=Path, help="write the table here as well")
    parser.add_argument("--incomplete", action="store_true", help="average over the seeds that are there")
    args = parser.parse_args()
    results, broken = read_results(args.folder)
    try:
        cells = collect(results)
    except ValueError as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    if not cells:
        print(f"report.py: no finished base or new result below {args.folder}", file=sys.stderr)
        return 2
    rows, notes = table(cells, incomplete=args.incomplete)
    text = as_markdown(rows)
    print("\n" + text)
    devices = sorted({result["device"] for result in results})
    print(f"\nMeasured here on: {', '.join(devices)}. ± is the sample standard deviation over seeds.")
    for note in [*notes, *broken]:
        print(f"Note: {note}")
    if args.markdown:
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
