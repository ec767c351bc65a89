"""Progress bars on standard error, only when it is a terminal."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from tqdm import tqdm


def progress(batches: Iterable, description: str) -> Iterable:
    """`batches` behind a bar that vanishes when done; unchanged when standard error is no terminal."""
    if not sys.stderr.isatty():
        return batches
    return tqdm(batches, desc=description, file=sys.stderr, leave=False, dynamic_ncols=True)


def printing(stream: Any) -> AbstractContextManager:
    """Around a write to standard output: a bar on the same terminal is taken away and drawn again."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    return tqdm.external_write_mode(file=stream)


class WatchedLoader:
    """A training loader that shows a bar, knows the current batch, and times the steps (without the wait for data)."""

    def __init__(self, loader: Any, description: str, seconds: list[float]) -> None:
        self.loader, self.description, self.seconds = loader, description, seconds
        self.batch: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in progress(self.loader, self.description):
            self.batch = batch
            start = time.perf_counter()
            yield batch
            self.seconds.append(time.perf_counter() - start)
