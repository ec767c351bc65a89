"""On a machine with a GPU: the same numbers as on the CPU, how fast, and how near to the device's own matrix products.

    python scripts/check_gpu.py --json gpu.json            # random ViT-B/16, fp32, bf16 and fp16, 50 classes, minutes
    python scripts/check_gpu.py --backbone tiny --device cpu --quick      # the script itself, without a GPU

First features, loss terms and gradients of one DeAR step against the CPU in fp32 (TF32 off), then each precision
against fp32; then everything that scripts/bench.py times, with all switches. `of rate` is the work counted from the
shapes over the time, as a fraction of what a plain product reaches there. Exit code 1 if a number is off.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import bench, show  # noqa: E402
from scripts.benching.work import Work  # noqa: E402

# Largest difference: of unit features, and of gradients relative to the largest one of their tensor.
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}


def outcome(name: str, *, device: torch.device, precision: str, classes: int, batch: int) -> dict[str, Tensor]:
    """Unit features of one model and batch, and the gradients of its first step, on the CPU in fp32."""
    torch.manual_seed(0)
    work = Work(name, classes=classes, batch=batch, device=device, precision=precision)
    with torch.no_grad(), work.autocast():
        image = work.model.image_features(work.images, frozen=True)
        text = work.model.text_features(work.prefix)
    found = {"class feature": image.cls, "frozen feature": image.frozen_cls, "attribute features": image.attributes,
             "text feature": text}  # fmt: skip
    found = {key: F.normalize(value.float(), dim=-1).cpu() for key, value in found.items()}
    work.step()
    scale = work.scaler.get_scale() if work.scaler is not None else 1.0
    for key, parameter in work.model.adapter.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {key}"] = parameter.grad.float().cpu() / scale
    return found


def difference(one: dict[str, Tensor], two: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, relative to the largest entry of the first."""
    if one.keys() != two.keys():
        raise RuntimeError(f"not the same tensors: {sorted(one.keys() ^ two.keys())}")
    return {key: float((one[key] - two[key]).abs().max() / one[key].abs().max().clamp(min=1e-12)) for key in one}


def compared(name: str, *, device: torch.device, precisions: list[str], classes: int, batch: int) -> dict[str, dict]:
    """Differences by what is compared: fp32 there against the CPU, each other precision there against fp32 there."""
    size = {"classes": classes, "batch": batch}
    base = outcome(name, device=torch.device("cpu"), precision="fp32", **size)
    there = outcome(name, device=device, precision="fp32", **size)
    rows = {"fp32": difference(base, there)}
    for precision in precisions:
        if precision != "fp32":
            rows[precision] = difference(there, outcome(name, device=device, precision=precision, **size))
    return rows


def show_differences(rows: dict[str, dict]) -> list[str]:
    """Prints the largest difference of each kind; returns what is beyond its tolerance."""
    beyond = []
    for precision, row in rows.items():
        against = "CPU" if precision == "fp32" else "fp32"
        for kind in ("feature", "gradient"):
            key = max((key for key in row if kind in key), key=row.__getitem__)
            print(f"{precision:5} against {against:5} {kind:9} largest difference {row[key]:.1e} ({key})")
            # gradients of half precision pass through a softmax of logits times 100: shown, and held for fp32 only
            if not row[key] <= TOLERANCE[precision] and (kind == "feature" or precision == "fp32"):
                beyond.append(f"{precision} {key}: {row[key]:.1e} > {TOLERANCE[precision]:g}")
    return beyond


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="random:ViT-B-16", help="a name, a file, or random:<open_clip name>")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16", "fp16"], choices=list(TOLERANCE))
    parser.add_argument("--classes", nargs="+", type=int, default=[50, 1000])
    parser.add_argument("--batch", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="torch.compile as well (minutes)")
    parser.add_argument("--quick", action="store_true", help="10 classes, batch 2, one repetition, fp32")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"check_gpu.py: torch {torch.__version__} sees no GPU: use --device cpu to try the script",
              file=sys.stderr)  # fmt: skip
        return 2
    if args.quick:
        args.precision, args.classes, args.batch, args.repeats = ["fp32"], [10], [2], 1
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device(args.device)
    differences = compared(args.backbone, device=device, precisions=args.precision, classes=10, batch=2)
    beyond = show_differences(differences)
    tables = []
    for precision in args.precision:
        for classes in args.classes:
            for batch in args.batch:
                table = bench(args.backbone, classes=classes, batch=batch, repeats=args.repeats, device=device,
                              precision=precision, switches=True, compiled=args.compile)  # fmt: skip
                show(table)
                for key, row in table["rows"].items():
                    row["of_rate"] = round(row["floor_ms"] / row["median_ms"], 3)
                    print(f"  of rate: {key:32}{row['of_rate']:8.2f}")
                tables.append(table)
    if args.json:
        found = {"differences": differences, "tables": tables}
        args.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print("beyond the tolerance: " + "; ".join(beyond) if beyond else "all numbers agree")
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
