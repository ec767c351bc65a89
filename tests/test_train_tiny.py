"""The script that made tiny: a short run resumes to the same weights and exports what the loader reads."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import train_tiny_clip  # noqa: E402

from dear_plugin import load_backbone  # noqa: E402


def test_rate_is_flat_then_falls_over_the_last_quarter():
    rates = [train_tiny_clip.rate(step, steps=1000, peak=2.0, warmup=10) for step in range(1000)]
    assert rates[0] == pytest.approx(0.2) and rates[9:750] == [2.0] * 741
    assert rates[875] == pytest.approx(1.0) and 0 < rates[-1] < 0.01


def test_the_loss_is_smallest_where_all_positives_are_equal_and_the_rest_far():
    positive = torch.tensor([[True, True, False], [False, True, True]])
    scale = torch.tensor(50.0)
    good = (torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.71, 0.71], [0.0, 1.0]]))
    swapped = (good[0].flip(0), good[1])
    assert train_tiny_clip.multi_positive_loss(*good, positive, scale) < train_tiny_clip.multi_positive_loss(
        *swapped, positive, scale)
    single = torch.eye(2, dtype=torch.bool)  # one positive each: CLIP's own loss
    logits = scale * good[0] @ good[0].T
    wanted = torch.nn.functional.cross_entropy(logits, torch.arange(2))
    assert train_tiny_clip.multi_positive_loss(good[0], good[0], single, scale) == pytest.approx(wanted.item())


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_and_loads(tmp_path, monkeypatch):
    def run(folder: str, steps: str, *more: str) -> None:
        monkeypatch.setattr(sys, "argv", [
            "train_tiny_clip.py", "--work-dir", str(tmp_path / folder), "--images", "128", "--batch", "32",
            "--steps", steps, "--evaluate-every", "2", "--processes", "1",
            "--output", str(tmp_path / folder / "assets"), *more])
        train_tiny_clip.main()

    monkeypatch.setattr(train_tiny_clip, "rate", lambda step, **_: 1e-3)  # the real one depends on --steps
    run("whole", "4")
    run("parts", "2")
    run("parts", "4")
    whole, parts = (torch.load(tmp_path / f / "checkpoint.pt", weights_only=True)["model"] for f in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    facts = json.loads((tmp_path / "parts" / "assets" / "tiny_clip.json").read_text())
    assert facts["steps"] == 4 and set(facts["zero_shot_accuracy_pct"]) == {
        "color", "entity", "texture", "location", "size"}
    backbone = load_backbone(tmp_path / "whole" / "assets" / "tiny_clip.safetensors")
    assert backbone.input_resolution == 64 and backbone.identity.heads == 4
    weight = whole["visual.conv1.weight"].half().float()
    assert torch.equal(backbone.model.visual.conv1.weight, weight)
