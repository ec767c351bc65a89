"""Accuracy, and the classification evaluator with the printed lines that CoOp's parsers read."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dear_plugin.engine.registry import EVALUATOR_REGISTRY


def compute_accuracy(output: Tensor | tuple | list, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    """Percent of rows of `output` [N, C] whose label [N] is among the k largest, for each k: one-element tensors."""
    logits = output[0] if isinstance(output, (tuple, list)) else output
    best = logits.topk(max(topk), dim=1).indices  # [N, K]
    hits = best == target.view(-1, 1)
    return [hits[:, :k].any(1).float().sum().reshape(1) * (100.0 / len(target)) for k in topk]


def macro_f1_pct(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Mean F1 in percent over the labels that occur in the ground truth; both [N]."""
    scores = []
    for label in np.unique(labels):
        true, said = labels == label, predictions == label
        scores.append(2 * np.sum(true & said) / (np.sum(true) + np.sum(said)))
    return 100.0 * float(np.mean(scores))


@EVALUATOR_REGISTRY.register()
class Classification:
    """Counts arg-max hits over batches."""

    def __init__(self, cfg: Any, lab2cname: dict[int, str] | None = None, **_: Any) -> None:
        self.cfg, self.lab2cname = cfg, lab2cname
        if cfg.TEST.PER_CLASS_RESULT and lab2cname is None:
            raise ValueError("TEST.PER_CLASS_RESULT wants the class names: build_evaluator(cfg, lab2cname=...)")
        self.reset()

    def reset(self) -> None:
        self._labels: list[np.ndarray] = []
        self._predictions: list[np.ndarray] = []

    def process(self, mo: Tensor, gt: Tensor) -> None:
        """Take in the model's output [N, C] and the labels [N] of a batch."""
        self._predictions.append(mo.argmax(1).cpu().numpy())
        self._labels.append(gt.cpu().numpy())

    def evaluate(self) -> OrderedDict[str, float]:
        """Print the result; return accuracy, error_rate, macro_f1 and, if asked for, perclass_accuracy, in percent."""
        if not self._labels:
            raise ValueError("nothing to evaluate: no batch was processed")
        labels, predictions = np.concatenate(self._labels), np.concatenate(self._predictions)
        correct, total = int(np.sum(labels == predictions)), len(labels)
        accuracy, macro_f1 = 100.0 * correct / total, macro_f1_pct(labels, predictions)
        results = OrderedDict(accuracy=accuracy, error_rate=100.0 - accuracy, macro_f1=macro_f1)
        print(
            f"=> result\n* total: {total:,}\n* correct: {correct:,}\n* accuracy: {accuracy:.1f}%\n"
            f"* error: {100.0 - accuracy:.1f}%\n* macro_f1: {macro_f1:.1f}%"
        )
        if self.cfg.TEST.PER_CLASS_RESULT:
            results["perclass_accuracy"] = self._per_class(labels, predictions)
        if self.cfg.TEST.COMPUTE_CMAT:
            self._save_confusion(labels, predictions)
        return results

    def _per_class(self, labels: np.ndarray, predictions: np.ndarray) -> float:
        print("=> per-class result")
        accuracies = []
        for label in np.unique(labels):
            hits = predictions[labels == label] == label
            accuracies.append(100.0 * float(np.mean(hits)))
            print(
                f"* class: {label} ({self.lab2cname[int(label)]})\ttotal: {len(hits):,}\tcorrect: {int(hits.sum()):,}\t"
                f"acc: {accuracies[-1]:.1f}%"
            )
        average = float(np.mean(accuracies))
        print(f"* average: {average:.1f}%")
        return average

    def _save_confusion(self, labels: np.ndarray, predictions: np.ndarray) -> None:
        """Row-normalised counts [C, C] over the occurring labels, as a tensor that loads without unpickling."""
        seen = np.union1d(labels, predictions)
        counts = np.zeros((len(seen), len(seen)))
        np.add.at(counts, (np.searchsorted(seen, labels), np.searchsorted(seen, predictions)), 1)
        rows = counts.sum(1, keepdims=True)
        path = Path(self.cfg.OUTPUT_DIR) / "cmat.pt"
        torch.save(torch.from_numpy(counts / np.where(rows == 0, 1, rows)), path)
        print(f"Confusion matrix is saved to {path}")
