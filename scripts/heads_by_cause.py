"""The check by cause for scripts/analyze_heads.py: labelled pictures of the procedural world, and a printed table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from dear_plugin import RoleMap
from dear_plugin.analysis import causal, streaming
from dear_plugin.analysis.entropy import label
from dear_plugin.backbones import Backbone
from dear_plugin.towers import VisionTower


def labelled_world(backbone: Backbone, prepare: streaming.Preparation, count: int, seed: int) -> tuple:
    """(prepared pictures, digests of their pixels, labels per attribute) of the procedural world."""
    from datasets.shapes import random_scene, render
    from scripts.probe_heads import attribute_labels

    rng = np.random.default_rng([seed, 2])
    scenes = [random_scene(rng) for _ in range(count)]
    pixels = [render(scene, rng, size=backbone.input_resolution) for scene in scenes]
    return prepare(pixels), [streaming.pixel_digest(p) for p in pixels], attribute_labels(scenes)


def check_by_cause(
    backbone: Backbone, tower: VisionTower, role_map: RoleMap, *, prepare: streaming.Preparation, seen: set[str],
    text_features: Callable[[list[str]], Tensor], count: int, seed: int,
) -> tuple[causal.CausalReport, dict]:
    """Half of the labelled pictures give the means, half are measured; none was used for the roles."""
    from datasets.shapes import COLORS, LOCATIONS, OBJECTS, SHAPES, SIZES, TEXTURES
    from datasets.shapes_captions import prompt

    images, digests, labels = labelled_world(backbone, prepare, count, seed)
    half = len(images) // 2
    causal.require_disjoint(roles=seen, means=digests[:half], measured=digests[half:])
    values = {"color": tuple(COLORS), "shape": SHAPES, "texture": TEXTURES, "object": OBJECTS, "location": LOCATIONS,
              "size": SIZES}
    tasks = []
    for name, words in values.items():
        key = "entity" if name in ("shape", "object") else name
        text = text_features([prompt(key, word) for word in words])
        tasks.append(causal.AttributeTask(name, labels[name][half:], text))
    ablation = causal.Ablation(tower, role_map.layers, images[half:], images[:half])
    scale = backbone.model.logit_scale.exp().item()
    untouched, _, lost = causal.untouched_scores(ablation.features, tasks, scale=scale)
    print(f"untouched model on {len(images) - half} pictures: "
          + ", ".join(f"{n} {s.accuracy_pct:.1f} %" for n, s in untouched.items()))
    if lost:
        print(f"at chance, left out: {', '.join(lost)}")
    report = causal.causal_check(ablation, tasks, role_map, scale=scale, seed=seed)
    found = {}
    for effect in causal.EFFECTS:
        print_effects(report, role_map, effect)
        for measure in ("margin_lost_pct", "loss_rise"):
            agreed = found[f"{effect} {measure}"] = causal.causal_agreement(
                report, role_map, attribute_shares(role_map), effect=effect, measure=measure)
            print(f"  agreement by {measure}: " + ", ".join(f"{k} {v:.3g}" for k, v in agreed.items()))
    return report, found


def attribute_shares(role_map: RoleMap) -> dict:
    """Per head the share of each attribute in its description, concepts of one attribute together."""
    attribute_of = role_map.parameters["concepts"]
    shares: dict = {}
    for layer in role_map.layers:
        for head in range(role_map.heads):
            own = shares.setdefault((layer, head), {})
            for concept, share in role_map.role(layer, head).evidence["concepts"].items():
                name = attribute_of[concept] if attribute_of[concept] != "other" else concept
                own[name] = own.get(name, 0.0) + share
    return shares


def print_effects(report: causal.CausalReport, role_map: RoleMap, effect: str) -> None:
    names = [n for n in report.untouched if n not in report.at_chance]
    print(f"{effect} effect of replacing heads by their mean: margin lost in % (drop of accuracy in points)")
    print("head        " + "".join(f"{n:>17s}" for n in names) + "  role")
    rows = [(f"{x}.{h}", label(role_map.role(x, h)), e) for (x, h), e in report.heads[effect].items()]
    for group in report.groups[effect]:
        rows.append((f"{len(group['heads'])} heads", group["name"], group["effect"]))
        if group["random"]:
            mean = {n: causal.Effect(*np.mean([d["effect"][n] for d in group["random"]], 0)) for n in names}
            rows.append((f"  {len(group['heads'])} random", f"mean of {len(group['random'])} draws", mean))
    for place, role, e in rows:
        shown = "".join(f"{e[n].margin_lost_pct:10.2f} ({e[n].drop_pct:4.1f})" for n in names)
        print(f"{place:12s}{shown}  {role}")
