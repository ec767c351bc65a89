"""Rates, counted work and peak memory."""

from __future__ import annotations

import ctypes
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def environment(device: torch.device) -> dict:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": f"{device} ({name})", "threads": torch.get_num_threads(), "torch": torch.__version__}


class _Counter(TorchDispatchMode):
    """Adds up what torch's registry says of each operation. (FlopCounterMode itself stumbles over no_grad modules.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        elif "scaled_dot_product" in str(func):
            query, key = args[1:3] if "backward" in str(func) else args[:2]
            products = 5 if "backward" in str(func) else 2
            self.total += products * 2 * query.numel() * key.shape[-2]
        elif "native_multi_head_attention" in str(func):  # the stock blocks' fused path: four projections, attention
            query = args[0]
            self.total += 2 * query.numel() * (4 * query.shape[-1] + 2 * query.shape[1])
        return out


def flops(run: Callable[[], None]) -> int:
    """Floating-point operations of a run, counted from the shapes of its products, backward included."""
    with _Counter() as counter:
        run()
    return counter.total


def matmul_rate(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, repeats: int = 7) -> float:
    """FLOP/s of one product [m, k] x [k, n], the median of some."""
    m, k, n = shape
    a, b = (torch.randn(size, device=device, dtype=dtype) for size in ((m, k), (k, n)))
    times = []
    for _ in range(repeats + 2):
        sync(device)
        began = time.perf_counter()
        a @ b
        sync(device)
        times.append(time.perf_counter() - began)
    return 2.0 * m * k * n / statistics.median(times[2:])


def peak_mib(run: Callable[[], None], device: torch.device) -> int:
    """Peak memory while `run` runs, in MiB: of the device (CUDA), else of this process, model included.

    Linux forgets an earlier peak on request; elsewhere the highest since the start is given.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        run()
        sync(device)
        return round(torch.cuda.max_memory_allocated(device) / 2**20)
    forget = Path("/proc/self/clear_refs")
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # memory that is free already is no part of this run
        forget.write_text("5")
    except (OSError, AttributeError):
        run()
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    run()
    status = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)
