"""Checks before the first step: labels, names, batch size, and why a loss is not finite."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from dear_plugin.engine.images import some

_ID_LIKE = re.compile(r"(n\d{8}|\d+|class[ _-]?\d+)$", re.IGNORECASE)
SAMPLE_IMAGES = 256


def check_labels(dataset: Any) -> None:
    """Labels are 0 .. C-1 without gaps in train_x, and no other split has a further one."""
    train = {item.label for item in dataset.train_x}
    missing = sorted(set(range(max(train) + 1)) - train)
    if missing or min(train) < 0:
        raise ValueError(
            f"train labels must be 0..{max(train)} without gaps; missing: {some(missing)}, smallest: {min(train)}. "
            "Check the split file"
        )
    for split in ("val", "test"):
        unknown = sorted({item.label for item in getattr(dataset, split)} - train)
        if unknown:
            raise ValueError(f"{split} has labels without a training image: {some(unknown)}. Check the split file")


def notes_on_names(names: Iterable[str]) -> list[str]:
    """A warning if most names look like ids, which CLIP cannot read, and one on names that occur twice."""
    names = list(names)
    ids = [name for name in names if _ID_LIKE.match(name)]
    notes = []
    if len(ids) * 2 > len(names):
        notes.append(
            f"Warning: class names look like ids ({some(ids, 3)}); CLIP reads them as words, so give real names"
        )
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        notes.append(f"Warning: class names occur twice: {some(repeated, 3)}; classes are told apart by label")
    return notes


def notes_on_batches(images: int, batch_size: int) -> list[str]:
    if images >= batch_size:
        return []
    return [
        f"Note: train_x has {images} images, fewer than DATALOADER.TRAIN_X.BATCH_SIZE {batch_size}: "
        "every step uses all of them and is not a full batch"
    ]


def sample_loader(images: Dataset, batch_size: int) -> DataLoader:
    """Up to SAMPLE_IMAGES of the images, evenly spaced, in order, without worker processes and feature cache."""
    images = copy.copy(images)
    images.features = None
    count = min(SAMPLE_IMAGES, len(images))
    return DataLoader(Subset(images, [i * len(images) // count for i in range(count)]), batch_size=batch_size)


@torch.no_grad()
def accuracy_on(loader: DataLoader, logits_of: Callable[[Tensor], Tensor], device: torch.device) -> float:
    """Percent of a loader's images that `logits_of` gets right."""
    hits = total = 0
    for batch in loader:
        hits += int((logits_of(batch["img"].to(device)).argmax(1).cpu() == batch["label"]).sum())
        total += len(batch["label"])
    return 100.0 * hits / total


def first_not_finite(terms: Mapping[str, Tensor]) -> str | None:
    """Name of the first loss term with a value that is infinite or not a number."""
    if not terms:
        return None
    finite = torch.stack(
        [torch.isfinite(term.detach()).all() for term in terms.values()]
    ).tolist()  # one wait for the device
    return next((name for name, fine in zip(terms, finite, strict=True) if not fine), None)


def diagnosis(models: Mapping[str, nn.Module], batch: Mapping[str, Any] | None, lr: float) -> str:
    """Whether the images, the parameters or the forward pass brought in the bad value, and the setting to change."""
    if paths := _bad_images(batch):
        return f"the input is not finite in {some(paths)}: replace these images, or check INPUT.PIXEL_STD"
    parameters = [
        (f"{model}.{name}", p.detach())
        for model, module in models.items()
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    for name, value in parameters:
        if not torch.isfinite(value).all():
            return f"parameter {name} is not finite after the previous step at lr {lr:g}: lower OPTIM.LR"
    advice = f"last lr {lr:g}; lower OPTIM.LR, or set the trainer's PREC to fp32 if it is not{_paths_of(batch)}"
    if not parameters:
        return f"the forward pass left the number range; {advice}"
    name, largest = max(((name, float(value.abs().max())) for name, value in parameters), key=lambda pair: pair[1])
    return f"the forward pass left the number range (largest parameter: {name}, {largest:.3g}); {advice}"


def _bad_images(batch: Mapping[str, Any] | None) -> list[str]:
    if batch is None or "img" not in batch:
        return []
    views = batch["img"] if isinstance(batch["img"], list) else [batch["img"]]
    bad = {row for view in views for row, image in enumerate(view) if not torch.isfinite(image).all()}
    paths = batch["impath"]
    if "hit" in batch:  # only images that the feature cache does not know have pixels
        paths = [path for path, hit in zip(paths, batch["hit"].tolist(), strict=True) if not hit]
    return [paths[row] for row in sorted(bad)]


def _paths_of(batch: Mapping[str, Any] | None) -> str:
    return f"; images of the batch: {some(batch['impath'], 3)}" if batch and "impath" in batch else ""
