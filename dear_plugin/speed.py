"""Switches of the exact speed-ups. Each changes the order of the same sums, never what is computed (all ours)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Speed:
    """What is on. The defaults are what `scripts/bench.py` measured as faster; docs/speed.md has the numbers.

    last_rows:     in the last layer of a tower, queries, output projection and MLP run for the rows that are read
                   after it (CLS and tokens; the end token), keys and values for all.
    grouped_heads: heads with the same role run together and without a mask, block by block, instead of all heads in
                   one call with a boolean mask.
    truncate_text: positions after the longest end token are dropped (the text mask is causal).
    own_layers:    vision layers without a mask run in our own form where a gradient passes, not as the stock block.
    reuse_trunk:   layers below the first one with tokens run once for adapted and frozen features, without gradient.
    """

    last_rows: bool = True
    grouped_heads: bool = False
    truncate_text: bool = True
    own_layers: bool = True
    reuse_trunk: bool = True


_current = Speed()


def speed() -> Speed:
    """The switches in force."""
    return _current


@contextlib.contextmanager
def switched(**values: bool) -> Iterator[Speed]:
    """Within it some switches are other ones, e.g. `with switched(last_rows=False): ...`; for benchmarks and tests.

    A backward pass that recomputes (class chunks) must run inside, too. Raises TypeError on an unknown switch.
    """
    global _current
    before = _current
    _current = replace(before, **values)
    try:
        yield _current
    finally:
        _current = before
