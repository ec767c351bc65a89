"""All 15 data sets read by the published loaders and by ours on generated trees: same lists, picks, halves, names.

DEAR_PEERS names a folder with the checkouts CoOp and Dassl.pytorch.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from yacs.config import CfgNode

from datasets.table import ROWS, extend_cfg, register_all

PEERS = os.environ.get("DEAR_PEERS", "")
pytestmark = pytest.mark.skipif(
    not (PEERS and (Path(PEERS) / "Dassl.pytorch").is_dir()),
    reason="DEAR_PEERS is not set, or has no Dassl.pytorch beside CoOp: it names the folder of the peers' checkouts",
)
FIFTEEN = [row for row in ROWS if row.counts]
CASES = [(shots, seed, "all") for shots in (1, 2, 4, 8, 16) for seed in (1, 2, 3)] + [
    (-1, 1, "all"), (16, 1, "base"), (16, 1, "new"), (4, 2, "base"), (4, 2, "new")]  # fmt: skip
NAMES = ["Übertopf", "F-16A/B", "kite (bird of prey)", "american_bulldog", "polka-dotted", "2000 AM Hummer", "x"]


def make_split_tree(row, root: Path, rng: random.Random) -> None:
    """Seven classes of uneven size (one below 16 images) in a shuffled split file; image files are empty."""
    folder, split = root / row.folder, {}
    sizes = {"train": (20, 3, 40, 17, 16, 25, 31), "val": (6, 2, 9, 4, 5, 7, 3), "test": (5, 5, 4, 3, 6, 2, 1)}
    for part, counts in sizes.items():
        items = [[f"class {label}/{part} {i}.jpg", label, NAMES[label]]
                 for label, n in enumerate(counts) for i in range(n)]  # fmt: skip
        rng.shuffle(items)
        split[part] = items
        touch(folder / row.images, [path for path, _, _ in items])
    (folder / row.split_file).write_text(json.dumps(split, indent=4), encoding="utf-8")


def touch(folder: Path, paths: list[str]) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()


def make_aircraft(root: Path, rng: random.Random) -> None:
    folder = root / "fgvc_aircraft"
    folder.mkdir()
    (folder / "variants.txt").write_text("\n".join(f"{name} v" for name in NAMES) + "\n", encoding="utf-8")
    for part, count in (("train", 140), ("val", 70), ("test", 50)):
        lines = [f"{part}{i:04d} {NAMES[i % len(NAMES)]} v" for i in range(count)]
        rng.shuffle(lines)
        (folder / f"images_variant_{part}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        touch(folder / "images", [f"{line.split()[0]}.jpg" for line in lines])


def make_imagenets(root: Path, rng: random.Random) -> None:
    """1000 classes, as the published loaders take for granted: few images each."""
    ids = [f"n{number:08d}" for number in sorted(rng.sample(range(10**7), 1000))]
    names = "".join(f"{wnid} class {i} (of {i % 7})\n" for i, wnid in enumerate(ids))
    for folder in ("imagenet", "imagenetv2", "imagenet-sketch", "imagenet-adversarial", "imagenet-rendition"):
        (root / folder).mkdir()
        (root / folder / "classnames.txt").write_text(names, encoding="utf-8")
    images = root / "imagenet" / "images"
    touch(images, [f"train/{w}/{w}_{i}.JPEG" for w in ids for i in range(3 if w > ids[9] else 20)])
    touch(images, [f"val/{w}/v_{i}.JPEG" for w in ids for i in range(2)])
    touch(root / "imagenetv2" / "imagenetv2-matched-frequency-format-val", [f"{k}/{k}.jpeg" for k in range(1000)])
    touch(root / "imagenet-sketch" / "images", [f"{w}/s.JPEG" for w in ids])
    for folder in ("imagenet-adversarial/imagenet-a", "imagenet-rendition/imagenet-r"):
        touch(root / folder, [f"{w}/{k}.jpg" for w in rng.sample(ids, 200) for k in "ab"])
        (root / folder / "README.txt").write_text("x")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> dict:
    """{(name, case): (theirs, ours)}"""
    root, work, rng = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("work"), random.Random(0)
    for row in FIFTEEN:
        if row.split_file:
            make_split_tree(row, root, rng)
    make_aircraft(root, rng)
    make_imagenets(root, rng)
    calls = [(row, case) for row in FIFTEEN for case in (CASES if not row.test_only else CASES[-1:])]
    (work / "in.json").write_text(json.dumps(
        [{"module": row.config, "name": row.name, "root": str(root), "shots": shots, "seed": seed, "classes": classes}
         for row, (shots, seed, classes) in calls]))  # fmt: skip
    loader = str(Path(__file__).with_name("run_loader.py"))
    command = [sys.executable, loader, f"{PEERS}/CoOp", f"{PEERS}/Dassl.pytorch", str(work / "in.json"),
               str(work / "out.json")]  # fmt: skip
    run = subprocess.run(command, cwd=work, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    theirs = json.loads((work / "out.json").read_text())
    return {(row.name, case): (result, ours(row.name, case, root))
            for (row, case), result in zip(calls, theirs, strict=True)}  # fmt: skip


def ours(name: str, case: tuple[int, int, str], root: Path) -> dict:
    from dear_plugin.engine import DATASET_REGISTRY

    register_all()
    shots, seed, classes = case
    cfg = CfgNode({"SEED": seed, "VERBOSE": False, "OUTPUT_DIR": "",
                   "DATASET": {"NAME": name, "ROOT": str(root), "NUM_SHOTS": shots}})
    extend_cfg(cfg)
    cfg.DATASET.SUBSAMPLE_CLASSES = classes
    made = DATASET_REGISTRY.get(name)(cfg)
    return {part: [[os.path.relpath(x.impath, root), x.label, x.classname] for x in getattr(made, part) or ()]
            for part in ("train_x", "val", "test")} | {"classnames": made.classnames}  # fmt: skip


@pytest.mark.parametrize("row", FIFTEEN, ids=lambda row: row.name)
def test_same_lists(row, both):
    compared = [case for name, case in both if name == row.name]
    assert len(compared) == (1 if row.test_only else len(CASES))
    for case in compared:
        theirs, mine = both[row.name, case]
        for part in ("classnames", "train_x", "val", "test"):
            assert mine[part] == theirs[part], (row.name, case, part)
        assert theirs["train_x"] and theirs["test"]
