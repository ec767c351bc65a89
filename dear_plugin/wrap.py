"""wrap_clip_with_roles() -> RoleCLIP: a frozen CLIP with attribute tokens and role masks that answers like a CLIP."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_plugin.block_check import check_blocks
from dear_plugin.config import CORE_ATTRIBUTES, DearConfig
from dear_plugin.encoder import (
    ImageFeatures,
    TextCache,
    TextPrefix,
    by_class_chunks,
    finish_text,
    make_text_prefix,
    read_with_tokens,
    run_with_tokens,
)
from dear_plugin.facade import ClipLogits, RoleTransformer, RoleVisual, positional, readable, with_inserted
from dear_plugin.head_groups import HeadGroups, as_groups
from dear_plugin.hosts import clip_host
from dear_plugin.masks import TokenLayout, build_role_mask
from dear_plugin.precision import (
    evaluating,
    float32_copy,
    frozen_weights,
    in_float32,
    is_half_on_cpu,
    note_half_on_cpu,
    parameters_version,
)
from dear_plugin.recompute import Recomputing
from dear_plugin.resolve import resolve_config, resolve_roles
from dear_plugin.roles import RoleMap
from dear_plugin.speed import speed
from dear_plugin.state_keys import hide_clip_prefix
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import TextTower, VisionTower, read_plain, text_tower, vision_tower
from dear_plugin.trainable import DearAdapter

# Text tokens stand right after the start token: everything later reads them, they read only it and themselves (ours).
TEXT_POSITION = 1

# What foreign code reads from a CLIP as a value; the host's own parts are handed through.
_TEXT_NAMES = ("token_embedding", "positional_embedding", "ln_final", "text_projection", "attn_mask")
_CLIP_NAMES = ("logit_scale", "logit_bias", "vocab_size", "context_length")
_HOST_CALLS = ("get_image_features", "get_text_features")  # where the host itself has them


def wrap_clip_with_roles(
    clip_model: nn.Module,
    roles: RoleMap | str | os.PathLike = "auto",
    *,
    attributes: Iterable[str] = CORE_ATTRIBUTES,
    first_layer: int | None = None,
    text_tokens: int | None = None,
    beta: float = 0.7,
    token_mixing: bool = True,
    latent_width: int = 512,
    text_first_layer: int | None = None,
    attribute_projection: str = "trained",
    per_layer_maps: bool = False,
    role_mask: bool = True,
    cls_weight: float = 0.7,
    class_chunk: int | None = None,
    recompute: bool = False,
) -> "RoleCLIP":
    """Give a CLIP (OpenAI's clip, open_clip, transformers) attribute tokens and role masks; DearConfig has each knob.

    `roles`: a RoleMap, the path of its JSON, the name of a shipped map, or "auto" (the shipped map of this very model).
    Nothing about the model is changed; it is run as a constant in eval mode, and what trains is `.adapter`.
    """
    config = DearConfig(
        attributes=attributes,
        first_layer=first_layer,
        text_first_layer=text_first_layer,
        text_tokens=text_tokens,
        beta=beta,
        token_mixing=token_mixing,
        latent_width=latent_width,
        attribute_projection=attribute_projection,
        per_layer_maps=per_layer_maps,
        role_mask=role_mask,
        cls_weight=cls_weight,
        class_chunk=class_chunk,
        recompute=recompute,
    )
    return wrap_clip_with_config(clip_model, roles, config)


def wrap_clip_with_config(clip_model: nn.Module, roles: RoleMap | str | os.PathLike, config: DearConfig) -> "RoleCLIP":
    """The same with all knobs in one DearConfig."""
    vision, text = vision_tower(clip_model), text_tower(clip_model)
    role_map = resolve_roles(roles, clip_model, vision)
    return RoleCLIP(clip_model, role_map, resolve_config(config, role_map, vision, text))


class RoleCLIP(nn.Module):
    """A frozen CLIP (`.clip`) and what DeAR trains (`.adapter`); made by wrap_clip_with_roles.

    Answers to what foreign code uses on a CLIP. `state_dict` holds the host's own keys and "adapter.*".
    Adapted passes give the CLIP's weights no gradient, whatever their requires_grad says; the flags are the caller's
    and stay (for DistributedDataParallel clear them: `clip_model.requires_grad_(False)`).
    """

    def __init__(self, clip_model: nn.Module, role_map: RoleMap, config: DearConfig):
        super().__init__()
        # The dtype that encode_image and encode_text give; a half model on the CPU is computed in fp32 all the same.
        self.output_dtype = vision_tower(clip_model).dtype
        self.clip = float32_copy(clip_model) if is_half_on_cpu(clip_model) else clip_model
        self.vision_tower: VisionTower = vision_tower(self.clip)
        self.text_tower: TextTower = text_tower(self.clip)
        check_blocks(self.vision_tower, self.clip, range(config.first_layer, self.vision_tower.layers))
        check_blocks(self.text_tower, self.clip, range(config.text_first_layer, self.text_tower.layers))
        self.config = config
        self.role_map = role_map
        self.adapter = DearAdapter(config, self.vision_tower, self.text_tower)
        self.text_cache = TextCache()
        self._enabled = True
        self._groups: dict[int, HeadGroups] = {}
        self.vision_schedule = TokenSchedule(config.first_layer, None, "mix", config.beta)
        self.text_schedule = TokenSchedule(config.text_first_layer, TEXT_POSITION, "mix", config.beta)
        self.layout = TokenLayout(self.vision_tower.sequence_length, config.attributes)
        self._build_masks()
        hide_clip_prefix(self)

    @property
    def host(self) -> Any:
        """`clip` under OpenAI's names: itself, or a view on it."""
        return clip_host(self.clip)

    def _build_masks(self) -> None:
        for layer in range(self.config.first_layer, self.vision_tower.layers):
            mask = None
            if self.config.role_mask:
                mask = build_role_mask(self.role_map, layer, self.layout, self.config.token_mixing)
                # A mask that blocks nothing is no mask: plain attention is the same and faster.
                mask = None if bool(mask.all()) else mask.to(self.vision_tower.device)
            self.register_buffer(f"role_mask_{layer}", mask, persistent=False)

    def role_masks(self) -> dict[int, Tensor]:
        """Layer -> boolean [H, L, L] over CLS, patches and attribute tokens; layers that block nothing are left out."""
        layers = range(self.config.first_layer, self.vision_tower.layers)
        masks = {layer: getattr(self, f"role_mask_{layer}") for layer in layers}
        return {layer: mask for layer, mask in masks.items() if mask is not None}

    # -- image side ---------------------------------------------------------------------------------------------

    def encode_image(self, image: Tensor) -> Tensor:
        """[N, 3, R, R] -> adapted CLS features [N, E], not normalised."""
        return self._to_output(self._encode_image(image))

    def visual_forward(self, image: Tensor) -> Tensor:
        """What `visual(image)` gives: as encode_image, but in the image's dtype where the host was lifted to fp32."""
        features = self._encode_image(image)
        return features.to(image.dtype) if self._lifted else features

    def _encode_image(self, image: Tensor) -> Tensor:
        tokens = self._vision_tokens()
        if tokens is None:
            with evaluating(self.clip):
                return self.host.encode_image(image.to(self.vision_tower.dtype))
        trunk = self.trunk(image, keep_graph=torch.is_grad_enabled() and image.requires_grad)
        with frozen_weights(self.clip):
            cls, _ = self._adapt(trunk, tokens)
            return self.vision_tower.project(cls)

    def trunk(self, images: Any, *, keep_graph: bool = False) -> Tensor:
        """Images -> input of the first layer with tokens [N, 1 + P, D], which itself is returned as it is."""
        if isinstance(images, Tensor) and images.dim() == 3:
            return images
        with (frozen_weights if keep_graph else evaluating)(self.clip), torch.set_grad_enabled(keep_graph):
            return self.vision_tower.run(self.vision_tower.embed(images), 0, self.config.first_layer, stock=True)

    def encode_image_attributes(self, images: Tensor) -> Tensor:
        """[N, 3, R, R] -> attribute features [N, A, E], not normalised, in the order of config.attributes."""
        return self._to_output(self.image_features(images).attributes)

    def image_features(self, images: Tensor, *, frozen: bool = False) -> ImageFeatures:
        """CLS [N, E] and attribute features [N, A, E] of images or of trunk(images); with `frozen` also stock CLIP's.

        The layers below the first one with tokens hold nothing learned: run once, without gradient, for both.
        """
        tokens, tower = self._vision_tokens(), self.vision_tower
        if tokens is None:
            with evaluating(self.clip), torch.no_grad():
                plain = tower.project(tower.run(tower.embed(images), 0, tower.layers)[:, 0])
            return ImageFeatures(plain, plain.new_zeros(len(plain), 0, plain.shape[1]), plain if frozen else None)
        trunk, plain = self.trunk(images), None
        if frozen:
            with evaluating(self.clip), torch.no_grad():
                start = self.config.first_layer if speed().reuse_trunk else 0
                plain = tower.project(read_plain(tower, trunk if start else tower.embed(images), 0, start))
        with frozen_weights(self.clip):
            cls, outputs = self._adapt(trunk, tokens)
            return ImageFeatures(tower.project(cls), self.adapter.project_attributes(tower, outputs), plain)

    def _adapt(self, trunk: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The trunk's output [N, 1 + P, D] and tokens [A, D] -> CLS row [N, D], the tokens' outputs [N, A, D]."""
        masks, start = self.role_masks(), self.config.first_layer
        rule = as_groups(masks, self._groups) if speed().grouped_heads else masks
        tower = Recomputing(self.vision_tower, self.clip) if self.config.recompute else self.vision_tower
        return read_with_tokens(tower, trunk, tokens, self.vision_schedule, read=0, allow=rule, start=start)

    def _vision_tokens(self) -> Tensor | None:
        return self.adapter.tokens.for_vision() if self._enabled else None

    @torch.no_grad()
    def attention_maps(self, images: Tensor, layers: int | Iterable[int]) -> Tensor | dict[int, Tensor]:
        """Attention probabilities [N, H, L, L] of one layer, or {layer: [N, H, L, L]} for several.

        From config.first_layer on the sequence ends with the attribute tokens (L = 1 + P + A), below it does not.
        """
        wanted, last = [layers] if isinstance(layers, int) else list(layers), self.vision_tower.layers - 1
        for layer in wanted:
            if not 0 <= layer <= last:
                raise ValueError(f"attention_maps: no layer {layer}; the vision tower has layers 0-{last}.")
        tokens, masks, maps = self._vision_tokens(), self.role_masks(), {}
        with evaluating(self.clip):
            x = self.vision_tower.embed(images)
            for layer in range(max(wanted, default=-1) + 1):
                allow = None
                if tokens is not None and layer >= self.config.first_layer:
                    join, first = self.vision_schedule, layer == self.config.first_layer
                    x = join.enter(x, tokens) if first else join.refresh(x, tokens, layer)
                    allow = masks.get(layer)
                if layer in wanted:
                    maps[layer] = self.vision_tower.attention(x, layer, allow)
                x = self.vision_tower.run(x, layer, layer + 1, allow=allow)
        return maps[layers] if isinstance(layers, int) else maps

    # -- text side ----------------------------------------------------------------------------------------------

    def encode_text(self, text: Tensor) -> Tensor:
        """Token ids [C, L] -> adapted text features [C, E], not normalised."""
        return self._to_output(self._encode_text(text))

    def _encode_text(self, text: Tensor) -> Tensor:
        if self._text_tokens() is None:
            with evaluating(self.clip):
                return self.host.encode_text(text)
        return self.text_features(self.text_prefix(text))

    def text_prefix(self, ids: Tensor) -> TextPrefix:
        """Class prompts [C, L] up to the layer where text tokens enter: nothing in it is learned, so keep it."""
        with evaluating(self.clip):
            return make_text_prefix(self.text_tower, ids, self.config.text_first_layer)

    def text_features(self, prefix: TextPrefix, *, chunk: int | None = None) -> Tensor:
        """Adapted text features [C, E]; `chunk` classes at a time with recomputation (default: config.class_chunk)."""
        tokens = self._text_tokens()
        if tokens is None:
            return prefix.frozen

        def run(part: TextPrefix) -> Tensor:
            with frozen_weights(self.clip):
                return finish_text(self.text_tower, part, tokens, self.text_schedule)

        return by_class_chunks(run, prefix, chunk or self.config.class_chunk)

    def cached_prefix(self, ids: Tensor) -> TextPrefix:
        """text_prefix(ids), computed again only when the class list or the model has changed."""
        return self.text_cache.prefix(ids, self.version(adapter=False), self.text_prefix)

    @torch.no_grad()
    def cached_text_features(self, ids: Tensor) -> Tensor:
        """Text features [C, E] without gradient, computed again only when anything they depend on has changed."""
        make: Callable[[Tensor], Tensor] = lambda ids: self.text_features(self.cached_prefix(ids))  # noqa: E731
        return self.text_cache.features(ids, self.version(), make)

    def run_text(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Embedded text [C, L, D] -> output of the text layers, same shape; tokens enter and leave inside."""
        tokens = self._text_tokens()
        allow = None if attn_mask is None or attn_mask is getattr(self, "attn_mask", None) else readable(attn_mask)
        if allow is not None and torch.equal(allow, torch.ones_like(allow).tril()):
            allow = None
        if tokens is None:
            with evaluating(self.clip):
                return self.text_tower.run(x, 0, self.text_tower.layers, allow=allow)
        with frozen_weights(self.clip):
            first, masks = self.config.text_first_layer, {}
            if allow is not None:
                extended = with_inserted(allow, TEXT_POSITION, tokens.shape[-2])
                masks = dict.fromkeys(range(first, self.text_tower.layers), extended)
            x = self.text_tower.run(x, 0, first, allow=allow)
            return run_with_tokens(self.text_tower, x, tokens, self.text_schedule, allow=masks, start=first)[0]

    def _text_tokens(self) -> Tensor | None:
        return self.adapter.tokens.for_text() if self._enabled else None

    # -- both ---------------------------------------------------------------------------------------------------

    def forward(self, image: Tensor | None = None, text: Tensor | None = None, **named: Tensor) -> ClipLogits:
        """CLIP's own contract: (logits_per_image [N, C], logits_per_text [C, N]) from encode_image and encode_text.

        The names of transformers (pixel_values, input_ids, attention_mask) are taken too. DeAR's fused class logits
        are class_logits().
        """
        if named or image is None or text is None:
            image, text = positional(image, text, named, self.text_tower.end_index)
        image_features = F.normalize(self._encode_image(image), dim=-1)
        text_features = F.normalize(self._encode_text(text), dim=-1)
        scale = self.clip.logit_scale.detach().exp().to(image_features.dtype)
        logits = self._to_output(scale * image_features @ text_features.t())
        return ClipLogits(logits, logits.t())

    def class_logits(self, image: ImageFeatures, text: Tensor) -> Tensor:
        """Fused logits [N, C] in fp32 from image features and text features [C, E] (CLIP's own where disabled)."""
        scale = self.clip.logit_scale.detach().exp().float()
        if not self._enabled:
            return scale * F.normalize(image.cls.float(), dim=-1) @ F.normalize(text.float(), dim=-1).t()
        return self.adapter.fusion(torch.cat([image.cls[:, None], image.attributes], dim=1), text, scale)

    @contextlib.contextmanager
    def disabled(self) -> Iterator["RoleCLIP"]:
        """Within it the model is the stock CLIP; leaving restores the state from before, so it nests."""
        before, self._enabled = self._enabled, False
        try:
            yield self
        finally:
            self._enabled = before

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """The adapter's parameters: what goes to the optimiser.

        Their requires_grad is set, as foreign trainers clear it on all that their own name filter does not know.
        """
        self.adapter.requires_grad_(True)
        return self.adapter.parameters()

    def version(self, *, adapter: bool = True) -> tuple:
        """Differs after any change of a weight, a load, a cast, a move or a switch by disabled(): the key of caches."""
        frozen = parameters_version(self.clip)
        return (frozen, parameters_version(self.adapter, sums=True), self._enabled) if adapter else frozen

    def save_adapter(self, directory: str | os.PathLike) -> Path:
        """Write adapter.safetensors and adapter.json into `directory`."""
        from dear_plugin.adapter import save_adapter

        return save_adapter(self, directory)

    def load_adapter(self, directory: str | os.PathLike) -> None:
        """Load what save_adapter wrote; another model, role map or setting is refused by name."""
        from dear_plugin.adapter import load_adapter

        load_adapter(self, directory)

    # -- what foreign code uses on a CLIP -----------------------------------------------------------------------

    @property
    def visual(self) -> RoleVisual:
        return RoleVisual(self)

    @property
    def transformer(self) -> RoleTransformer:
        return RoleTransformer(self)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the model computes in (fp32 for a half model on the CPU)."""
        return self.vision_tower.dtype

    @property
    def _lifted(self) -> bool:
        return self.output_dtype != self.vision_tower.dtype

    def _to_output(self, x: Tensor) -> Tensor:
        return x.to(self.output_dtype) if self._lifted else x

    def __getattr__(self, name: str) -> Any:
        if name in _TEXT_NAMES and "text_tower" in self.__dict__:
            return getattr(self.text_tower.host, name)
        if name in _CLIP_NAMES and "clip" in self.__dict__.get("_modules", {}):
            return getattr(self.host, name)
        if name in _HOST_CALLS and name in getattr(self.host, "adapted_calls", ()):
            return functools.partial(self.host.adapted_calls[name], self)
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RoleCLIP":
        """Casts and moves: the adapter stays fp32 (Float32Module); a cast to half on the CPU leaves the CLIP fp32."""
        probe = fn(torch.zeros(1, dtype=self.output_dtype, device=self.vision_tower.device))
        half_on_cpu = probe.dtype == torch.float16 and probe.device.type == "cpu"
        if half_on_cpu and not self._lifted:
            note_half_on_cpu()
        self.output_dtype = probe.dtype
        return super()._apply(in_float32(fn) if half_on_cpu else fn, recurse)

    def _replicate_for_data_parallel(self) -> "RoleCLIP":
        raise RuntimeError(
            "a RoleCLIP does not run under nn.DataParallel: replicas would share the towers of the first device. "
            "Use one device (CUDA_VISIBLE_DEVICES), or one process per device with DistributedDataParallel."
        )
