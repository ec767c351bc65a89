"""Speed as ratios measured in one run: a DeAR step against the frozen image forward of the same batch.

    python scripts/bench.py                               # tiny and random ViT-B/16, batch 4, 50 classes
    python scripts/bench.py --backbone random:ViT-B-16 --classes 200 --batch 4 --repeats 5

Repetitions of all measurements are interleaved, so noise of the machine falls on all of them alike; medians are shown.
Peak memory is that of this process at its highest while the step runs (CUDA: of the device).
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dear_plugin import (  # noqa: E402
    HeadInfo,
    HeadRole,
    RoleCLIP,
    RoleMap,
    load_backbone,
    loss_terms,
    wrap_clip_with_roles,  # noqa: E402
)
from dear_plugin.config import CORE_ATTRIBUTES  # noqa: E402
from dear_plugin.towers import vision_tower  # noqa: E402

_SYLLABLES = ("ba", "ko", "ri", "du", "mel", "ton", "sa", "vi")


def clip_for(name: str, device: torch.device) -> nn.Module:
    """A backbone by name, or `random:<open_clip name>` for random weights of that geometry."""
    if not name.startswith("random:"):
        return load_backbone(name, device=device).model
    import open_clip

    torch.manual_seed(0)
    model = open_clip.create_model(name.removeprefix("random:"), pretrained=None, force_quick_gelu=True)
    return model.to(device).eval()


def bench_roles(layers: int, heads: int) -> RoleMap:
    """The last four layers with every kind of head, in turn: the mask can't be left out and no role is favoured."""
    kinds = [HeadInfo(HeadRole.ATTRIBUTE, name) for name in CORE_ATTRIBUTES]
    kinds += [HeadInfo(HeadRole.MIXED), HeadInfo(HeadRole.GENERALIZATION)]
    turn = itertools.cycle(kinds)
    chosen = range(max(0, layers - 4), layers)
    return RoleMap(tuple(chosen), heads, tuple(tuple(next(turn) for _ in range(heads)) for _ in chosen))


def class_prompts(count: int) -> list[str]:
    """`count` different sentences of the usual length."""
    names = itertools.islice(itertools.product(_SYLLABLES, repeat=4), count)
    return [f"a photo of a {''.join(name[:2])} {''.join(name[2:])}." for name in names]


def measurements(clip: nn.Module, model: RoleCLIP, images: Tensor, ids: Tensor,
                 chunk: int | None) -> dict[str, Callable]:
    prefix = model.text_prefix(ids)
    labels = torch.arange(len(images), device=images.device) % len(ids)
    optimizer = torch.optim.AdamW(model.trainable_parameters(), lr=1e-3)

    @torch.no_grad()
    def frozen_image() -> None:
        clip.encode_image(images)

    @torch.no_grad()
    def adapted_image() -> None:
        model.image_features(images)

    @torch.no_grad()
    def full_text() -> None:
        clip.encode_text(ids)

    @torch.no_grad()
    def adapted_text() -> None:
        model.text_features(prefix, chunk=chunk)

    def step() -> None:
        image = model.image_features(images, frozen=True)
        text = model.text_features(prefix, chunk=chunk)
        terms = loss_terms(logits=model.class_logits(image, text), labels=labels, image=image, text=text,
                           frozen_text=prefix.frozen, fusion=model.adapter.fusion, lambda_reg=1.0, lambda_fusion=0.1)
        optimizer.zero_grad(set_to_none=True)
        terms["total"].backward()
        optimizer.step()

    return {"frozen image forward": frozen_image, "DeAR image forward": adapted_image,
            "frozen text forward, 77 positions": full_text, "DeAR text forward from the prefix": adapted_text,
            "DeAR training step": step}


def bench(name: str, *, classes: int, batch: int, repeats: int, device: torch.device, chunk: int | None) -> dict:
    clip = clip_for(name, device)
    tower = vision_tower(clip)
    model = wrap_clip_with_roles(clip, bench_roles(tower.layers, tower.heads)).to(device)
    size = tower.input_resolution
    images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
    from open_clip.tokenizer import SimpleTokenizer

    ids = SimpleTokenizer()(class_prompts(classes)).to(device)
    runs = measurements(clip, model, images, ids, chunk)
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(repeats + 1):  # the first one warms up and is not counted
        for key, run in runs.items():
            began = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if repeat:
                times[key].append(1e3 * (time.perf_counter() - began))
    base = statistics.median(times["frozen image forward"])
    rows = {key: {"median_ms": round(statistics.median(v), 3), "min_ms": round(min(v), 3), "max_ms": round(max(v), 3),
                  "ratio": round(statistics.median(v) / base, 3)} for key, v in times.items()}
    peak = (torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return {"backbone": name, "classes": classes, "batch": batch, "repeats": repeats, "device": str(device),
            "threads": torch.get_num_threads(), "torch": torch.__version__, "peak_memory_mib": round(peak),
            "trainable_parameters": sum(p.numel() for p in model.trainable_parameters()), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", nargs="+", default=["tiny", "random:ViT-B-16"])
    parser.add_argument("--classes", type=int, default=50)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--class-chunk", type=int, default=None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    args = parser.parse_args()
    results = []
    for name in args.backbone:
        result = bench(name, classes=args.classes, batch=args.batch, repeats=args.repeats,
                       device=torch.device(args.device), chunk=args.class_chunk)
        results.append(result)
        print(f"\n{name}: batch {args.batch}, {args.classes} classes, {result['device']}, {result['threads']} threads, "
              f"{result['trainable_parameters']:,} trainable, peak {result['peak_memory_mib']:,} MiB")
        print(f"{'':36}{'median ms':>10}{'min':>9}{'max':>9}{'ratio':>8}")
        for key, row in result["rows"].items():
            print(f"{key:36}{row['median_ms']:10.1f}{row['min_ms']:9.1f}{row['max_ms']:9.1f}{row['ratio']:8.2f}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
