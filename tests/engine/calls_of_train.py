"""For torchrun: calls of scripts/train.py from a JSON list of argument lists; writes their exit codes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402

from dear_plugin.engine import distributed  # noqa: E402
from scripts.train import main  # noqa: E402

if __name__ == "__main__":
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    with distributed.processes(use_cuda=False):  # once: torchrun's store remembers a group that is gone
        codes = [main(arguments) for arguments in json.loads(file.read_text(encoding="utf-8"))]
    file.with_suffix(f".codes{os.environ['RANK']}").write_text(json.dumps(codes), encoding="utf-8")
