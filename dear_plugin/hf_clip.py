"""A Hugging Face CLIPModel under the names that OpenAI's clip uses: a view, which copies nothing and owns nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dear_plugin.attention import Projections, refuse_changed_linear
from dear_plugin.facade import check_padding

# OpenAI's name of a part <- Hugging Face's, within a tower and within a block.
_BLOCK_NAMES = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "self_attn.out_proj": "attn.out_proj",
                "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj"}
_VISION_NAMES = {"embeddings.class_embedding": "class_embedding", "embeddings.patch_embedding.weight": "conv1.weight",
                 "embeddings.position_embedding.weight": "positional_embedding", "pre_layrnorm": "ln_pre",
                 "post_layernorm": "ln_post"}
_TEXT_NAMES = {"embeddings.token_embedding": "token_embedding", "final_layer_norm": "ln_final",
               "embeddings.position_embedding.weight": "positional_embedding"}
_LEGACY_EOS = 2  # configs with this id (a known mistake of old files) are read at the largest id, as transformers does
_VISION_PARTS = ("embeddings.class_embedding", "embeddings.patch_embedding", "embeddings.position_embedding",
                 "pre_layrnorm", "encoder.layers", "post_layernorm")
_TEXT_PARTS = ("embeddings.token_embedding", "embeddings.position_embedding", "encoder.layers", "final_layer_norm")


class HfClip:
    """transformers.CLIPModel as a CLIP with `visual`, `text`, `encode_image`, `encode_text`.

    Raises ValueError naming the part that another model of transformers lacks (SigLIP, AltCLIP, a single tower, ...).
    """

    def __init__(self, model: nn.Module):
        kind = type(model).__name__
        for part in ("visual_projection", "text_projection", "logit_scale"):
            if getattr(model, part, None) is None:
                raise ValueError(
                    f"a {kind} has no {part}: of transformers' models CLIPModel is supported, whose image feature is "
                    "its CLS token (SigLIP's, for one, is pooled by an attention head of its own)."
                )
        _check_parts(model.vision_model, _VISION_PARTS, f"the vision tower of a {kind}")
        _check_parts(model.text_model, _TEXT_PARTS, f"the text tower of a {kind}")
        self.model = model

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether a model has the two towers of transformers' image-text models."""
        return hasattr(model, "vision_model") and hasattr(model, "text_model")

    @property
    def visual(self) -> HfVisual:
        return HfVisual(self.model.vision_model, self.model.visual_projection)

    @property
    def text(self) -> HfText:
        return HfText(self.model.text_model, self.model.text_projection)

    @property
    def logit_scale(self) -> Tensor:
        return self.model.logit_scale

    @property
    def context_length(self) -> int:
        return self.text.context_length

    @property
    def vocab_size(self) -> int:
        return int(self.text.token_embedding.num_embeddings)

    def encode_image(self, images: Tensor) -> Tensor:
        """[N, 3, R, R] -> [N, E], the model's own get_image_features."""
        return _pooled(self.model.get_image_features(pixel_values=images))

    def encode_text(self, ids: Tensor) -> Tensor:
        """ids [C, L] -> [C, E], the model's own get_text_features."""
        return _pooled(self.model.get_text_features(input_ids=ids))

    def state_dict(self) -> dict[str, Tensor]:
        """The weights in OpenAI's layout: the same model from either library has the same identity."""
        return openai_layout(self.model.state_dict())

    @property
    def adapted_calls(self) -> Mapping[str, Callable]:
        """Calls of the host that a RoleCLIP around it answers too; each takes the RoleCLIP first."""
        return {"get_image_features": get_image_features, "get_text_features": get_text_features}


class HfVisual:
    """CLIPVisionModel with the names of OpenAI's VisionTransformer; calling it gives the projected CLS feature."""

    def __init__(self, tower: nn.Module, projection: nn.Linear):
        self.tower, self.projection = tower, projection

    @property
    def conv1(self) -> nn.Conv2d:
        return self.tower.embeddings.patch_embedding

    @property
    def class_embedding(self) -> Tensor:
        return self.tower.embeddings.class_embedding

    @property
    def positional_embedding(self) -> Tensor:
        """[1 + P, D]"""
        return self.tower.embeddings.position_embedding.weight

    @property
    def ln_pre(self) -> nn.Module:
        return self.tower.pre_layrnorm

    @property
    def ln_post(self) -> nn.Module:
        return self.tower.post_layernorm

    @property
    def proj(self) -> Tensor:
        """[D, E]"""
        return self.projection.weight.t()

    @property
    def output_dim(self) -> int:
        return int(self.projection.out_features)

    @property
    def image_size(self) -> int:
        return int(self.tower.embeddings.image_size)

    @property
    def transformer(self) -> SimpleNamespace:
        return SimpleNamespace(resblocks=[HfBlock(layer) for layer in self.tower.encoder.layers])


class HfText:
    """CLIPTextModel with the names of OpenAI's text tower."""

    def __init__(self, tower: nn.Module, projection: nn.Linear):
        self.tower, self.projection = tower, projection

    @property
    def text_projection(self) -> Tensor:
        """[D, E]"""
        return self.projection.weight.t()

    @property
    def token_embedding(self) -> nn.Embedding:
        return self.tower.embeddings.token_embedding

    @property
    def positional_embedding(self) -> Tensor:
        """[context length, D]"""
        return self.tower.embeddings.position_embedding.weight

    @property
    def ln_final(self) -> nn.Module:
        return self.tower.final_layer_norm

    @property
    def context_length(self) -> int:
        return int(self.positional_embedding.shape[0])

    @property
    def text_eos_id(self) -> int:
        return int(self.tower.eos_token_id)

    @property
    def text_pool_type(self) -> str:
        return "argmax" if self.text_eos_id == _LEGACY_EOS else "eos"

    @property
    def transformer(self) -> SimpleNamespace:
        length = self.context_length
        return SimpleNamespace(resblocks=[HfBlock(layer, causal=length) for layer in self.tower.encoder.layers])


class HfBlock:
    """CLIPEncoderLayer with the names of OpenAI's residual block; `causal`: context length of a causal tower."""

    def __init__(self, layer: nn.Module, *, causal: int | None = None):
        _check_parts(layer, ("layer_norm1", "self_attn", "layer_norm2", "mlp"), f"a {type(layer).__name__}")
        self.layer, self.causal = layer, causal

    @property
    def ln_1(self) -> nn.Module:
        return self.layer.layer_norm1

    @property
    def ln_2(self) -> nn.Module:
        return self.layer.layer_norm2

    @property
    def mlp(self) -> nn.Module:
        return self.layer.mlp

    @property
    def attn(self) -> HfAttention:
        return HfAttention(self.layer.self_attn)

    @property
    def attn_mask(self) -> Tensor | None:
        """[L, L] with 0 and -inf for a causal tower, else None."""
        if self.causal is None:
            return None
        weight = self.attn.out_proj.weight
        blocked = torch.full((self.causal, self.causal), float("-inf"), dtype=weight.dtype, device=weight.device)
        return blocked.triu(1)

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, L, D] -> the same by the layer itself, called as its own encoder calls it."""
        config = getattr(self.layer.self_attn, "config", None)
        if "causal_attention_mask" in inspect.signature(type(self.layer).forward).parameters:
            mask = self.attn_mask  # transformers 4: two masks, and a tuple comes back
            out = self.layer(x, None, None if mask is None else mask[None, None])
        elif self.causal is None:
            out = self.layer(x, None)
        elif getattr(config, "_attn_implementation", None) == "eager":
            out = self.layer(x, self.attn_mask[None, None])
        else:
            out = self.layer(x, None, is_causal=True)
        return out[0] if isinstance(out, tuple) else out


class HfAttention:
    """CLIPAttention, whose query, key and value are three Linear layers, as one packed projection."""

    def __init__(self, attention: nn.Module):
        self.attention = attention

    @property
    def num_heads(self) -> int:
        return int(self.attention.num_heads)

    @property
    def out_proj(self) -> nn.Linear:
        return self.attention.out_proj

    def projections(self, where: str) -> Projections:
        """The weights packed anew at each call (three D x D copies), so that casts, moves and loads are followed."""
        _check_parts(self.attention, ("q_proj", "k_proj", "v_proj", "out_proj", "num_heads"), where)
        attention = self.attention
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        for name, part in zip(("q_proj", "k_proj", "v_proj", "out_proj"), [*parts, attention.out_proj], strict=True):
            refuse_changed_linear(part, f"{where}.{name}")
        weight = torch.cat([part.weight for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        return Projections(weight, bias, attention.out_proj.weight, attention.out_proj.bias, self.num_heads)


# -- what a RoleCLIP around a CLIPModel answers beside OpenAI's calls ----------------------------------------------


def get_image_features(role_clip: Any, pixel_values: Tensor) -> Any:
    """Adapted image features [N, E] in the form that the installed transformers gives (from 5.0: `.pooler_output`)."""
    return _as_host(role_clip.encode_image(pixel_values))


def get_text_features(role_clip: Any, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
    """Adapted text features [C, E] in the same form; padding after the end token may be masked, nothing before it.

    Raises ValueError for an attention_mask that hides a position up to the end token (left padding).
    """
    if attention_mask is not None:
        check_padding(attention_mask, role_clip.text_tower.end_index(input_ids))
    return _as_host(role_clip.encode_text(input_ids))


def _as_host(features: Tensor) -> Any:
    import transformers
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    if int(transformers.__version__.split(".")[0]) < 5:
        return features
    return BaseModelOutputWithPooling(pooler_output=features)


def _pooled(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.pooler_output


# -- layout -------------------------------------------------------------------------------------------------------


def openai_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A CLIPModel's state dict under OpenAI's keys: query, key, value packed, projections as [D, E]."""
    found: dict[str, Tensor] = {}
    packed: dict[str, list[Tensor]] = {}
    for key, value in state.items():
        name = _renamed(key)
        if name.projection:
            found[name.key] = value.t()
        elif name.packed is None:
            found[name.key] = value
        else:
            packed.setdefault(name.key, [value] * 3)[name.packed] = value
    return {**found, **{key: torch.cat(parts) for key, parts in packed.items()}}


class _Renamed(NamedTuple):
    key: str
    packed: int | None = None  # place among query, key, value
    projection: bool = False


def _renamed(key: str) -> _Renamed:
    if key in ("visual_projection.weight", "text_projection.weight"):
        return _Renamed({"v": "visual.proj", "t": "text_projection"}[key[0]], projection=True)
    for start, prefix, names in (("vision_model.", "visual.", _VISION_NAMES), ("text_model.", "", _TEXT_NAMES)):
        if not key.startswith(start):
            continue
        rest = key[len(start) :]
        if rest.startswith("encoder.layers."):
            index, _, part = rest.removeprefix("encoder.layers.").partition(".")
            block = f"{prefix}transformer.resblocks.{index}."
            for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
                if part.startswith(f"self_attn.{name}."):
                    return _Renamed(f"{block}attn.in_proj_{part.rpartition('.')[2]}", packed=place)
            return _Renamed(block + _by_prefix(part, _BLOCK_NAMES))
        return _Renamed(prefix + _by_prefix(rest, names))
    return _Renamed(key)


def _by_prefix(name: str, names: Mapping[str, str]) -> str:
    for theirs, ours in names.items():
        if name == theirs or name.startswith(theirs + "."):
            return ours + name[len(theirs) :]
    return name


def _check_parts(owner: Any, parts: tuple[str, ...], where: str) -> None:
    for path in parts:
        part = owner
        for name in path.split("."):
            part = getattr(part, name, None)
        if part is None:
            raise ValueError(f"{where} has no {path}: only CLIP's own pre-LN blocks and CLS pooling are supported.")
