"""Checkpoints of the published codes: which tensors are trained, which belong to a class list, which are CLIP's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

# Name of the published tensor -> (our tensor, its row there or None for the whole).
Keys = dict[str, tuple[str, int | None]]
CLASS_BOUND = ("token_prefix", "token_suffix", "prompt_embeddings")
# The published whole-model files hold CLIP under these prefixes (frozen, so ours is used).
_CLIP_PARTS = (
    ("prompt_learner.ZS_image_encoder.", "visual."), ("image_encoder.", "visual."), ("text_encoder.", ""),
    ("logit_scale", "logit_scale"),
)
# Relative distance of a frozen tensor beyond which the file is of another CLIP; rounding to half stays below 0.001,
# averaging in half (PromptSRC) below 0.01.
_OTHER_CLIP = 0.05


def coop_keys() -> Keys:
    return {"ctx": ("ctx", None)}


def cocoop_keys() -> Keys:
    parts = [f"meta_net.{layer}.{part}" for layer in ("linear1", "linear2") for part in ("weight", "bias")]
    return {name: (name, None) for name in ("ctx", *parts)}


def maple_keys(*, depth: int) -> Keys:
    keys: Keys = {"prompt_learner.ctx": ("text", 0)}
    for part in ("weight", "bias"):
        keys[f"prompt_learner.proj.{part}"] = (f"to_vision.0.{part}", None)
    for row in range(1, depth):
        keys[f"prompt_learner.compound_prompts_text.{row - 1}"] = ("text", row)
        for part in ("weight", "bias"):
            name = f"prompt_learner.compound_prompt_projections.{row - 1}.{part}"
            keys[name] = (f"to_vision.{row}.{part}", None)
    return keys


def promptsrc_keys(*, text_depth: int, vision_depth: int) -> Keys:
    keys: Keys = {"prompt_learner.ctx": ("text", 0)}
    if vision_depth:
        keys["image_encoder.VPT"] = ("vision", 0)
    for tower, ours, depth in (("text_encoder", "text", text_depth), ("image_encoder", "vision", vision_depth)):
        for row in range(1, depth):
            keys[f"{tower}.transformer.resblocks.{row}.VPT_shallow"] = (ours, row)
    return keys


def mmrl_keys(*, layers: int) -> Keys:
    prefix = "representation_learner.compound_rep_tokens"
    keys: Keys = {prefix: ("tokens", None), "image_encoder.proj_rep": ("projection", None)}
    for row in range(layers):
        for part in ("weight", "bias"):
            keys[f"{prefix}_r2vproj.{row}.{part}"] = (f"to_vision.{row}.{part}", None)
            keys[f"{prefix}_r2tproj.{row}.{part}"] = (f"to_text.{row}.{part}", None)
    return keys


def is_published(state: Mapping[str, Tensor], keys: Keys) -> bool:
    """Whether a state dict is in a published layout: a class-bound tensor, or a name that only published code has."""
    ours = {name for name, _ in keys.values()}
    return any(_class_bound(name) or (name in keys and name not in ours) for name in state)


def read_published(state: Mapping[str, Tensor], keys: Keys, clip: nn.Module) -> Mapping[str, Tensor]:
    """A published state dict under our names in fp32; one of ours is returned as it is.

    Dropped by name: what depends on the class list. Compared and not taken: frozen CLIP. All the rest must be trained
    tensors that are expected; a missing or further one is a ValueError. Prints what was dropped.
    """
    if not is_published(state, keys):
        return state
    dropped = [name for name in state if _class_bound(name)]
    own = clip.state_dict()
    frozen = {name: ours for name in state if name not in keys and (ours := _clip_name(name, own)) is not None}
    missing = [name for name in keys if name not in state]
    unknown = [name for name in state if name not in keys and name not in frozen and name not in dropped]
    if missing or unknown:
        parts = [f"{what} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
                 for what, names in (("missing", missing), ("unexpected", unknown)) if names]
        raise ValueError(f"a published checkpoint that does not fit: {'; '.join(parts)}. Check the trainer's depth or "
                         "layer settings, which must be those of the training")
    print(f"Published checkpoint: dropped {', '.join(sorted(dropped)) or 'nothing'}; took {len(keys)} trained tensors"
          + (f"; {_compare(state, frozen, own)}" if frozen else ""))
    return _renamed(state, keys)


def _renamed(state: Mapping[str, Tensor], keys: Keys) -> dict[str, Tensor]:
    rows: dict[str, dict[int, Tensor]] = {}
    renamed: dict[str, Tensor] = {}
    for theirs, (ours, row) in keys.items():
        if row is None:
            renamed[ours] = state[theirs].float()
        else:
            rows.setdefault(ours, {})[row] = state[theirs].float()
    return {**renamed, **{ours: torch.stack([of[row] for row in sorted(of)]) for ours, of in rows.items()}}


def _class_bound(name: str) -> bool:
    return any(part in name for part in CLASS_BOUND)


def _clip_name(name: str, own: Mapping[str, Tensor]) -> str | None:
    """The CLIP tensor that a published name stands for; None if it is none."""
    for theirs, ours in _CLIP_PARTS:
        if name.startswith(theirs) and (found := ours + name.removeprefix(theirs)) in own:
            return found
    return None


def _compare(state: Mapping[str, Tensor], frozen: Mapping[str, str], own: Mapping[str, Tensor]) -> str:
    """How far the file's frozen CLIP is from ours; another CLIP is a ValueError."""
    largest = 0.0
    for theirs, ours in frozen.items():
        there, here = state[theirs].float().cpu(), own[ours].float().cpu()
        if there.shape != here.shape or (there - here).norm() > _OTHER_CLIP * here.norm() + 1e-3:
            raise ValueError(f"{theirs} in the file is not this backbone's: it was trained on another CLIP; check "
                             "MODEL.BACKBONE.NAME")
        largest = max(largest, float((there - here).abs().max()))
    return f"kept this backbone's frozen weights, from which the file's differ by at most {largest:.2g}"
