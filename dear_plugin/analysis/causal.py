"""The check by cause: replace heads by their mean and see which attribute is recognised less well.

Two ways to replace a head (both ours to choose, both reported): `direct` takes its contribution to the CLS feature and
puts the mean in its place (exact and cheap, as TEXTSPAN's authors do); `total` puts the mean in place of its output at
every position and lets the later layers go on from there. Means come from other pictures than those measured.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dear_plugin.analysis.contributions import head_contributions
from dear_plugin.analysis.entropy import cohen_kappa, rank_correlation
from dear_plugin.attention import projections
from dear_plugin.roles import HeadRole, RoleMap
from dear_plugin.towers import VisionTower

Place = tuple[int, int]  # (layer, head)
EFFECTS = ("direct", "total")
_ERRORS_ABOVE_CHANCE = 3.0  # standard errors by which accuracy must exceed chance


class AttributeTask(NamedTuple):
    """Zero-shot recognition of one attribute."""

    name: str
    labels: Tensor  # [N], -1 where the attribute is not there
    text: Tensor  # [V, E], the feature of each value's sentence


class Score(NamedTuple):
    """Of one attribute under one intervention."""

    accuracy_pct: float
    loss: float  # cross-entropy in nats at CLIP's temperature


class Effect(NamedTuple):
    """What an intervention costs one attribute; positive: it is recognised less well."""

    drop_pct: float  # percentage points of accuracy
    error_pct: float  # standard error of that drop, paired over pictures
    loss_rise: float  # nats
    margin_lost_pct: float  # share of the margin lost; unlike the loss it does not vanish where the model is sure


@dataclass(frozen=True)
class CausalReport:
    """All that was measured, as differences from the untouched model."""

    untouched: dict[str, Score]
    at_chance: tuple[str, ...]  # attributes left out
    images: int
    heads: dict[str, dict[Place, dict[str, Effect]]]  # effect -> head -> attribute
    groups: dict[str, list[dict]]  # effect -> one entry a group of heads, with its random draws


def chance_pct(labels: Tensor, values: int) -> float:
    """What guessing gives: the larger of 1 / V and the share of the most frequent value."""
    present = labels[labels >= 0]
    most = present.bincount(minlength=values).max().item() / max(1, len(present))
    return 100.0 * max(1.0 / values, most)


def outcomes(features: Tensor, task: AttributeTask, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(correct, cross-entropy, margin) per picture that has the attribute, from features [N, E].

    The margin is the true value's logit less the mean of the others.
    """
    present = task.labels >= 0
    text = F.normalize(task.text.float(), dim=-1)
    logits = scale * F.normalize(features[present].float(), dim=-1) @ text.T
    labels = task.labels[present].to(logits.device)
    true = logits.gather(1, labels[:, None])[:, 0]
    margin = true - (logits.sum(1) - true) / (logits.shape[1] - 1)
    return (logits.argmax(1) == labels).float(), F.cross_entropy(logits, labels, reduction="none"), margin


def untouched_scores(
    features: Tensor, tasks: Sequence[AttributeTask], *, scale: float
) -> tuple[dict[str, Score], list[AttributeTask], tuple[str, ...]]:
    """Scores of the untouched model, the tasks above chance, the names of those at chance.

    With no task above chance a ValueError says so: a drop from chance means nothing.
    """
    scores, usable, lost = {}, [], []
    for task in tasks:
        correct, loss, _ = outcomes(features, task, scale)
        if len(correct) < 2:
            raise ValueError(f"{task.name}: {len(correct)} pictures have it; give more labelled pictures.")
        scores[task.name] = Score(100.0 * correct.mean().item(), loss.mean().item())
        chance = chance_pct(task.labels, len(task.text)) / 100.0
        error = math.sqrt(chance * (1.0 - chance) / len(correct))
        above = correct.mean().item() > chance + _ERRORS_ABOVE_CHANCE * error
        usable.append(task) if above else lost.append(task.name)
    if not usable:
        shown = ", ".join(f"{t.name} {scores[t.name].accuracy_pct:.1f} % (chance "
                          f"{chance_pct(t.labels, len(t.text)):.1f} %)" for t in tasks)
        raise ValueError(f"the untouched model is at chance on every attribute ({shown}): labels, pictures and prompts "
                         "do not belong together, or it cannot see them; the causal check stops.")
    return scores, usable, tuple(lost)


def require_disjoint(**digests: Iterable[str]) -> None:
    """Refuse sets of pictures (by the sha256 of their pixels) that share one."""
    items = [(name, set(found)) for name, found in digests.items()]
    for i, (first, ours) in enumerate(items):
        for second, theirs in items[i + 1 :]:
            if ours & theirs:
                raise ValueError(f"{len(ours & theirs)} pictures are both in {first} and in {second}: the effect of a "
                                 "head must be measured on pictures used neither for its mean nor for its role.")


class HeadMeans(NamedTuple):
    """Means of what heads write, over the pictures given for that."""

    contributions: Tensor  # [S, H, E]
    outputs: dict[int, Tensor]  # layer -> [H, L, K]


class Ablation:
    """Interventions on the heads of the last layers of a tower, on a fixed set of pictures."""

    def __init__(self, tower: VisionTower, layers: Sequence[int], images: Tensor, means_from: Tensor, *,
                 batch_size: int = 250):
        """images and means_from: prepared pictures [N, 3, R, R], disjoint."""
        self.tower, self.layers, self.batch_size = tower, tuple(layers), batch_size
        contributions, outputs = [], {layer: 0.0 for layer in self.layers}
        for batch in means_from.split(batch_size):
            contributions.append(head_contributions(tower, batch, self.layers).heads.sum(0))
            for layer, z in _head_outputs(tower, batch, self.layers).items():
                outputs[layer] = outputs[layer] + z.sum(0) / len(means_from)
        self.means = HeadMeans(torch.stack(contributions).sum(0) / len(means_from), outputs)
        found = [head_contributions(tower, batch, self.layers) for batch in images.split(batch_size)]
        self.heads = torch.cat([f.heads for f in found])  # [N, S, H, E]
        self.features = torch.cat([f.total() for f in found])  # [N, E], untouched
        # What enters the first ablated layer never changes.
        self.entry = torch.cat([tower.run(tower.embed(b), 0, self.layers[0]) for b in images.split(batch_size)])

    def places(self) -> list[Place]:
        return [(layer, head) for layer in self.layers for head in range(self.tower.heads)]

    @torch.no_grad()
    def without(self, places: Iterable[Place], *, effect: str = "direct") -> Tensor:
        """Features [N, E] with these heads replaced by their means."""
        places = list(places)
        if effect == "direct":
            change = torch.zeros_like(self.features)
            for layer, head in places:
                s = self.layers.index(layer)
                change += self.means.contributions[s, head] - self.heads[:, s, head]
            return self.features + change
        if effect != "total":
            raise ValueError(f"effect must be one of {', '.join(EFFECTS)}, got {effect!r}.")
        if not places:
            return self.features
        first = min(layer for layer, _ in places)
        parts = []
        for x in self.entry.split(self.batch_size):
            x = self.tower.run(x, self.layers[0], first)
            for layer in range(first, self.tower.layers):
                replaced = {head: self.means.outputs[layer][head] for at, head in places if at == layer}
                x = _block(self.tower, layer, x, replaced)[0] if replaced else self.tower.run(x, layer, layer + 1)
            parts.append(self.tower.project(x[:, 0]))
        return torch.cat(parts)


@torch.no_grad()
def _head_outputs(tower: VisionTower, images: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """layer -> [N, H, L, K], what each head reads out at each position."""
    x = tower.run(tower.embed(images), 0, layers[0])
    found = {}
    for layer in layers:
        x, found[layer] = _block(tower, layer, x, {})
    return found


def _block(tower: VisionTower, layer: int, x: Tensor, replaced: Mapping[int, Tensor]) -> tuple[Tensor, Tensor]:
    """One block on x [N, L, D] with the outputs of some heads replaced by [L, K]; also the outputs [N, H, L, K]."""
    block = tower.blocks[layer]
    weights = projections(block.attn, where=f"vision tower, layer {layer}, attn")
    n, length, width = x.shape
    packed = F.linear(block.ln_1(x), weights.in_weight, weights.in_bias)
    query, key, value = packed.reshape(n, length, 3, weights.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(query, key, value)  # [N, H, L, K]
    if replaced:
        out = out.clone()
        for head, mean in replaced.items():
            out[:, head] = mean
    joined = F.linear(out.transpose(1, 2).reshape(n, length, width), weights.out_weight, weights.out_bias)
    scale_1, scale_2 = (getattr(block, name, None) or (lambda y: y) for name in ("ls_1", "ls_2"))
    x = x + scale_1(joined)
    return x + scale_2(block.mlp(block.ln_2(x))), out


def effects(ablation: Ablation, features: Tensor, tasks: Sequence[AttributeTask], *, scale: float) -> dict[str, Effect]:
    """What features [N, E] lose against the untouched ones, per attribute."""
    result = {}
    for task in tasks:
        before, loss_before, margin_before = outcomes(ablation.features, task, scale)
        after, loss_after, margin_after = outcomes(features, task, scale)
        drop = before - after
        error = drop.std().item() / math.sqrt(len(drop))
        lost = 100.0 * (1.0 - margin_after.mean() / margin_before.mean()).item()
        rise = (loss_after - loss_before).mean().item()
        result[task.name] = Effect(100.0 * drop.mean().item(), 100.0 * error, rise, lost)
    return result


def role_groups(role_map: RoleMap) -> dict[str, list[Place]]:
    """Heads by what the mask makes of them: one group an attribute, mixed, generalization."""
    groups: dict[str, list[Place]] = {}
    for layer in role_map.layers:
        for head in range(role_map.heads):
            info = role_map.role(layer, head)
            name = f"attribute: {info.attribute}" if info.role is HeadRole.ATTRIBUTE else info.role.value
            groups.setdefault(name, []).append((layer, head))
    return dict(sorted(groups.items()))


def causal_check(
    ablation: Ablation, tasks: Sequence[AttributeTask], role_map: RoleMap, *, scale: float, draws: int = 10,
    seed: int = 0, kinds: Sequence[str] = EFFECTS,
) -> CausalReport:
    """Every head alone, and the heads of each role together beside as many random heads of the others."""
    untouched, usable, lost = untouched_scores(ablation.features, tasks, scale=scale)
    heads: dict[str, dict[Place, dict[str, Effect]]] = {}
    groups: dict[str, list[dict]] = {}
    generator = torch.Generator().manual_seed(seed)
    for kind in kinds:
        def measure(places: Iterable[Place], kind: str = kind) -> dict[str, Effect]:
            return effects(ablation, ablation.without(places, effect=kind), usable, scale=scale)

        heads[kind] = {place: measure([place]) for place in ablation.places()}
        groups[kind] = []
        for name, members in role_groups(role_map).items():
            others = [p for p in ablation.places() if p not in members]
            random_draws = []
            for _ in range(draws if len(others) >= len(members) else 0):
                picks = torch.randperm(len(others), generator=generator)[: len(members)].tolist()
                chosen = sorted(others[i] for i in picks)
                random_draws.append({"heads": chosen, "effect": measure(chosen)})
            groups[kind].append({"name": name, "heads": members, "effect": measure(members), "random": random_draws})
    return CausalReport(untouched, lost, len(ablation.features), heads, groups)


def causal_agreement(report: CausalReport, role_map: RoleMap, shares: Mapping[Place, Mapping[str, float]], *,
                     effect: str = "direct", measure: str = "margin_lost_pct") -> dict[str, float]:
    """How far the ablations say the same as the map: over all heads, and over its attribute heads alone.

    shares: head -> attribute -> share of its description. `kappa` compares the map's attribute with the attribute that
    loses most by `measure` (a field of Effect); `rank_*` correlate, over heads, an attribute's share with its loss.
    """
    names = [n for n in report.untouched if n not in report.at_chance]
    found = report.heads[effect]
    hurt = {place: max(names, key=lambda n: getattr(e[n], measure)) for place, e in found.items()}
    named = {place: str(role_map.role(*place).attribute) for place in found}
    special = [p for p in found if role_map.role(*p).role is HeadRole.ATTRIBUTE and named[p] in names]
    places = list(found)
    result = {
        "attribute_heads": len(special),
        "attribute_heads_confirmed": sum(hurt[p] == named[p] for p in special),
        "kappa": cohen_kappa([named[p] for p in places], [hurt[p] for p in places]),
    }
    for name in names:
        result[f"rank_{name}"] = rank_correlation(
            [shares[p].get(name, 0.0) for p in places], [getattr(found[p][name], measure) for p in places])
    return result


def as_json(report: CausalReport) -> dict:
    """Plain lists and dictionaries; a head is "layer.head"."""
    def name(place: Place) -> str:
        return f"{place[0]}.{place[1]}"

    def plain(found: Mapping[str, Effect]) -> dict:
        return {attribute: effect._asdict() for attribute, effect in found.items()}

    groups = {
        kind: [{"name": g["name"], "heads": [name(p) for p in g["heads"]], "effect": plain(g["effect"]),
                "random": [{"heads": [name(p) for p in d["heads"]], "effect": plain(d["effect"])} for d in g["random"]]}
               for g in entries]
        for kind, entries in report.groups.items()
    }
    return {
        "untouched": {n: s._asdict() for n, s in report.untouched.items()}, "at_chance": list(report.at_chance),
        "images": report.images, "groups": groups,
        "heads": {kind: {name(p): plain(e) for p, e in found.items()} for kind, found in report.heads.items()},
    }
