"""Precision and run mode: fp32 for what trains and for half models on CPU, eval mode for the frozen CLIP."""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

HALF_ON_CPU = (
    "dear_plugin: the CLIP is in half precision on the CPU, where its layers are slow or missing; it is computed in "
    "fp32 and outputs keep the half dtype."
)


class Float32Module(nn.Module):
    """A module whose floating tensors stay fp32, whatever .half(), .bfloat16() or .to(dtype) is called on or above it.

    Trained parameters in half precision lose small updates and overflow (ours: no setting for it). Moves are followed.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Float32Module":
        return super()._apply(in_float32(fn), recurse)


def in_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`fn` of nn.Module._apply without its cast: the device follows `fn`, floating tensors are fp32."""

    def apply(tensor: Tensor) -> Tensor:
        changed = fn(tensor)
        if not tensor.is_floating_point() or changed.dtype == torch.float32:
            return changed
        return tensor.to(device=changed.device, dtype=torch.float32)

    return apply


def is_half_on_cpu(model: nn.Module) -> bool:
    """Whether any weight is fp16 on the CPU."""
    return any(p.dtype == torch.float16 and p.device.type == "cpu" for p in model.parameters())


def note_half_on_cpu() -> None:
    warnings.warn(HALF_ON_CPU, stacklevel=4)


def float32_copy(model: nn.Module) -> nn.Module:
    """A deep copy in fp32, with one notice; the caller's model stays as it is."""
    note_half_on_cpu()
    return copy.deepcopy(model).float()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a frozen model in eval mode (no dropout of any kind); every module gets its flag back afterwards."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode and as a constant: its weights ask for no gradient; all flags are given back afterwards.

    The flags are not cleared for good: the model is the caller's, and torch picks its kernels by them, so that a stock
    CLIP whose flags were changed differs from itself in the last bits.
    """
    asking = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with evaluating(model):
        try:
            for parameter in asking:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in asking:
                parameter.requires_grad_(True)


def tensor_version(tensor: Tensor) -> tuple:
    """Changes whenever a tensor is written in place, replaced, cast or moved."""
    written = 0 if tensor.is_inference() else tensor._version
    return (tensor.data_ptr(), written, tensor.dtype, tensor.device)


def parameters_version(module: nn.Module, *, sums: bool = False) -> tuple:
    """tensor_version of every parameter; with `sums` their sums too, as writing through .data leaves no other trace."""
    found = tuple(tensor_version(p) for p in module.parameters())
    return (found, tuple(float(p.detach().double().sum()) for p in module.parameters())) if sums else found
