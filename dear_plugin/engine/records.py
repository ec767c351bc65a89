"""What a run leaves behind: result.json (schema below) and predictions.csv, both written in one move.

result.json, schema 1. Written at the end only: a folder without it is not finished. Percent is 0 to 100, never rounded.

    schema, status ("complete"), kind ("train" | "evaluation"), started, finished
    wall_time_s (training and test, all sessions of a resumed run)
    trainer, backbone, dataset, classes ("base" | "new" | "all"), shots, seed
    split ("test" | "val" | null if not tested), accuracy_pct, correct, total, macro_f1_pct
    per_class: [{label, name, correct, total, accuracy_pct}], classnames (label order), classnames_sha256
    metrics: the evaluator's own numbers; data: what the data set says of itself (split, picks, their hashes)
    skipped_images: paths left out by DATASET.SKIP_BROKEN
    images: {train, val, test}; loaded: {model: {file, epoch, sha256, tensors}} (evaluation and best_val; else {})
    zero_shot_sample: null | {images, source, zero_shot_pct, final_pct}
    trainable_parameters, epochs, steps, step_time_ms (median, this session), peak_memory_mib, device
    config (resolved), config_digest, git {commit, dirty}, versions, engine
    and whatever the trainer's run_facts() adds, e.g. role_map_hash
"""

from __future__ import annotations

import csv
import hashlib
import importlib.metadata
import platform
import resource
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dear_plugin.engine import ENGINE
from dear_plugin.engine.checkpoints import write_atomically
from dear_plugin.engine.config import flatten, has_key
from dear_plugin.engine.identity import RESULT_FILE, config_digest, now, write_json_atomically
from dear_plugin.engine.system import device_name

RESULT_SCHEMA = 1
PREDICTIONS_FILE = "predictions.csv"


@dataclass(frozen=True)
class Evaluation:
    """One pass over a split: labels, predictions and probabilities of the predicted class [N], image paths, metrics."""

    split: str
    labels: Tensor
    predictions: Tensor
    probabilities: Tensor
    paths: list[str]
    metrics: dict[str, float]

    @property
    def correct(self) -> int:
        return int((self.labels == self.predictions).sum())

    @property
    def total(self) -> int:
        return len(self.labels)

    @property
    def accuracy_pct(self) -> float:
        return 100.0 * self.correct / self.total


class Gatherer:
    """Collects an Evaluation batch by batch."""

    def __init__(self) -> None:
        self.labels: list[Tensor] = []
        self.predictions: list[Tensor] = []
        self.probabilities: list[Tensor] = []
        self.paths: list[str] = []

    def add(self, logits: Tensor, labels: Tensor, paths: list[str]) -> None:
        """Logits [N, C] and labels [N] of one batch."""
        best, index = logits.float().softmax(1).max(1)
        self.labels.append(labels.cpu())
        self.predictions.append(index.cpu())
        self.probabilities.append(best.cpu())
        self.paths += paths

    def evaluation(self, split: str, metrics: dict[str, float]) -> Evaluation:
        parts = (torch.cat(part) for part in (self.labels, self.predictions, self.probabilities))
        return Evaluation(split, *parts, self.paths, {name: float(value) for name, value in metrics.items()})


def per_class(evaluation: Evaluation, names: dict[int, str]) -> list[dict[str, Any]]:
    """Counts by label (names may repeat); a class without images has accuracy null."""
    rows = []
    for label, name in sorted(names.items()):
        of_class = evaluation.labels == label
        total, correct = int(of_class.sum()), int((evaluation.predictions[of_class] == label).sum())
        rows.append(
            {
                "label": label,
                "name": name,
                "correct": correct,
                "total": total,
                "accuracy_pct": 100.0 * correct / total if total else None,
            }
        )
    return rows


def result_of(evaluation: Evaluation | None, cfg: Any, *, kind: str, lab2cname: dict[int, str]) -> dict[str, Any]:
    """The fields that follow from the config and the evaluation; None if the run was not tested."""
    names = [lab2cname[label] for label in sorted(lab2cname)]
    result: dict[str, Any] = {
        "schema": RESULT_SCHEMA,
        "status": "complete",
        "kind": kind,
        "trainer": cfg.TRAINER.NAME,
        "backbone": cfg.MODEL.BACKBONE.NAME,
        "dataset": cfg.DATASET.NAME,
        "classes": cfg.DATASET.SUBSAMPLE_CLASSES if has_key(cfg, "DATASET.SUBSAMPLE_CLASSES") else "all",
        "shots": cfg.DATASET.NUM_SHOTS,
        "seed": cfg.SEED,
        "split": None,
        "accuracy_pct": None,
        "correct": None,
        "total": None,
        "macro_f1_pct": None,
        "per_class": [],
        "metrics": {},
    }
    if evaluation is not None:
        result |= {
            "split": evaluation.split,
            "accuracy_pct": evaluation.accuracy_pct,
            "correct": evaluation.correct,
            "total": evaluation.total,
            "macro_f1_pct": evaluation.metrics.get("macro_f1"),
            "per_class": per_class(evaluation, lab2cname),
            "metrics": evaluation.metrics,
        }
    return result | {
        "classnames": names,
        "classnames_sha256": hashlib.sha256("\n".join(names).encode()).hexdigest(),
        "config": dict(flatten(cfg)),
        "config_digest": config_digest(cfg),
        "git": git_state(),
        "versions": versions(),
        "device": device_name() if cfg.USE_CUDA else f"CPU ({platform.machine()})",
    }


def write_records(trainer: Any, kind: str) -> None:
    """predictions.csv, then result.json, of a MethodTrainer's run in its output folder."""
    folder, dataset, steps = Path(trainer.output_dir), trainer.dm.dataset, trainer.step_seconds
    trained = kind == "train"
    evaluation = None if trained and trainer.cfg.TEST.NO_TEST else trainer.evaluation
    if evaluation is not None:
        path = folder / PREDICTIONS_FILE
        write_predictions(path, evaluation, names=trainer.lab2cname, root=trainer.cfg.DATASET.ROOT)
    parameters = [p for model in trainer._models.values() for p in model.parameters() if p.requires_grad]
    result = result_of(evaluation, trainer.cfg, kind=kind, lab2cname=trainer.lab2cname) | {
        "engine": ENGINE,
        "loaded": trainer.loaded,
        "zero_shot_sample": trainer.zero_shot_sample,
        "data": getattr(dataset, "facts", {}),
        "skipped_images": getattr(dataset, "skipped_images", []),
        "images": {"train": len(dataset.train_x), "val": len(dataset.val or ()), "test": len(dataset.test)},
        "trainable_parameters": sum(p.numel() for p in parameters),
        "epochs": trainer.max_epoch if trained else 0,
        "steps": trainer.max_epoch * len(trainer.train_loader_x) if trained else 0,
        "step_time_ms": 1000 * statistics.median(steps) if steps else None,
        "peak_memory_mib": peak_memory_mib(),
        "wall_time_s": trainer.seconds(),
        "started": trainer.started,
        "finished": now(),
    }
    facts = trainer.run_facts()
    if clash := sorted(facts.keys() & result.keys()):
        raise ValueError(f"run_facts() may not replace the shared fields {', '.join(clash)}; rename them")
    write_json_atomically(folder / RESULT_FILE, result | facts)
    print(f"Result written to {folder / RESULT_FILE}")


def write_predictions(path: Path, evaluation: Evaluation, *, names: dict[int, str], root: str) -> None:
    """One row an image; its label columns give the reported accuracy exactly. Paths below `root` are relative to it."""
    base = Path(root).expanduser().absolute() if root else None

    def shown(image: str) -> str:
        absolute = Path(image).absolute()
        return absolute.relative_to(base).as_posix() if base and absolute.is_relative_to(base) else image

    def write(temporary: Path) -> None:
        with open(temporary, "w", newline="", encoding="utf-8") as handle:
            writer = csv.writer(handle)
            writer.writerow(["path", "true", "predicted", "probability", "true_label", "predicted_label"])
            rows = zip(
                evaluation.paths,
                evaluation.labels.tolist(),
                evaluation.predictions.tolist(),
                evaluation.probabilities.tolist(),
                strict=True,
            )
            for image, label, predicted, probability in rows:
                writer.writerow(
                    [
                        shown(image),
                        names.get(label, label),
                        names.get(predicted, predicted),
                        f"{probability:.6f}",
                        label,
                        predicted,
                    ]
                )

    write_atomically(path, write)


def git_state() -> dict[str, Any]:
    """Commit and whether the tree differs from it; nulls outside a checkout."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> str | None:
        try:
            run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return run.stdout.strip() if run.returncode == 0 else None

    commit = git("rev-parse", "--verify", "HEAD")
    status = git("status", "--porcelain") if commit else None
    return {"commit": commit, "dirty": bool(status) if status is not None else None}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that numbers depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("dear-plugin", "torch", "torchvision", "numpy", "pillow", "open_clip_torch", "safetensors"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    if found["dear-plugin"] is None:
        from dear_plugin.version import __version__

        found["dear-plugin"] = __version__
    return found


def peak_memory_mib() -> float:
    """Most memory used so far: of the GPU by torch, else of this process."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return torch.cuda.max_memory_allocated() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
