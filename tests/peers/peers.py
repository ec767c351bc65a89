"""The folder of checkouts that DEAR_PEERS names, and how a program of one is run: shared by the tests here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = os.environ.get("DEAR_PEERS", "")
DASSL = Path(PEERS) / "Dassl.pytorch"
needs_dassl = pytest.mark.skipif(
    not (PEERS and DASSL.is_dir()),
    reason="DEAR_PEERS is not set, or has no Dassl.pytorch: it names the folder of the peers' checkouts")


def run_checkout(checkout: Path, out: Path, *flags: str, engine: str = "dassl", clip: Path | None = None,
                 shims: str = "", timeout: int = 900) -> subprocess.CompletedProcess:
    """train.py of a checkout beside the real Dassl, as run_checkout.py does it. `engine` "" lets dear_plugin choose."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(DASSL)]), "PYTHONWARNINGS": "ignore",
                   "PYTHONDONTWRITEBYTECODE": "1", "DEAR_ENGINE": engine}
    command = [sys.executable, str(Path(__file__).with_name("run_checkout.py")), str(checkout),
               str(clip) if clip else "", shims, "--output-dir", str(out), *flags]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=timeout)


def scalars(out: Path) -> list:
    """[[tag, unrounded value, step], ...] in the order of writing."""
    return json.loads((out / "scalars.json").read_text(encoding="utf-8"))
