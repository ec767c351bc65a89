"""What foreign code sees of a RoleCLIP: its parts `visual` and `transformer`, its argument names, its logits."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# What foreign code reads from a vision tower beside calling it; the host's own values are handed through.
_VISUAL_NAMES = (
    "conv1",
    "class_embedding",
    "positional_embedding",
    "ln_pre",
    "ln_post",
    "proj",
    "output_dim",
    "image_size",
    "patch_size",
    "grid_size",
    "image_mean",
    "image_std",
)


class ClipLogits(NamedTuple):
    """A pair, as OpenAI's clip gives it, with the names that transformers gives it."""

    logits_per_image: Tensor  # [N, C]
    logits_per_text: Tensor  # [C, N]


def positional(
    image: Tensor | None, text: Tensor | None, named: Mapping[str, Tensor], end_index: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """(image, text) from OpenAI's arguments or transformers' names; others are refused with the known ones."""
    known = ("pixel_values", "input_ids", "attention_mask")
    unknown = [name for name in named if name not in known]
    image, text = named.get("pixel_values", image), named.get("input_ids", text)
    if unknown or image is None or text is None:
        got = ", ".join([*unknown, *(name for name in known if name in named)]) or "one argument alone"
        raise TypeError(f"a RoleCLIP takes (image, text), or {', '.join(known)} by name; got {got}.")
    if named.get("attention_mask") is not None:
        check_padding(named["attention_mask"], end_index(text))
    return image, text


def check_padding(attention_mask: Tensor, end: Tensor) -> None:
    """Refuse a text mask [C, L] that hides a position up to the end token [C]; what comes after it is never read."""
    needed = torch.arange(attention_mask.shape[1], device=end.device) <= end[:, None]
    if bool((needed & (attention_mask == 0)).any()):
        raise ValueError("attention_mask hides positions up to the end token: pad on the right (padding_side='right').")


class RoleVisual(nn.Module):
    """`clip_model.visual` of a RoleCLIP: images [N, 3, R, R] -> adapted CLS features [N, E]."""

    def __init__(self, role_clip: nn.Module):
        super().__init__()
        self.role_clip = role_clip

    @property
    def input_resolution(self) -> int:
        return self.role_clip.vision_tower.input_resolution

    def forward(self, image: Tensor) -> Tensor:
        return self.role_clip.visual_forward(image)

    def __getattr__(self, name: str) -> Any:
        if name in _VISUAL_NAMES:
            return getattr(self.role_clip.host.visual, name)
        return super().__getattr__(name)


class RoleTransformer(nn.Module):
    """`clip_model.transformer` of a RoleCLIP: embedded text in the host's own axis order -> the same shape.

    Text tokens join at their layer and are taken out again, so the end token stays where the caller knows it.
    OpenAI's order is sequence first, [L, C, D]; open_clip's is batch first, [C, L, D]. `attn_mask` is open_clip's
    argument; left out, the host's causal mask holds, as in its encode_text.
    """

    def __init__(self, role_clip: nn.Module):
        super().__init__()
        self.role_clip = role_clip

    @property
    def batch_first(self) -> bool:
        return bool(getattr(self.role_clip.text_tower.blocks[0].attn, "batch_first", True)) or hasattr(
            self.role_clip.text_tower.host.transformer, "batch_first"
        )

    @property
    def width(self) -> int:
        return self.role_clip.text_tower.width

    @property
    def layers(self) -> int:
        return self.role_clip.text_tower.layers

    @property
    def resblocks(self) -> nn.Module:
        return self.role_clip.text_tower.host.transformer.resblocks

    def get_cast_dtype(self) -> torch.dtype:
        return self.role_clip.text_tower.dtype

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        length = x.shape[1 if self.batch_first else 0]
        limit = self.role_clip.text_tower.context_length
        if x.dim() != 3 or length > limit:
            order = "[C, L, D]" if self.batch_first else "[L, C, D] (sequence first)"
            raise ValueError(f"transformer takes {order} with L up to {limit}, got {list(x.shape)}.")
        x = x if self.batch_first else x.permute(1, 0, 2)
        x = self.role_clip.run_text(x, attn_mask)
        return x if self.batch_first else x.permute(1, 0, 2)


def readable(attn_mask: Tensor) -> Tensor:
    """An attn_mask [L, L] of torch's kinds -> boolean, True where the row may read the column."""
    if attn_mask.dtype == torch.bool:
        return ~attn_mask
    blocked = attn_mask == float("-inf")
    if not bool((blocked | (attn_mask == 0)).all()):
        raise ValueError("attn_mask must hold 0 and -inf alone: attention biases are not supported.")
    return ~blocked


def with_inserted(allow: Tensor, position: int, count: int) -> Tensor:
    """Extend a text mask [L, L] by `count` tokens at `position`, as causal order would have it -> [L + K, L + K].

    Inserted tokens read what stands before them and each other causally; whatever stands after them reads them.
    """
    length = allow.shape[0]
    old = torch.cat([torch.arange(position), torch.arange(position + count, length + count)]).to(allow.device)
    extended = torch.ones(length + count, length + count, dtype=torch.bool, device=allow.device).tril()
    extended[old[:, None], old[None, :]] = allow
    return extended
