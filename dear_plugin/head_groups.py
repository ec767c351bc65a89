"""Heads that share a role run together and without a mask: the other exact way to compute role-masked attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadGroup(NamedTuple):
    """Heads with one mask that splits the sequence into blocks, each reading all of itself and nothing else."""

    heads: Tensor  # [G]
    blocks: tuple[Tensor, ...]  # positions of each block of two and more
    alone: Tensor  # positions that read only themselves: their output is their own value
    order: Tensor  # [L], where position i stands in the blocks laid end to end with `alone` last


class HeadGroups(NamedTuple):
    """A role mask [H, L, L] and the same as groups of heads."""

    mask: Tensor
    groups: tuple[HeadGroup, ...]


def head_groups(allow: Tensor) -> HeadGroups | None:
    """Boolean [H, L, L] -> its groups, or None where the mask of some head is not a split into blocks.

    Every role mask of DeAR is one: a mixed head is one block; an isolated head has the objects and the tokens as
    blocks; an attribute head has the objects with its token as a block, and the other tokens alone.
    """
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for head, mask in enumerate(allow.cpu()):
        blocks = tuple(dict.fromkeys(tuple(row.nonzero().flatten().tolist()) for row in mask))
        if sorted(i for block in blocks for i in block) != list(range(mask.shape[0])):
            return None
        found.setdefault(blocks, []).append(head)
    return HeadGroups(allow, tuple(_group(heads, blocks, allow.device) for blocks, heads in found.items()))


def as_groups(masks: dict[int, Tensor], known: dict[int, HeadGroups]) -> dict[int, HeadGroups | Tensor]:
    """Masks by layer -> groups by layer; `known` keeps what was made of the same mask (a mask that is none stays)."""
    for layer, mask in masks.items():
        if layer not in known or known[layer].mask is not mask:
            known[layer] = head_groups(mask) or HeadGroups(mask, ())
    return {layer: known[layer] if known[layer].groups else mask for layer, mask in masks.items()}


def _group(heads: list[int], blocks: tuple[tuple[int, ...], ...], device: torch.device) -> HeadGroup:
    large = [block for block in blocks if len(block) > 1]
    alone = [block[0] for block in blocks if len(block) == 1]
    laid = torch.tensor([i for block in large for i in block] + alone)
    tensors = [torch.tensor(part, dtype=torch.long, device=device) for part in (*large, alone, heads)]
    return HeadGroup(tensors[-1], tuple(tensors[:-2]), tensors[-2], laid.argsort().to(device))


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, split: HeadGroups) -> Tensor:
    """query, key, value [N, H, L, d] -> [N, H, L, d], as attention under the mask that the groups came from."""
    outputs = []
    for group in split.groups:
        q, k, v = (part.index_select(1, group.heads) for part in (query, key, value))
        if len(group.blocks) == 1 and not len(group.alone):
            outputs.append(F.scaled_dot_product_attention(q, k, v))
            continue
        parts = [F.scaled_dot_product_attention(*(part.index_select(2, block) for part in (q, k, v)))
                 for block in group.blocks]
        parts.append(v.index_select(2, group.alone))
        outputs.append(torch.cat(parts, dim=2).index_select(2, group.order))
    place = torch.cat([group.heads for group in split.groups]).argsort()
    return torch.cat(outputs, dim=1).index_select(1, place)
