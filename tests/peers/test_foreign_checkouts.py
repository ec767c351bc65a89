"""DeAR in copies of the published codebases on a real Dassl, and RoleCLIP in their own CoOp trainer; nothing is faked.

DEAR_PEERS names a folder with the checkouts CoOp (ran at ff61507), multimodal-prompt-learning (69bce21), PromptSRC
(bb95c77), MMRL (27d8821) and Dassl.pytorch (c61a1b5). The edits made to the copies are in edits.py: what README, "In
your own codebase", tells a reader to write. Random ViT-B/16 weights, pictures in EuroSAT's layout.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

TRAINERS = Path(__file__).resolve().parents[1] / "trainers"
sys.path.insert(0, str(TRAINERS))

from edits import IMPORT, MMRL_GUARD, TRAIN_ADAPTER, TWO_LINES, WRAP  # noqa: E402
from peers import PEERS, ROOT, needs_dassl, run_checkout, scalars  # noqa: E402
from tiny_world import random_openai_state  # noqa: E402

from dear_plugin.roles import RoleMap  # noqa: E402

pytestmark = needs_dassl
CHECKOUTS = ("CoOp", "multimodal-prompt-learning", "PromptSRC", "MMRL")
SHIPPED = "openai_vit_b16"  # what README shows
WITH_COOP = CHECKOUTS[:3]  # MMRL's has no CoOp trainer

def insert(path: Path, line: str, ours: str) -> None:
    """Put `ours` on a line of its own after the only line that is `line`."""
    lines = path.read_text().splitlines()
    assert lines.count(line) == 1, (path, line)
    lines.insert(lines.index(line) + 1, ours)
    path.write_text("\n".join(lines) + "\n")


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new))


@pytest.fixture(scope="module", params=[32, pytest.param(224, marks=pytest.mark.slow)], ids=lambda size: f"{size}px")
def world(request, tmp_path_factory) -> Path:
    """<folder>/clip.pt, random ViT-B/16 weights in OpenAI's keys and halves; <folder>/data/eurosat in CoOp's layout.

    224 pixels is the exact file; at 32 only the table of positions is shorter, and a run takes seconds.
    """
    folder = tmp_path_factory.mktemp(f"world-{request.param}")
    state = random_openai_state(layers=12, width=768, text_width=512, embed=512, size=request.param)
    torch.save({key: value.half() for key, value in state.items()}, folder / "clip.pt")
    write_eurosat(folder / "data" / "eurosat")
    shipped = RoleMap.load(SHIPPED)  # is refused at 32 pixels; the roles are the same
    RoleMap(shipped.layers, shipped.heads, shipped.infos).save(folder / "roles.json")
    return folder


def roles_for(world: Path) -> str:
    return SHIPPED if world.name.startswith("world-224") else str(world / "roles.json")


def write_eurosat(folder: Path) -> None:
    names = ("Annual Crop Land", "Forest", "Highway or Road", "Industrial Buildings", "Pasture Land", "River")
    draw = torch.Generator().manual_seed(3)
    split: dict[str, list] = {"train": [], "val": [], "test": []}
    for label, name in enumerate(names):
        (folder / "2750" / name.split()[0]).mkdir(parents=True)
        for number, part in enumerate(["train"] * 4 + ["val"] + ["test"] * 2):
            path = f"{name.split()[0]}/{number}.jpg"
            pixels = 30 * label + 40 + 40 * torch.randn(64, 64, 3, generator=draw)
            Image.fromarray(pixels.clamp(0, 255).byte().numpy()).save(folder / "2750" / path)
            split[part].append([path, label, name])
    (folder / "split_zhou_EuroSAT.json").write_text(json.dumps(split), encoding="utf-8")


def copy_of(name: str, tmp_path: Path) -> Path:
    checkout = Path(PEERS) / name
    if not checkout.is_dir():
        pytest.skip(f"DEAR_PEERS has no {name}")
    return Path(shutil.copytree(checkout, tmp_path / name, ignore=shutil.ignore_patterns(".git", "__pycache__")))


def flags(world: Path, trainer: str, config: Path | str, *pairs: str, classes: str) -> list[str]:
    return [
        "--root", str(world / "data"), "--seed", "1", "--trainer", trainer, "--dataset-config-file",
        "configs/datasets/eurosat.yaml", "--config-file", str(config), *pairs, "DATASET.NUM_SHOTS", "3",
        "DATASET.SUBSAMPLE_CLASSES", classes, "OPTIM.MAX_EPOCH", "2", "DATALOADER.NUM_WORKERS", "0",
        "DATALOADER.TRAIN_X.BATCH_SIZE", "4", "TRAIN.PRINT_FREQ", "1",
        "INPUT.SIZE", "(224, 224)" if world.name.startswith("world-224") else "(32, 32)"]


DEAR_YAML = ROOT / "configs" / "trainers" / "DeAR" / "vit_b16.yaml"


def dear_flags(world: Path, *, mmrl: bool = False, classes: str = "base") -> list[str]:
    """DeAR takes a file as its backbone, so nothing is fetched; vit_b16.yaml is read where it is."""
    task = ("TASK", "B2N") if mmrl else ()
    return flags(world, "DeAR", DEAR_YAML, *task, "MODEL.BACKBONE.NAME", str(world / "clip.pt"),
                 "TRAINER.DEAR.ROLES", roles_for(world), "TRAINER.DEAR.PREC", "fp32", classes=classes)


@pytest.fixture(scope="module")
def in_our_checkout(world, tmp_path_factory) -> list:
    """Scalars of the same run by scripts/train.py here, on the built-in engine."""
    out = tmp_path_factory.mktemp("ours") / "out"
    run = run_checkout(ROOT, out, *dear_flags(world), engine="builtin")
    assert run.returncode == 0, run.stderr[-3000:]
    return scalars(out)


@pytest.mark.parametrize("name", CHECKOUTS)
def test_dear_trains_and_tests_in_their_checkout(name, world, in_our_checkout, tmp_path, capsys):
    checkout, out = copy_of(name, tmp_path), tmp_path / "out"
    shutil.copy(ROOT / "trainers" / "dear.py", checkout / "trainers")
    for line, ours in TWO_LINES:
        insert(checkout / "train.py", line, ours)
    if name == "MMRL":
        replace(checkout / "train.py", *MMRL_GUARD)
    run = run_checkout(checkout, out, *dear_flags(world, mmrl=name == "MMRL"), engine="")
    assert run.returncode == 0, run.stderr[-3000:]
    log = (out / "log.txt").read_text()
    assert "Finish training" in log and "=> result" in log and "Loading trainer: DeAR" in log
    assert scalars(out) == in_our_checkout, "their data and harness, the same numbers as here"
    assert json.loads((out / "result.json").read_text())["engine"] == "dassl 0.6.3"
    assert (out / "adapter" / "adapter.safetensors").is_file()
    again = run_checkout(checkout, tmp_path / "new", "--eval-only", "--model-dir", str(out), "--load-epoch", "2",
                         *dear_flags(world, mmrl=name == "MMRL", classes="new"), engine="")
    assert again.returncode == 0, again.stderr[-3000:]
    log = (tmp_path / "new" / "log.txt").read_text()
    assert "Loaded" in log and "* total: 6" in log
    with capsys.disabled():
        losses = [value for tag, value, _ in in_our_checkout if tag == "train/loss"]
        print(f"\n{name}: {len(losses)} steps, losses {losses[0]:.4f} ... {losses[-1]:.4f}, as in this checkout")


def coop_flags(world: Path, *, classes: str = "base") -> list[str]:
    return flags(world, "CoOp", "configs/trainers/CoOp/vit_b16_ep50.yaml", "TRAINER.COOP.PREC", "fp32",
                 "TRAINER.COOP.N_CTX", "4", "OPTIM.LR", "0.02", classes=classes)


@pytest.mark.parametrize("name", WITH_COOP)
def test_their_coop_trains_on_a_role_clip(name, world, tmp_path):
    checkout = copy_of(name, tmp_path)
    insert(checkout / "train.py", "from dassl.engine import build_trainer", "import dear_plugin.engine")
    losses = {}
    for kind in ("stock", "wrapped", "adapter"):
        if kind == "wrapped":
            insert(checkout / "trainers" / "coop.py", *IMPORT)
            insert(checkout / "trainers" / "coop.py", WRAP[0], WRAP[1].replace(SHIPPED, roles_for(world)))
        if kind == "adapter":
            replace(checkout / "trainers" / "coop.py", *TRAIN_ADAPTER[0])
            insert(checkout / "trainers" / "coop.py", *TRAIN_ADAPTER[1])
        run = run_checkout(checkout, tmp_path / kind, *coop_flags(world), engine="", clip=world / "clip.pt")
        assert run.returncode == 0, run.stderr[-3000:]
        losses[kind] = [value for tag, value, _ in scalars(tmp_path / kind) if tag == "train/loss"]
    assert len(losses["stock"]) == 4
    assert losses["wrapped"][0] != pytest.approx(losses["stock"][0], abs=1e-3), "the tokens are read"
    assert losses["adapter"][0] == pytest.approx(losses["wrapped"][0], abs=1e-5), "the same start"
    assert losses["adapter"][-1] != pytest.approx(losses["wrapped"][-1], abs=1e-4), "the adapter has moved"
    saved = torch.load(tmp_path / "adapter" / "dear_adapter" / "model.pth.tar-2", weights_only=True)["state_dict"]
    assert "tokens.latents" in saved
    again = run_checkout(checkout, tmp_path / "new", "--eval-only", "--model-dir", str(tmp_path / "adapter"),
                         "--load-epoch", "2", *coop_flags(world, classes="new"), engine="", clip=world / "clip.pt")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "Loading weights to dear_adapter" in (tmp_path / "new" / "log.txt").read_text()
