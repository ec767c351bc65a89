"""Tiny random CLIPs of several geometries and both libraries, and inputs that fit them."""

import copy
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dear_plugin import RoleCLIP, wrap_clip_with_roles
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap

CONTEXT, VOCABULARY = 16, 64
START, END = VOCABULARY - 2, VOCABULARY - 1


@dataclass(frozen=True)
class Geometry:
    library: str  # "openai", "open_clip", "custom_text" (open_clip's CustomTextCLIP) or "hf" (transformers' CLIPModel)
    layers: int
    width: int
    heads: int
    text_layers: int
    text_width: int
    text_heads: int
    patch: int = 16
    resolution: int = 48
    embed: int = 32
    quick_gelu: bool = True
    layer_scale: float | None = None
    block: str | None = None  # "custom": open_clip's own attention class
    eos: int = 2  # of "hf": 2 means the largest id, as old files have it

    @property
    def first_layer(self) -> int:
        return self.layers - 2


GEOMETRIES = {
    "openai": Geometry("openai", 3, 128, 2, 3, 64, 2),
    "openai-shallow-text": Geometry("openai", 4, 192, 3, 1, 64, 1, patch=8, resolution=24, embed=48),
    "open_clip": Geometry("open_clip", 3, 128, 2, 3, 64, 2),
    "open_clip-narrow-heads": Geometry("open_clip", 3, 64, 4, 5, 48, 3, quick_gelu=False),
    "open_clip-own-attention": Geometry("open_clip", 3, 72, 3, 3, 64, 2, layer_scale=0.5, block="custom"),
    "open_clip-custom-text": Geometry("custom_text", 3, 64, 2, 3, 64, 2),
    "hf": Geometry("hf", 3, 128, 2, 3, 64, 2),
    "hf-narrow-heads": Geometry("hf", 4, 64, 4, 3, 48, 3, quick_gelu=False, eos=END),
}


# OpenAI's geometries with their own patch, resolution, head width and number of tokens; only depth and width are less.
EXACT = {
    f"{name} {library}": Geometry(
        library, 3, 64 * heads, heads, 2, 64, 1, patch=patch, resolution=resolution, quick_gelu=library != "open_clip")
    for name, heads, patch, resolution in (
        ("ViT-B/32", 2, 32, 224), ("ViT-B/16", 2, 16, 224), ("ViT-L/14", 3, 14, 224), ("ViT-L/14@336px", 3, 14, 336))
    for library in ("openai", "open_clip", "hf")
}
ALL = {**GEOMETRIES, **EXACT}


def toy_clip(name: str = "open_clip", *, seed: int = 0, **open_clip_vision: object) -> nn.Module:
    """A fresh random CLIP in eval mode; built once per geometry and seed, then copied."""
    if open_clip_vision:
        return _build(ALL[name], seed, open_clip_vision)
    return copy.deepcopy(_cached(name, seed))


@cache
def _cached(name: str, seed: int) -> nn.Module:
    return _build(ALL[name], seed, {})


def _build(g: Geometry, seed: int, vision: dict) -> nn.Module:
    torch.manual_seed(seed)
    if g.library == "openai":
        import pytest

        openai = pytest.importorskip("clip.model", reason="OpenAI's clip is not installed (tests only)")
        model = openai.CLIP(
            g.embed, g.resolution, g.layers, g.width, g.patch, CONTEXT, VOCABULARY, g.text_width, g.text_heads,
            g.text_layers,
        )
    elif g.library == "hf":
        model = _hf_clip(g)
    else:
        from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

        vision_cfg = CLIPVisionCfg(
            layers=g.layers, width=g.width, head_width=g.width // g.heads, patch_size=g.patch,
            image_size=g.resolution, ls_init_value=g.layer_scale, block_type=g.block, **vision,
        )
        text_cfg = CLIPTextCfg(
            context_length=CONTEXT, vocab_size=VOCABULARY, width=g.text_width, heads=g.text_heads,
            layers=g.text_layers, ls_init_value=g.layer_scale, block_type=g.block,
        )
        kind = CustomTextCLIP if g.library == "custom_text" else CLIP
        model = kind(g.embed, vision_cfg, text_cfg, quick_gelu=g.quick_gelu)
    with torch.no_grad():
        # Fresh CLIPs have zero biases and unit norms: move all weights, or a swapped or dropped one would not show.
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.logit_scale.fill_(3.0)
    return model.eval()


def _hf_clip(g: Geometry) -> nn.Module:
    import pytest

    transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")
    shared = {"hidden_act": "quick_gelu" if g.quick_gelu else "gelu", "projection_dim": g.embed}
    vision = transformers.CLIPVisionConfig(
        hidden_size=g.width, intermediate_size=4 * g.width, num_hidden_layers=g.layers, num_attention_heads=g.heads,
        image_size=g.resolution, patch_size=g.patch, **shared,
    )
    text = transformers.CLIPTextConfig(
        vocab_size=VOCABULARY, hidden_size=g.text_width, intermediate_size=4 * g.text_width,
        num_hidden_layers=g.text_layers, num_attention_heads=g.text_heads, max_position_embeddings=CONTEXT,
        bos_token_id=START, eos_token_id=g.eos, **shared,
    )
    config = transformers.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=g.embed)
    return transformers.CLIPModel(config)


def stock_image(clip: nn.Module, images: Tensor) -> Tensor:
    """Image features [N, E] by the library's own call."""
    if hasattr(clip, "encode_image"):
        return clip.encode_image(images)
    return clip.get_image_features(pixel_values=images).pooler_output


def stock_text(clip: nn.Module, ids: Tensor) -> Tensor:
    """Text features [C, E] by the library's own call."""
    if hasattr(clip, "encode_text"):
        return clip.encode_text(ids)
    return clip.get_text_features(input_ids=ids).pooler_output


def toy_images(name: str = "open_clip", n: int = 3, *, seed: int = 1) -> Tensor:
    g = ALL[name]
    return torch.randn(n, 3, g.resolution, g.resolution, generator=torch.Generator().manual_seed(seed))


def toy_ids(classes: int = 5, *, seed: int = 2) -> Tensor:
    """Token ids [C, 16] with start and end tokens and prompts of 1 to 9 tokens; zeros after the end."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(classes, CONTEXT, dtype=torch.long)
    for row in range(classes):
        length = 1 + (row * 4) % 9
        ids[row, 0] = START
        ids[row, 1 : 1 + length] = torch.randint(1, START, (length,), generator=generator)
        ids[row, 1 + length] = END
    return ids


def uniform_map(name: str, role: str, attribute: str | None = None) -> RoleMap:
    g = ALL[name]
    return RoleMap.uniform(role, layers=range(g.first_layer, g.layers), heads=g.heads, attribute=attribute)


def varied_map(name: str) -> RoleMap:
    """All three roles in one map; a head of each kind comes as early as the number of heads allows."""
    g = ALL[name]
    kinds = [
        HeadInfo(HeadRole.ATTRIBUTE, "color", 0.4),
        HeadInfo(HeadRole.MIXED, None, 1.8),
        HeadInfo(HeadRole.GENERALIZATION, None, 3.1),
        HeadInfo(HeadRole.ATTRIBUTE, "shape", 0.2),
        HeadInfo(HeadRole.ATTRIBUTE, "other", 0.1),
    ]
    cells = [(layer, head) for layer in range(g.first_layer, g.layers) for head in range(g.heads)]
    return RoleMap.from_heads({cell: kinds[i % len(kinds)] for i, cell in enumerate(cells)})


def one_core_head(name: str, attribute: str = "color") -> RoleMap:
    """One attribute head in the first adapted layer, all other heads generalization."""
    g = ALL[name]
    cells = [(layer, head) for layer in range(g.first_layer, g.layers) for head in range(g.heads)]
    infos = {cell: HeadInfo(HeadRole.GENERALIZATION) for cell in cells}
    infos[g.first_layer, g.heads - 1] = HeadInfo(HeadRole.ATTRIBUTE, attribute)
    return RoleMap.from_heads(infos)


def wrapped(name: str, roles: RoleMap | None = None, *, clip: nn.Module | None = None, **options: object) -> RoleCLIP:
    """A toy RoleCLIP with seeded tokens, large ones: fresh tokens are almost nothing, and a leak would not show."""
    torch.manual_seed(11)
    roles = varied_map(name) if roles is None else roles
    role_clip = wrap_clip_with_roles(toy_clip(name) if clip is None else clip, roles, latent_width=24, **options)
    with torch.no_grad():
        role_clip.adapter.tokens.latents.mul_(20)
    return role_clip


def close(a: Tensor, b: Tensor, tolerance: float = 1e-6) -> bool:
    """Whether two rows of features [N, E] agree as unit vectors."""
    return torch.allclose(F.normalize(a, dim=-1), F.normalize(b, dim=-1), atol=tolerance, rtol=0)
