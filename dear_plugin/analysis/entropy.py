"""Concept Entropy: over how many concepts a head's sentences spread, and the role that follows.

P(c) of a head is the share of its explained variance that its sentences about concept c explain; H = -sum P log2 P in
bits. Low: attribute head; high: generalization head; between: mixed head (paper). The thresholds are ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dear_plugin.analysis.concepts import OTHER, Concepts
from dear_plugin.model_identity import ModelIdentity
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap

METHOD = "concept-entropy"


@dataclass(frozen=True)
class Thresholds:
    """Shares of the largest possible entropy, log2 K: below `low` an attribute head, above `high` generalization."""

    low: float = 0.66
    high: float = 0.75

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0:
            raise ValueError(f"thresholds must satisfy 0 <= low <= high <= 1, got low {self.low} and high {self.high}.")

    def role(self, relative: float) -> HeadRole:
        if relative < self.low:
            return HeadRole.ATTRIBUTE
        return HeadRole.GENERALIZATION if relative > self.high else HeadRole.MIXED


@dataclass(frozen=True)
class HeadSentences:
    """One head's sentences, strongest first, and the share of its variance that each explains."""

    sentences: tuple[str, ...]
    shares: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.sentences or len(self.sentences) != len(self.shares):
            got = f"{len(self.shares)} and {len(self.sentences)}"
            raise ValueError(f"a head needs at least one sentence and as many shares as sentences, got {got}.")


def entropy_bits(p: np.ndarray) -> float:
    """Entropy in bits of a distribution [K]; between 0 and log2 K whatever the rounding."""
    p = np.asarray(p, dtype=np.float64)
    if p.ndim != 1 or not np.isfinite(p).all() or (p < 0).any() or p.sum() <= 0:
        raise ValueError(f"a distribution must be finite, non-negative and not all zero, got {p!r}.")
    p = p / p.sum()
    bits = -sum(x * math.log2(x) for x in p.tolist() if x > 0)
    return min(max(bits, 0.0), math.log2(len(p)))


def concept_distribution(head: HeadSentences, concepts: Concepts) -> np.ndarray:
    """P [K]: each sentence's memberships, weighted by the variance it explains; sums to 1.

    A head that its sentences explain nothing of counts them evenly.
    """
    weights = np.asarray(head.shares, dtype=np.float64)
    if weights.sum() <= 0:
        weights = np.ones_like(weights)
    p = weights @ np.stack([concepts.row(s) for s in head.sentences])
    return p / p.sum()


def noise_share(head: HeadSentences, concepts: Concepts) -> float:
    """Share of the head's weight on sentences that belong to no cluster."""
    weights = np.asarray(head.shares, dtype=np.float64)
    weights = weights if weights.sum() > 0 else np.ones_like(weights)
    own = np.array([concepts.labels[concepts.sentences.index(s)] >= 0 for s in head.sentences])
    return float(weights[~own].sum() / weights.sum())


def dominant_attribute(p: np.ndarray, concepts: Concepts) -> str:
    """The core attribute with the largest share, its concepts together; "other" if one other concept has more."""
    mass: dict[Any, float] = {}
    for k, attribute in enumerate(concepts.attributes):
        key = attribute if attribute != OTHER else k
        mass[key] = mass.get(key, 0.0) + float(p[k])
    best = max(mass, key=lambda key: mass[key])
    return best if isinstance(best, str) else OTHER


def role_of(head: HeadSentences, concepts: Concepts, thresholds: Thresholds) -> HeadInfo:
    """Role of one head, with its distribution and noise share as evidence."""
    p = concept_distribution(head, concepts)
    bits = entropy_bits(p)
    role = thresholds.role(bits / math.log2(len(p)))
    evidence = {
        "concepts": {name: round(float(v), 4) for name, v in zip(concepts.names, p, strict=True) if v >= 5e-5},
        "explained": round(float(sum(head.shares)), 4),
        "noise": round(noise_share(head, concepts), 4),
    }
    return HeadInfo(role, dominant_attribute(p, concepts), round(bits, 4), evidence)


def entropy_role_map(
    heads: Mapping[tuple[int, int], HeadSentences], concepts: Concepts, *, model: ModelIdentity | None,
    thresholds: Thresholds | None = None, parameters: Mapping[str, Any] | None = None,
    stability: Mapping[tuple[int, int], float] | None = None,
) -> RoleMap:
    """The role map of method `concept-entropy`; `stability` is how often each head kept its role when resampled."""
    thresholds = thresholds or Thresholds()
    infos = {}
    for place, head in heads.items():
        info = role_of(head, concepts, thresholds)
        if stability is not None:
            info.evidence["kept"] = round(stability[place], 3)  # type: ignore[index]
        infos[place] = info
    settings = {
        **asdict(thresholds), "clusters": len(concepts.names), "noise": round(concepts.noise_share, 4),
        "concepts": {n: a for n, a in zip(concepts.names, concepts.attributes, strict=True)},
        "sbert": concepts.encoder, "hdbscan": concepts.backend, **(parameters or {}),
    }
    return RoleMap.from_heads(infos, model=model, method=METHOD, parameters=settings)


def kept_share(reference: RoleMap, others: Sequence[RoleMap]) -> dict[tuple[int, int], float]:
    """Per head, in which share of the other maps it has the reference's role (and attribute, for an attribute head)."""
    if not others:
        raise ValueError("role stability needs at least one other map.")
    places = [(layer, head) for layer in reference.layers for head in range(reference.heads)]
    same = {place: sum(label(m.role(*place)) == label(reference.role(*place)) for m in others) for place in places}
    return {place: count / len(others) for place, count in same.items()}


def label(info: HeadInfo) -> str:
    """ "color", "mixed", "generalization": what the mask does with the head."""
    return str(info.attribute) if info.role is HeadRole.ATTRIBUTE else info.role.value


# -- agreement of two maps -------------------------------------------------------------------------------------------


def cohen_kappa(first: Sequence[str], second: Sequence[str]) -> float:
    """Agreement beyond chance of two labellings; 1 for equal ones, NaN where chance alone already agrees fully."""
    if len(first) != len(second) or not first:
        raise ValueError(f"kappa needs two labellings of one length, got {len(first)} and {len(second)}.")
    n = len(first)
    observed = sum(a == b for a, b in zip(first, second, strict=True)) / n
    chance = sum(list(first).count(v) * list(second).count(v) for v in set(first)) / n**2
    return (observed - chance) / (1 - chance) if chance < 1 else math.nan


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; NaN where one side is constant."""
    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"rank correlation needs two lists of one length, at least 2, got {len(first)}, {len(second)}")
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    length = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / length if length > 0 else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    x = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = counts.cumsum()
    return (last - (counts - 1) / 2.0)[inverse]


def agreement(first: RoleMap, second: RoleMap) -> dict[str, float]:
    """Two maps over the heads both have: kappa of the roles, kappa of role and attribute, correlation of entropies."""
    layers, heads = [x for x in first.layers if x in second.layers], range(min(first.heads, second.heads))
    places = [(layer, head) for layer in layers for head in heads]
    if not places:
        raise ValueError(f"maps of layers {list(first.layers)} and {list(second.layers)} have no head in common.")
    a, b = ([m.role(*place) for place in places] for m in (first, second))
    both = [(x.entropy_bits, y.entropy_bits) for x, y in zip(a, b, strict=True)
            if x.entropy_bits is not None and y.entropy_bits is not None]
    return {
        "heads": len(places),
        "kappa_role": cohen_kappa([i.role.value for i in a], [i.role.value for i in b]),
        "kappa_label": cohen_kappa([label(i) for i in a], [label(i) for i in b]),
        "kappa_attribute": cohen_kappa([str(i.attribute) for i in a], [str(i.attribute) for i in b]),
        "entropy_rank_correlation": rank_correlation(*zip(*both, strict=True)) if len(both) > 1 else math.nan,
    }
