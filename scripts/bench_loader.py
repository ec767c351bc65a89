"""Images a second of this harness's loader against torchvision's ImageFolder with the same transform, in one run.

    python scripts/bench_loader.py --images $DATA/dtd/images $DATA/caltech-101/101_ObjectCategories
    python scripts/bench_loader.py --images $DATA/shapes/images --size 64 --limit 2000 --train

Both read the same files in the same order with the same batch size and workers; repetitions are interleaved, so noise
of the machine falls on both, and medians are shown. Beside the wall clock stands the processor time (of workers too),
which says what an image costs where the machine is shared. A folder with fewer images than --limit is gone through
again.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

ROOT = Path(__file__).resolve().parents[1]
if sys.path[0] != str(ROOT):  # first, because Hugging Face's package is called datasets too
    sys.path.insert(0, str(ROOT))

from datasets.listing import EXTENSIONS  # noqa: E402
from dear_plugin.engine import Datum, build_transform, get_cfg_default  # noqa: E402
from dear_plugin.engine.data import build_data_loader  # noqa: E402

CLIP_MEAN, CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def config(args: argparse.Namespace, workers: int):
    """The engine's defaults with CLIP's preprocessing, as the trainers' YAML files have it."""
    cfg = get_cfg_default()
    cfg.VERBOSE = False
    cfg.INPUT.SIZE, cfg.INPUT.INTERPOLATION = (args.size, args.size), "bicubic"
    cfg.INPUT.PIXEL_MEAN, cfg.INPUT.PIXEL_STD = CLIP_MEAN, CLIP_STD
    cfg.INPUT.TRANSFORMS = ("random_resized_crop", "random_flip", "normalize") if args.train else ("normalize",)
    cfg.DATALOADER.NUM_WORKERS, cfg.DATALOADER.TEST.BATCH_SIZE = workers, args.batch
    return cfg


def find_images(folder: Path, limit: int) -> list[Path]:
    """`limit` images below `folder`, evenly over it, and again from the start where there are fewer."""
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in EXTENSIONS)
    if not found:
        raise ValueError(f"{folder} has no images (looked for {' '.join(EXTENSIONS)} at any depth)")
    step = max(1, len(found) // limit)
    return list(itertools.islice(itertools.cycle(found[::step]), limit))


def link_tree(images: list[Path], place: Path) -> Path:
    """The tree of class folders that ImageFolder wants, as links in the order of `images`."""
    for i, path in enumerate(images):
        folder = place / f"{i // 100:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{i:07d}{path.suffix.lower()}").symlink_to(path.resolve())
    return place


def cost(make: Callable[[], DataLoader], key: str | int) -> tuple[float, float, int]:
    """(wall s, processor s, images) of one pass; the start of the workers is part of it, as it is of an epoch."""

    def processor_s() -> float:
        return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (0, resource.RUSAGE_CHILDREN)))

    before, started, seen = processor_s(), time.perf_counter(), 0
    loader = make()
    for batch in loader:
        seen += len(batch[key])
    wall = time.perf_counter() - started
    del loader
    return wall, processor_s() - before, seen


def measure(images: list[Path], tree: Path, args: argparse.Namespace, workers: int) -> list[str]:
    """A row of the table: median images/s of both, and the medians of the ratios of neighbouring repetitions."""
    cfg = config(args, workers)
    transform = build_transform(cfg, is_train=args.train)
    items = [Datum(str(path), 0, 0, path.parent.name) for path in images]

    def ours() -> DataLoader:
        return build_data_loader(cfg, items, cfg.DATALOADER.TEST, transform=transform, is_train=False)

    linked = ImageFolder(str(tree), transform)  # its listing is not timed, as ours is not

    def theirs() -> DataLoader:
        return DataLoader(linked, batch_size=args.batch, num_workers=workers)

    runs: dict[str, list[tuple[float, float, int]]] = {"ours": [], "theirs": []}
    for repeat in range(-1, args.repeats):  # the first one fills the page cache and is not counted
        pair = [("ours", ours, "img"), ("theirs", theirs, 0)]
        for name, make, key in pair if repeat % 2 else pair[::-1]:
            done = cost(make, key)
            if done[2] != len(images):
                raise RuntimeError(f"{name} gave {done[2]} of {len(images)} images")
            if repeat >= 0:
                runs[name].append(done)
    speed = {name: statistics.median(n / wall for wall, _, n in done) for name, done in runs.items()}
    ratios = [statistics.median(b[i] / a[i] for a, b in zip(runs["ours"], runs["theirs"], strict=True)) for i in (0, 1)]
    return [str(workers), f"{speed['ours']:.0f}", f"{speed['theirs']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--images", nargs="+", type=Path, required=True, help="folders with images at any depth")
    add("--workers", nargs="+", type=int, default=[0, 2])
    add("--size", type=int, default=224, help="pixels that come out")
    add("--batch", type=int, default=32)
    add("--limit", type=int, default=500, help="images a pass")
    add("--repeats", type=int, default=5)
    add("--train", action="store_true", help="random crop and flip in place of resize and centre crop")
    args = parser.parse_args(arguments)
    head = ["images", "workers", "ours images/s", "ImageFolder images/s", "ours / ImageFolder", "by processor time"]
    rows = []
    try:
        for folder in args.images:
            images = find_images(folder, args.limit)
            with tempfile.TemporaryDirectory() as place:
                tree = link_tree(images, Path(place))
                rows += [[folder.as_posix(), *measure(images, tree, args, workers)] for workers in args.workers]
    except (ValueError, OSError) as error:
        print(f"bench_loader.py: {error}", file=sys.stderr)
        return 2
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * width for width in widths], *rows]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
    print(f"\n{args.limit} images a pass, {args.repeats} passes each, batch {args.batch}, {args.size} pixels, "
          f"{'train' if args.train else 'test'} transform, {os.cpu_count()} CPU cores, torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
