"""Whether a tower's blocks compute what borrowing them computes: run once at wrapping, on a few random tokens."""

from typing import Any

import torch

from dear_plugin.precision import evaluating
from dear_plugin.towers import TextTower

# Largest difference that rounding explains, as a share of what the block adds: fp32 on the CPU, and everything else.
_EXACT, _ROUNDED = 1e-3, 2e-2


@torch.no_grad()
def check_blocks(tower: Any, clip: torch.nn.Module, layers: range) -> None:
    """Refuse a layer whose own forward differs from x + attn(ln_1(x)), then x + mlp(ln_2(x)) with its weights.

    Names alone do not tell a post-LN block, a changed forward or a hook that rewrites an output. Raises ValueError with
    layer, class and difference. Half precision on the CPU and the meta device are left out: the host may not run there.
    """
    exact = tower.device.type == "cpu" and tower.dtype in (torch.float32, torch.float64)
    if not exact and tower.device.type in ("cpu", "meta"):
        return
    # A causal block brings its mask in one size: the whole context. For the others a few tokens tell all.
    length = tower.context_length if isinstance(tower, TextTower) else 5
    x = torch.randn(1, length, tower.width, generator=torch.Generator().manual_seed(0)).to(tower.device, tower.dtype)
    allow = torch.ones(length, length, dtype=torch.bool, device=tower.device)
    if isinstance(tower, TextTower):
        allow = allow.tril()
    with evaluating(clip), torch.autocast(tower.device.type, enabled=False):
        for layer in layers:
            own, borrowed = tower.run(x, layer, layer + 1), tower.run(x, layer, layer + 1, allow=allow)
            added = (own - x).float().norm()
            difference = float((own - borrowed).float().norm() / added.clamp_min(1e-12))
            if not difference <= (_EXACT if exact else _ROUNDED):
                block = tower.blocks[layer]
                raise ValueError(
                    f"{tower.where}, layer {layer}: a {type(getattr(block, 'layer', block)).__name__} does not compute "
                    f"x + attn(ln_1(x)), then x + mlp(ln_2(x)) with its own weights (off by {difference:.0%}): only "
                    "such pre-LN blocks can be borrowed, without hooks or adapters that change their output."
                )
