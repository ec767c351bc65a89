"""One case a method for parity with the published code: inputs, our side, and how far two results are apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tiny_world import NAMES, build, config, random_openai_state

from trainers.published import Keys, cocoop_keys, coop_keys, maple_keys, mmrl_keys, promptsrc_keys

CLASSES = NAMES[:3]
STEPS = 3
SGD = {"NAME": "sgd", "LR": 0.01}
ADAMW = {"NAME": "adamw", "LR": 0.001}


@dataclass(frozen=True)
class Case:
    """Settings of one method under the published keys, for a CLIP of some depth."""

    method: str
    node: str  # of TRAINER
    settings: dict[str, Any]
    keys: Keys
    model: str  # registered name
    ours: tuple = ()  # settings that only we have
    optim: tuple = tuple(SGD.items())


@dataclass(frozen=True)
class Geometry:
    """Widths of ViT-B/16, which some published code has as constants."""

    layers: int
    size: int

    def state(self) -> dict[str, torch.Tensor]:
        return random_openai_state(layers=self.layers, width=768, text_width=512, embed=512, size=self.size)

    def images(self) -> torch.Tensor:
        return torch.randn(2, 3, self.size, self.size, generator=torch.Generator().manual_seed(11))


GEOMETRIES = {"small": Geometry(3, 32), "ViT-B/16": Geometry(12, 224)}
LABELS = torch.tensor([2, 0])
WORDS = "a photo of a"


def cases(geometry: str) -> dict[str, Case]:
    full = geometry == "ViT-B/16"
    depth, text_depth, rows = (9, 9, list(range(6, 13))) if full else (3, 2, [2, 3])
    found = [
        Case("CoOp", "COOP", {"N_CTX": 4, "CTX_INIT": WORDS, "CSC": False, "CLASS_TOKEN_POSITION": "end"}, coop_keys(),
             "prompt_learner"),
        Case("CoCoOp", "COCOOP", {"N_CTX": 4, "CTX_INIT": WORDS}, cocoop_keys(), "prompt_learner", ("CHUNK", 4)),
        Case("MaPLe", "MAPLE", {"N_CTX": 2, "CTX_INIT": WORDS, "PROMPT_DEPTH": depth}, maple_keys(depth=depth),
             "MultiModalPromptLearner"),
        Case("PromptSRC", "PROMPTSRC", {
            "N_CTX_VISION": 4, "N_CTX_TEXT": 4, "CTX_INIT": WORDS, "PROMPT_DEPTH_VISION": depth,
            "PROMPT_DEPTH_TEXT": text_depth, "TEXT_LOSS_WEIGHT": 25, "IMAGE_LOSS_WEIGHT": 10, "GPA_MEAN": 2,
            "GPA_STD": 1,
        }, promptsrc_keys(text_depth=text_depth, vision_depth=depth), "VLPromptLearner"),
        Case("MMRL", "MMRL", {"ALPHA": 0.7, "REG_WEIGHT": 4.0, "N_REP_TOKENS": 5, "REP_LAYERS": rows, "REP_DIM": 64},
             mmrl_keys(layers=len(rows)), "MultiModalRepresentationLearner",
             ("LOGIT_SCALE", 100.0, "TEXT_REP_LAYERS", [])),
    ]
    named = {case.method: case for case in found}
    return named | {"MMRL with AdamW": replace(named["MMRL"], optim=tuple(ADAMW.items()))}


def our_trainer(case: Case, geometry: str, *, root: Path, backbone: Path, out: Path, classes: str = "base"):
    """Our trainer with the case's settings, not trained."""
    pairs = [*(part for pair in case.settings.items() for part in pair), *case.ours]
    extra = [part for key, value in zip(pairs[::2], pairs[1::2], strict=True)
             for part in (f"TRAINER.{case.node}.{key}", value)]
    size = GEOMETRIES[geometry].size
    optim = {f"OPTIM.{key}": value for key, value in case.optim}
    return build(config(
        case.method, root=root, backbone=backbone, out=out, classes=classes, extra=extra, **optim,
        **{"INPUT.SIZE": (size, size), "OPTIM.WARMUP_EPOCH": 0, "OPTIM.MAX_EPOCH": STEPS}))


def starting_values(case: Case, trainer) -> dict[str, torch.Tensor]:
    """Seeded values of every trained tensor under the published names."""
    own, draw = trainer._models[case.model].state_dict(), torch.Generator().manual_seed(17)
    shapes = {theirs: own[ours].shape if row is None else own[ours][row].shape
              for theirs, (ours, row) in case.keys.items()}
    return {name: 0.05 * torch.randn(shapes[name], generator=draw) for name in sorted(shapes)}


def under_published_names(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Ours -> theirs: rows of a stacked tensor one by one."""
    return {theirs: (tensors[ours] if row is None else tensors[ours][row]).detach().clone()
            for theirs, (ours, row) in case.keys.items()}


def our_result(case: Case, trainer, start: dict[str, torch.Tensor], images: torch.Tensor) -> dict[str, Any]:
    """logits, loss, grads of the first step, and the parameters after STEPS steps, each step an epoch of its own."""
    model = trainer._models[case.model]
    marker = {"prompt_learner.token_prefix": torch.zeros(1)}  # as in a published file: its names are read
    trainer.load_adapter_state(case.model, {**start, **marker})
    trainer.set_model_mode("eval")
    with torch.no_grad():
        result: dict[str, Any] = {"logits": trainer.model_inference(images)}
    trainer.set_model_mode("train")
    trainer.num_batches, trainer.max_epoch = 1, STEPS
    trainer.update_lr = lambda names=None: None  # the peers' schedule is not compared here
    for epoch in range(STEPS):
        trainer.epoch, trainer.batch_idx = epoch, 0
        shown = trainer.forward_backward({"img": images, "label": LABELS})
        if epoch == 0:
            result["loss"] = torch.tensor(shown["loss"])
            grads = {name: value.grad for name, value in model.named_parameters()}
            result["grads"] = under_published_names(case, grads)
    result["parameters"] = under_published_names(case, dict(model.named_parameters()))
    return result


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30))


def distances(case: Case, ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float]:
    """Per kind of result; the worst tensor counts.

    AdamW divides a gradient by its own size, so one that is only rounding error becomes a full step of any sign:
    entries with a gradient below 1e-5 of their tensor's largest are left out there, and their share is given.
    """
    found = {name: distance(ours[name], theirs[name]) for name in ("logits", "loss")}
    found["grads"] = max(distance(ours["grads"][name], theirs["grads"][name]) for name in theirs["grads"])
    floor = 1e-5 if dict(case.optim)["NAME"] == "adamw" else 0.0
    kept = {name: grad.abs() >= floor * grad.abs().max() for name, grad in theirs["grads"].items()}
    found["parameters"] = max(distance(ours["parameters"][name][keep], theirs["parameters"][name][keep])
                              for name, keep in kept.items())
    if floor:
        left_out = sum(int((~keep).sum()) for keep in kept.values())
        found["left out"] = left_out / sum(keep.numel() for keep in kept.values())
    return found
