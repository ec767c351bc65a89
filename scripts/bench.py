"""Speed as ratios measured in one run: DeAR against the frozen image forward of the same batch, part by part.

    python scripts/bench.py                                            # tiny and random ViT-B/16, batch 4, 50 classes
    python scripts/bench.py --backbone random:ViT-B-16 --classes 50 200 1000 --class-chunk 250
    python scripts/bench.py --backbone tiny --switches                 # each exact speed-up on and off
    python scripts/bench.py --device cuda --precision fp32 bf16        # where there is a GPU

Repetitions of all measurements are interleaved, so noise of the machine falls on all of them alike; medians and the
spread are shown. Peak memory is the process's (CUDA: the device's) while that part runs. The floor is the counted work
divided by the rate that this machine reaches on the tower's own matrix product.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.benching.measure import environment, flops, matmul_rate, peak_mib, sync  # noqa: E402
from scripts.benching.work import SWITCHES, Work  # noqa: E402

MAIN = ("frozen image forward", "DeAR image forward", "text, 77 positions, frozen", "DeAR text from the prefix",
        "DeAR training step")  # fmt: skip


def interleaved(runs: dict[str, Callable[[], None]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each run, `repeats` times in turn; a first round warms up and is not counted."""
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):
        for key, run in runs.items():
            sync(device)
            began = time.perf_counter()
            run()
            sync(device)
            if repeat:
                times[key].append(1e3 * (time.perf_counter() - began))
    return times


def row(times: list[float], base: float) -> dict[str, float]:
    median = statistics.median(times)
    return {"median_ms": round(median, 3), "min_ms": round(min(times), 3), "max_ms": round(max(times), 3),
            "ratio": round(median / base, 3)}


def bench(name: str, *, classes: int, batch: int, repeats: int, device: torch.device, precision: str,
          chunk: int | None = None, switches: bool = False, compiled: bool = False) -> dict:
    """One table: the main measurements, the parts of a step, and with `switches` the step with each of them turned."""
    work = Work(name, classes=classes, batch=batch, device=device, precision=precision, chunk=chunk)
    runs = {"frozen image forward": work.frozen_image, "DeAR image forward": work.image,
            "text, 77 positions, frozen": work.full_text, "DeAR text from the prefix": work.text,
            "DeAR training step": work.step}
    if classes > 200:  # minutes, and no part of a step
        del runs["text, 77 positions, frozen"]
    times = interleaved(runs, repeats, device)
    base = statistics.median(times["frozen image forward"])
    parts = work.parts(repeats)
    rate = matmul_rate(work.matmul_shape, device, work.dtype)
    rows = {}
    for key, run in runs.items():
        work_done = flops(run)
        rows[key] = {**row(times[key], base), "gflop": round(work_done / 1e9, 2),
                     "floor_ms": round(1e3 * work_done / rate, 3), "peak_mib": peak_mib(run, device)}
    result = {"backbone": name, "classes": classes, "batch": batch, "precision": precision, "class_chunk": chunk,
              "trainable_parameters": work.trainable, "matmul_gflops": round(rate / 1e9, 1), **environment(device),
              "rows": rows, "parts": {key: row(value, base) for key, value in parts.items()}}
    if switches:
        turned = interleaved(work.switched_steps(SWITCHES, compiled=compiled), repeats, device)
        shipped = statistics.median(turned["as shipped"])
        result["switches"] = {key: row(value, shipped) for key, value in turned.items()}
    return result


def show(result: dict) -> None:
    chunk = f", chunks of {result['class_chunk']}" if result["class_chunk"] else ""
    facts = [f"batch {result['batch']}", f"{result['classes']} classes{chunk}", result["precision"], result["device"],
             f"{result['threads']} threads", f"{result['trainable_parameters']:,} trainable",
             f"matmul {result['matmul_gflops']:,} GFLOP/s"]
    print(f"\n{result['backbone']}: {', '.join(facts)}")
    print(f"{'':30}{'median ms':>10}{'min':>9}{'max':>9}{'ratio':>8}{'floor ms':>10}{'peak MiB':>10}")
    for key, value in result["rows"].items():
        print(f"{key:30}{value['median_ms']:10.1f}{value['min_ms']:9.1f}{value['max_ms']:9.1f}{value['ratio']:8.2f}"
              f"{value['floor_ms']:10.1f}{value['peak_mib']:10,}")
    for title, key, unit in (("of a step", "parts", "frozen forward"), ("step with", "switches", "step as shipped")):
        for name, value in result.get(key, {}).items():
            print(f"  {title}: {name:32}{value['median_ms']:8.1f} ms{value['ratio']:8.2f} x {unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", nargs="+", default=["tiny", "random:ViT-B-16"],
                        help="a name, a file, or random:<open_clip name>")
    parser.add_argument("--classes", nargs="+", type=int, default=[50])
    parser.add_argument("--batch", nargs="+", type=int, default=[4])
    parser.add_argument("--precision", nargs="+", default=["fp32"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--class-chunk", type=int, default=None, help="classes at a time in the text tower")
    parser.add_argument("--switches", action="store_true", help="also a step with each speed-up turned")
    parser.add_argument("--compile", action="store_true", help="with --switches: torch.compile as well (minutes)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny, one repetition, all switches: is it in order?")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    if args.quick:
        args.backbone, args.classes, args.batch, args.repeats, args.switches = ["tiny"], [10], [2], 1, True
    results = []
    for name in args.backbone:
        for precision in args.precision:
            for classes in args.classes:
                for batch in args.batch:
                    results.append(bench(
                        name, classes=classes, batch=batch, repeats=args.repeats, device=torch.device(args.device),
                        precision=precision, chunk=args.class_chunk, switches=args.switches, compiled=args.compile))
                    show(results[-1])
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
