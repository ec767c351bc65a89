"""CoCoOp: the learnt context is shifted by a vector that a small network makes of the image (Zhou et al. 2022)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from yacs.config import CfgNode

from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes, cosine_logits
from dear_plugin.towers import text_tower
from trainers.coop import PromptLearner
from trainers.published import cocoop_keys, read_published

REDUCTION = 16  # the network's hidden layer is this much narrower than the embedding, as published


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.COCOOP` with the published keys and defaults, and CHUNK (ours)."""
    cfg.TRAINER.COCOOP = CfgNode()
    cfg.TRAINER.COCOOP.N_CTX = 16  # context vectors
    cfg.TRAINER.COCOOP.CTX_INIT = ""  # words to start from; if given, N_CTX is their number
    cfg.TRAINER.COCOOP.PREC = "fp16"
    cfg.TRAINER.COCOOP.CHUNK = 2048  # sequences (images x classes) in the text tower at a time; 0: all. Same result


class ConditionalPromptLearner(PromptLearner):
    """Context `ctx` [n, D] and the network `meta_net`, E -> E / 16 -> D, whose output is added to every vector."""

    def __init__(self, tower: Any, tokenize: Any, classnames: list[str], *, n_ctx: int, ctx_init: str) -> None:
        super().__init__(tower, tokenize, classnames, n_ctx=n_ctx, ctx_init=ctx_init)
        hidden = max(1, tower.embed_dim // REDUCTION)
        self.meta_net = nn.Sequential(OrderedDict(
            linear1=nn.Linear(tower.embed_dim, hidden), relu=nn.ReLU(), linear2=nn.Linear(hidden, tower.width)))
        self.to(self.ctx.device)

    def for_images(self, shift: Tensor, classes: slice) -> Tensor:
        """shift [N, D] -> embedded prompts [N * C', L, D] of the C' classes in the slice, images outermost."""
        ctx = (self.ctx + shift[:, None])[:, None]  # [N, 1, n, D]
        before, after = self.before[classes], self.after[classes]  # [C', ., D]
        images, count = len(shift), len(after)
        rows = torch.cat([before.expand(images, -1, -1, -1), ctx.expand(-1, count, -1, -1),
                          after.expand(images, -1, -1, -1)], 2)
        return (rows + self.positions).flatten(0, 1)


@TRAINER_REGISTRY.register()
class CoCoOp(ClipTrainer):
    """Cross-entropy; the text tower runs for every pair of image and class, in chunks that change nothing."""

    precision_key = "TRAINER.COCOOP.PREC"
    takes_resnet = True
    frozen_part = "image"
    memory_key = "TRAINER.COCOOP.CHUNK"

    def build_method(self) -> None:
        settings = self.cfg.TRAINER.COCOOP
        self.tower = text_tower(self.clip)
        self.prompt_learner = ConditionalPromptLearner(
            self.tower, self.tokenize, self.classnames, n_ctx=settings.N_CTX, ctx_init=settings.CTX_INIT)
        self.optim = build_optimizer(self.prompt_learner, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("prompt_learner", self.prompt_learner, self.optim, self.sched)

    def prompts(self) -> list[str]:
        return self.prompt_learner.prompts

    def activation_parts(self) -> dict[str, int]:
        learner = self.prompt_learner
        pairs = self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE * len(learner.after)
        at_once = min(pairs, self.cfg.TRAINER.COCOOP.CHUNK or pairs)
        size = activation_bytes(
            self.tower, sequences=at_once, length=learner.positions.shape[0], layers=self.tower.layers)
        return {f"text of {at_once} of {pairs} pairs of image and class": size}

    def model_inference(self, images: Tensor) -> Tensor:
        """Logits [N, C]. The text features belong to the image, so there is nothing to keep between batches."""
        with self.precision.autocast():
            return self.pair_logits(images)

    def pair_logits(self, images: Tensor) -> Tensor:
        """Logits [N, C]; chunks are recomputed in the backward pass, so a step's memory grows with CHUNK alone."""
        image = F.normalize(self.frozen_image(images).float(), dim=-1)  # the network sees unit vectors
        shift = self.prompt_learner.meta_net(image).float()
        rows: dict[int, list[Tensor]] = {}
        parts = list(self._chunks(len(images), len(self.prompt_learner.after)))
        for some, classes in parts:
            if len(parts) > 1 and torch.is_grad_enabled():
                part = checkpoint(self._part, image[some], shift[some], classes, use_reentrant=False)
            else:
                part = self._part(image[some], shift[some], classes)
            rows.setdefault(some.start, []).append(part)
        return torch.cat([torch.cat(of_images, 1) for of_images in rows.values()])

    def _chunks(self, images: int, classes: int) -> Iterator[tuple[slice, slice]]:
        """Slices of images and classes with at most CHUNK pairs: whole class lists where they fit."""
        limit = self.cfg.TRAINER.COCOOP.CHUNK or images * classes
        if limit < 0:
            raise ValueError(f"TRAINER.COCOOP.CHUNK is {limit}; wanted 0 (all) or more")
        width, height = min(classes, limit), max(1, limit // classes)
        for row in range(0, images, height):
            for column in range(0, classes, width):
                yield slice(row, row + height), slice(column, column + width)

    def _part(self, image: Tensor, shift: Tensor, classes: slice) -> Tensor:
        """Logits [N', C'] of some images and the classes in the slice."""
        learner = self.prompt_learner
        rows, end = learner.for_images(shift, classes).to(self.tower.dtype), learner.end[classes]
        text = self.tower.encode_embedded(rows, end.repeat(len(image))).unflatten(0, (len(image), -1))  # [N', C', E]
        scale = self.clip.logit_scale.exp()
        return torch.stack([cosine_logits(image[i : i + 1], text[i], scale)[0] for i in range(len(image))])

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        with self.precision.autocast():
            logits = self.pair_logits(images)
            loss = F.cross_entropy(logits, labels)
        return self.finish_step({"total": loss}, logits, labels)

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        super().load_adapter_state(name, read_published(state, cocoop_keys(), self.clip))
