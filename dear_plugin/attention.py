"""Attention with borrowed weights: who may read whom is decided per head by a boolean mask."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_plugin.head_groups import HeadGroups, grouped_attention

# Parts of open_clip's own Attention that change what attention computes when they are switched on.
_CHANGING_PARTS = ("ln_q", "ln_k", "ln_inner", "logit_scale", "head_scale", "bias_k", "bias_v")


class Projections(NamedTuple):
    """The weights of one attention layer, read from the stock module at each call."""

    in_weight: Tensor  # [3D, D]
    in_bias: Tensor | None  # [3D]
    out_weight: Tensor  # [D, D]
    out_bias: Tensor | None  # [D]
    heads: int


def projections(attention: Any, *, where: str = "attention") -> Projections:
    """Read the weights of a stock attention module (nn.MultiheadAttention, or open_clip's own with the same names).

    Weights parametrised by torch.nn.utils.parametrize are followed. A module whose forward does more than these
    weights say (a wrapped out_proj, normalised queries) is refused by name: ignoring that part would train nothing.
    """
    if hasattr(attention, "projections"):  # a view, which knows the layout of what it looks at
        return attention.projections(where)
    _refuse_unlike(attention, where)
    out_proj = attention.out_proj
    return Projections(
        attention.in_proj_weight, attention.in_proj_bias, out_proj.weight, out_proj.bias, int(attention.num_heads)
    )


def _refuse_unlike(attention: Any, where: str) -> None:
    for name in ("in_proj_weight", "in_proj_bias", "out_proj", "num_heads"):
        if not hasattr(attention, name):
            raise ValueError(f"{where} is a {type(attention).__name__} without {name}: cannot borrow its weights.")
    if isinstance(attention, nn.MultiheadAttention):
        if type(attention).forward is not nn.MultiheadAttention.forward:
            raise ValueError(f"{where} is a {type(attention).__name__} with its own forward: not supported.")
        if attention.in_proj_weight is None or attention.add_zero_attn:
            raise ValueError(f"{where} has separate query, key and value weights or add_zero_attn: not supported.")
    for name in _CHANGING_PARTS:
        part = getattr(attention, name, None)
        if part is not None and not isinstance(part, nn.Identity):
            raise ValueError(f"{where} uses {name} ({type(part).__name__}), which masked attention does not cover.")
    refuse_changed_linear(attention.out_proj, f"{where}.out_proj")


def refuse_changed_linear(module: Any, where: str) -> None:
    """Refuse a projection whose forward does more than its weight and bias say (LoRA of PEFT, 8-bit layers, ...)."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(
            f"{where} is a {type(module).__name__} of {type(module).__module__}, not torch's plain Linear: its extra "
            "computation would be bypassed; merge it into the weight first (PEFT: merge_and_unload), or use "
            "torch.nn.utils.parametrize, which is followed."
        )


def masked_attention(
    weights: Projections,
    x: Tensor,
    allow: Tensor | HeadGroups | None = None,
    *,
    causal: bool = False,
    rows: Tensor | None = None,
) -> Tensor:
    """Self-attention of x [N, L, D] -> [N, L, D], or [N, R, D] for `rows` only.

    `allow`: boolean [L, L] or [H, L, L], True where the row may read the column, the same for all N; None: all.
    `causal`: token i reads tokens 0..i; not together with `allow`.
    `rows`: positions [R], or [N, R] (then without `allow`), whose output is wanted; keys and values are those of all.
    `allow` as HeadGroups: the same rule by groups of heads, without a mask where all rows are wanted.
    """
    if causal and allow is not None:
        raise ValueError("masked_attention takes either allow or causal=True, not both.")
    if isinstance(allow, HeadGroups) and rows is None:
        out = grouped_attention(*_heads(weights, x), allow)
    elif rows is None:
        query, key, value = _heads(weights, x)
        mask = None if allow is None else _broadcastable(allow, weights.heads, x.shape[1])
        # One mask broadcast over N, never repeated by hand: tiling in the wrong order would mix samples.
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    else:
        query, key, value = _heads_of_rows(weights, x, rows)
        allow = allow.mask if isinstance(allow, HeadGroups) else allow
        mask = _mask_of_rows(allow, causal, rows, weights.heads, x.shape[1])
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    out = out.transpose(1, 2).flatten(2)  # [N, H, R, D/H] -> [N, R, D]
    return F.linear(out, weights.out_weight, weights.out_bias)


def pick_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x [N, L, D], rows [R] or [N, R] -> [N, R, D]."""
    if rows.dim() == 1:
        return x.index_select(1, rows)
    return x.gather(1, rows[..., None].expand(-1, -1, x.shape[-1]))


def attention_weights(weights: Projections, x: Tensor, allow: Tensor | None = None) -> Tensor:
    """Attention probabilities of x [N, L, D] -> [N, H, L, L]; rows sum to 1, masked entries are 0."""
    query, key, _ = _heads(weights, x)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if allow is not None:
        scores = scores.masked_fill(~_broadcastable(allow, weights.heads, x.shape[1]), float("-inf"))
    return scores.float().softmax(dim=-1).to(x.dtype)


def _heads(weights: Projections, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, L, D] -> query, key, value, each [N, H, L, D/H]."""
    n, length, _ = x.shape
    packed = F.linear(x, weights.in_weight, weights.in_bias)  # [N, L, 3D]
    query, key, value = packed.reshape(n, length, 3, weights.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return query, key, value


def _heads_of_rows(weights: Projections, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query of the rows [N, H, R, D/H], key and value of all [N, H, L, D/H]."""
    (n, length, width), heads, bias = x.shape, weights.heads, weights.in_bias
    query = F.linear(pick_rows(x, rows), weights.in_weight[:width], None if bias is None else bias[:width])
    packed = F.linear(x, weights.in_weight[width:], None if bias is None else bias[width:])  # [N, L, 2D]
    key, value = packed.reshape(n, length, 2, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return query.reshape(n, -1, heads, width // heads).transpose(1, 2), key, value


def _mask_of_rows(allow: Tensor | None, causal: bool, rows: Tensor, heads: int, length: int) -> Tensor | None:
    """The rows of the mask, broadcastable to [N, H, R, L]."""
    if causal:
        mask = torch.arange(length, device=rows.device) <= rows[..., None]  # [R, L] or [N, R, L]
        return mask if rows.dim() == 1 else mask[:, None]
    if allow is None:
        return None
    if rows.dim() != 1:
        raise ValueError("rows that differ between samples go with causal=True or no mask, not with allow.")
    return _broadcastable(allow, heads, length).index_select(1, rows)


def _broadcastable(allow: Tensor, heads: int, length: int) -> Tensor:
    """Boolean [L, L] or [H, L, L] -> [1 or H, L, L], checked."""
    if allow.dtype != torch.bool:
        raise ValueError(f"an attention mask is boolean (True = may read), got {allow.dtype}.")
    if tuple(allow.shape) not in ((length, length), (heads, length, length)):
        raise ValueError(
            f"attention mask of shape {tuple(allow.shape)}, wanted {(length, length)} or {(heads, length, length)}."
        )
    return allow if allow.dim() == 3 else allow[None]
