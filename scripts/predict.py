"""Classify pictures with a trained adapter.

    python scripts/predict.py photo.jpg folder/ --adapter output/.../seed1/adapter --classes cat dog "grand piano"

In code:

    backbone = dear_plugin.load_backbone("tiny")
    model = dear_plugin.wrap_clip_with_adapter(backbone.model, "output/.../seed1/adapter")
    logits = model.class_logits(model.image_features(images), model.encode_text(backbone.tokenize(prompts)))
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dear_plugin import load_backbone, wrap_clip_with_adapter  # noqa: E402
from dear_plugin.adapter import read_adapter  # noqa: E402

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm")


def picture_files(paths: list[Path]) -> Iterator[Path]:
    """The files given, and the pictures below the folders given, sorted."""
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS)
        else:
            yield path


def make_transform(values: dict):
    """CLIP's test transform with the adapter's own size, mean and std."""
    from torchvision.transforms import v2

    return v2.Compose([
        v2.Resize(values["size"], interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(values["size"]),
        v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(values["mean"], values["std"]),
    ])


def class_names(args: argparse.Namespace) -> list[str]:
    names = list(args.classes or [])
    if args.classes_file:
        names += [line.strip() for line in args.classes_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(names) < 2:
        raise ValueError(f"got {len(names)} class names, wanted at least 2: give --classes A B or --classes-file FILE")
    return [name.replace("_", " ") for name in names]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", nargs="+", type=Path, help="pictures, or folders of them")
    parser.add_argument("--adapter", type=Path, required=True, help="folder with adapter.safetensors and adapter.json")
    parser.add_argument("--backbone", default=None, help="name or file of the CLIP; default: the one the adapter names")
    parser.add_argument("--classes", nargs="+")
    parser.add_argument("--classes-file", type=Path, help="one class name a line")
    parser.add_argument("--template", default="a photo of a {}.")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


@torch.no_grad()
def predict(args: argparse.Namespace) -> int:
    """Print one line a picture; returns how many could not be read."""
    names = class_names(args)
    description, _ = read_adapter(args.adapter)
    backbone = load_backbone(args.backbone or description["model"]["name"] or "", device=args.device)
    model = wrap_clip_with_adapter(backbone.model, args.adapter).to(args.device)
    text = model.encode_text(backbone.tokenize([args.template.format(name) for name in names]).to(args.device))
    transform, broken = make_transform(description["preprocessing"]), 0
    for path in picture_files(args.images):
        try:
            with Image.open(path) as image:
                pixels = transform(image.convert("RGB"))[None].to(args.device)
        except (OSError, UnidentifiedImageError) as error:
            print(f"{path}: cannot be read as a picture ({error})", file=sys.stderr)
            broken += 1
            continue
        shares = model.class_logits(model.image_features(pixels), text).softmax(-1)[0]
        best = shares.topk(min(args.top, len(names)))
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        print(f"{path}: " + ", ".join(f"{names[i]} {100 * share:.1f}%" for share, i in pairs))
    return broken


def main() -> int:
    try:
        return 1 if predict(parse()) else 0
    except (ValueError, FileNotFoundError) as error:
        print(f"predict.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
