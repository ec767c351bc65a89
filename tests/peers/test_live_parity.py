"""Every published method, run from its own checkout, against ours on the same weights, images, names and start.

DEAR_PEERS names a folder with the checkouts CoOp, multimodal-prompt-learning, PromptSRC and MMRL. DEAR_PEERS_FREEZE=1
also writes the expected values of tests/trainers/test_parity.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TRAINERS = Path(__file__).resolve().parents[1] / "trainers"
sys.path.insert(0, str(TRAINERS))

from parity import CLASSES, GEOMETRIES, LABELS, STEPS, cases, distances, our_result, our_trainer, starting_values  # noqa: E402,I001
from tiny_world import write_data  # noqa: E402

PEERS = os.environ.get("DEAR_PEERS", "")
CHECKOUTS = {"CoOp": "CoOp", "CoCoOp": "CoOp", "MaPLe": "multimodal-prompt-learning", "PromptSRC": "PromptSRC",
             "MMRL": "MMRL"}
pytestmark = pytest.mark.skipif(not PEERS, reason="DEAR_PEERS is not set: it names the folder of the peers' checkouts")


@pytest.fixture(scope="module", params=[
    "small", pytest.param("ViT-B/16", marks=pytest.mark.slow)])
def geometry(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("geometry")
    torch.save(GEOMETRIES[request.param].state(), folder / "clip.pt")
    write_data(folder / "data")
    return request.param, folder


@pytest.mark.parametrize("row", sorted(cases("small")))
def test_same_numbers(row, geometry, tmp_path, capsys):
    name, folder = geometry
    case, images = cases(name)[row], GEOMETRIES[name].images()
    method = case.method
    trainer = our_trainer(case, name, root=folder / "data", backbone=folder / "clip.pt", out=tmp_path / "out")
    start = starting_values(case, trainer)
    torch.save({
        "method": method, "node": case.node, "settings": case.settings, "optim": dict(case.optim), "start": start,
        "clip": str(folder / "clip.pt"), "images": images, "labels": LABELS, "classnames": list(CLASSES),
        "steps": STEPS, "dataset": "DescribableTextures", "with_state": name == "small",
    }, tmp_path / "input.pt")
    checkout = Path(PEERS) / CHECKOUTS[method]
    command = [sys.executable, str(Path(__file__).parent / "run_peer.py"), str(checkout), str(tmp_path / "input.pt"),
               str(tmp_path / "output.pt")]
    run = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-2000:]
    theirs = torch.load(tmp_path / "output.pt", weights_only=True)
    assert theirs["name"] == case.model
    ours = our_result(case, trainer, start, images)
    found = distances(case, ours, theirs)
    with capsys.disabled():
        print(f"\n{row}, {name}: " + ", ".join(f"{kind} {value:.1e}" for kind, value in found.items()))
    if os.environ.get("DEAR_PEERS_FREEZE") and name == "small":
        freeze(row, theirs, start, checkout)
    assert found.pop("left out", 0.0) < 1e-2 and max(found.values()) < 1e-4
    if "state_dict" in theirs:
        read_the_checkpoint(case, trainer, theirs, images, capsys)


def read_the_checkpoint(case, trainer, theirs, images, capsys) -> None:
    """The published file, as it is, goes into another trainer of ours."""
    with torch.no_grad():
        for value in trainer._models[case.model].parameters():
            value.add_(1.0)
    trainer.load_adapter_state(case.model, theirs["state_dict"])
    shown = capsys.readouterr().out
    assert "Published checkpoint: dropped" in shown and ("token_suffix" in shown or "prompt_embeddings" in shown)
    again = trainer._models[case.model].state_dict()
    for name, (ours, row) in case.keys.items():
        assert torch.equal(again[ours] if row is None else again[ours][row], theirs["parameters"][name])


def freeze(row: str, theirs: dict, start: dict, checkout: Path) -> None:
    """A few numbers of the published code's result into expected_parity.json."""
    path = TRAINERS / "expected_parity.json"
    known = json.loads(path.read_text()) if path.is_file() else {}
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=checkout, capture_output=True, text=True).stdout.strip()
    moved = {name: (value - start[name]).norm().item() for name, value in sorted(theirs["parameters"].items())}
    known[row] = {
        "made_by": f"tests/peers/test_live_parity.py with DEAR_PEERS_FREEZE=1 on {checkout.name} {commit}, fp32",
        "logits": theirs["logits"].tolist(), "loss": theirs["loss"].item(),
        "grad_norms": {name: value.norm().item() for name, value in sorted(theirs["grads"].items())},
        "moved_norms": moved,
    }
    path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")
