"""Numbers quoted from elsewhere, with their source marks; never mixed with measured ones."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("published.csv")
BACKBONE = "ViT-B/16"
SOURCES = {
    "S1": "zhengli97/PromptKD images/exp_results.png (base to new, 16 shots)",
    "S2": "zhengli97/PromptKD images/exp_results2.png (cross-dataset)",
    "S3": "zhengli97/PromptKD docs/PromptKD_chinese_version.pdf, table 9 (domain generalisation)",
    "S4": "zhengli97/ATPrompt images/exp_results2.png (accuracy on the source, 16 shots)",
    "S8": "published summaries of the DeAR paper (the paper's number)",
}


@cache
def published_table() -> dict[tuple[str, str, str, str], tuple[float, str]]:
    """(protocol, trainer, data set, part) -> (percent, source mark)."""
    with open(FILE, newline="", encoding="utf-8") as handle:
        rows = list(csv.DictReader(handle))
    for row in rows:
        if row["source"] not in SOURCES:
            raise ValueError(f"{FILE}: {row} has no known source; wanted one of {', '.join(SOURCES)}")
    return {(r["protocol"], r["trainer"], r["dataset"], r["part"]): (float(r["percent"]), r["source"]) for r in rows}


def beside(protocol: str, trainer: str, dataset: str, part: str, value: float | None, backbone: str) -> str:
    """ "79.97 [S1], here +0.12"; "" where nothing is published. The difference only for the published backbone."""
    found = published_table().get((protocol, trainer, dataset, part))
    if found is None:
        return ""
    text = f"{found[0]:.2f} [{found[1]}]"
    return text if value is None or backbone != BACKBONE else f"{text}, here {value - found[0]:+.2f}"


def footnotes(shown: list[str]) -> list[str]:
    """The sources whose marks are in the cells `shown`."""
    return [f"[{mark}] quoted from {text}; {BACKBONE}" for mark, text in SOURCES.items()
            if any(f"[{mark}]" in cell for cell in shown)]  # fmt: skip
