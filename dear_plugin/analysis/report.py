"""The report a person looks at: one self-contained HTML page, and PNGs for a paper."""

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dear_plugin.analysis.concepts import OTHER, Concepts
from dear_plugin.analysis.contributions import head_contributions
from dear_plugin.analysis.entropy import HeadSentences, concept_distribution
from dear_plugin.analysis.streaming import Pictures, Preparation, read_batch
from dear_plugin.roles import RoleMap
from dear_plugin.towers import VisionTower

TEMPLATE = Path(__file__).parents[1] / "assets" / "report.html"
Place = tuple[int, int]


class Examples(NamedTuple):
    """Pictures for the page, and per head which of them stand for it."""

    images: list[str]  # data URIs
    shown: list[int]  # pictures with attention maps
    attention: dict[Place, list[list[float]]]  # per shown picture [P]
    largest: dict[Place, list[tuple[int, float]]]  # (picture, contribution along the head's first sentence)
    smallest: dict[Place, list[tuple[int, float]]]


@torch.no_grad()
def find_examples(
    tower: VisionTower, pictures: Pictures, prepare: Preparation, layers: Sequence[int], first: Mapping[Place, Tensor],
    *, limit: int = 400, count: int = 6, batch_size: int = 64,
) -> Examples:
    """Among `limit` pictures spread evenly: those with the largest and smallest contribution along first[place] [E]."""
    step = max(1, len(pictures) // max(1, limit))
    wanted = list(range(0, len(pictures), step))[:limit]
    directions = torch.stack([torch.stack([first[layer, h] for h in range(tower.heads)]) for layer in layers])
    scores, used = [], []
    for at in range(0, len(wanted), batch_size):
        read, pixels, _ = read_batch(pictures, wanted[at : at + batch_size])
        if pixels:
            heads = head_contributions(tower, prepare(pixels), layers).heads
            scores.append(torch.einsum("nshe,she->nsh", heads, directions.to(heads)).cpu())
            used += read
    score = torch.cat(scores) - torch.cat(scores).mean(0)
    kept: dict[int, int] = {}

    def keep(position: int) -> int:
        return kept.setdefault(used[position], len(kept))

    shown = [keep(i) for i in range(min(count, len(used)))]
    largest, smallest = {}, {}
    for s, layer in enumerate(layers):
        for h in range(tower.heads):
            order = score[:, s, h].argsort(descending=True).tolist()
            value = score[:, s, h].tolist()
            largest[layer, h] = [(keep(i), value[i]) for i in order[:count]]
            smallest[layer, h] = [(keep(i), value[i]) for i in order[::-1][:count]]
    x = tower.run(tower.embed(prepare([pictures.read(used[i]) for i in range(len(shown))])), 0, layers[0])
    attention: dict[Place, list[list[float]]] = {}
    for layer in layers:
        weights = tower.attention(x, layer)[:, :, 0, 1:].cpu()  # [N, H, P]
        for h in range(tower.heads):
            attention[layer, h] = [[round(v, 4) for v in row] for row in weights[:, h].tolist()]
        x = tower.run(x, layer, layer + 1)
    return Examples([_data_uri(pictures.read(i)) for i in kept], shown, attention, largest, smallest)


def _data_uri(pixels: np.ndarray) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    image = Image.fromarray(pixels)
    image.thumbnail((112, 112))
    image.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def page_data(
    role_map: RoleMap, heads: Mapping[Place, HeadSentences], concepts: Concepts, *, about: str,
    sweep: Sequence[Mapping[str, Any]] = (), shared: Sequence = (), examples: Examples | None = None,
    effects: Mapping[Place, Mapping[str, float]] | None = None,
) -> dict[str, Any]:
    """All the page shows, as plain values; `effects`: head -> attribute -> share of the margin lost, in %."""
    most, cells = math.log2(len(concepts.names)), []
    found = zip(concepts.names, concepts.attributes, concepts.typical, strict=True)
    table = [{"name": n, "attribute": a, "count": int((concepts.labels == k).sum()), "typical": t}
             for k, (n, a, t) in enumerate(found)]
    for (layer, head), found in heads.items():
        info = role_map.role(layer, head)
        evidence = info.evidence if isinstance(info.evidence, dict) else {}
        bits = info.entropy_bits
        cell = {
            "layer": layer, "head": head, "role": info.role.value, "attribute": info.attribute, "bits": bits,
            "relative": None if bits is None else bits / most, "kept": evidence.get("kept"),
            "sentences": found.sentences, "shares": found.shares,
            "concepts": concept_distribution(found, concepts).round(5).tolist(), "why": _why(bits, most, evidence),
            "effects": None if effects is None else effects.get((layer, head)),
        }
        if examples is not None:
            place = (layer, head)
            cell |= {"attention": examples.attention[place], "largest": examples.largest[place],
                     "smallest": examples.smallest[place]}
        cells.append(cell)
    return {
        "about": about, "layers": role_map.layers, "heads": role_map.heads, "cells": cells,
        "low": role_map.parameters.get("low", 0.0), "high": role_map.parameters.get("high", 1.0),
        "concepts": table,
        "points": [[round(float(x), 4), round(float(y), 4), int(k), s] for (x, y), k, s in
                   zip(concepts.map_2d, concepts.labels, concepts.sentences, strict=True)],
        "sweep": [{k: v for k, v in row.items() if k != "labels"} for row in sweep], "shared": list(shared),
        "images": [] if examples is None else examples.images, "examples": [] if examples is None else examples.shown,
    }


def _why(bits: float | None, most: float, evidence: Mapping[str, Any]) -> str:
    if bits is None:
        return ""
    parts = [f"{bits:.2f} of {most:.2f} bits"]
    for name, words in (("explained", "of its variance explained by these sentences"), ("noise", "of that by sentences "
                        "outside all concepts"), ("kept", "of the resampled image sets give the same role")):
        if name in evidence:
            parts.append(f"{100 * evidence[name]:.0f} % {words}")
    return "; ".join(parts) + "."


def write_page(path: Path, data: Mapping[str, Any]) -> Path:
    """Write the page; it needs no network and no other file."""
    # "</" would end the script element that holds the data.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False).replace("</", "<\\/")
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("__DATA__", text), encoding="utf-8")
    return path


def write_pngs(folder: Path, data: Mapping[str, Any]) -> list[Path]:
    """roles.png, entropies.png and concepts.png for a paper."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"PNGs need matplotlib: pip install matplotlib ({error})") from None
    cells, layers = data["cells"], list(data["layers"])
    colors = {"generalization": "#cfd8dc", "mixed": "#f3e3a7", "color": "#f2a9a0", "shape": "#a9c9f0",
              "texture": "#b9dfb0", "object": "#d9bdf0", "location": "#f7c98b", "other": "#c9b8a8"}

    def color(cell: Mapping[str, Any]) -> str:
        return colors.get(cell["attribute"] if cell["role"] == "attribute" else cell["role"], colors["other"])

    figures = {name: Figure(figsize=size, dpi=160) for name, size in
               (("roles", (1.1 * data["heads"] + 1, 0.8 * len(layers) + 0.8)), ("entropies", (6, 3)),
                ("concepts", (6, 5)))}
    axes = {name: figure.add_subplot() for name, figure in figures.items()}
    for cell in cells:
        row = layers.index(cell["layer"])
        axes["roles"].add_patch(_box(cell["head"], row, color(cell)))
        name = cell["attribute"] if cell["role"] == "attribute" else cell["role"]
        bits = "" if cell["bits"] is None else f"{cell['bits']:.2f}\n"
        shown = "general" if name == "generalization" else name
        axes["roles"].text(cell["head"] + 0.5, row + 0.5, f"{bits}{shown}", ha="center", va="center", fontsize=7)
    axes["roles"].set(xlim=(0, data["heads"]), ylim=(len(layers), 0), xlabel="head", ylabel="layer")
    axes["roles"].set_xticks(np.arange(data["heads"]) + 0.5, range(data["heads"]))
    axes["roles"].set_yticks(np.arange(len(layers)) + 0.5, layers)
    ordered = sorted((c for c in cells if c["relative"] is not None), key=lambda c: c["relative"])
    axes["entropies"].bar(range(len(ordered)), [c["relative"] for c in ordered], color=[color(c) for c in ordered])
    for name in ("low", "high"):
        axes["entropies"].axhline(data[name], color="#b33", linestyle="--", linewidth=0.8)
    axes["entropies"].set(xlabel="heads, sorted", ylabel="entropy / log2 K")
    for k, concept in enumerate([{"name": "noise"}, *data["concepts"]], start=-1):
        points = [(x, y) for x, y, label, _ in data["points"] if label == k]
        if points:
            tint = colors.get(concept.get("attribute")) if concept.get("attribute") != OTHER else None  # else its own
            axes["concepts"].scatter(*zip(*points, strict=True), s=9, label=concept["name"], edgecolors="#0006",
                                     linewidths=0.3, c="#e3e3e3" if k < 0 else tint)
    axes["concepts"].legend(fontsize=6)
    axes["concepts"].set(xlabel="two strongest directions of the sentence embeddings", xticks=[], yticks=[])
    paths = []
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png", bbox_inches="tight")
        paths.append(folder / f"{name}.png")
    return paths


def _box(x: float, y: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=color, edgecolor="none")
