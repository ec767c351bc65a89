"""Gradient checkpointing: a tower whose layers are computed again in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dear_plugin.precision import frozen_weights


class Recomputing:
    """A tower whose `run` and `run_last` keep only their input and compute the rest again for the gradient (exact).

    The host's flags are set anew then: by the time of the backward pass the caller's own context has ended.
    """

    def __init__(self, tower: Any, clip: nn.Module):
        self.tower, self.clip = tower, clip

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(self.tower.run, x, *args, **kwargs)

    def run_last(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self._kept(self.tower.run_last, x, *args, **kwargs)

    def _kept(self, run: Callable[..., Tensor], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not (torch.is_grad_enabled() and x.requires_grad):
            return run(x, *args, **kwargs)

        def again(x: Tensor) -> Tensor:
            with frozen_weights(self.clip):
                return run(x, *args, **kwargs)

        return checkpoint(again, x, use_reentrant=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tower, name)
