"""scripts/bench.py: its own correctness, not how fast anything is."""

import json
import subprocess
import sys

import pytest
import torch

from dear_plugin.towers import vision_tower
from scripts.benching.measure import flops, matmul_rate, peak_mib
from scripts.benching.work import Work, bench_roles, class_prompts


def test_quick_run(root, tmp_path):
    out = tmp_path / "bench.json"
    command = [sys.executable, str(root / "scripts" / "bench.py"), "--quick", "--device", "cpu", "--json", str(out)]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    (result,) = json.loads(out.read_text())
    assert result["rows"]["frozen image forward"]["ratio"] == 1.0 and result["switches"]["as shipped"]["ratio"] == 1.0
    assert {"last_rows off", "grouped_heads on", "truncate_text off", "reuse_trunk off"} < set(result["switches"])
    assert all(0 < row["floor_ms"] and 0 < row["peak_mib"] for row in result["rows"].values())
    assert "DeAR training step" in shown and result["trainable_parameters"] > 0


def test_counted_work_is_the_work_of_the_shapes():
    a, b = torch.randn(3, 5), torch.randn(5, 7, requires_grad=True)
    assert flops(lambda: a @ b) == 2 * 3 * 5 * 7
    assert flops(lambda: (a @ b).sum().backward()) == 2 * 2 * 3 * 5 * 7, "backward counts: only b has a gradient"
    q = torch.randn(1, 2, 4, 8)
    assert flops(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)) == 2 * 2 * 2 * 4 * 4 * 8


def test_the_stock_and_our_passes_count_the_same_work():
    """The stock blocks run a fused operation of torch; left out of the count, their floor would be too low."""
    work = Work("tiny", classes=3, batch=2, device=torch.device("cpu"))
    tower, length, width = vision_tower(work.clip), 17, work.matmul_shape[1]
    layers = 2 * tower.layers * length * (24 * width**2 + 4 * length * width)
    assert flops(work.frozen_image) == pytest.approx(layers, rel=0.1), "plus patches and projection"
    assert flops(work.step) > flops(work.image) > 0


def test_rate_and_memory_are_measured():
    assert matmul_rate((64, 64, 64), torch.device("cpu"), torch.float32) > 0
    small = peak_mib(lambda: None, torch.device("cpu"))
    large = peak_mib(lambda: torch.ones(64 * 2**20 // 4 * 4).sum(), torch.device("cpu"))
    assert large >= small + 200, "256 MiB were touched"


def test_bench_uses_every_kind_of_head_and_different_prompts():
    roles = bench_roles(8, 4)
    assert roles.layers == (4, 5, 6, 7)
    assert len({str(roles.role(layer, head)) for layer in roles.layers for head in range(4)}) == 7
    assert len(set(class_prompts(1000))) == 1000


def test_the_gpu_check_finds_what_differs(monkeypatch, capsys, tmp_path):
    """On the CPU against itself nothing differs; a model with another seed does."""
    from scripts import check_gpu

    size = {"device": torch.device("cpu"), "precision": "fp32", "classes": 5, "batch": 2}
    one = check_gpu.outcome("tiny", **size)
    rows = {"fp32": check_gpu.difference(one, check_gpu.outcome("tiny", **size))}
    assert check_gpu.show_differences(rows) == []
    assert max(rows["fp32"].values()) == 0 and any("gradient" in key for key in one)
    half = check_gpu.outcome("tiny", **{**size, "precision": "bf16"})
    assert check_gpu.show_differences({"fp32": check_gpu.difference(one, half)}) != []
    monkeypatch.setattr("sys.argv", ["check_gpu.py"])
    if not torch.cuda.is_available():
        assert check_gpu.main() == 2
        assert "sees no GPU" in capsys.readouterr().err
    out = tmp_path / "gpu.json"
    command = ["check_gpu.py", "--backbone", "tiny", "--device", "cpu", "--quick", "--json", str(out)]
    monkeypatch.setattr("sys.argv", command)
    assert check_gpu.main() == 0
    assert "all numbers agree" in capsys.readouterr().out
    (table,) = json.loads(out.read_text())["tables"]
    assert all(row["of_rate"] > 0 for row in table["rows"].values())
