"""Learning rates by epoch: the contract's three schedules, and the warm-up before them, with a state of plain data."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR, StepLR

from dear_plugin.engine.registry import check_name

SCHEDULES = ("single_step", "multi_step", "cosine")
WARMUPS = ("constant", "linear")


class WarmupScheduler:
    """Fixed rates for the first epochs, then another schedule from its beginning (not shortened, not shifted).

    Dassl's warm-up puts the whole inner scheduler, with the optimizer, into its state, which torch.load refuses since
    2.6. Here the state is numbers.
    """

    def __init__(self, optimizer: Optimizer, successor: LRScheduler, warmup_epoch: int) -> None:
        self.optimizer, self.successor, self.warmup_epoch = optimizer, successor, warmup_epoch
        self.base_lrs = [group["initial_lr"] for group in optimizer.param_groups]
        self.last_epoch = 0
        self._set(self.warmup_lrs(0))

    def warmup_lrs(self, epoch: int) -> list[float]:
        """Rates of the groups in a warm-up epoch."""
        raise TypeError(f"{type(self).__name__} must define warmup_lrs")

    def step(self, epoch: int | None = None) -> None:
        """Go to the next epoch. `epoch` is accepted for the signature's sake; schedules only go forward."""
        self.last_epoch += 1
        if self.last_epoch > self.warmup_epoch:
            self.successor.step()
        elif self.last_epoch == self.warmup_epoch:
            self._set(self.base_lrs)
        else:
            self._set(self.warmup_lrs(self.last_epoch))

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def get_last_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch, "successor": plain_state(self.successor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The optimizer's rates come back with the optimizer's own state."""
        self.last_epoch = state["last_epoch"]
        self.successor.load_state_dict(state["successor"])


class ConstantWarmupScheduler(WarmupScheduler):
    """All groups at one rate."""

    def __init__(self, optimizer: Optimizer, successor: LRScheduler, warmup_epoch: int, cons_lr: float) -> None:
        self.cons_lr = cons_lr
        super().__init__(optimizer, successor, warmup_epoch)

    def warmup_lrs(self, epoch: int) -> list[float]:
        return [self.cons_lr] * len(self.base_lrs)


class LinearWarmupScheduler(WarmupScheduler):
    """`min_lr` in epoch 0, then the share epoch / warmup_epoch of the base rate."""

    def __init__(self, optimizer: Optimizer, successor: LRScheduler, warmup_epoch: int, min_lr: float) -> None:
        self.min_lr = min_lr
        super().__init__(optimizer, successor, warmup_epoch)

    def warmup_lrs(self, epoch: int) -> list[float]:
        return [self.min_lr if epoch == 0 else rate * epoch / self.warmup_epoch for rate in self.base_lrs]


def plain_state(scheduler: Any) -> dict[str, Any]:
    """A scheduler's state as numbers, strings, lists and dicts."""
    return {key: dict(value) if isinstance(value, Counter) else value for key, value in scheduler.state_dict().items()}


def build_lr_scheduler(optimizer: Optimizer, optim_cfg: Any) -> LRScheduler | WarmupScheduler:
    """The schedule of the OPTIM node; stepped once an epoch by the trainer."""
    check_name(optim_cfg.LR_SCHEDULER, SCHEDULES, what="schedule", key="OPTIM.LR_SCHEDULER")
    steps = optim_cfg.STEPSIZE if isinstance(optim_cfg.STEPSIZE, (list, tuple)) else [optim_cfg.STEPSIZE]
    if optim_cfg.LR_SCHEDULER == "single_step":
        size = int(steps[-1]) if steps[-1] > 0 else optim_cfg.MAX_EPOCH
        inner: LRScheduler = StepLR(optimizer, size, gamma=optim_cfg.GAMMA)
    elif optim_cfg.LR_SCHEDULER == "multi_step":
        inner = MultiStepLR(optimizer, [int(step) for step in steps], gamma=optim_cfg.GAMMA)
    else:
        inner = CosineAnnealingLR(optimizer, optim_cfg.MAX_EPOCH)
    if optim_cfg.WARMUP_EPOCH <= 0:
        return inner
    check_name(optim_cfg.WARMUP_TYPE, WARMUPS, what="warm-up", key="OPTIM.WARMUP_TYPE")
    if not optim_cfg.WARMUP_RECOUNT:
        inner.last_epoch = optim_cfg.WARMUP_EPOCH  # a quirk kept: the recursion of cosine goes on from the full rate
    if optim_cfg.WARMUP_TYPE == "constant":
        return ConstantWarmupScheduler(optimizer, inner, optim_cfg.WARMUP_EPOCH, optim_cfg.WARMUP_CONS_LR)
    return LinearWarmupScheduler(optimizer, inner, optim_cfg.WARMUP_EPOCH, optim_cfg.WARMUP_MIN_LR)
