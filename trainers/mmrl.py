"""MMRL: a shared space of tokens enters the upper layers of both towers, with its own classifier (Guo, Gu 2025)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yacs.config import CfgNode

from dear_plugin.encoder import TextPrefix, finish_text, make_text_prefix, read_with_tokens
from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes, cosine_logits
from dear_plugin.engine.distributed import by_classes
from dear_plugin.engine.identity import read_run
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import read_plain, text_tower, vision_tower
from trainers.published import mmrl_keys, read_published

SCORED = ("auto", "fused", "class")


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.MMRL` with the published keys (values of the published YAML), and three of ours."""
    node = cfg.TRAINER.MMRL = CfgNode()
    node.ALPHA = 0.7  # share of the class token's logits
    node.REG_WEIGHT = 1.0
    node.N_REP_TOKENS = 5
    node.REP_LAYERS = [6, 7, 8, 9, 10, 11, 12]  # layers with tokens of their own, counted from 1 as published
    node.REP_DIM = 512
    node.PREC = "amp"
    node.TEXT_REP_LAYERS = []  # ours: for a text tower of another depth; empty: REP_LAYERS
    node.LOGIT_SCALE = 100.0  # the published constant; 0: CLIP's own scale, which in the released weights is 100 too
    node.TEST_LOGITS = "auto"  # ours: auto: fused for classes that were trained on, class for others; or fused, class


class RepresentationLearner(nn.Module):
    """Tokens R [K, W], a linear map a layer into each tower, and the projection [D, E] of the tokens' outputs."""

    def __init__(self, vision: Any, text: Any, *, count: int, width: int, layers: tuple[int, int]) -> None:
        super().__init__()
        self.tokens = nn.Parameter(0.02 * torch.randn(count, width))
        # All layers of a tower start from the same map, and the projection at random, as published.
        to_vision, to_text = nn.Linear(width, vision.width), nn.Linear(width, text.width)
        self.to_vision = nn.ModuleList(copy.deepcopy(to_vision) for _ in range(layers[0]))
        self.to_text = nn.ModuleList(copy.deepcopy(to_text) for _ in range(layers[1]))
        self.projection = nn.Parameter(vision.width**-0.5 * torch.randn(vision.width, vision.embed_dim))

    def mapped(self, maps: nn.ModuleList) -> Tensor:
        """[layers, K, D] by `to_vision` or `to_text`."""
        return torch.stack([linear(self.tokens) for linear in maps])


def schedule_for(layers: list[int], tower: Any, *, key: str) -> TokenSchedule:
    """Tokens after the first position, at the inputs of `layers` (counted from 1)."""
    row = list(range(layers[0], layers[0] + len(layers))) if layers else []
    if not row or list(layers) != row or row[0] < 1 or row[-1] > tower.layers:
        raise ValueError(f"{key} is {list(layers)}; wanted a row of layers of the {tower.where}, 1 to {tower.layers}")
    return TokenSchedule(first_layer=layers[0] - 1, position=1, then="replace")


def loss_terms(
    *, class_logits: Tensor, token_logits: Tensor, labels: Tensor, image: Tensor, text: Tensor, frozen_image: Tensor,
    frozen_text: Tensor, alpha: float, reg_weight: float,
) -> dict[str, Tensor]:
    """Named terms and "total"; the regulariser sees the class token's and the text features, not the tokens'."""
    cosines = [F.cosine_similarity(a.float(), b.float(), dim=-1).mean()
               for a, b in ((image, frozen_image), (text, frozen_text))]
    ce = alpha * F.cross_entropy(class_logits, labels) + (1 - alpha) * F.cross_entropy(token_logits, labels)
    reg = reg_weight * ((1 - cosines[0]) + (1 - cosines[1]))
    return {"ce": ce, "reg": reg, "total": ce + reg}


def scored_logits(setting: str, here: tuple[str, str], trained: tuple[str, str]) -> str:
    """Which logits a test scores, "fused" or "class"; `here` and `trained` are (data set, all | base | new)."""
    if setting not in SCORED:
        raise ValueError(f"TRAINER.MMRL.TEST_LOGITS is {setting!r}; allowed: {', '.join(SCORED)}")
    if setting != "auto":
        return setting
    return "fused" if here[0] == trained[0] and trained[1] in ("all", here[1]) else "class"


@TRAINER_REGISTRY.register()
class MMRL(ClipTrainer):
    """Below the first layer with tokens nothing is learned: that part runs once, for adapted and frozen features."""

    precision_key = "TRAINER.MMRL.PREC"
    frozen_part = "trunk"

    def build_method(self) -> None:
        settings = self.cfg.TRAINER.MMRL
        self.text_tower, self.vision_tower = text_tower(self.clip), vision_tower(self.clip)
        self.text_layers = settings.TEXT_REP_LAYERS or settings.REP_LAYERS
        self.in_vision = schedule_for(settings.REP_LAYERS, self.vision_tower, key="TRAINER.MMRL.REP_LAYERS")
        self.in_text = schedule_for(self.text_layers, self.text_tower, key="TRAINER.MMRL.TEXT_REP_LAYERS")
        self.trained_on = self._data_here()
        scored_logits(settings.TEST_LOGITS, self.trained_on, self.trained_on)  # refuses an unknown setting early
        self._prefix: TextPrefix | None = None
        self.learner = self._learner(settings.REP_DIM)
        self.optim = build_optimizer(self.learner, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("MultiModalRepresentationLearner", self.learner, self.optim, self.sched)

    def _learner(self, width: int) -> RepresentationLearner:
        settings = self.cfg.TRAINER.MMRL
        return RepresentationLearner(
            self.vision_tower, self.text_tower, count=settings.N_REP_TOKENS, width=width,
            layers=(len(settings.REP_LAYERS), len(self.text_layers))).to(self.device)

    def _data_here(self) -> tuple[str, str]:
        return self.cfg.DATASET.NAME, self.cfg.DATASET.SUBSAMPLE_CLASSES

    @property
    def scored(self) -> str:
        return scored_logits(self.cfg.TRAINER.MMRL.TEST_LOGITS, self._data_here(), self.trained_on)

    def text_prefix(self) -> TextPrefix:
        """Class sentences up to the layer where tokens enter, and their frozen features; once per class list."""
        if self._prefix is None:
            ids = self.tokenize(self.zero_shot_prompts())
            with torch.autocast(self.device.type, enabled=False):  # the same whoever asks first
                self._prefix = make_text_prefix(self.text_tower, ids, self.in_text.first_layer)
        return self._prefix

    def activation_parts(self) -> dict[str, int]:
        text, vision, (classes, length) = self.text_tower, self.vision_tower, self.text_prefix().hidden.shape[:2]
        count, layers = self.cfg.TRAINER.MMRL.N_REP_TOKENS, vision.layers - self.in_vision.first_layer
        of_text = activation_bytes(
            text, sequences=classes, length=length + count, layers=text.layers - self.in_text.first_layer)
        images, length = self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE, vision.sequence_length + count
        of_images = activation_bytes(vision, sequences=images, length=length, layers=layers)
        return {f"text of {classes} classes": of_text, "images": of_images}

    def class_text_features(self) -> Tensor:
        tokens = self.learner.mapped(self.learner.to_text)
        prefix = self.text_prefix()
        return by_classes(
            lambda part: finish_text(self.text_tower, prefix.of(part), tokens, self.in_text), len(prefix.end))

    def first_trained_layer(self) -> int:
        return self.in_vision.first_layer

    def reusable(self, images: Tensor) -> Tensor:
        return self.trunk(images)

    def trunk(self, images: Tensor) -> Tensor:
        """[N, L, D] at the layer where tokens enter; what comes from the cache is that already."""
        if images.dim() == 3:
            return images
        with torch.no_grad():
            return self.vision_tower.run(self.vision_tower.embed(images), 0, self.in_vision.first_layer)

    def image_features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Trunk output -> features of the class token (frozen projection) and of the tokens (their own), [N, E]."""
        tower, first = self.vision_tower, self.in_vision.first_layer
        tokens = self.learner.mapped(self.learner.to_vision)
        x, tokens = read_with_tokens(tower, x, tokens, self.in_vision, read=0, start=first)
        mean = tower.ln_post(tokens).mean(1).to(self.learner.projection.dtype)
        return tower.project(x), mean @ self.learner.projection

    def both_logits(self, image: Tensor, tokens: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        fixed = self.cfg.TRAINER.MMRL.LOGIT_SCALE
        scale = image.new_tensor(fixed, dtype=torch.float32) if fixed else self.clip.logit_scale.exp()
        return cosine_logits(image, text, scale), cosine_logits(tokens, text, scale)

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        of_class, of_tokens = self.both_logits(*self.image_features(self.trunk(images)), text)
        alpha = self.cfg.TRAINER.MMRL.ALPHA
        return alpha * of_class + (1 - alpha) * of_tokens if self.scored == "fused" else of_class

    def losses(self, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """(named loss terms, fused logits [N, C])."""
        settings, tower, prefix = self.cfg.TRAINER.MMRL, self.vision_tower, self.text_prefix()
        with self.precision.autocast():
            x = self.trunk(images)
            with torch.no_grad():
                frozen = tower.project(read_plain(tower, x, 0, self.in_vision.first_layer))
            image, tokens = self.image_features(x)
            text = self.class_text_features()
            of_class, of_tokens = self.both_logits(image, tokens, text)
        terms = loss_terms(
            class_logits=of_class, token_logits=of_tokens, labels=labels, image=image, text=text, frozen_image=frozen,
            frozen_text=prefix.frozen, alpha=settings.ALPHA, reg_weight=settings.REG_WEIGHT)
        return terms, settings.ALPHA * of_class + (1 - settings.ALPHA) * of_tokens

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        return self.finish_step(*self.losses(images, labels), labels)

    def load_model(self, directory: str | Path, epoch: int | None = None) -> None:
        """Also learns which classes the model was trained on; without our record: the same data set, its base half."""
        super().load_model(directory, epoch)
        run, here = read_run(Path(directory)), self._data_here()
        there = run["identity"] if run else {"dataset": here[0], "classes": here[1].replace("new", "base")}
        self.trained_on = there["dataset"], there["classes"]
        print(f"Scoring {self.scored} logits: trained on {self.trained_on}, testing {here} (TRAINER.MMRL.TEST_LOGITS)")

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        """The width of the space is the file's (REP_DIM of another data set's training need not be known here)."""
        state = read_published(state, mmrl_keys(layers=len(self.learner.to_vision)), self.clip)
        width = state["tokens"].shape[-1] if "tokens" in state else self.learner.tokens.shape[1]
        if width != self.learner.tokens.shape[1]:
            self.learner = self._models[name] = self._learner(width)
        super().load_adapter_state(name, state)

    def run_facts(self) -> dict[str, Any]:
        return {"scored_logits": self.scored}
