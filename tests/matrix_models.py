"""Models of the matrix beside the toys: from files in OpenAI's layout, of full size, and those that are refused."""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn
from toys import Geometry, toy_clip

from dear_plugin import load_backbone

FULL = {
    "ViT-B/32": Geometry("openai", 12, 768, 12, 12, 512, 8, patch=32, resolution=224, embed=512),
    "ViT-B/16": Geometry("openai", 12, 768, 12, 12, 512, 8, patch=16, resolution=224, embed=512),
    "ViT-L/14": Geometry("openai", 24, 1024, 16, 12, 768, 12, patch=14, resolution=224, embed=768),
    "ViT-L/14@336px": Geometry("openai", 24, 1024, 16, 12, 768, 12, patch=14, resolution=336, embed=768),
}


def from_file(g: Geometry, kind: str) -> Callable[[], nn.Module]:
    """A builder: random weights under OpenAI's keys, written as a file of that kind and loaded again."""

    def build() -> nn.Module:
        state = _random_state(g)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "weights.pt"
            if kind == "state dict":
                torch.save(state, path)
            else:
                torch.jit.save(torch.jit.script(_Archived(state, g.resolution)), str(path))
            del state
            return load_backbone(path).model

    return build


def full_size(name: str, kind: str) -> tuple[Callable[[], nn.Module], Geometry]:
    """The same at full size; the last model is kept, as a minute goes by until it is built."""
    return lambda: copy.deepcopy(_kept(name, kind)), FULL[name]


@lru_cache(maxsize=1)
def _kept(name: str, kind: str) -> nn.Module:
    return from_file(FULL[name], kind)()


def _random_state(g: Geometry) -> dict[str, torch.Tensor]:
    """Made by OpenAI's own class, so that keys and shapes are theirs."""
    import clip.model

    torch.manual_seed(0)
    model = clip.model.CLIP(
        g.embed, g.resolution, g.layers, g.width, g.patch, 77, 49408, g.text_width, g.text_heads, g.text_layers)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.state_dict()


class _Archived(nn.Module):
    """OpenAI's .pt files are TorchScript archives with three numbers beside the weights."""

    def __init__(self, state: dict, resolution: int):
        super().__init__()
        numbers = {"input_resolution": resolution, "context_length": 77, "vocab_size": 49408}
        for key, value in {**state, **{name: torch.tensor(n) for name, n in numbers.items()}}.items():
            owner = self
            *path, name = key.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


# -- refused ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A model that cannot be wrapped, and the words that the reason must contain (a regular expression)."""

    name: str
    build: Callable[[], nn.Module]
    words: str


def _resnet() -> nn.Module:
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    return CLIP(32, CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, image_size=64), _text(CLIPTextCfg))


def _openai_resnet() -> nn.Module:
    import clip.model

    return clip.model.CLIP(32, 64, (1, 1, 1, 1), 8, None, 16, 64, 64, 1, 1)


def _timm() -> nn.Module:
    """As open_clip's ViT-*-SigLIP models are built: a timm tower with an attention pool."""
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    vision = CLIPVisionCfg(
        timm_model_name="vit_tiny_patch16_224", timm_pool="map", timm_proj="none",
        image_size=64, timm_model_pretrained=False)
    return CustomTextCLIP(192, vision, _text(CLIPTextCfg))


def _text(kind: type, **options: object):
    return kind(context_length=16, vocab_size=64, width=64, heads=1, layers=1, **options)


def _coca_text() -> nn.Module:
    from open_clip.model import CLIPTextCfg, CLIPVisionCfg, CustomTextCLIP

    vision = CLIPVisionCfg(layers=3, width=128, patch_size=16, image_size=48)
    return CustomTextCLIP(32, vision, _text(CLIPTextCfg, embed_cls=True, output_tokens=True))


def _text_pooled_by(pool: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        clip = toy_clip("open_clip")
        clip.text_pool_type = pool
        return clip

    return build


def _post_norm(*, text: bool) -> Callable[[], nn.Module]:
    """Blocks with the names of pre-LN blocks that normalise after the sum instead."""

    def build() -> nn.Module:
        from open_clip.transformer import ResidualAttentionBlock

        class PostNormBlock(ResidualAttentionBlock):
            def forward(self, q_x, k_x=None, v_x=None, attn_mask=None):
                x = self.ln_1(q_x + self.attention(q_x=q_x, attn_mask=attn_mask))
                return self.ln_2(x + self.mlp(x))

        clip = toy_clip("open_clip")
        for block in (clip if text else clip.visual).transformer.resblocks:
            block.__class__ = PostNormBlock
        return clip

    return build


def _hooked() -> nn.Module:
    clip = toy_clip("open_clip")
    clip.visual.transformer.resblocks[2].attn.register_forward_hook(lambda module, args, out: (2 * out[0], out[1]))
    return clip


def _lora() -> nn.Module:
    """As PEFT leaves an attention output projection: a Linear with something added."""

    class LoraLinear(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.1 * x

    clip = toy_clip("open_clip")
    clip.visual.transformer.resblocks[2].attn.out_proj = LoraLinear(128, 128)
    return clip


def _transformers(kind: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        vision = {**small, "image_size": 16, "patch_size": 8}
        text = {**small, "vocab_size": 64, "max_position_embeddings": 16}
        if kind == "CLIPVisionModelWithProjection":
            return transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision))
        if kind == "SiglipModel":
            return transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
        config = transformers.ChineseCLIPConfig(text_config={**text, "pad_token_id": 0}, vision_config=vision)
        return transformers.ChineseCLIPModel(config)

    return build


REFUSED = [
    Refused("open_clip RN50 and other ResNets", _resnet, r"is a ResNet .*no attention heads to give roles to"),
    Refused("OpenAI clip RN50 and other ResNets", _openai_resnet, r"is a ResNet .*no attention heads to give roles to"),
    Refused("open_clip ViT-*-SigLIP (timm towers)", _timm, r"\(TimmModel\) has no conv1: not a ViT with a CLS token"),
    Refused("open_clip, mean of the patches", lambda: toy_clip("open_clip", pool_type="avg"), "pools by 'avg'"),
    Refused("open_clip, attention pool (CoCa)",
            lambda: toy_clip("open_clip", attentional_pool=True, attn_pooler_heads=2), "an attn_pool, not by its CLS"),
    Refused("open_clip, CoCa's text tower", _coca_text, "appends a class embedding"),
    Refused("open_clip, text read at the last position", _text_pooled_by("last"), "text tower pools by 'last'"),
    Refused("open_clip, normalised queries", lambda: toy_clip("open_clip", qk_norm=True), "layer 0, attn uses ln_q"),
    Refused("vision blocks that normalise after the sum", _post_norm(text=False),
            "vision tower, layer 1: a PostNormBlock does not compute x"),
    Refused("text blocks that normalise after the sum", _post_norm(text=True),
            "text tower, layer 1: a PostNormBlock does not compute x"),
    Refused("an attention with a hook that changes its output", _hooked, r"layer 2: a ResidualAttentionBlock .*hooks"),
    Refused("PEFT's LoRA in an attention projection", _lora, "out_proj is a LoraLinear .*merge_and_unload"),
    Refused("transformers SiglipModel", _transformers("SiglipModel"), "a SiglipModel has no visual_projection"),
    Refused("transformers ChineseCLIPModel", _transformers("ChineseCLIPModel"), "only CLIP's own pre-LN blocks"),
    Refused("transformers, one tower alone", _transformers("CLIPVisionModelWithProjection"), "has no `visual`"),
    Refused("torch.nn.DataParallel around a CLIP", lambda: nn.DataParallel(toy_clip("open_clip")), "give its .module"),
]
