"""What of the field's 15 data sets is below a data root: complete, incomplete or absent, as a table.

    python scripts/check_data.py --root $DATA [--dataset caltech101 dtd]

Counts are held against the published ones; images against the disk. Nothing is written. Exit code 0 if everything that
was asked for is complete, else 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] != str(ROOT):  # first, because Hugging Face's package is called datasets too
    sys.path.insert(0, str(ROOT))

from datasets.row import COOP_DATA_PAGE, Row, Source  # noqa: E402
from datasets.splits import check_labels, lines_hash, missing_images, some  # noqa: E402
from datasets.table import ROWS  # noqa: E402

FIFTEEN = [row for row in ROWS if row.counts is not None]


@dataclass
class Finding:
    """`state`: "complete", "wrong" (something differs or is missing) or "absent" (no folder)."""

    row: Row
    state: str
    counts: tuple[int, ...] = ()
    problems: list[str] = field(default_factory=list)


def check(row: Row, root: Path) -> Finding:
    """Read one data set as a run would, without its harness."""
    if not (root / row.folder).is_dir():
        return Finding(row, "absent", problems=[f"no folder {root / row.folder}"])
    try:
        split = row.reader(row, Source(root=root))
        check_labels(split, row.name)
    except (ValueError, OSError) as error:
        return Finding(row, "wrong", problems=[str(error)])
    problems = []
    counts = (len(split.train), len(split.val), len(split.test), len({item.label for item in split.train}))
    for part, have, want in zip(("train", "val", "test", "classes"), counts, row.counts, strict=True):
        if have != want:
            problems.append(f"{part}: {have:,}, published {want:,}")
    everything = split.train + split.val + split.test
    missing = [] if split.listed else missing_images(everything, split.folder)
    if missing:
        total = len({item.path for item in everything})
        problems.append(f"{len(missing):,} of {total:,} images are not in {split.folder}: {some(missing)}")
    if row.names_hash and lines_hash(split.class_names())[:16] != row.names_hash:
        problems.append("class names differ from the published list")
    return Finding(row, "wrong" if problems else "complete", counts, problems)


def as_table(findings: list[Finding]) -> str:
    head = ["data set", "folder", "state", "train", "val", "test", "classes"]
    rows = [[f.row.name, f.row.folder, f.state, *(f"{count:,}" for count in f.counts or ())] for f in findings]
    rows = [[*row, *["-"] * (len(head) - len(row))] for row in rows]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                     for row in [head, *rows])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("DATA", ""), help="folder of the data sets; left out: $DATA")
    parser.add_argument("--dataset", nargs="+", choices=[row.config for row in FIFTEEN], metavar="STEM",
                        help="left out: all 15; stems of configs/datasets")  # fmt: skip
    args = parser.parse_args(arguments)
    root = Path(args.root).expanduser().absolute()
    if not args.root or not root.is_dir():
        print(f"check_data.py: no folder {args.root or '(--root is empty and $DATA is not set)'}", file=sys.stderr)
        return 2
    findings = [check(row, root) for row in FIFTEEN if not args.dataset or row.config in args.dataset]
    print(as_table(findings))
    wrong = [finding for finding in findings if finding.state == "wrong"]
    print("\n" * bool(wrong), *(f"{f.row.name}: {'; '.join(f.problems)}\n" for f in wrong), sep="", end="")
    complete, absent = (sum(f.state == state for f in findings) for state in ("complete", "absent"))
    get = f"; {absent} absent, where to get them: {COOP_DATA_PAGE}" if absent else ""
    print(f"\n{complete} of {len(findings)} complete{get}")
    return 0 if complete == len(findings) else 1


if __name__ == "__main__":
    sys.exit(main())
