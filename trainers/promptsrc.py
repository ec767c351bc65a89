"""PromptSRC: deep prompts in both towers, held near frozen CLIP, averaged over epochs (Khattak et al., ICCV 2023)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from yacs.config import CfgNode

from dear_plugin.engine import TRAINER_REGISTRY, build_lr_scheduler, build_optimizer
from dear_plugin.engine.clip_method import ClipTrainer, activation_bytes, cosine_logits
from dear_plugin.towers import text_tower, vision_tower
from trainers.deep_prompts import check_depth, class_sentences, prompted_image, prompted_text, starting_vectors
from trainers.published import promptsrc_keys, read_published

TEACHER_TEMPLATES = 60  # of ImageNet's 80 sentences


def extend_cfg(cfg: CfgNode) -> None:
    """Add `TRAINER.PROMPTSRC` with the published keys and defaults, and two of ours."""
    node = cfg.TRAINER.PROMPTSRC = CfgNode()
    node.N_CTX_VISION = 4  # prompts per layer
    node.N_CTX_TEXT = 4
    node.CTX_INIT = "a photo of a"
    node.PREC = "fp16"
    node.PROMPT_DEPTH_VISION = 9  # layers with prompts of their own; 1: at the input only; 0 (vision): none
    node.PROMPT_DEPTH_TEXT = 9
    node.TEXT_LOSS_WEIGHT = 25.0
    node.IMAGE_LOSS_WEIGHT = 10.0
    node.GPA_MEAN = 15.0  # epoch, counted from 1, that weighs most in the average
    node.GPA_STD = 1.0
    node.TEACHER_TEMPLATES = []  # ours: sentences with {} for the text teacher; empty: the published 60
    node.KL_FROZEN_FIRST = True  # ours: KL(frozen || prompted), as the published code has it; else the other way round


class DeepPrompts(nn.Module):
    """Text prompts [J, K, D] and vision prompts [J, K, D], all free (no vision prompts with a depth of 0)."""

    def __init__(self, start: Tensor, *, text_depth: int, vision: tuple[int, int, int]) -> None:
        super().__init__()
        self.text = nn.Parameter(torch.cat([start[None], 0.02 * torch.randn(text_depth - 1, *start.shape)]))
        self.register_parameter("vision", nn.Parameter(0.02 * torch.randn(vision)) if vision[0] else None)


def teacher_templates(own: list[str]) -> list[str]:
    """Sentences with {}: `own`, else the plain one and the first 60 of ImageNet's 80 without it, as published."""
    if wrong := [sentence for sentence in own if "{}" not in sentence]:
        raise ValueError(f"TRAINER.PROMPTSRC.TEACHER_TEMPLATES: {wrong[0]!r} has no {{}} for the class name")
    if own:
        return list(own)
    from open_clip import OPENAI_IMAGENET_TEMPLATES

    plain = "a photo of a {}."
    others = [template("{}") for template in OPENAI_IMAGENET_TEMPLATES[:TEACHER_TEMPLATES]]
    return [plain, *(sentence for sentence in others if sentence != plain)]


def gaussian_weights(mean: float, std: float, epochs: int) -> list[float]:
    """Weight of each epoch 1..epochs in the average, summing to 1."""
    if std <= 0:
        raise ValueError(f"TRAINER.PROMPTSRC.GPA_STD is {std:g}; wanted more than 0")
    exponents = [-0.5 * ((epoch - mean) / std) ** 2 for epoch in range(1, epochs + 1)]
    shares = [math.exp(exponent - max(exponents)) for exponent in exponents]  # a far mean does not vanish
    return [share / sum(shares) for share in shares]


def loss_terms(
    *, logits: Tensor, labels: Tensor, image: Tensor, text: Tensor, frozen_image: Tensor, frozen_text: Tensor,
    scale: Tensor, text_weight: float, image_weight: float, frozen_first: bool = True,
) -> dict[str, Tensor]:
    """Named terms and "total". Features [N, E] and [C, E] are compared as unit vectors, in fp32.

    The divergence is KL(frozen || prompted), summed and divided by N * C, as in the published code.
    """
    image, text, frozen_image, frozen_text = (
        F.normalize(x.float(), dim=-1) for x in (image, text, frozen_image, frozen_text))
    frozen_logits = cosine_logits(frozen_image, frozen_text, scale)
    pair = [logits.log_softmax(1), frozen_logits.log_softmax(1)]  # F.kl_div(b, a) is KL(a || b)
    divergence = F.kl_div(*(pair if frozen_first else reversed(pair)), reduction="sum", log_target=True)
    terms = {
        "ce": F.cross_entropy(logits, labels),
        "text": text_weight * (text - frozen_text).abs().mean(),
        "image": image_weight * (image - frozen_image).abs().mean(),
        "kl": divergence / logits.numel(),
    }
    return {**terms, "total": sum(terms.values())}


@TRAINER_REGISTRY.register()
class PromptSRC(ClipTrainer):
    """One frozen CLIP gives prompted and teacher features; at the end the prompts become their average over epochs."""

    precision_key = "TRAINER.PROMPTSRC.PREC"

    def build_method(self) -> None:
        settings = self.cfg.TRAINER.PROMPTSRC
        text, vision = self.text_tower, self.vision_tower = text_tower(self.clip), vision_tower(self.clip)
        check_depth(settings.PROMPT_DEPTH_TEXT, text, key="TRAINER.PROMPTSRC.PROMPT_DEPTH_TEXT")
        check_depth(settings.PROMPT_DEPTH_VISION, vision, key="TRAINER.PROMPTSRC.PROMPT_DEPTH_VISION", least=0)
        words, count = settings.CTX_INIT, settings.N_CTX_TEXT
        self.sentences = class_sentences(text, self.tokenize, self.classnames, words=words, count=count)
        start = starting_vectors(text, self.tokenize, words=words, count=count, key="TRAINER.PROMPTSRC.N_CTX_TEXT")
        self.learner = DeepPrompts(
            start, text_depth=settings.PROMPT_DEPTH_TEXT,
            vision=(settings.PROMPT_DEPTH_VISION, settings.N_CTX_VISION, vision.width)).to(self.device)
        self.epoch_weights = gaussian_weights(settings.GPA_MEAN, settings.GPA_STD, self.cfg.OPTIM.MAX_EPOCH)
        self.average: dict[str, Tensor] = {}  # sum so far of weight x prompts, in fp64
        self._teacher: Tensor | None = None
        self.optim = build_optimizer(self.learner, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("VLPromptLearner", self.learner, self.optim, self.sched)

    def prompts(self) -> list[str]:
        return self.sentences.sentences

    def activation_parts(self) -> dict[str, int]:
        text, vision = self.text_tower, self.vision_tower
        classes, length = self.sentences.hidden.shape[:2]
        images, count = self.cfg.DATALOADER.TRAIN_X.BATCH_SIZE, self.cfg.TRAINER.PROMPTSRC.N_CTX_VISION
        return {
            f"text of {classes} classes": activation_bytes(text, sequences=classes, length=length, layers=text.layers),
            "images": activation_bytes(
                vision, sequences=images, length=vision.sequence_length + count, layers=vision.layers),
        }

    @torch.no_grad()
    def teacher_text(self) -> Tensor:
        """[C, E], frozen: the mean over templates of features that are not normalised before it, as published."""
        if self._teacher is None:
            rows = []
            for template in teacher_templates(self.cfg.TRAINER.PROMPTSRC.TEACHER_TEMPLATES):
                ids = self.tokenize([template.replace("{}", name) for name in self.classnames])
                rows.append(torch.cat([self.text_tower.encode_embedded(
                    self.text_tower.embed(part), self.text_tower.end_index(part)).float() for part in ids.split(256)]))
            self._teacher = torch.stack(rows).mean(0)
        return self._teacher

    def class_text_features(self) -> Tensor:
        return prompted_text(self.text_tower, self.sentences, self.learner.text)

    def logits(self, images: Tensor, text: Tensor) -> Tensor:
        with torch.no_grad():  # nothing learnable before the first layer
            x = self.vision_tower.embed(images)
        image = prompted_image(self.vision_tower, x, self.learner.vision)
        return cosine_logits(image, text, self.clip.logit_scale.exp())

    def losses(self, images: Tensor, labels: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """(named loss terms, logits [N, C])."""
        settings, vision, scale = self.cfg.TRAINER.PROMPTSRC, self.vision_tower, self.clip.logit_scale.exp()
        teacher = self.teacher_text()
        with self.precision.autocast():
            with torch.no_grad():
                x = vision.embed(images)
                frozen_image = prompted_image(vision, x, None)
            image, text = prompted_image(vision, x, self.learner.vision), self.class_text_features()
            logits = cosine_logits(image, text, scale)
        terms = loss_terms(
            logits=logits, labels=labels, image=image, text=text, frozen_image=frozen_image, frozen_text=teacher,
            scale=scale, text_weight=settings.TEXT_LOSS_WEIGHT, image_weight=settings.IMAGE_LOSS_WEIGHT,
            frozen_first=settings.KL_FROZEN_FIRST)
        return terms, logits

    def forward_backward(self, batch: dict) -> dict[str, float]:
        images, labels = self.parse_batch_train(batch)
        terms, logits = self.losses(images, labels)
        shown = self.finish_step(terms, logits, labels)
        if self.batch_idx + 1 == self.num_batches:
            self._add_to_average()
        return shown

    @torch.no_grad()
    def _add_to_average(self) -> None:
        """Only what is trained is averaged (the published code averages the frozen CLIP too, in half precision)."""
        weight = self.epoch_weights[self.epoch]
        for name, value in self.learner.named_parameters():
            self.average[name] = self.average.get(name, 0.0) + weight * value.double()
        if self.epoch + 1 == self.max_epoch:
            print("The prompts are now their Gaussian-weighted average over the epochs")
            for name, value in self.learner.named_parameters():
                value.copy_(self.average[name])

    def extra_state(self) -> dict:
        return {**super().extra_state(), "average": self.average}

    def load_extra_state(self, state: dict) -> None:
        super().load_extra_state(state)
        self.average = {name: value.to(self.device) for name, value in state["average"].items()}

    def load_adapter_state(self, name: str, state: Mapping[str, Tensor]) -> None:
        settings = self.cfg.TRAINER.PROMPTSRC
        keys = promptsrc_keys(text_depth=settings.PROMPT_DEPTH_TEXT, vision_depth=settings.PROMPT_DEPTH_VISION)
        super().load_adapter_state(name, read_published(state, keys, self.clip))
