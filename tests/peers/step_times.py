"""Step time and peak memory of each published trainer and of ours, on the same random ViT-B/16, one after the other.

    python tests/peers/step_times.py --peers FOLDER [--classes 50] [--methods MaPLe ...]

Batch 4 (CoCoOp 1, as published), fp32 on the CPU, each in its own process; the median of the steps after the first.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "trainers")]

from parity import GEOMETRIES, cases, our_trainer, starting_values  # noqa: E402
from tiny_world import write_data  # noqa: E402

CHECKOUTS = {"CoOp": "CoOp", "CoCoOp": "CoOp", "MaPLe": "multimodal-prompt-learning", "PromptSRC": "PromptSRC",
             "MMRL": "MMRL"}
STEPS = 3


def names(count: int) -> tuple[str, ...]:
    return tuple(f"thing_number_{index:03d}" for index in range(count))


def make_input(method: str, classes: int, folder: Path):
    """Our trainer, and the file that a peer reads."""
    case, geometry = cases("ViT-B/16")[method], GEOMETRIES["ViT-B/16"]
    if not (folder / "data").is_dir():
        write_data(folder / "data", names(classes))
        torch.save(geometry.state(), folder / "clip.pt")
    images = torch.randn(1 if method == "CoCoOp" else 4, 3, geometry.size, geometry.size)
    labels = torch.arange(len(images))
    trainer = our_trainer(case, "ViT-B/16", root=folder / "data", backbone=folder / "clip.pt", classes="all",
                          out=folder / f"out-{method}-{os.getpid()}")
    if method == "CoCoOp":
        trainer.cfg.defrost()
        trainer.cfg.TRAINER.COCOOP.CHUNK = 2048
    given = {
        "method": method, "node": case.node, "settings": case.settings, "optim": dict(case.optim),
        "start": starting_values(case, trainer), "clip": str(folder / "clip.pt"), "images": images, "labels": labels,
        "classnames": list(names(classes)), "steps": STEPS, "dataset": "DescribableTextures", "with_state": False,
        "timing": True,
    }
    return trainer, given


def ours(method: str, classes: int, folder: Path) -> None:
    """Run in a process of its own; prints seconds and MiB."""
    trainer, given = make_input(method, classes, folder)
    trainer.set_model_mode("train")
    trainer.num_batches, trainer.batch_idx, trainer.epoch = 9, 0, 0
    seconds = []
    for _ in range(STEPS):
        started = time.perf_counter()
        trainer.forward_backward({"img": given["images"], "label": given["labels"]})
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"RESULT {statistics.median(seconds[1:])} {peak}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", required=True)
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--methods", nargs="+", default=list(CHECKOUTS))
    parser.add_argument("--ours", default="", help="internal: folder of a run")
    args = parser.parse_args()
    if args.ours:
        ours(args.methods[0], args.classes, Path(args.ours))
        return
    print("| method | classes | published s/step | ours s/step | published peak MiB | ours peak MiB |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for method in args.methods:
            with contextlib.redirect_stdout(sys.stderr):
                _, given = make_input(method, args.classes, folder)
            torch.save(given, folder / "input.pt")
            del given
            checkout = str(Path(args.peers) / CHECKOUTS[method])
            subprocess.run([sys.executable, str(HERE / "run_peer.py"), checkout, str(folder / "input.pt"),
                            str(folder / "output.pt")], cwd=checkout, check=True, capture_output=True)
            theirs = torch.load(folder / "output.pt", weights_only=True)
            run = subprocess.run([sys.executable, __file__, "--peers", args.peers, "--classes", str(args.classes),
                                  "--methods", method, "--ours", temporary], capture_output=True, text=True, check=True)
            seconds, peak = next(line for line in run.stdout.splitlines() if line.startswith("RESULT")).split()[1:]
            median = statistics.median(theirs["seconds"][1:])
            print(f"| {method} | {args.classes} | {median:.2f} | {float(seconds):.2f} | {theirs['peak_mib']:,.0f} | "
                  f"{float(peak):,.0f} |", flush=True)


if __name__ == "__main__":
    main()
