"""A toy method (a linear layer on pixel means) and a toy data set (generated PNGs of three colours)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from yacs.config import CfgNode

from dear_plugin.engine import (
    DATASET_REGISTRY,
    TRAINER_REGISTRY,
    DatasetBase,
    Datum,
    build_lr_scheduler,
    build_optimizer,
)
from dear_plugin.engine.method import MethodTrainer

NAMES = ("red_thing", "green_thing", "blue_thing")
COLORS = ((200, 40, 40), (40, 200, 40), (40, 40, 200))
TRAIN, VAL, TEST = 6, 2, 4  # images a class


def make_images(root: Path) -> Path:
    """<root>/toy/<class>/<n>.png, coloured noise around the class colour."""
    draw = random.Random(7)
    for name, color in zip(NAMES, COLORS, strict=True):
        folder = root / "toy" / name
        folder.mkdir(parents=True)
        for number in range(TRAIN + VAL + TEST):
            image = Image.new("RGB", (10, 10), color)
            for x in range(10):
                for y in range(10):
                    image.putpixel((x, y), tuple(min(255, max(0, c + draw.randint(-90, 90))) for c in color))
            image.save(folder / f"{number:02d}.png")
    return root


@DATASET_REGISTRY.register()
class Toy(DatasetBase):
    """Reads what make_images wrote; the TOY settings take images away."""

    def __init__(self, cfg) -> None:
        folder = Path(cfg.DATASET.ROOT) / "toy"
        if not folder.is_dir():
            raise FileNotFoundError(f"missing split file {folder}/split.json: get it from the data page")

        def items(start: int, stop: int) -> list[Datum]:
            return [
                Datum(str(folder / name / f"{n:02d}.png"), label, 0, name)
                for label, name in enumerate(NAMES)
                for n in range(start, stop)
            ]

        train = items(0, TRAIN)[: cfg.TOY.TRAIN_IMAGES] if cfg.TOY.TRAIN_IMAGES else items(0, TRAIN)
        if cfg.TOY.ONE_EACH:
            train = [train[label * TRAIN] for label in range(len(NAMES))]
        val = items(TRAIN, TRAIN + VAL) if cfg.TOY.VAL else []
        super().__init__(train_x=train, val=val, test=items(TRAIN + VAL, TRAIN + VAL + TEST))


class PixelMeans(nn.Module):
    """A linear layer on the channel means, with noise so that random generators matter."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)
        nn.init.zeros_(self.head.weight)

    def forward(self, images):
        means = images.mean((2, 3))
        return self.head(F.dropout(means, 0.3, self.training))


def extend_toy(cfg) -> None:
    cfg.TOY = CfgNode({"TRAIN_IMAGES": 0, "ONE_EACH": False, "VAL": True, "POISON": -1})
    cfg.DATASET.SUBSAMPLE_CLASSES = "all"
    cfg.DATASET.SKIP_BROKEN = False


class Killed(RuntimeError):
    """Stands for a kill in the middle of training."""


class ToyMethod(MethodTrainer):
    """Cross-entropy on PixelMeans."""

    kill_at = -1  # step, counted from 0

    def build_model(self) -> None:
        self.model = PixelMeans(self.num_classes).to(self.device)
        self.optim = build_optimizer(self.model, self.cfg.OPTIM)
        self.sched = build_lr_scheduler(self.optim, self.cfg.OPTIM)
        self.register_model("toy_head", self.model, self.optim, self.sched)
        self.steps = 0

    def prompts(self) -> list[str]:
        return [f"a photo of a {name.replace('_', ' ')}." for name in self.dm.dataset.classnames]

    def zero_shot_logits(self, images):
        return images.mean((2, 3)) @ torch.eye(3)[:, : self.num_classes]

    def run_facts(self) -> dict:
        return {"toy_fact": 1}

    def forward_backward(self, batch):
        if self.steps + self.start_epoch * self.num_batches == self.kill_at:
            raise Killed("killed")
        images, labels = self.parse_batch_train(batch)
        if self.steps == self.cfg.TOY.POISON:
            batch["img"][1, 0, 0, 0] = float("inf")
            images = batch["img"]
        self.steps += 1
        logits = self.model(images)
        loss = F.cross_entropy(logits, labels)
        self.check_finite({"ce": loss})
        self.model_backward_and_update(loss)
        if self.batch_idx + 1 == self.num_batches:
            self.update_lr()
        return {"loss": loss.item(), "acc": (logits.argmax(1) == labels).float().mean().item()}


TRAINER_REGISTRY.register(ToyMethod)


@TRAINER_REGISTRY.register()
class ToyZeroShot(MethodTrainer):
    """Nothing to train."""

    trains = False

    def build_model(self) -> None:
        pass

    def model_inference(self, images):
        return images.mean((2, 3))


TOY_YAML = """
INPUT:
  SIZE: (8, 8)
  TRANSFORMS: ["random_flip", "normalize"]
DATALOADER:
  NUM_WORKERS: 0
  TRAIN_X:
    BATCH_SIZE: 5
OPTIM:
  NAME: sgd
  LR: 1e-1
  MAX_EPOCH: 2
  LR_SCHEDULER: cosine
  WARMUP_EPOCH: 1
  WARMUP_TYPE: constant
"""


def read_result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))
