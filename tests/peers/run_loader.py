"""Builds data sets with the published loaders, unchanged: python run_loader.py COOP DASSL INPUT.json OUTPUT.json

A program of its own, because the checkout's package is called datasets too. Directory listings are sorted here: the
published code takes the disk's order, which is no property of a data set.
"""

from __future__ import annotations

import json
import os
import random
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

# Imported by Dassl, not used here.
STAND_INS = ("gdown", "tabulate", "wilds", "tensorboard", "torch.utils.tensorboard",
             *(f"dassl.data.datasets.{kind}" for kind in ("da", "dg", "ssl")))  # fmt: skip


def main() -> None:
    coop, dassl, source, target = sys.argv[1:]
    sys.path[:0] = [coop, dassl]
    import torchvision  # noqa: F401 - before the stand-ins, since it looks for optional packages

    for name in STAND_INS:
        sys.modules.setdefault(name, MagicMock(__spec__=None, __all__=[]))
    plain = os.listdir
    os.listdir = lambda path=".": sorted(plain(path))
    with open(source, encoding="utf-8") as handle:
        calls = json.load(handle)
    from dassl.data.datasets import DATASET_REGISTRY
    for module in sorted({call["module"] for call in calls}):
        __import__(f"datasets.{module}")
    found = []
    for call in calls:
        random.seed(call["seed"])
        data = SimpleNamespace(ROOT=call["root"], NUM_SHOTS=call["shots"], SUBSAMPLE_CLASSES=call["classes"])
        made = DATASET_REGISTRY.get(call["name"])(SimpleNamespace(DATASET=data, SEED=call["seed"]))
        found.append({part: [(os.path.relpath(x.impath, call["root"]), x.label, x.classname)
                             for x in getattr(made, part) or ()] for part in ("train_x", "val", "test")}
                     | {"classnames": made.classnames})  # fmt: skip
    with open(target, "w", encoding="utf-8") as handle:
        json.dump(found, handle)


if __name__ == "__main__":
    main()
