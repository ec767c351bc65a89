"""Our trainers give the published codes' numbers: a few of them, frozen, so that no checkout is needed.

expected_parity.json says for each how it was made; the seeded inputs are those of parity.py (geometry "small").
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from parity import GEOMETRIES, cases, our_result, our_trainer, starting_values

EXPECTED = json.loads((Path(__file__).parent / "expected_parity.json").read_text())


@pytest.fixture(scope="module")
def wide_backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "clip.pt"
    torch.save(GEOMETRIES["small"].state(), path)
    return path


def test_every_case_has_expected_values():
    assert sorted(EXPECTED) == sorted(cases("small")) and len(EXPECTED) == 6


@pytest.mark.parametrize("row", sorted(EXPECTED))
def test_numbers_of_the_published_code(row, world, wide_backbone, tmp_path):
    case, wanted = cases("small")[row], EXPECTED[row]
    trainer = our_trainer(case, "small", root=world.root, backbone=wide_backbone, out=tmp_path)
    start = starting_values(case, trainer)
    found = our_result(case, trainer, start, GEOMETRIES["small"].images())
    torch.testing.assert_close(found["logits"], torch.tensor(wanted["logits"]), rtol=1e-4, atol=1e-4)
    assert found["loss"].item() == pytest.approx(wanted["loss"], rel=1e-4)
    assert found["grads"].keys() == wanted["grad_norms"].keys()
    for name, norm in wanted["grad_norms"].items():
        assert found["grads"][name].norm().item() == pytest.approx(norm, rel=1e-4), name
        moved = (found["parameters"][name] - start[name]).norm().item()
        assert moved == pytest.approx(wanted["moved_norms"][name], rel=1e-3), name
