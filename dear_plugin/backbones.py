"""A CLIP by name ("tiny", "ViT-B/16", "open_clip:<name>/<tag>") or by file, with its tokenizer and image values."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dear_plugin.hosts import clip_host
from dear_plugin.messages import nearest
from dear_plugin.model_identity import ModelIdentity, identity
from dear_plugin.towers import image_resolution, is_resnet
from dear_plugin.weight_files import read_safetensors, read_state_dict

ASSETS = Path(__file__).parent / "assets"
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
# OpenAI's names -> open_clip's. ResNets have the same name in both.
_OPENAI_VITS = {
    "ViT-B/32": "ViT-B-32",
    "ViT-B/16": "ViT-B-16",
    "ViT-L/14": "ViT-L-14",
    "ViT-L/14@336px": "ViT-L-14-336",
}
_OPENAI_RESNETS = ("RN50", "RN101", "RN50x4", "RN50x16", "RN50x64")
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HEAD_WIDTH = 64  # OpenAI's files do not name the number of heads: it is width / 64
_FREE_ROWS_SEED = 0  # of the token-embedding rows that tiny's vocabulary does not use
_ROWS, _ROW_WEIGHTS = "token_embedding.rows", "token_embedding.weight"
_START_ID, _END_ID = 49406, 49407


class Backbone(NamedTuple):
    """A CLIP and what is needed to feed it."""

    model: nn.Module
    tokenize: Callable[[list[str]], Tensor]  # texts -> LongTensor [n, context length]
    input_resolution: int  # pixels
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    identity: ModelIdentity | None  # None for a ResNet, whose roles cannot be asked for
    name: str


def load_backbone(
    name_or_path: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
    resnet: bool = False,
) -> Backbone:
    """Load a frozen CLIP in eval mode.

    Names: "tiny" (shipped), OpenAI's ViTs ("ViT-B/16", ...), "open_clip:<name>/<tag>"; or the path of an OpenAI
    archive, of a state dict in OpenAI's keys (.pt), or of a safetensors file.
    `precision` of the weights: fp32, fp16 or bf16.
    `resnet`: also take a CLIP with a ResNet ("RN50", ...), whose `identity` is then None; by default it is a
    ValueError, before any download. Weights that cannot be fetched are a FileNotFoundError that says what to do.
    """
    if precision not in _DTYPES:
        raise ValueError(f"precision must be one of {', '.join(_DTYPES)}, got {precision!r}.")
    text = os.fspath(name_or_path)
    if text == "tiny":
        model, name = build_openai_clip(unpack_tiny(_read_tiny()), precision=precision), "tiny"
    elif Path(text).is_file() or Path(text).is_dir():
        model, name = _from_file(Path(text), precision, resnet), Path(text).stem
    elif text.startswith("open_clip:"):
        return _finish(*_from_open_clip(text, precision, resnet), device=device)
    else:
        model, name = _from_openai_name(text, precision, resnet), text
    return _finish(model, name, Tokenizer(context_length=model.context_length), device=device)


def _finish(model: nn.Module, name: str, tokenizer: "Tokenizer", *, device: str | torch.device) -> Backbone:
    model = model.to(device).eval().requires_grad_(False)
    size, mean, std = image_values(model)
    known = None if is_resnet(model.visual) else identity(model, name=name)
    return Backbone(model, tokenizer, size, mean, std, known, name)


def image_values(clip: Any) -> tuple[int, tuple, tuple]:
    """Of the image transform: size in pixels, mean and std per channel (OpenAI's where the model does not say)."""
    visual = clip_host(clip).visual
    mean = tuple(getattr(visual, "image_mean", None) or OPENAI_MEAN)
    std = tuple(getattr(visual, "image_std", None) or OPENAI_STD)
    return image_resolution(visual), mean, std


def build_openai_clip(
    state_dict: Mapping[str, Tensor], *, precision: str = "fp32", resnet: bool = False
) -> nn.Module:
    """A CLIP from a state dict in OpenAI's keys; open_clip's own builder reads the geometry from the shapes."""
    from open_clip.model import build_model_from_openai_state_dict, convert_weights_to_lp

    state = {k: v for k, v in state_dict.items() if k not in ("input_resolution", "context_length", "vocab_size")}
    _check_openai_keys(state, resnet)
    dtype = _DTYPES[precision]
    try:
        # The builder casts to fp16 and back would round fp32 files: build in fp32, load, then cast what OpenAI casts.
        model = build_model_from_openai_state_dict(dict(state), cast_dtype=None if precision == "fp32" else dtype)
        model = model.float()
        model.load_state_dict(state)
    except (RuntimeError, KeyError) as error:
        raise ValueError(f"state dict does not fit CLIP's layout: {str(error).strip()[:500]}") from None
    if precision != "fp32":
        convert_weights_to_lp(model, dtype=dtype)
    model.visual.image_mean, model.visual.image_std = OPENAI_MEAN, OPENAI_STD
    return model.eval()


def _check_openai_keys(state: Mapping[str, Tensor], resnet: bool) -> None:
    is_resnet = any(key.startswith("visual.layer1.") for key in state)
    if is_resnet and not resnet:
        raise ValueError(_no_resnet("the file"))
    pooled = ["visual.attnpool.positional_embedding", "visual.attnpool.c_proj.weight"]
    wanted = [
        "visual.conv1.weight",
        *(pooled if is_resnet else ["visual.positional_embedding", "visual.proj"]),
        "text_projection",
        "positional_embedding",
        "token_embedding.weight",
        "ln_final.weight",
    ]
    missing = [key for key in wanted if key not in state]
    if missing:
        hint = ""
        if any(key.startswith("text_model.") for key in state):
            hint = (" It is in Hugging Face's: load it with transformers.CLIPModel.from_pretrained and give the model "
                    "to wrap_clip_with_roles.")
        raise ValueError(f"state dict is not in OpenAI's CLIP layout: it has no {', '.join(missing)}.{hint}")
    for key in ("ln_final.weight",) if is_resnet else ("visual.conv1.weight", "ln_final.weight"):
        if state[key].shape[0] % _HEAD_WIDTH:
            raise ValueError(f"{key} has width {state[key].shape[0]}, not a multiple of the head width {_HEAD_WIDTH}.")


def _no_resnet(name: str) -> str:
    return (
        f'{name} is a ResNet CLIP: roles need attention heads, use a ViT such as "ViT-B/16" '
        "(CoOp, CoCoOp and ZeroshotCLIP take ResNets; load_backbone takes resnet=True)."
    )


# -- by name and by file ----------------------------------------------------------------------------------------


def _from_file(path: Path, precision: str, resnet: bool) -> nn.Module:
    state = read_state_dict(path)
    if _ROWS in state:
        state = unpack_tiny(state)
    try:
        return build_openai_clip(state, precision=precision, resnet=resnet)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _from_openai_name(name: str, precision: str, resnet: bool) -> nn.Module:
    if name in _OPENAI_RESNETS and not resnet:
        raise ValueError(_no_resnet(name))
    known = {**{v: v for v in _OPENAI_VITS.values()}, **_OPENAI_VITS, **{name: name for name in _OPENAI_RESNETS}}
    if name not in known:
        names = ["tiny", *_OPENAI_VITS, *(_OPENAI_RESNETS if resnet else ())]
        raise ValueError(
            f"unknown backbone {name!r}: no such file, and not one of {', '.join(names)}, "
            f"open_clip:<name>/<tag>.{nearest(name, names)}"
        )
    cached = Path.home() / ".cache" / "clip" / f"{known[name]}{'px' if known[name].endswith('336') else ''}.pt"
    if cached.is_file():
        _check_sum(cached, known[name])
        return _from_file(cached, precision, resnet)
    return _create(known[name], "openai", precision, force_quick_gelu=True)


def _digest(file: Any) -> str:
    digest = hashlib.sha256()
    while part := file.read(1 << 24):
        digest.update(part)
    return digest.hexdigest()


def _check_sum(cached: Path, name: str) -> None:
    """Compare a file in OpenAI's cache with the sha256 that stands in its address."""
    import open_clip

    parts = (open_clip.get_pretrained_cfg(name, "openai") or {}).get("url", "").split("/")
    wanted = parts[-2] if len(parts) > 2 and len(parts[-2]) == 64 else ""
    if not wanted:
        return
    with cached.open("rb") as file:
        found = _digest(file)
    if found != wanted:
        raise ValueError(
            f"{cached} has sha256 {found[:12]}..., OpenAI's {cached.name} has {wanted[:12]}...: incomplete or another "
            "file. Delete it to fetch it anew; without network copy the right file there. To use it as it is, pass "
            "its path."
        )


def _from_open_clip(text: str, precision: str, resnet: bool) -> tuple[nn.Module, str, "Tokenizer"]:
    import open_clip

    name, _, tag = text.removeprefix("open_clip:").rpartition("/")
    if not name or not tag:
        raise ValueError(f"{text!r}: wanted open_clip:<name>/<tag>, for example open_clip:ViT-B-16/laion2b_s34b_b88k.")
    if name not in open_clip.list_models():
        raise ValueError(f"open_clip has no model {name!r}.{nearest(name, open_clip.list_models())}")
    if isinstance(open_clip.get_model_config(name)["vision_cfg"].get("layers"), list) and not resnet:
        raise ValueError(_no_resnet(name))
    tags = open_clip.list_pretrained_tags_by_model(name)
    if tag not in tags:
        raise ValueError(f"open_clip has no weights {tag!r} for {name}, but: {', '.join(tags) or 'none'}.")
    model = _create(name, tag, precision)
    inner = open_clip.get_tokenizer(name)
    if not hasattr(inner, "sot_token_id"):
        raise ValueError(f"{name} uses a {type(inner).__name__}, not CLIP's tokenizer: not supported.")
    return model, text, Tokenizer(inner=inner, context_length=model.context_length)


def _create(name: str, tag: str, precision: str, **kwargs: Any) -> nn.Module:
    import open_clip

    try:
        return open_clip.create_model(name, pretrained=tag, precision=precision, **kwargs)
    except (OSError, RuntimeError) as error:
        raise FileNotFoundError(
            f"weights of {name} ({tag}) are not in the local cache and could not be fetched "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0][:160]}). Without network: fetch the file "
            "elsewhere and pass its path, or use the shipped backbone, \"tiny\"."
        ) from error


# -- tiny -------------------------------------------------------------------------------------------------------


def pack_tiny(state_dict: Mapping[str, Tensor], used_token_ids: Iterable[int]) -> dict[str, Tensor]:
    """What tiny_clip.safetensors holds: OpenAI's keys in half, of the token embedding only the rows in use.

    The start and end tokens are always kept.
    """
    vocabulary = state_dict[_ROW_WEIGHTS].shape[0]
    rows = torch.tensor(sorted({*used_token_ids, *(i for i in (_START_ID, _END_ID) if i < vocabulary)}))
    packed = {key: value.detach().cpu().to(torch.float16).contiguous() for key, value in state_dict.items()}
    packed[_ROW_WEIGHTS] = packed[_ROW_WEIGHTS][rows].contiguous()
    packed[_ROWS] = rows.to(torch.int64)
    return packed


def unpack_tiny(packed: Mapping[str, Tensor], *, vocabulary: int = 49408) -> dict[str, Tensor]:
    """Inverse of pack_tiny in fp32; rows outside its vocabulary are drawn from N(0, 0.02) with a fixed seed."""
    for key in (_ROWS, _ROW_WEIGHTS):
        if key not in packed:
            raise ValueError(f"packed CLIP has no {key}: not a file of pack_tiny.")
    state = {key: value.float() for key, value in packed.items() if key != _ROWS}
    generator = torch.Generator().manual_seed(_FREE_ROWS_SEED)
    table = 0.02 * torch.randn(vocabulary, state[_ROW_WEIGHTS].shape[1], generator=generator)
    table[packed[_ROWS]] = state[_ROW_WEIGHTS]
    state[_ROW_WEIGHTS] = table
    return state


def _read_tiny() -> dict[str, Tensor]:
    path, description = ASSETS / "tiny_clip.safetensors", ASSETS / "tiny_clip.json"
    if not path.is_file():
        raise FileNotFoundError(f"the shipped backbone is missing: {path}; scripts/train_tiny_clip.py makes it.")
    if description.is_file():
        wanted = json.loads(description.read_text(encoding="utf-8")).get("sha256")
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if wanted and wanted != found:
            raise ValueError(f"{path} is damaged: sha256 {found[:16]}..., wanted {wanted[:16]}...; fetch it again.")
    return read_safetensors(path)


# -- text -------------------------------------------------------------------------------------------------------


class Tokenizer:
    """CLIP's tokenizer (open_clip's), which refuses a text that does not fit instead of cutting it."""

    def __init__(self, *, inner: Any = None, context_length: int = 77):
        if inner is None:
            from open_clip.tokenizer import SimpleTokenizer

            inner = SimpleTokenizer()
        self.inner, self.context_length = inner, context_length

    def length(self, text: str) -> int:
        """Number of tokens of a text, start and end token included."""
        return len(self.inner.encode(text)) + 2

    def __call__(self, texts: str | list[str], *, truncate: bool = False) -> Tensor:
        """Texts -> LongTensor [n, context length]; with `truncate` a long text loses its last words."""
        texts = [texts] if isinstance(texts, str) else list(texts)
        ids = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(f"a text must be a str, got {type(text).__name__}: {text!r}.")
            tokens = [self.inner.sot_token_id, *self.inner.encode(text), self.inner.eot_token_id]
            if len(tokens) > self.context_length:
                if not truncate:
                    short = text if len(text) <= 80 else text[:77] + "..."
                    raise ValueError(
                        f"text too long: {short!r} has {len(tokens)} tokens (start and end included), "
                        f"the limit is {self.context_length}."
                    )
                tokens = [*tokens[: self.context_length - 1], tokens[-1]]
            ids[row, : len(tokens)] = torch.tensor(tokens)
        return ids
