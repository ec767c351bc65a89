"""Which CLIP a model is: its geometry, its activation and a hash of its weights."""

import hashlib
from dataclasses import asdict, dataclass, fields
from typing import Any

from dear_plugin.messages import check_fields

# Two copies of one CLIP may come from different libraries or under different names: these fields do not decide.
_INFORMATIVE = ("family", "name")
_FAMILIES = {"open_clip": "open_clip", "transformers": "transformers"}
_ACTIVATIONS = {  # class name -> name; transformers has classes of its own for the same functions
    "QuickGELU": "quick_gelu",
    "QuickGELUActivation": "quick_gelu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
}


@dataclass(frozen=True)
class ModelIdentity:
    """What must agree for a role map or an adapter to fit a CLIP (all but `family` and `name`)."""

    family: str
    name: str | None
    layers: int
    heads: int
    width: int
    patch_size: int
    resolution: int
    embed_dim: int
    text_layers: int
    text_heads: int
    text_width: int
    activation: str
    sha256: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "ModelIdentity":
        names = [f.name for f in fields(cls)]
        data = check_fields(data, required=names, where="model identity")
        for name in names:
            wanted = str if name in ("family", "activation", "sha256") else int
            if name != "name" and (not isinstance(data[name], wanted) or isinstance(data[name], bool)):
                raise ValueError(f"model identity: {name} must be {wanted.__name__}, got {data[name]!r}.")
        return cls(**{name: data[name] for name in names})

    def difference(self, other: "ModelIdentity") -> list[str]:
        """Fields that disagree, as "field: ours here, theirs there", in order of how telling they are; [] if none."""
        names = [f.name for f in fields(self) if f.name not in _INFORMATIVE]
        return [
            f"{name}: {getattr(self, name)!r} against {getattr(other, name)!r}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


def identity(clip: Any, *, name: str | None = None) -> ModelIdentity:
    """Identity of a CLIP of any supported library; `name` is kept for the reader and decides nothing."""
    from dear_plugin.towers import text_tower, vision_tower

    vision, text = vision_tower(clip), text_tower(clip)
    return ModelIdentity(
        family=_FAMILIES.get(type(clip).__module__.split(".")[0], "openai"),
        name=name,
        layers=vision.layers,
        heads=vision.heads,
        width=vision.width,
        patch_size=vision.patch_size,
        resolution=vision.input_resolution,
        embed_dim=vision.embed_dim,
        text_layers=text.layers,
        text_heads=text.heads,
        text_width=text.width,
        activation=activation_name(vision.blocks[0]),
        sha256=weights_hash(clip),
    )


def activation_name(block: Any) -> str:
    """ "quick_gelu", "gelu", "gelu_tanh", or the class name of another activation of a block's MLP."""
    activation = getattr(block.mlp, "gelu", None) or getattr(block.mlp, "activation_fn", None)
    if activation is None:
        return "unknown"
    kind = type(activation).__name__
    if kind == "GELU":
        return "gelu" if getattr(activation, "approximate", "none") == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(kind, kind)


def weights_hash(clip: Any) -> str:
    """sha256 over the state dict: per key in sorted order its name, its shape, its values rounded to fp16.

    Rounding to fp16 first makes a model and its half-precision copy one and the same model (OpenAI's files are
    half, and are loaded as half or as fp32 depending on the device). Keys and shapes are OpenAI's whatever the library.
    """
    import torch

    from dear_plugin.hosts import clip_host

    digest = hashlib.sha256()
    state = clip_host(clip).state_dict()
    for key in sorted(state):
        value = state[key].detach()
        rounded = value.to(device="cpu", dtype=torch.float16).contiguous()
        digest.update(f"{key}:{tuple(value.shape)};".encode())
        digest.update(rounded.view(torch.uint8).numpy().tobytes() if rounded.dim() else rounded.numpy().tobytes())
    return digest.hexdigest()
