"""Make the `attribute-probe` role map of a backbone from labelled pictures of the procedural world.

    python scripts/probe_heads.py --backbone tiny --output dear_plugin/assets/roles/tiny.json

Prints, per head, the share of its contribution's variance that each attribute explains, its entropy and its role.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from datasets.shapes import ATTRIBUTES, OBJECTS, SHAPES, Scene, random_scene, render  # noqa: E402
from dear_plugin import RoleMap, load_backbone  # noqa: E402
from dear_plugin.analysis.contributions import head_contributions  # noqa: E402
from dear_plugin.analysis.probe import HIGH, LOW, probe_role_map  # noqa: E402
from dear_plugin.towers import vision_tower  # noqa: E402


def attribute_labels(scenes: list[Scene]) -> dict[str, Tensor]:
    """Label [N] per attribute; shape is -1 where the entity is an object, and object where it is a shape."""
    def of(values: tuple[str, ...], key: str) -> Tensor:
        return torch.tensor([values.index(v) if (v := getattr(scene, key)) in values else -1 for scene in scenes])

    labels = {name: of(ATTRIBUTES[name], name) for name in ("color", "texture", "location", "size")}
    return {"color": labels["color"], "shape": of(SHAPES, "entity"), "texture": labels["texture"],
            "object": of(OBJECTS, "entity"), "location": labels["location"], "size": labels["size"]}


def print_table(role_map: RoleMap) -> None:
    names = role_map.parameters["attributes"]
    print("layer head  " + "  ".join(f"{name:>8}" for name in names) + "  entropy  role")
    for layer in role_map.layers:
        for head in range(role_map.heads):
            info = role_map.role(layer, head)
            shares = "  ".join(f"{info.evidence['eta_squared'][name]:8.3f}" for name in names)
            role = info.role.value + (f" ({info.attribute})" if info.role.value == "attribute" else "")
            print(f"{layer:5d} {head:4d}  {shares}  {info.entropy_bits:7.3f}  {role}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="tiny")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--layers", type=int, default=4, help="how many of the last layers")
    parser.add_argument("--seed", type=int, default=12)
    parser.add_argument("--low", type=float, default=LOW, help="share of the largest entropy below which: attribute")
    parser.add_argument("--high", type=float, default=HIGH, help="share above which: generalization")
    args = parser.parse_args()
    backbone = load_backbone(args.backbone)
    tower = vision_tower(backbone.model)
    rng = np.random.default_rng(args.seed)
    scenes = [random_scene(rng) for _ in range(args.images)]
    mean, std = (torch.tensor(values)[:, None, None] for values in (backbone.mean, backbone.std))
    layers, parts = tuple(range(tower.layers - args.layers, tower.layers)), []
    for at in range(0, len(scenes), 500):
        pixels = np.stack([render(scene, rng, size=backbone.input_resolution) for scene in scenes[at : at + 500]])
        images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255.0 - mean) / std
        parts.append(head_contributions(tower, images, layers).heads)
    role_map = probe_role_map(torch.cat(parts), attribute_labels(scenes), layers=layers, model=backbone.identity,
                              parameters={"seed": args.seed, "source": "datasets/shapes.py, training style"},
                              low=args.low, high=args.high)
    print_table(role_map)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    role_map.save(args.output)
    print(f"wrote {args.output} ({role_map.content_hash()[:12]})")


if __name__ == "__main__":
    main()
