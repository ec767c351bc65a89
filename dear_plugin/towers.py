"""One view on a CLIP tower, whichever library made it: batch-first, without parameters of its own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dear_plugin.attention import attention_weights, masked_attention, pick_rows, projections
from dear_plugin.head_groups import HeadGroups
from dear_plugin.hosts import clip_host
from dear_plugin.model_identity import ModelIdentity, identity
from dear_plugin.speed import speed

__all__ = [
    "VisionTower", "TextTower", "vision_tower", "text_tower", "text_host", "is_resnet", "image_resolution",
    "ModelIdentity", "identity",
]


def vision_tower(clip: Any) -> "VisionTower":
    """View on the vision tower of a CLIP (OpenAI's clip, open_clip, transformers); others are refused by the part."""
    _refuse_wrappers(clip)
    return VisionTower(clip_host(clip).visual)


def text_tower(clip: Any) -> "TextTower":
    """View on the text tower of a CLIP (OpenAI's clip, open_clip, transformers); others are refused by the part."""
    _refuse_wrappers(clip)
    return TextTower(text_host(clip))


def text_host(clip: Any) -> Any:
    """What owns the text tower's parts: the CLIP itself, or its `text` (open_clip's CustomTextCLIP, a view)."""
    host = clip_host(clip)
    return getattr(host, "text", None) or host


def _refuse_wrappers(clip: Any) -> None:
    if isinstance(clip, torch.jit.ScriptModule):
        raise ValueError(
            "the CLIP is a TorchScript module, whose layers cannot be borrowed: load it with jit=False, "
            "or read its file with dear_plugin.load_backbone(path)."
        )
    if isinstance(clip, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        raise ValueError(f"the CLIP is inside {type(clip).__name__}: give its .module instead.")
    if hasattr(clip, "role_map"):
        raise ValueError("the CLIP is wrapped already (RoleCLIP): give its .clip to wrap it anew.")
    if not hasattr(clip_host(clip), "visual"):
        raise ValueError(
            f"a {type(clip).__name__} has no `visual`: wanted a CLIP of OpenAI's clip or of open_clip, or the "
            "CLIPModel of transformers (both towers)."
        )


class _Tower:
    """What both towers share: a row of stock blocks, called as they are or with our own mask."""

    _rule: dict[str, Any] = {}  # who reads whom where no mask is given

    def __init__(self, transformer: Any, where: str):
        self.blocks = list(getattr(transformer, "resblocks", ()))
        if not self.blocks:
            raise ValueError(f"{where} has no transformer.resblocks ({type(transformer).__name__}).")
        for index, block in enumerate(self.blocks):
            for part in ("ln_1", "attn", "ln_2", "mlp"):
                if not hasattr(block, part):
                    raise ValueError(f"{where}, layer {index}: a {type(block).__name__} has no {part}.")
            projections(block.attn, where=f"{where}, layer {index}, attn")
        self.where = where
        self.layers = len(self.blocks)
        self.heads = int(self.blocks[0].attn.num_heads)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that this tower computes with."""
        return self.blocks[0].attn.out_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks[0].attn.out_proj.weight.device

    def _run_stock(self, x: Tensor, start: int, stop: int, **kwargs: Any) -> Tensor:
        """Call the host's own blocks on x [N, L, D], in the axis order that each of them wants."""
        for block in self.blocks[start:stop]:
            if getattr(block.attn, "batch_first", True):
                x = block(x, **kwargs)
            else:
                # Permuting there and back leaves the strides as the host's own loop has them: bit-identical.
                x = block(x.permute(1, 0, 2), **kwargs).permute(1, 0, 2)
        return x

    def _run_masked(self, x: Tensor, start: int, stop: int, **kwargs: Any) -> Tensor:
        for index in range(start, stop):
            x = self._layer(index, x, **kwargs)
        return x

    def _layer(self, index: int, x: Tensor, *, rows: Tensor | None = None, **kwargs: Any) -> Tensor:
        """One layer on x [N, L, D] -> [N, L, D], or [N, R, D] for the `rows` that are wanted."""
        block = self.blocks[index]
        weights = projections(block.attn, where=f"{self.where}, layer {index}, attn")
        # Parts that only some hosts have: layer scale, and a norm after attention.
        scale_1, scale_2, norm = (getattr(block, n, _same) for n in ("ls_1", "ls_2", "ln_attn"))
        attended = masked_attention(weights, block.ln_1(x), rows=rows, **kwargs)
        x = (x if rows is None else pick_rows(x, rows)) + scale_1(norm(attended))
        return x + scale_2(block.mlp(block.ln_2(x)))

    def run_last(self, x: Tensor, rows: Tensor, allow: Tensor | HeadGroups | None = None) -> Tensor:
        """The last layer on x [N, L, D] for rows [R] or [N, R] only -> [N, R, D]; all L give keys and values.

        Exact (the spec's "dead work"): what the last layer writes to other rows is never read.
        """
        kwargs = {"allow": allow} if allow is not None else self._rule
        return self._layer(self.layers - 1, x, rows=rows, **kwargs)

    def attention(self, x: Tensor, layer: int, allow: Tensor | None = None) -> Tensor:
        """Attention probabilities [N, H, L, L] of one layer on its input x [N, L, D]."""
        block = self.blocks[layer]
        weights = projections(block.attn, where=f"{self.where}, layer {layer}, attn")
        return attention_weights(weights, block.ln_1(x), allow)


def _same(x: Tensor) -> Tensor:
    return x


class VisionTower(_Tower):
    """View on a ViT tower with a CLS token.

    layers, heads, width D, embed_dim E, input_resolution, patch_size, sequence_length = 1 + P, blocks, ln_post, proj.
    """

    def __init__(self, visual: Any):
        _check_vision(visual)
        super().__init__(visual.transformer, "vision tower")
        self.visual = visual
        self.width = int(visual.class_embedding.shape[-1])
        self.patch_size = int(visual.conv1.kernel_size[0])
        self.sequence_length = int(visual.positional_embedding.shape[0])
        self.input_resolution = _square_resolution(visual, self.patch_size, self.sequence_length)
        self.embed_dim = int(visual.proj.shape[1])

    # Read at each call, so that a cast, a move or a replaced weight is followed.
    @property
    def ln_pre(self) -> Callable[[Tensor], Tensor]:
        return self.visual.ln_pre

    @property
    def ln_post(self) -> Callable[[Tensor], Tensor]:
        return self.visual.ln_post

    @property
    def proj(self) -> Tensor:
        """[D, E]"""
        return self.visual.proj

    def embed(self, images: Tensor) -> Tensor:
        """Images [N, 3, R, R] -> [N, 1 + P, D], the input of layer 0 (after ln_pre); patch dropout plays no part."""
        self._check_images(images)
        visual = self.visual
        x = visual.conv1(images.to(visual.conv1.weight.dtype))  # [N, D, grid, grid]
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)  # [N, P, D]
        cls = visual.class_embedding.to(x.dtype).expand(x.shape[0], 1, -1)
        x = torch.cat([cls, x], dim=1) + visual.positional_embedding.to(x.dtype)
        return visual.ln_pre(x)

    def _check_images(self, images: Any) -> None:
        size = self.input_resolution
        if not isinstance(images, Tensor):
            raise TypeError(
                f"images must be a tensor [N, 3, {size}, {size}] made by the backbone's transform, "
                f"got {type(images).__name__}."
            )
        if images.dim() != 4 or tuple(images.shape[1:]) != (3, size, size):
            raise ValueError(f"images must have shape [N, 3, {size}, {size}], got {list(images.shape)}.")

    def run(self, x: Tensor, start: int, stop: int, allow: Tensor | HeadGroups | None = None, *,
            stock: bool = False) -> Tensor:
        """Layers start..stop-1 on x [N, L, D]; without a mask and a gradient the stock blocks, called as they are.

        With a gradient our own layer is faster: torch's attention module hands its projection a transposed view, whose
        product then runs sample by sample, forward and backward (measured: docs/speed.md). `stock` keeps the blocks.
        """
        own = speed().own_layers and not stock and torch.is_grad_enabled() and x.requires_grad
        if allow is None and not own:
            return self._run_stock(x, start, stop)
        return self._run_masked(x, start, stop, allow=allow)

    def project(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., E] by ln_post and the visual projection."""
        return self.visual.ln_post(x) @ self.visual.proj


class TextTower(_Tower):
    """View on a causal text tower read at the end token.

    layers, heads, width D, embed_dim E, context_length, blocks.
    """

    _rule = {"causal": True}

    def __init__(self, host: Any):
        _check_text(host)
        super().__init__(host.transformer, "text tower")
        self.host = host
        self.context_length = int(host.positional_embedding.shape[0])
        self.width = int(host.positional_embedding.shape[1])
        projection = host.text_projection
        self.embed_dim = int(projection.out_features if isinstance(projection, nn.Linear) else projection.shape[1])

    @property
    def positional_embedding(self) -> Tensor:
        """[context_length, D]"""
        return self.host.positional_embedding

    @property
    def token_embedding(self) -> Callable[[Tensor], Tensor]:
        """ids [C, L] -> [C, L, D]"""
        return self.host.token_embedding

    def embed(self, ids: Tensor) -> Tensor:
        """ids [C, L] with L up to the context length -> [C, L, D], positions added."""
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point():
            got = list(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"text must be token ids [C, L] of whole numbers, got {got}.")
        if ids.shape[1] > self.context_length:
            raise ValueError(f"text has {ids.shape[1]} positions, the tower has {self.context_length}.")
        x = self.host.token_embedding(ids).to(self.dtype)
        return x + self.host.positional_embedding[: ids.shape[1]].to(self.dtype)

    def end_index(self, ids: Tensor) -> Tensor:
        """ids [C, L] -> [C], the position that the feature is read from (the end token)."""
        pool = _pool_type(self.host)
        if pool == "argmax":
            return ids.argmax(dim=-1)
        end_id = getattr(self.host, "text_eos_id", getattr(self.host, "eos_id", None))
        return (ids == end_id).int().argmax(dim=-1)

    def run(
        self, x: Tensor, start: int, stop: int, causal: bool = True, *, allow: Tensor | HeadGroups | None = None
    ) -> Tensor:
        """Layers start..stop-1 on x [C, L, D].

        At full length the stock blocks run as they are; shorter or longer sequences run with the same causal rule.
        `allow` [L, L] replaces the causal rule; with `causal` False and no `allow` every position reads all.
        """
        if allow is not None:
            return self._run_masked(x, start, stop, allow=allow)
        if not causal or x.shape[1] != self.context_length:
            return self._run_masked(x, start, stop, causal=causal)
        # OpenAI's blocks hold the mask themselves; open_clip hands it to each block.
        mask = getattr(self.host, "attn_mask", None)
        return self._run_stock(x, start, stop, **({} if mask is None else {"attn_mask": mask}))

    def project(self, x: Tensor) -> Tensor:
        """[C, D] -> [C, E] by ln_final and the text projection."""
        x = self.host.ln_final(x).to(self.dtype)
        projection = self.host.text_projection
        return projection(x) if isinstance(projection, nn.Linear) else x @ projection

    def encode_embedded(self, x: Tensor, end: Tensor) -> Tensor:
        """x [C, L, D] with positions already added, end [C] -> [C, E]; positions after the longest end are dropped."""
        if speed().truncate_text:
            x = x[:, : int(end.max()) + 1]
        return self.project(read_plain(self, x, end))


def read_plain(tower: _Tower, x: Tensor, read: int | Tensor, start: int = 0) -> Tensor:
    """Layers `start` to the last on x [N, L, D] without tokens -> [N, D], the row `read` (one for all, or [N])."""
    if not speed().last_rows:
        x = tower.run(x, start, tower.layers)
        return x[:, read] if isinstance(read, int) else take_positions(x, read)
    x = tower.run(x, start, tower.layers - 1)
    rows = torch.tensor([read], device=x.device) if isinstance(read, int) else read[:, None]
    return tower.run_last(x, rows)[:, 0]


def take_positions(x: Tensor, index: Tensor) -> Tensor:
    """x [C, L, D], index [C] -> [C, D]."""
    return x[torch.arange(x.shape[0], device=x.device), index]


def is_resnet(visual: Any) -> bool:
    """Whether a vision tower is one of CLIP's ResNets, which have one attention layer, for pooling, and no blocks."""
    return hasattr(visual, "attnpool") or hasattr(visual, "layer1")


def image_resolution(visual: Any) -> int:
    """Side in pixels of the square images that a vision tower takes, of a ViT or a ResNet."""
    if is_resnet(visual):
        return _square_resolution(visual, 32, int(visual.attnpool.positional_embedding.shape[0]))
    return VisionTower(visual).input_resolution


def _check_vision(visual: Any) -> None:
    if is_resnet(visual):
        raise ValueError(
            f"the vision tower is a ResNet ({type(visual).__name__}), which has no attention heads to give roles to: "
            'use a ViT, for example "ViT-B/16".'
        )
    for part in ("conv1", "class_embedding", "positional_embedding", "ln_pre", "transformer", "ln_post", "proj"):
        if getattr(visual, part, None) is None:
            raise ValueError(f"the vision tower ({type(visual).__name__}) has no {part}: not a ViT with a CLS token.")
    pool = getattr(visual, "pool_type", "tok")
    if getattr(visual, "attn_pool", None) is not None or pool != "tok":
        raise ValueError(f"the vision tower pools by {pool!r} or an attn_pool, not by its CLS token: not supported.")
    if getattr(visual, "output_tokens", False):
        raise ValueError("the vision tower returns its tokens too (output_tokens=True): build it without.")


def _square_resolution(visual: Any, patch_size: int, length: int) -> int:
    size = getattr(visual, "image_size", None) or getattr(visual, "input_resolution", None)
    if size is None:
        size = round((length - 1) ** 0.5) * patch_size
    if isinstance(size, (tuple, list)):
        if size[0] != size[1]:
            raise ValueError(f"the vision tower takes images of {tuple(size)}: only square images are supported.")
        size = size[0]
    return int(size)


def _check_text(host: Any) -> None:
    for part in ("token_embedding", "positional_embedding", "transformer", "ln_final", "text_projection"):
        if getattr(host, part, None) is None:
            raise ValueError(f"the text tower ({type(host).__name__}) has no {part}: not CLIP's own transformer.")
    if _pool_type(host) not in ("argmax", "eos"):
        raise ValueError(f"the text tower pools by {_pool_type(host)!r}: only the end token is supported.")
    if getattr(host, "cls_emb", None) is not None:
        raise ValueError("the text tower appends a class embedding (cls_emb, as CoCa does): not supported.")
    if getattr(host, "output_tokens", False):
        raise ValueError("the text tower returns its tokens too (output_tokens=True): build it without.")
    blocks = getattr(host.transformer, "resblocks", ())
    if getattr(host, "attn_mask", None) is None and len(blocks) and getattr(blocks[0], "attn_mask", None) is None:
        raise ValueError("the text tower has no causal mask (attn_mask): only causal text towers are supported.")


def _pool_type(host: Any) -> str:
    return getattr(host, "text_pool_type", None) or getattr(host, "pool_type", None) or "argmax"
