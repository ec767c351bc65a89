"""One training by several processes (torchrun): each takes its share of every global batch, the first one writes.

The result is that of one process with the same batches and `DATALOADER.AUGMENT_SEED image`, up to the order of sums
(ours; tests/engine/test_distributed.py). No DistributedDataParallel: the trained part is a few megabytes at most, so
its gradients go through one sum, and text features of the classes are shared out as images are.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

T = TypeVar("T")


def world_size() -> int:
    """Number of processes; 1 without torchrun."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def asked_for() -> int:
    """The number of processes that torchrun started, whether they have met yet or not."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


@contextlib.contextmanager
def processes(*, use_cuda: bool) -> Iterator[None]:
    """Within it the processes that torchrun started know each other; nothing happens where there is one."""
    if asked_for() < 2 or world_size() > 1:
        yield
        return
    on_cuda = use_cuda and torch.cuda.is_available()
    if on_cuda:
        local, devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= devices:
            raise ValueError(f"torchrun started process {local + 1} on a machine with {devices} GPUs: lower "
                             "--nproc-per-node, or set USE_CUDA False")
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    yield
    dist.destroy_process_group()  # not after an error: it would wait for the others, who may be waiting for this one


class OfFirstProcess(RuntimeError):
    """What the first process raised, passed on to the others so that none waits for it; its text is shown once."""


def is_loss_of_another(error: RuntimeError) -> bool:
    """Whether a collective failed because another process ended; that one has said why."""
    known = getattr(dist, "DistError", ())
    return world_size() > 1 and (isinstance(error, known) or " peer" in str(error) or "remote" in str(error))


def first_only(function: Callable[[], T]) -> T:
    """Call `function` in the first process while the others wait; its result, which must pickle, goes to all.

    Where it raises, all do: the others an OfFirstProcess. Every process must come here.
    """
    if world_size() == 1:
        return function()
    answer: list[Any] = [None, ""]
    error: Exception | None = None
    if rank() == 0:
        try:
            answer[0] = function()
        except Exception as caught:
            error, answer[1] = caught, f"{type(caught).__name__}: {caught}"
    dist.broadcast_object_list(answer, src=0)
    if error is not None:
        raise error
    if answer[1]:
        raise OfFirstProcess(answer[1])
    return answer[0]


def gather(value: T) -> list[T]:
    """The values of all processes in order; tensors should be on the CPU."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


class ShareOfBatches:
    """A batch sampler for training: of every global batch the rows of one process, as even as they divide."""

    def __init__(self, batches: Iterable[Sequence[int]], *, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            yield list(batch[share(len(batch), self.rank, self.world)])

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


class EveryNthBatch:
    """A batch sampler for evaluation: whole batches, each for one process, so that each is computed as ever."""

    def __init__(self, batches: Iterable[Sequence[int]], *, rank: int, world: int) -> None:
        self.batches, self.rank, self.world = batches, rank, world

    def __iter__(self) -> Iterator[list[int]]:
        for index, batch in enumerate(self.batches):
            if index % self.world == self.rank:
                yield list(batch)

    def __len__(self) -> int:
        return len(range(self.rank, len(self.batches), self.world))  # type: ignore[arg-type]


def share(count: int, rank: int, world: int) -> slice:
    """The part of 0 .. count - 1 that is one process's, sizes differing by one at most."""
    return slice(count * rank // world, count * (rank + 1) // world)


def in_turns(work: Callable[[Any], tuple], batches: Iterable[Any], count: int) -> Iterator[tuple]:
    """`work` on every batch, in the order of one process; `count`: how many this process has (see EveryNthBatch).

    The processes tell each other what they made, tensors by way of the CPU, so all of them see all of it.
    """
    if world_size() == 1:
        yield from map(work, batches)
        return
    rest = iter(batches)
    for _ in range(max(gather(count))):
        batch = next(rest, None)
        made = None if batch is None else work(batch)
        on_cpu = made and tuple(part.cpu() if isinstance(part, Tensor) else part for part in made)
        yield from (of_one for of_one in gather(on_cpu) if of_one is not None)


class _RowsOfAll(torch.autograd.Function):
    """[c, E] of each process -> [C, E]; backward: the sum over processes of what reaches the own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, counts: list[int]) -> Tensor:
        ctx.counts = counts
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        start = sum(ctx.counts[: rank()])
        return total[start : start + ctx.counts[rank()]], None


def by_classes(run: Callable[[slice], Tensor], classes: int) -> Tensor:
    """`run` on the classes of a slice -> their features [c, E]; each process runs its share, all get all, [C, E].

    Gradients are exact if every process weighs its loss by its share of the batch. Without a graph (evaluation, where
    processes do not run in step), and with fewer classes than processes, each runs them all.
    """
    world = world_size()
    if world == 1 or classes < world or not torch.is_grad_enabled():
        return run(slice(0, classes))
    parts = [share(classes, index, world) for index in range(world)]
    return _RowsOfAll.apply(run(parts[rank()]).float(), [part.stop - part.start for part in parts])


def batch_share(images: int) -> float:
    """This process's part of the images of the global batch, e.g. 0.5 for 2 of 4."""
    if world_size() == 1:
        return 1.0
    return images / sum(gather(images))


def sum_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Gradients of the optimiser's parameters become their sums over the processes, in one message a dtype."""
    if world_size() == 1:
        return
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for dtype in sorted({gradient.dtype for gradient in gradients}, key=str):
        same = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in same])
        dist.all_reduce(flat)
        for gradient, total in zip(same, flat.split([g.numel() for g in same]), strict=True):
            gradient.copy_(total.view_as(gradient))


def averaged(values: Mapping[str, float], part: float) -> dict[str, float]:
    """Numbers of this process's share of the batch -> those of the global batch."""
    if world_size() == 1:
        return dict(values)
    rows = gather({name: part * value for name, value in values.items()})
    return {name: sum(row[name] for row in rows) for name in values}


def check_same(models: Mapping[str, nn.Module], when: str) -> None:
    """RuntimeError unless all processes hold the same trained parameters, to the bit."""
    if world_size() == 1:
        return
    sums = {f"{name}.{key}": p.detach().double().sum().item()
            for name, model in models.items() for key, p in model.named_parameters() if p.requires_grad}
    rows = gather(sums)
    different = [key for key in sums if any(row.get(key) != rows[0].get(key) for row in rows)]
    if different:
        raise RuntimeError(f"{when}: the processes hold different values of {', '.join(different[:3])}: check that all "
                           "have the same weights, data and versions")
