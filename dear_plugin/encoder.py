"""The loop over borrowed blocks in which tokens enter, are masked and leave; trunk and text-prefix reuse."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dear_plugin.head_groups import HeadGroups
from dear_plugin.speed import speed
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import TextTower, VisionTower, read_plain, take_positions


class ImageFeatures(NamedTuple):
    """Raw features, not normalised."""

    cls: Tensor  # [N, E]
    attributes: Tensor  # [N, A, E]
    frozen_cls: Tensor | None = None  # [N, E]


class TextPrefix(NamedTuple):
    """Class prompts up to the layer where tokens enter; nothing in it is learned, so it is computed once."""

    hidden: Tensor  # [C, L', D], L' = longest end token + 1
    end: Tensor  # [C], position of the end token
    frozen: Tensor  # [C, E], the stock model's text feature

    def of(self, classes: slice) -> "TextPrefix":
        """The same of some classes."""
        return TextPrefix(*(tensor[classes] for tensor in self))


def run_with_tokens(
    tower: VisionTower | TextTower,
    x: Tensor,
    tokens: Tensor,
    schedule: TokenSchedule,
    *,
    allow: Mapping[int, Tensor | HeadGroups] | None = None,
    start: int = 0,
    stop: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run layers start..stop-1 of a tower on x [N, L, D] with tokens [K, D] or [S, K, D] joining by the schedule.

    Returns (x [N, L, D] without the tokens, the tokens' outputs [N, K, D]). `allow`: layer -> boolean mask over the
    sequence with tokens; a layer without an entry runs as the tower runs by itself (text: causally).
    """
    stop = tower.layers if stop is None else stop
    allow = allow or {}
    x = _up_to(tower, x, tokens, schedule, allow, start, stop - 1)
    x = tower.run(x, stop - 1, stop, allow=allow.get(stop - 1))
    return schedule.leave(x, tokens.shape[-2])


def read_with_tokens(
    tower: VisionTower | TextTower,
    x: Tensor,
    tokens: Tensor,
    schedule: TokenSchedule,
    *,
    read: int | Tensor,
    allow: Mapping[int, Tensor | HeadGroups] | None = None,
    start: int = 0,
    outputs: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As run_with_tokens to the last layer, for what is read after it: (row `read` [N, D], the tokens' [N, K, D]).

    `read`: a position in x without tokens, one for all or [N]. The last layer computes nothing else (see Speed);
    without `outputs` not the tokens either, and None stands for them.
    """
    allow, count, last = allow or {}, tokens.shape[-2], tower.layers - 1
    if not speed().last_rows:
        x, inside = run_with_tokens(tower, x, tokens, schedule, allow=allow, start=start)
        return (x[:, read] if isinstance(read, int) else take_positions(x, read)), inside if outputs else None
    rows = schedule.place(torch.as_tensor(read, device=x.device), count)[..., None]  # [1] or [N, 1]
    if outputs:
        inside = torch.arange(count, device=x.device) + schedule.start(x.shape[1])
        rows = torch.cat([rows, inside.expand(*rows.shape[:-1], -1)], dim=-1)
    x = _up_to(tower, x, tokens, schedule, allow, start, last)
    x = tower.run_last(x, rows, allow=allow.get(last))
    return x[:, 0], x[:, 1:] if outputs else None


def _up_to(tower: VisionTower | TextTower, x: Tensor, tokens: Tensor, schedule: TokenSchedule,
           allow: Mapping[int, Tensor | HeadGroups], start: int, layer: int) -> Tensor:
    """x at the input of `layer`, the tokens inside."""
    first = schedule.first_layer
    if not start <= first <= layer:
        raise ValueError(f"tokens enter at layer {first}, which is outside the layers {start}-{layer} to run.")
    x = schedule.enter(tower.run(x, start, first), tokens)
    for index in range(first, layer):
        x = tower.run(x, index, index + 1, allow=allow.get(index))
        x = schedule.refresh(x, tokens, index + 1)
    return x


def make_text_prefix(tower: TextTower, ids: Tensor, first_layer: int) -> TextPrefix:
    """ids [C, L] -> TextPrefix at the input of `first_layer`.

    Exact: the mask is causal and the feature is read at the end token, so later positions are never read.
    """
    with torch.no_grad():
        end = tower.end_index(ids)
        if speed().truncate_text:
            ids = ids[:, : int(end.max()) + 1]
        hidden = tower.run(tower.embed(ids), 0, first_layer)
        return TextPrefix(hidden, end, tower.project(read_plain(tower, hidden, end, first_layer)))


def finish_text(tower: TextTower, prefix: TextPrefix, tokens: Tensor, schedule: TokenSchedule) -> Tensor:
    """Text features [C, E] from a prefix and tokens [K, D] that enter at the prefix's layer."""
    first = schedule.first_layer
    x, _ = read_with_tokens(tower, prefix.hidden, tokens, schedule, read=prefix.end, start=first, outputs=False)
    return tower.project(x)


def by_class_chunks(run: Callable[[TextPrefix], Tensor], prefix: TextPrefix, chunk: int | None) -> Tensor:
    """`run` on `chunk` classes at a time, [C, E]; chunks are recomputed in the backward pass (exact gradients).

    Memory for the text side then grows with `chunk`, not with the number of classes.
    """
    classes = prefix.end.shape[0]
    if not chunk or chunk >= classes:
        return run(prefix)
    parts = []
    for at in range(0, classes, chunk):
        part = prefix.of(slice(at, at + chunk))
        if torch.is_grad_enabled():
            parts.append(checkpoint(lambda p=part: run(p), use_reentrant=False))
        else:
            parts.append(run(part))
    return torch.cat(parts)


class TextCache:
    """Text prefix and text features of one class list, kept as long as they are true.

    `version` returns something that differs after any change of a parameter, a load, a cast or a move (see
    RoleCLIP.version); another class list is another entry. Only the last list is kept.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._prefix: tuple | None = None
        self._features: tuple | None = None

    def prefix(self, ids: Tensor, version: tuple, make: Callable[[Tensor], TextPrefix]) -> TextPrefix:
        if self._prefix is None or self._prefix[0] != version or not _same_ids(self._prefix[1], ids):
            self._prefix = (version, ids.clone(), make(ids))
        return self._prefix[2]

    def features(self, ids: Tensor, version: tuple, make: Callable[[Tensor], Tensor]) -> Tensor:
        if self._features is None or self._features[0] != version or not _same_ids(self._features[1], ids):
            self._features = (version, ids.clone(), make(ids))
        return self._features[2]

    # A copy or a pickle of the model starts with an empty cache: addresses of tensors are part of the version.
    def __getstate__(self) -> dict:
        return {}

    def __setstate__(self, state: dict) -> None:
        self.clear()


def _same_ids(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.device == b.device and torch.equal(a, b)
