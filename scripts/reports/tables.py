"""One table a protocol, never two protocols in one; a cell that is not there says `missing`."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from reports.results import ELEVEN, MISSING, ORDER, TARGETS, Seeds, family_of, harmonic_mean, rank, spread, values

Published = Callable[..., str]  # (protocol, trainer, data set, part, value, backbone) -> "82.28 [S1], +0.10" or ""


@dataclass
class Table:
    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


def tables_of(cells: dict[tuple, Seeds], *, incomplete: bool, published: Published | None = None) -> list[Table]:
    """All tables that the results give, base to new first."""
    found = []
    for protocol in sorted({key[0] for key in cells}, key=lambda name: (name != "base2new", name)):
        for backbone, shots in sorted({key[1:3] for key in cells if key[0] == protocol}, key=str):
            part = {key[3:]: seeds for key, seeds in cells.items() if key[:3] == (protocol, backbone, shots)}
            where = f"{backbone}, {shots} shots"
            if protocol == "base2new" or protocol.startswith("ablation"):
                table = base_to_new(part, f"{protocol}, {where}", protocol, backbone, incomplete, published)
                found += [table] if protocol == "base2new" else under(found, table, protocol.partition(":")[2], where)
            elif protocol in ("xd", "dg"):
                source = {key[3:]: seeds for key, seeds in cells.items() if key[:3] == ("source", backbone, shots)}
                for family in sorted({family_of(key[1]) for key in part}):
                    mine, trained = ({key: seeds for key, seeds in some.items() if family_of(key[1]) == family}
                                     for some in (part, source))  # fmt: skip
                    found.append(transfer(mine, trained, f"{protocol}, {where}", protocol, backbone, incomplete,
                                          published))  # fmt: skip
        if protocol == "fewshot":
            for backbone in sorted({key[1] for key in cells if key[0] == protocol}):
                part = {key[2:]: seeds for key, seeds in cells.items() if key[:2] == (protocol, backbone)}
                found.append(few_shot(part, f"fewshot, {backbone}", incomplete))
    return found


def under(found: list[Table], table: Table, changed: str, where: str) -> list[Table]:
    """The ablations of one backbone as one table: `table` goes into it, the unchanged method first; new if it is."""
    title, rows = f"ablation, {where}", [[changed, *row] for row in table.rows]
    for other in found:
        if other.title == title:
            other.rows = rows + other.rows if changed == "full" else other.rows + rows
            other.notes += table.notes
            return []
    return [Table(title, ["changed", *table.head], rows, table.notes)]


def pairs(part: dict[tuple, Seeds]) -> list[tuple[str, str]]:
    """Every data set with every trainer, in the field's order, so that what was not run has a row too."""
    datasets, trainers = (sorted({key[i] for key in part}, key=lambda name: rank(names, name))
                          for i, names in ((1, ELEVEN), (0, ORDER)))  # fmt: skip
    return [(dataset, trainer) for dataset in datasets for trainer in trainers]


def counted(seeds: list[int]) -> str:
    """ "3 (1, 2, 3)" """
    return f"{len(seeds)} ({', '.join(map(str, seeds))})" if seeds else "0"


def cell_text(cell: Seeds, seeds: list[int], incomplete: bool) -> str:
    """Mean and deviation; missing unless the cell has all of the row's seeds, or, if told so, with its own n."""
    if cell and set(cell) == set(seeds):
        return spread(values(cell))
    return f"{spread(values(cell))} (n={len(cell)})" if cell and incomplete else MISSING


def base_to_new(part, title, protocol, backbone, incomplete, published) -> Table:  # noqa: ANN001 - see tables_of
    head = ["data set", "trainer", "base %", "new %", "HM", "n (seeds)", "trained parameters", "run s"]
    table, means = Table(title, head, []), {}
    for dataset, trainer in pairs(part):
        base, new = (part.get((trainer, dataset, half), {}) for half in ("base", "new"))
        both, lone = sorted(base.keys() & new.keys()), sorted(base.keys() ^ new.keys())
        if lone:
            table.notes.append(f"{dataset} {trainer} ({title}): seed {', '.join(map(str, lone))} has only one half")
        means.setdefault(trainer, {})[dataset] = None
        if not both or (lone and not incomplete):
            row = [dataset, trainer, MISSING, MISSING, MISSING, str(len(both)), "", ""]
        else:
            b, n = ([half[seed]["accuracy_pct"] for seed in both] for half in (base, new))
            means[trainer][dataset] = pair = (statistics.mean(b), statistics.mean(n))
            seconds = statistics.mean(base[seed]["wall_time_s"] for seed in both)
            parameters = base[both[0]]["trainable_parameters"]
            row = [dataset, trainer, spread(b), spread(n), f"{harmonic_mean(*pair):.2f}",
                   counted(both), f"{parameters:,}", f"{seconds:.0f}"]  # fmt: skip
        table.rows.append(row)
        _add_published(row, published, protocol, trainer, dataset, means[trainer][dataset], backbone)
    datasets = sorted({dataset for dataset, _ in pairs(part)})
    if len(datasets) > 1:
        for trainer in sorted(means, key=lambda name: rank(ORDER, name)):
            _averages(table, trainer, [means[trainer].get(name) for name in datasets], protocol, backbone, published)
    if published:
        table.head += ["paper base", "paper new", "paper HM"]
    return table


def _averages(table: Table, trainer, found, protocol, backbone, published) -> None:  # noqa: ANN001
    """Both ways of averaging HM; missing where a data set is."""
    n = f"{sum(pair is not None for pair in found)} data sets"
    if None in found:
        rows, pair = [["average", trainer, MISSING, MISSING, MISSING, n, "", ""]], None
    else:
        pair = tuple(statistics.mean(values) for values in zip(*found, strict=True))
        of_hms = statistics.mean(harmonic_mean(*one) for one in found)
        rows = [["average, HM of averages", trainer, *(f"{v:.2f}" for v in (*pair, harmonic_mean(*pair))), n, "", ""],
                ["average of HMs", trainer, "", "", f"{of_hms:.2f}", n, "", ""]]  # fmt: skip
    for i, row in enumerate(rows):
        _add_published(row, published if not i else (published and (lambda *_: "")), protocol, trainer, "Average", pair,
                       backbone)  # fmt: skip
    table.rows += rows


def _add_published(row, published, protocol, trainer, dataset, pair, backbone) -> None:  # noqa: ANN001
    if published:
        numbers = {"base": pair and pair[0], "new": pair and pair[1], "HM": pair and harmonic_mean(*pair)}
        row += [published(protocol, trainer, dataset, half, value, backbone) for half, value in numbers.items()]


def transfer(part, source, title, protocol, backbone, incomplete, published) -> Table:  # noqa: ANN001
    """One row a trainer: the source, each target, and the mean over the targets; no target is left out of the head."""
    family = family_of(next(iter(part))[1])
    known = TARGETS.get((protocol, family), ())
    targets = [*known, *sorted({key[1] for key in part} - set(known))]
    trained_on = sorted({key[1] for key in source}) or [family] * bool(family)
    table = Table(title, ["trainer", *(f"{name} (source)" for name in trained_on), *targets,
                          f"average of {len(targets)} targets", "n (seeds)"], [])  # fmt: skip
    for trainer in sorted({key[0] for key in [*part, *source]}, key=lambda name: rank(ORDER, name)):
        cells = {name: source.get((trainer, name, "all"), {}) for name in trained_on}
        cells |= {name: part.get((trainer, name, "all"), {}) for name in targets}
        seeds = sorted(set().union(*cells.values()))
        short = [name for name, cell in cells.items() if set(cell) != set(seeds)]
        if short:
            table.notes.append(f"{trainer} ({title}): not all of the seeds {', '.join(map(str, seeds))} on "
                               f"{', '.join(short)}")
        shown = {name: cell_text(cell, seeds, incomplete) for name, cell in cells.items()}
        whole = all(shown[name] != MISSING for name in targets)
        mean = statistics.mean(statistics.mean(values(cells[name])) for name in targets) if whole else None
        table.rows.append([trainer, *shown.values(), f"{mean:.2f}" if whole else MISSING,
                           counted(seeds)])
        if published:
            line = [published("source" if name in trained_on else protocol, trainer, name, "all",
                              None if text == MISSING else statistics.mean(values(cells[name])), backbone)
                    for name, text in shown.items()]  # fmt: skip
            line.append(published(protocol, trainer, "Average", "all", mean, backbone))
            if any(line):
                table.rows.append([f"{trainer}, paper", *line, ""])
    return table


def few_shot(part: dict[tuple, Seeds], title: str, incomplete: bool) -> Table:
    """Keys (shots, trainer, data set, classes). One row a data set and trainer, one column a number of shots."""
    shots = sorted({key[0] for key in part})
    table = Table(title, ["data set", "trainer", *(f"{k} shots" for k in shots), "n (seeds)"], [])
    means: dict[str, dict[tuple[str, int], float]] = {}
    order = pairs({key[1:]: seeds for key, seeds in part.items()})
    for dataset, trainer in order:
        cells = {k: part.get((k, trainer, dataset, "all"), {}) for k in shots}
        seeds = sorted(set().union(*cells.values()))
        if any(cell and set(cell) != set(seeds) for cell in cells.values()):
            table.notes.append(f"{dataset} {trainer} ({title}): seeds differ between the numbers of shots")
        shown = {k: cell_text(cell, seeds, incomplete) for k, cell in cells.items()}
        table.rows.append([dataset, trainer, *shown.values(), counted(seeds)])
        keep = {k: values(cell) for k, cell in cells.items() if shown[k] != MISSING}
        means.setdefault(trainer, {}).update({(dataset, k): statistics.mean(v) for k, v in keep.items()})
    datasets = sorted({dataset for dataset, _ in order})
    if len(datasets) > 1:
        for trainer, found in means.items():
            line = [f"{statistics.mean(found[name, k] for name in datasets):.2f}"
                    if all((name, k) in found for name in datasets) else MISSING for k in shots]  # fmt: skip
            table.rows.append(["average", trainer, *line, f"{len(datasets)} data sets"])
    return table


def as_markdown(table: Table) -> str:
    head, rows = table.head, table.rows
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(cells: list[str]) -> str:
        return "| " + " | ".join(c.ljust(w) for c, w in zip(cells, widths, strict=True)) + " |"

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])


def as_csv(tables: list[Table]) -> str:
    """All tables under each other, each line with its table's title first."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for table in tables:
        writer.writerow(["table", *table.head])
        writer.writerows([table.title, *row] for row in table.rows)
    return out.getvalue()


def escaped(text: str) -> str:
    """Text as LaTeX shows it."""
    for char in "&%_#$":
        text = text.replace(char, f"\\{char}")
    return text.replace("±", r"$\pm$")


def as_latex(table: Table) -> str:
    """A booktabs tabular."""
    def line(cells: list[str]) -> str:
        return " & ".join(map(escaped, cells)) + r" \\"

    columns = "l" * 2 + "r" * (len(table.head) - 2)
    body = "\n".join(line(row) for row in table.rows)
    return "\n".join([f"% {escaped(table.title)}", f"\\begin{{tabular}}{{{columns}}}", r"\toprule", line(table.head),
                      r"\midrule", body, r"\bottomrule", r"\end{tabular}"])  # fmt: skip
