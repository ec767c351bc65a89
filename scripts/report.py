"""Tables from the result.json files below a folder, one for each protocol; protocols are never mixed.

    python scripts/report.py output [--markdown FILE] [--csv FILE] [--latex FILE] [--plots FOLDER] [--paper]
    python scripts/report.py output --compare DeAR CoOp
    python scripts/report.py output --protocol xd

Accuracy in percent, mean and sample standard deviation over seeds. HM is the harmonic mean of the mean base and mean
new accuracy (as the field reports it), from unrounded numbers; over several data sets both HM of the averages and the
average of the HMs are given. Seeds that have only one half are named, and left out of the table with the whole cell
unless --incomplete is given. --paper puts published numbers beside, each with the mark of its source.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
if str(SCRIPTS) not in sys.path:
    sys.path.insert(0, str(SCRIPTS))

from reports.results import harmonic_mean, protocol_of, read_results, sort_results  # noqa: E402
from reports.tables import Table, as_csv, as_latex, as_markdown, tables_of  # noqa: E402

PROTOCOLS = ("base2new", "fewshot", "xd", "dg", "ablation")
__all__ = ["harmonic_mean", "main"]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path)
    add("--protocol", choices=PROTOCOLS, help="this one alone; left out: all that are there")
    add("--markdown", type=Path, help="write the tables here as well")
    add("--csv", type=Path)
    add("--latex", type=Path)
    add("--plots", type=Path, help="folder for few-shot curves and base-new scatters")
    add("--plot-format", choices=("png", "svg"), default="png")
    add("--incomplete", action="store_true", help="average over the seeds that are there")
    add("--paper", action="store_true", help="published numbers beside, marked as such")
    add("--compare", nargs=2, metavar=("A", "B"), help="paired bootstrap over test images")
    return parser.parse_args()


def make_tables(args: argparse.Namespace, cells: dict) -> list[Table]:
    if args.compare:
        from reports.bootstrap import compare

        have = sorted({key[3] for key in cells})
        for name in args.compare:
            if name not in have:
                raise ValueError(f"--compare {name}: no result of it; there are {', '.join(have)}")
        return [compare(cells, *args.compare)]
    published = None
    if args.paper:
        from reports.published import beside as published
    return tables_of(cells, incomplete=args.incomplete, published=published)


def chosen(results: list[dict], protocol: str | None) -> list[dict]:
    """The results of one protocol; those of the source's training belong to xd and to dg."""
    if protocol is None:
        return results
    wanted = (protocol, "source") if protocol in ("xd", "dg") else (protocol,)
    found = [result for result in results if protocol_of(result).partition(":")[0] in wanted]
    return found if any(protocol_of(result) != "source" for result in found) else []


def write_files(args: argparse.Namespace, tables: list[Table], cells: dict, said: list[str]) -> None:
    many = len(tables) > 1
    markdown = [(f"### {t.title}\n\n" if many else "") + as_markdown(t) for t in tables]
    texts = [(args.markdown, "\n\n".join([*markdown, *said])), (args.csv, as_csv(tables).rstrip("\n")),
             (args.latex, "\n\n".join(map(as_latex, tables)))]  # fmt: skip
    for path, text in texts:
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
    if args.plots:
        from reports.plots import base_new_scatter, few_shot_curves

        for plot in (few_shot_curves, base_new_scatter):
            for path in plot(cells, args.plots, args.plot_format):
                print(f"Plot: {path}")


def origin(results: list[dict]) -> str:
    """Where and by which code it was measured, and how long all runs took."""
    commits = {(git["commit"] or "")[:7] + ("" if not git["dirty"] else " with changes")
               for git in (r.get("git") or {} for r in results) if git.get("commit")}  # fmt: skip
    torches = {version for r in results if (version := (r.get("versions") or {}).get("torch"))}
    seconds = sum(r.get("wall_time_s") or 0 for r in results)
    parts = [", ".join(sorted({r["device"] for r in results})), *(f"torch {version}" for version in sorted(torches)),
             f"commit {', '.join(sorted(commits))}" if commits else "commit not recorded",
             f"{len(results)} runs of {seconds / 60:.0f} min in all"]  # fmt: skip
    return f"Measured here on: {', '.join(parts)}. ± is the sample standard deviation over seeds."


def remarks(args: argparse.Namespace, tables: list[Table], results: list[dict], broken: list[str]) -> list[str]:
    """What stands below the tables."""
    notes = [note for table in tables for note in table.notes]
    if args.paper:
        from reports.published import footnotes

        notes += footnotes([cell for table in tables for row in table.rows for cell in row])
    generated = sorted({r["dataset"] for r in results if (r.get("data") or {}).get("split_generated")})
    if generated:
        notes.append(f"the split of {', '.join(generated)} was generated here: no number compares with it")
    return [origin(results), *(f"Note: {note}" for note in [*notes, *broken])]


def main() -> int:
    args = parse_arguments()
    results, broken = read_results(args.folder)
    try:
        results = chosen(results, args.protocol)
        cells = sort_results(results)
        tables = make_tables(args, cells)
        if not tables:
            what = f"{args.protocol} result" if args.protocol else "base or new result"
            raise ValueError(f"no finished {what} below {args.folder}")
        for table in tables:
            title = f"{table.title}\n\n" if len(tables) > 1 or args.compare else ""
            print(f"\n{title}{as_markdown(table)}")
        said = remarks(args, tables, results, broken)
        print("", *said, sep="\n")
        write_files(args, tables, cells, said)
    except (ValueError, OSError) as error:
        print(f"report.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
