"""Roles from labelled pictures: how much of each head's variance a known attribute explains (method `attribute-probe`).

Ours: a supervised stand-in for Concept Entropy where attributes are known, as in the procedural world of `tiny`. For
head (l, h) and attribute a, eta squared is the share of the variance of its contribution that lies between the groups
of equal attribute value, corrected for chance. Normalised over the attributes it is a distribution; its entropy gives
the role.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dear_plugin.model_identity import ModelIdentity
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap

METHOD = "attribute-probe"
# Shares of the largest possible entropy below which a head is an attribute head and above which a generalization head.
# Set by looking at tiny (see dear_plugin/assets/README.md).
LOW, HIGH = 0.60, 0.80
# A head whose contribution no attribute explains to this share carries none of them: generalization.
LEAST_EXPLAINED = 0.05


def eta_squared(x: Tensor, labels: Tensor) -> float:
    """Share of the variance of x [N, E] between the groups of equal label [N], corrected for chance, in [0, 1].

    The correction is epsilon squared, 1 - (1 - eta^2)(N - 1)/(N - G), which is 0 on average for labels without meaning.
    """
    x = x.double() - x.double().mean(0)
    values, group, counts = labels.unique(return_inverse=True, return_counts=True)
    n, groups = len(x), len(values)
    if n <= groups:
        raise ValueError(f"eta squared of {n} pictures in {groups} groups says nothing: give more pictures.")
    total = x.square().sum()
    if total <= 0:
        return 0.0
    sums = torch.zeros(groups, x.shape[1], dtype=x.dtype).index_add_(0, group, x)
    between = (sums.square().sum(1) / counts).sum()
    eta = (between / total).item()
    return min(1.0, max(0.0, 1.0 - (1.0 - eta) * (n - 1) / (n - groups)))


def entropy_bits(shares: Mapping[str, float]) -> float:
    """Entropy in bits of non-negative shares, normalised to sum 1; all zero counts as uniform."""
    total = sum(shares.values())
    if total <= 0:
        return math.log2(len(shares))
    # 0.0 - sum: an exactly certain head has entropy 0.0, not -0.0
    return 0.0 - sum(p / total * math.log2(p / total) for p in shares.values() if p > 0)


def role_of(shares: Mapping[str, float], *, low: float = LOW, high: float = HIGH,
            least_explained: float = LEAST_EXPLAINED) -> HeadInfo:
    """Role of one head from its eta squared per attribute."""
    bits = entropy_bits(shares)
    relative = bits / math.log2(len(shares))
    dominant = max(shares, key=lambda name: shares[name])
    if shares[dominant] < least_explained or relative > high:
        role = HeadRole.GENERALIZATION
    elif relative < low:
        role = HeadRole.ATTRIBUTE
    else:
        role = HeadRole.MIXED
    evidence = {"eta_squared": {name: round(value, 4) for name, value in shares.items()}}
    return HeadInfo(role, dominant, round(bits, 4), evidence)


def probe_role_map(heads: Tensor, labels: Mapping[str, Tensor], *, layers: tuple[int, ...], model: ModelIdentity | None,
                   parameters: Mapping | None = None, low: float = LOW, high: float = HIGH) -> RoleMap:
    """A role map from contributions heads [N, S, H, E] and, per attribute, labels [N] (-1: the attribute is not there).

    An attribute is judged on the pictures that have it (a picture of an object has no geometric shape).
    """
    if heads.dim() != 4 or heads.shape[1] != len(layers):
        raise ValueError(f"heads must be [N, {len(layers)}, H, E], got {list(heads.shape)}.")
    infos = []
    for s in range(heads.shape[1]):
        row = []
        for h in range(heads.shape[2]):
            shares = {name: eta_squared(heads[y >= 0, s, h], y[y >= 0]) for name, y in labels.items()}
            row.append(role_of(shares, low=low, high=high))
        infos.append(tuple(row))
    settings = {"low": low, "high": high, "least_explained": LEAST_EXPLAINED, "attributes": list(labels),
                "images": heads.shape[0], **(parameters or {})}
    return RoleMap(tuple(layers), heads.shape[2], tuple(infos), model=model, method=METHOD, parameters=settings)
