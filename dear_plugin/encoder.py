"""The loop over borrowed blocks in which tokens enter, are masked and leave; trunk and text-prefix reuse."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import TextTower, VisionTower, take_positions


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


def run_with_tokens(
    tower: VisionTower | TextTower,
    x: Tensor,
    tokens: Tensor,
    schedule: TokenSchedule,
    *,
    allow: Mapping[int, Tensor] | None = None,
    start: int = 0,
    stop: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Run layers start..stop-1 of a tower on x [N, L, D] with tokens [K, D] or [S, K, D] joining by the schedule.

    Returns (x [N, L, D] without the tokens, the tokens' outputs [N, K, D]). `allow`: layer -> boolean mask over the
    sequence with tokens; a layer without an entry runs as the tower runs by itself (text: causally).
    """
    stop = tower.layers if stop is None else stop
    first = schedule.first_layer
    if not start <= first < stop:
        raise ValueError(f"tokens enter at layer {first}, which is outside the layers {start}-{stop - 1} to run.")
    allow = allow or {}
    x = tower.run(x, start, first)
    x = schedule.enter(x, tokens)
    for layer in range(first, stop):
        if layer > first:
            x = schedule.refresh(x, tokens, layer)
        x = tower.run(x, layer, layer + 1, allow=allow.get(layer))
    return schedule.leave(x, tokens.shape[-2])


def make_text_prefix(tower: TextTower, ids: Tensor, first_layer: int) -> TextPrefix:
    """ids [C, L] -> TextPrefix at the input of `first_layer`.

    Exact: the mask is causal and the feature is read at the end token, so later positions are never read.
    """
    with torch.no_grad():
        end = tower.end_index(ids)
        hidden = tower.run(tower.embed(ids[:, : int(end.max()) + 1]), 0, first_layer)
        last = tower.run(hidden, first_layer, tower.layers)
        return TextPrefix(hidden, end, tower.project(take_positions(last, end)))


def finish_text(tower: TextTower, prefix: TextPrefix, tokens: Tensor, schedule: TokenSchedule) -> Tensor:
    """Text features [C, E] from a prefix and tokens [K, D] that enter at the prefix's layer."""
    x, _ = run_with_tokens(tower, prefix.hidden, tokens, schedule, start=schedule.first_layer)
    return tower.project(take_positions(x, prefix.end))


def by_class_chunks(run: Callable[[TextPrefix], Tensor], prefix: TextPrefix, chunk: int | None) -> Tensor:
    """`run` on `chunk` classes at a time, [C, E]; chunks are recomputed in the backward pass (exact gradients).

    Memory for the text side then grows with `chunk`, not with the number of classes.
    """
    classes = prefix.end.shape[0]
    if not chunk or chunk >= classes:
        return run(prefix)
    parts = []
    for at in range(0, classes, chunk):
        part = TextPrefix(*(tensor[at : at + chunk] for tensor in prefix))
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
