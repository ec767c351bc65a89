"""Running means for the training line."""

from __future__ import annotations

from collections.abc import Mapping

import torch


class AverageMeter:
    """Current value and mean so far."""

    def __init__(self) -> None:
        self.val = self.sum = 0.0
        self.count = 0

    def update(self, value: float | torch.Tensor, n: int = 1) -> None:
        self.val = value.item() if isinstance(value, torch.Tensor) else float(value)
        self.sum += self.val * n
        self.count += n

    @property
    def avg(self) -> float:
        return self.sum / self.count if self.count else 0.0


class MetricMeter:
    """One AverageMeter a name, shown in the order in which the names came: `loss 1.1881 (1.1881) acc ...`."""

    def __init__(self) -> None:
        self.meters: dict[str, AverageMeter] = {}

    def update(self, values: Mapping[str, float | torch.Tensor] | None) -> None:
        for name, value in (values or {}).items():
            self.meters.setdefault(name, AverageMeter()).update(value)

    def __str__(self) -> str:
        return " ".join(f"{name} {meter.val:.4f} ({meter.avg:.4f})" for name, meter in self.meters.items())
