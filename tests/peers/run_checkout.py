"""Runs train.py of a checkout on this machine: python run_checkout.py CHECKOUT CLIP_FILE SHIMS [flags of train.py].

SHIMS is a list such as cpu_in_float32,scheduler_of_older_torch ("" for none) from shims.py. A program of its own,
because the checkouts have packages called clip, trainers and datasets. Every scalar that the run writes to TensorBoard
goes unrounded into OUTPUT_DIR/scalars.json as [tag, value, step], the logits of the last evaluation into logits.pt.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from pathlib import Path

import shims
import torch


def record_scalars(scalars: list) -> None:
    """Keep what the trainer writes. Of dear_plugin nothing is imported unless its engine is asked for."""
    engine = "dear_plugin.engine.trainer" if os.environ.get("DEAR_ENGINE") == "builtin" else "dassl.engine.trainer"
    base = importlib.import_module(engine).TrainerBase
    write = base.write_scalar

    def keep(self, tag, scalar_value, global_step=None):
        scalars.append([tag, float(scalar_value), global_step])
        return write(self, tag, scalar_value, global_step)

    base.write_scalar = keep


def record_logits(batches: list) -> None:
    """Keep what Dassl's evaluator is given; it is reset before each pass."""
    from dassl.evaluation.evaluator import Classification

    process, reset = Classification.process, Classification.reset
    Classification.process = lambda self, mo, gt: (batches.append(mo.detach().clone()), process(self, mo, gt))[1]
    Classification.reset = lambda self: (batches.clear(), reset(self))[1]


def main(checkout: str, clip_file: str, chosen: str, *flags: str) -> None:
    program = Path(checkout) / "train.py"
    if not program.is_file():
        program = Path(checkout) / "scripts" / "train.py"  # ours
    missing = shims.missing_packages()
    sys.path.insert(0, checkout)
    if missing:
        print(f"stand-ins for {', '.join(missing)}", file=sys.stderr)
    if clip_file:
        shims.weights_from(clip_file)
    for name in filter(None, chosen.split(",")):
        getattr(shims, name)()
    sys.argv = [str(program), *flags]
    scalars: list = []
    logits: list[torch.Tensor] = []
    record_scalars(scalars)
    if os.environ.get("DEAR_ENGINE") != "builtin":
        record_logits(logits)
    try:
        runpy.run_path(str(program), run_name="__main__")
    finally:
        folder = Path(flags[flags.index("--output-dir") + 1])
        if folder.is_dir():
            (folder / "scalars.json").write_text(json.dumps(scalars), encoding="utf-8")
            torch.save(torch.cat(logits) if logits else torch.empty(0), folder / "logits.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
