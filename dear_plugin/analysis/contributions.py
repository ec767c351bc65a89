"""The CLS feature of a ViT as an exact sum over heads, MLPs and what entered the first analysed layer."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_plugin.attention import Projections, projections
from dear_plugin.towers import VisionTower


class Contributions(NamedTuple):
    """Parts of the projected CLS feature, each already in the joint space; S is the number of analysed layers.

    `heads + biases + mlps + entry + constant`, summed over S and H, is the feature (see `total`).
    """

    heads: Tensor  # [N, S, H, E], what each head writes at the CLS position
    biases: Tensor  # [N, S, E], the bias of each attention output (it belongs to no head)
    mlps: Tensor  # [N, S, E]
    entry: Tensor  # [N, E], the CLS residual that enters the first analysed layer (the embedding, for layer 0)
    constant: Tensor  # [E], the bias of the final LayerNorm

    def total(self) -> Tensor:
        """[N, E], equal to the CLS feature up to rounding."""
        parts = self.heads.sum((1, 2)) + self.biases.sum(1) + self.mlps.sum(1)
        return parts + self.entry + self.constant


@torch.no_grad()
def head_contributions(tower: VisionTower, images: Tensor, layers: Sequence[int] | None = None) -> Contributions:
    """Decompose the CLS features of images [N, 3, R, R] over the layers from min(layers) to the last.

    The final LayerNorm is linearised with each image's own CLS mean and variance, so the sum is exact
    (TEXTSPAN, Gandelsman et al. 2024). `layers` must be the last layers of the tower without a gap.

    Raises ValueError for other layers and for blocks that normalise the attention output (not linear in the heads).
    """
    layers = tuple(range(tower.layers)) if layers is None else tuple(layers)
    if not layers or layers != tuple(range(tower.layers - len(layers), tower.layers)):
        raise ValueError(
            f"layers {list(layers)} cannot be decomposed: wanted the last layers of {tower.layers} without a gap, "
            f"e.g. {list(range(max(0, tower.layers - 4), tower.layers))}."
        )
    x = tower.run(tower.embed(images), 0, layers[0])
    entry = x[:, 0]
    heads, biases, mlps = [], [], []
    for layer in layers:
        block = tower.blocks[layer]
        by_head, bias = _attention_parts(tower, layer, x)
        middle = x[:, 0] + by_head.sum(1) + bias
        heads.append(by_head)
        biases.append(bias.expand_as(entry))
        mlps.append(_scaled(block, "ls_2", block.mlp(block.ln_2(middle))))
        x = tower.run(x, layer, layer + 1)
    project = _linearised_projection(tower, x[:, 0])
    constant = tower.ln_post.bias @ tower.proj
    return Contributions(
        project(torch.stack(heads, 1)), project(torch.stack(biases, 1)), project(torch.stack(mlps, 1)), project(entry),
        constant,
    )


def _attention_parts(tower: VisionTower, layer: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """What each head adds to the CLS residual, [N, H, D], and the output bias, [D]."""
    block = tower.blocks[layer]
    if not isinstance(getattr(block, "ln_attn", nn.Identity()), nn.Identity):
        raise ValueError(f"vision layer {layer} normalises its attention output, which is then no sum over heads.")
    weights: Projections = projections(block.attn, where=f"vision tower, layer {layer}, attn")
    n, length, width = x.shape
    packed = F.linear(block.ln_1(x), weights.in_weight, weights.in_bias)
    query, key, value = packed.reshape(n, length, 3, weights.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    scores = query[:, :, :1] @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # the CLS row alone: [N, H, 1, L]
    mixed = (scores.softmax(-1) @ value)[:, :, 0]  # [N, H, K]
    out = weights.out_weight.reshape(width, weights.heads, -1)  # [D, H, K]
    by_head = torch.einsum("nhk,dhk->nhd", mixed, out)
    bias = torch.zeros_like(x[0, 0]) if weights.out_bias is None else weights.out_bias
    return _scaled(block, "ls_1", by_head), _scaled(block, "ls_1", bias)


def _scaled(block: nn.Module, name: str, x: Tensor) -> Tensor:
    scale = getattr(block, name, None)
    return x if scale is None else scale(x)


def _linearised_projection(tower: VisionTower, last: Tensor):
    """The map from parts of the last CLS residual [N, ..., D] to [N, ..., E], with each image's own statistics."""
    norm = tower.ln_post
    sigma = (last.var(-1, unbiased=False) + norm.eps).sqrt()  # [N]

    def project(part: Tensor) -> Tensor:
        centred = part - part.mean(-1, keepdim=True)
        return centred / sigma.reshape(-1, *[1] * (part.dim() - 1)) * norm.weight @ tower.proj

    return project
