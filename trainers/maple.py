"""MaPLe: deep text prompts, and vision prompts that linear maps derive from them (Khattak et al., CVPR 2023)."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yacs.config import CfgNode

from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes, cosine_logits
from dear_plugin.towers import text_tower, vision_tower
from trainers.deep_prompts import check_depth, class_sentences, prompted_image, prompted_text, starting_vectors
from trainers.published import maple_keys, read_published


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.MAPLE` with the published keys and defaults."""
    cfg.TRAINER.MAPLE = CfgNode()
    cfg.TRAINER.MAPLE.N_CTX = 2  # prompts per layer
    cfg.TRAINER.MAPLE.CTX_INIT = "a photo of a"  # the first N_CTX of its tokens are learned, the others stay as words
    cfg.TRAINER.MAPLE.PREC = "fp16"
    cfg.TRAINER.MAPLE.PROMPT_DEPTH = 9  # layers with prompts of their own; 1: at the input only


class CoupledPrompts(nn.Module):
    """Text prompts [J, K, D of text] and one linear map a layer to the vision prompts [J, K, D of vision]."""

    def __init__(self, start: Tensor, *, depth: int, vision_width: int) -> None:
        super().__init__()
        count, width = start.shape
        self.text = nn.Parameter(torch.cat([start[None], 0.02 * torch.randn(depth - 1, count, width)]))
        first, deeper = nn.Linear(width, vision_width), nn.Linear(width, vision_width)
        self.to_vision = nn.ModuleList([first, *(copy.deepcopy(deeper) for _ in range(depth - 1))])  # as published

    def for_vision(self) -> Tensor:
        """[J, K, D of vision]"""
        return torch.stack([linear(row) for linear, row in zip(self.to_vision, self.text, strict=True)])


@TRAINER_REGISTRY.register()
class MaPLe(ClipTrainer):
    """Cross-entropy on the logits of prompted towers; the gradients of both reach the text prompts."""

    precision_key = "TRAINER.MAPLE.PREC"

    def build_method(self) -> None:
        settings = self.cfg.TRAINER.MAPLE
        self.text_tower, self.vision_tower = text_tower(self.clip), vision_tower(self.clip)
        for tower in (self.text_tower, self.vision_tower):
            check_depth(settings.PROMPT_DEPTH, tower, key="TRAINER.MAPLE.PROMPT_DEPTH")
        self.sentences = class_sentences(
            self.text_tower, self.tokenize, self.classnames, words=settings.CTX_INIT, count=settings.N_CTX)
        start = starting_vectors(
            self.text_tower, self.tokenize, words=settings.CTX_INIT, count=settings.N_CTX, key="TRAINER.MAPLE.N_CTX")
        self.learner = CoupledPrompts(
            start, depth=settings.PROMPT_DEPTH, vision_width=self.vision_tower.width).to(self.device)
        self.optim = build_optimizer(self.learner, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("MultiModalPromptLearner", self.learner, self.optim, self.sched)

    def prompts(self) -> list[str]:
        return self.sentences.sentences

    def activation_parts(self) -> dict[str, int]:
        text, vision = self.text_tower, self.vision_tower
        classes, length = self.sentences.hidden.shape[:2]
        images, count = self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE, self.learner.text.shape[1]
        return {
            f"text of {classes} classes": activation_bytes(text, sequences=classes, length=length, layers=text.layers),
            "images": activation_bytes(
                vision, sequences=images, length=vision.sequence_length + count, layers=vision.layers),
        }

    def class_text_features(self) -> Tensor:
        return prompted_text(self.text_tower, self.sentences, self.learner.text)

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        with torch.no_grad():  # nothing learnable before the first layer
            x = self.vision_tower.embed(images)
        image = prompted_image(self.vision_tower, x, self.learner.for_vision())
        return cosine_logits(image, text, self.clip.logit_scale.exp())

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        with self.precision.autocast():
            logits = self.logits(images, self.class_text_features())
            loss = F.cross_entropy(logits, labels)
        return self.finish_step({"total": loss}, logits, labels)

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        keys = maple_keys(depth=len(self.learner.to_vision))
        super().load_adapter_state(name, read_published(state, keys, self.clip))
