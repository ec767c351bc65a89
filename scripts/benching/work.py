"""The pieces of work that are timed: forwards, a training step and its parts, and the step with a switch turned."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from dear_plugin import HeadInfo, HeadRole, RoleMap, load_backbone, loss_terms, wrap_clip_with_roles
from dear_plugin.config import CORE_ATTRIBUTES
from dear_plugin.speed import speed, switched
from dear_plugin.towers import vision_tower
from scripts.benching.measure import sync

SWITCHES = ("last_rows", "grouped_heads", "truncate_text", "own_layers", "reuse_trunk")
_SYLLABLES = ("ba", "ko", "ri", "du", "mel", "ton", "sa", "vi")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def clip_for(name: str, device: torch.device) -> nn.Module:
    """A backbone by name, or `random:<open_clip name>` for random weights of that geometry."""
    if not name.startswith("random:"):
        return load_backbone(name, device=device).model
    import open_clip

    torch.manual_seed(0)
    logging.getLogger().setLevel(logging.ERROR)  # that the weights are random is what was asked for
    model = open_clip.create_model(name.removeprefix("random:"), pretrained=None, force_quick_gelu=True)
    return model.to(device).eval()


def bench_roles(layers: int, heads: int) -> RoleMap:
    """The last four layers with every kind of head, in turn: the mask can't be left out and no role is favoured."""
    kinds = [HeadInfo(HeadRole.ATTRIBUTE, name) for name in CORE_ATTRIBUTES]
    kinds += [HeadInfo(HeadRole.MIXED), HeadInfo(HeadRole.GENERALIZATION)]
    turn = itertools.cycle(kinds)
    chosen = range(max(0, layers - 4), layers)
    return RoleMap(tuple(chosen), heads, tuple(tuple(next(turn) for _ in range(heads)) for _ in chosen))


def class_prompts(count: int) -> list[str]:
    """`count` different sentences of the usual length."""
    names = itertools.islice(itertools.product(_SYLLABLES, repeat=4), count)
    return [f"a photo of a {''.join(name[:2])} {''.join(name[2:])}." for name in names]


class Work:
    """A wrapped CLIP, a batch and a class list; every method is one thing to time."""

    def __init__(self, name: str, *, classes: int, batch: int, device: torch.device, precision: str = "fp32",
                 chunk: int | None = None) -> None:
        from open_clip.tokenizer import SimpleTokenizer

        self.device, self.dtype, self.chunk = device, _DTYPES[precision], chunk
        self.clip = clip_for(name, device)
        tower = vision_tower(self.clip)
        self.model = wrap_clip_with_roles(self.clip, bench_roles(tower.layers, tower.heads)).to(device)
        size = tower.input_resolution
        self.images = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0)).to(device)
        self.ids = SimpleTokenizer()(class_prompts(classes)).to(device)
        self.labels = (torch.arange(batch) % classes).to(device)
        self.prefix = self.model.text_prefix(self.ids)
        self.optimizer = torch.optim.AdamW(self.model.trainable_parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler(device.type) if precision == "fp16" else None
        self.trainable = sum(p.numel() for p in self.model.trainable_parameters())
        self.matmul_shape = (batch * tower.sequence_length, tower.width, 4 * tower.width)
        self._image_features = self.model.image_features

    def autocast(self, dtype: torch.dtype | None = None) -> contextlib.AbstractContextManager:
        dtype = dtype or self.dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not torch.float32)

    @torch.no_grad()
    def frozen_image(self) -> None:
        with self.autocast():
            self.clip.encode_image(self.images)

    @torch.no_grad()
    def image(self) -> None:
        with self.autocast():
            self.model.image_features(self.images)

    @torch.no_grad()
    def full_text(self) -> None:
        with self.autocast():
            self.clip.encode_text(self.ids)

    @torch.no_grad()
    def text(self) -> None:
        with self.autocast():
            self.model.text_features(self.prefix, chunk=self.chunk)

    @torch.no_grad()
    def _trunk_of(self, images: torch.Tensor) -> torch.Tensor:
        with self.autocast():
            return self.model.trunk(images)

    def step(self, mark: Callable[[str], None] = lambda part: None, *, prefix: object = None,
             dtype: torch.dtype | None = None, images: torch.Tensor | None = None) -> None:
        """Forward, backward, optimiser; `mark` is called after each part."""
        prefix, images = prefix or self.prefix, self.images if images is None else images
        with self.autocast(dtype):
            image = self._image_features(images, frozen=True)
            mark("images, adapted and frozen")
            text = self.model.text_features(prefix, chunk=self.chunk)
            mark("text")
            terms = loss_terms(
                logits=self.model.class_logits(image, text), labels=self.labels, image=image, text=text,
                frozen_text=prefix.frozen, fusion=self.model.adapter.fusion, lambda_reg=1.0, lambda_fusion=0.1)
        mark("loss")
        self.optimizer.zero_grad(set_to_none=True)
        if self.scaler is None:
            terms["total"].backward()
            mark("backward")
            self.optimizer.step()
        else:
            self.scaler.scale(terms["total"]).backward()
            mark("backward")
            self.scaler.step(self.optimizer)
            self.scaler.update()
        mark("optimiser")

    def parts(self, repeats: int) -> dict[str, list[float]]:
        """Milliseconds of each part of a step, and of the frozen layers below the tokens."""
        times: dict[str, list[float]] = {"trunk alone": []}
        for repeat in range(repeats + 1):
            last = [0.0]

            def mark(part: str, keep: bool = repeat > 0, last: list[float] = last) -> None:
                sync(self.device)
                now = time.perf_counter()
                if keep:
                    times.setdefault(part, []).append(1e3 * (now - last[0]))
                last[0] = now

            mark("", keep=False)
            self._trunk_of(self.images)
            mark("trunk alone")
            mark("", keep=False)
            self.step(mark)
        return times

    def switched_steps(self, names: tuple[str, ...], *, compiled: bool = False) -> dict[str, Callable[[], None]]:
        """A training step as shipped and with each switch turned; a step that no longer fits a switch is remade."""
        runs: dict[str, Callable[[], None]] = {"as shipped": self.step}
        for name in names:
            value = not getattr(speed(), name)
            with switched(**{name: value}):
                prefix = self.model.text_prefix(self.ids)  # its length is part of truncate_text
            runs[f"{name} {'on' if value else 'off'}"] = self._with(name, value, prefix)
        known = self._trunk_of(self.images)
        runs["trunk known (feature cache in memory)"] = lambda: self.step(images=known)
        last = self.images.to(memory_format=torch.channels_last)
        runs["images channels-last"] = lambda: self.step(images=last)
        if self.device.type == "cuda":
            pageable, pinned = self.images.cpu(), self.images.cpu().pin_memory()
            runs["batch copied from pageable memory"] = lambda: self.step(images=pageable.to(self.device))
            runs["batch copied from pinned memory"] = lambda: self.step(
                images=pinned.to(self.device, non_blocking=True))
        runs["text prefix made anew"] = lambda: self.step(prefix=self.model.text_prefix(self.ids))
        if self.dtype is torch.float32 and self.device.type == "cpu":
            runs["bf16 autocast"] = lambda: self.step(dtype=torch.bfloat16)
        if compiled:
            fast = torch.compile(self.model.image_features)
            runs["torch.compile of the image side"] = lambda: self._compiled(fast)
        return runs

    def _with(self, name: str, value: bool, prefix: object) -> Callable[[], None]:
        def run() -> None:
            with switched(**{name: value}):
                self.step(prefix=prefix)

        return run

    def _compiled(self, fast: Callable) -> None:
        plain, self._image_features = self._image_features, fast
        try:
            self.step()
        finally:
            self._image_features = plain
