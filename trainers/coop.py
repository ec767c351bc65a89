"""CoOp: the words around the class name become learnable vectors (Zhou et al. 2022; spec of the published code)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yacs.config import CfgNode

from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes, cosine_logits
from dear_plugin.engine.distributed import by_classes
from dear_plugin.towers import text_tower
from trainers.published import coop_keys, read_published

POSITIONS = ("end", "middle", "front")


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.COOP` with CoOp's published keys and defaults."""
    cfg.TRAINER.COOP = CfgNode()
    cfg.TRAINER.COOP.N_CTX = 16  # context vectors
    cfg.TRAINER.COOP.CSC = False  # one context per class
    cfg.TRAINER.COOP.CTX_INIT = ""  # words to start from; if given, N_CTX is their number and CSC is off, as published
    cfg.TRAINER.COOP.PREC = "fp16"
    cfg.TRAINER.COOP.CLASS_TOKEN_POSITION = "end"


class PromptLearner(nn.Module):
    """Context vectors `ctx` [n, D] (or [C, n, D]) and the frozen embeddings around them for one class list."""

    def __init__(self, tower: Any, tokenize: Any, classnames: list[str], *, n_ctx: int, ctx_init: str = "",
                 class_specific: bool = False, position: str = "end") -> None:
        super().__init__()
        if position not in POSITIONS:
            raise ValueError(f"TRAINER.COOP.CLASS_TOKEN_POSITION is {position!r}; allowed: {', '.join(POSITIONS)}")
        words = ctx_init.replace("_", " ").split()
        if words:
            n_ctx, class_specific = len(words), False
        prefix = " ".join(words) if words else " ".join(["X"] * n_ctx)
        prompts = [f"{prefix} {name}." for name in classnames]
        ids = tokenize(prompts)  # [C, 77]
        with torch.no_grad():
            embedded = tower.token_embedding(ids).float()  # [C, 77, D]
            # a word is not always one token: the first n positions after the start token are taken, as published
            start = embedded[0, 1 : 1 + n_ctx].clone() if words else torch.empty(n_ctx, embedded.shape[-1])
            if not words:
                start.normal_(std=0.02)
        if class_specific:
            start = torch.empty(len(classnames), n_ctx, embedded.shape[-1]).normal_(std=0.02)
        self.ctx = nn.Parameter(start.to(embedded.device))
        self.prompts, self.position = prompts, position
        self.end = tower.end_index(ids)
        length = int(self.end.max()) + 1  # exact: the mask is causal, nothing after the end token is read
        name_ids = tokenize(classnames)
        self.name_lengths = (tower.end_index(name_ids) - 1).tolist()
        self.register_buffer("before", embedded[:, :1], persistent=False)  # start token
        self.register_buffer("after", embedded[:, 1 + n_ctx : length], persistent=False)  # name, full stop, end token
        self.register_buffer("positions", tower.positional_embedding[:length].detach().float(), persistent=False)

    def forward(self) -> Tensor:
        """Embedded prompts with positions added, [C, L, D]."""
        ctx = self.ctx if self.ctx.dim() == 3 else self.ctx.expand(len(self.after), -1, -1)
        if self.position == "end":
            rows = torch.cat([self.before, ctx, self.after], 1)
        else:
            half = ctx.shape[1] // 2 if self.position == "middle" else 0
            pieces = [torch.cat([self.before[c], ctx[c, :half], self.after[c, :m], ctx[c, half:], self.after[c, m:]])
                      for c, m in enumerate(self.name_lengths)]
            rows = torch.stack(pieces)
        return rows + self.positions


@TRAINER_REGISTRY.register()
class CoOp(ClipTrainer):
    """Cross-entropy on the logits of learnt prompts; both encoders stay frozen."""

    precision_key = "TRAINER.COOP.PREC"
    takes_resnet = True
    frozen_part = "image"

    def build_method(self) -> None:
        settings = self.cfg.TRAINER.COOP
        self.tower = text_tower(self.clip)
        self.prompt_learner = PromptLearner(
            self.tower, self.tokenize, self.classnames, n_ctx=settings.N_CTX, ctx_init=settings.CTX_INIT,
            class_specific=settings.CSC, position=settings.CLASS_TOKEN_POSITION)
        self.optim = build_optimizer(self.prompt_learner, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("prompt_learner", self.prompt_learner, self.optim, self.sched)

    def prompts(self) -> list[str]:
        return self.prompt_learner.prompts

    def activation_parts(self) -> dict[str, int]:
        classes, length = self.prompt_learner.after.shape[0], self.prompt_learner.positions.shape[0]
        size = activation_bytes(self.tower, sequences=classes, length=length, layers=self.tower.layers)
        return {f"text of {classes} classes": size}

    def class_text_features(self) -> Tensor:
        rows, end = self.prompt_learner().to(self.tower.dtype), self.prompt_learner.end
        return by_classes(lambda part: self.tower.encode_embedded(rows[part], end[part]), len(end))

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        return cosine_logits(self.frozen_image(images), text, self.clip.logit_scale.exp())  # nothing learnt in images

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        with self.precision.autocast():
            logits = self.logits(images, self.class_text_features())
            loss = F.cross_entropy(logits, labels)
        return self.finish_step({"total": loss}, logits, labels)

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        super().load_adapter_state(name, read_published(state, coop_keys(), self.clip))
