"""Log file, seeds, environment report and small file helpers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import PIL
import torch
import torchvision

from dear_plugin.engine.progress import printing


class Tee:
    """A standard output that is also written to a file."""

    def __init__(self, console: TextIO, path: Path, mode: str) -> None:
        self.console = console
        self.file = open(path, mode, encoding="utf-8")  # open as long as the run
        self.encoding = getattr(console, "encoding", "utf-8")

    def write(self, text: str) -> int:
        with printing(self):
            self.console.write(text)
        self.file.write(text)
        if "\n" in text:
            self.file.flush()
        return len(text)

    def flush(self) -> None:
        self.console.flush()
        self.file.flush()

    def isatty(self) -> bool:
        return self.console.isatty()

    def fileno(self) -> int:
        return self.console.fileno()


def log_path(output: str | Path) -> Path:
    """`log.txt` in a folder, or the path itself if it ends in .txt or .log."""
    output = Path(output)
    return output if output.suffix in (".txt", ".log") else output / "log.txt"


def setup_logger(output: str | Path | None = None, *, append: bool = False) -> None:
    """Write everything printed from now on to the log file too (standard error is not).

    The newest log is always `log.txt`, which is what result parsers read: an older one is moved to `log.txt-<time>`, or
    continued with `append` (a resumed run). Dassl gives the new log the suffix, and parsers then read the stale one.
    """
    close_logger()
    if output is None or str(output) == "":
        return
    path = log_path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not append:
        stamp = time.strftime("-%Y-%m-%d-%H-%M-%S", time.localtime(path.stat().st_mtime))
        aside = path.with_name(path.name + stamp)
        number = 1
        while aside.exists():
            number += 1
            aside = path.with_name(f"{path.name}{stamp}-{number}")
        os.replace(path, aside)
    sys.stdout = Tee(sys.stdout, path, "a" if append else "w")


def log_only(text: str) -> None:
    """Write to the open log file without showing it on the terminal."""
    if isinstance(sys.stdout, Tee):
        sys.stdout.file.write(text)
        sys.stdout.file.flush()


def close_logger() -> None:
    """Give standard output back to the terminal."""
    if isinstance(sys.stdout, Tee):
        tee, sys.stdout = sys.stdout, sys.stdout.console
        tee.file.close()


def set_random_seed(seed: int) -> None:
    """Seed Python, numpy, torch and all CUDA devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def seeded(*numbers: int) -> Iterator[None]:
    """Within it Python's and torch's CPU generators start from `numbers`; afterwards they go on as if nothing was."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    seed, python = int.from_bytes(digest, "little") >> 1, random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)


def collect_env_info() -> str:
    """A few lines on versions and devices, without starting other programs (torch's own report takes seconds)."""
    rows = {
        "Python": platform.python_version(),
        "System": platform.platform(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "numpy": np.__version__,
        "Pillow": PIL.__version__,
        "CUDA": torch.version.cuda or "none",
        "CPU threads": torch.get_num_threads(),
        "Device": device_name(),
    }
    return "\n".join(f"{name}: {value}" for name, value in rows.items())


def device_name() -> str:
    """Name of the first GPU, else of the processor's architecture."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"


def mkdir_if_missing(dirname: str | Path) -> None:
    Path(dirname).mkdir(parents=True, exist_ok=True)


def check_isfile(fpath: str | Path) -> bool:
    """Whether it is a file; warns if not."""
    found = Path(fpath).is_file()
    if not found:
        warnings.warn(f"no file {fpath}", stacklevel=2)
    return found


def listdir_nohidden(path: str | Path, sort: bool = False) -> list[str]:
    names = [name for name in os.listdir(path) if not name.startswith(".")]
    return sorted(names) if sort else names


def read_json(fpath: str | Path) -> Any:
    return json.loads(Path(fpath).read_text(encoding="utf-8"))


def write_json(obj: Any, fpath: str | Path) -> None:
    """Indent 4 and plain separators, as the published split files have."""
    path = Path(fpath)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(obj, indent=4, separators=(",", ": ")), encoding="utf-8")
