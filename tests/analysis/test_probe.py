"""The attribute probe: eta squared against its definition, entropy against known values, roles of planted heads."""

import math

import pytest
import torch

from dear_plugin.analysis.probe import entropy_bits, eta_squared, probe_role_map, role_of
from dear_plugin.roles import HeadRole


def test_eta_squared_equals_the_definition_with_the_chance_correction():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 5, (200,), generator=generator)
    x = torch.randn(200, 7, generator=generator) + torch.randn(5, 7, generator=generator)[labels]
    centred = x.double() - x.double().mean(0)
    between = sum((labels == g).sum() * centred[labels == g].mean(0).square().sum() for g in range(5))
    eta = (between / centred.square().sum()).item()
    assert eta_squared(x, labels) == pytest.approx(1 - (1 - eta) * 199 / 195, rel=1e-9)


def test_eta_squared_is_one_for_a_function_of_the_label_and_about_zero_without_relation():
    labels = torch.arange(300) % 6
    assert eta_squared(torch.eye(6)[labels], labels) == pytest.approx(1.0)
    noise = [eta_squared(torch.randn(300, 4, generator=torch.Generator().manual_seed(s)), labels) for s in range(20)]
    assert sum(noise) / 20 < 0.01
    assert eta_squared(torch.ones(300, 4), labels) == 0.0


def test_eta_squared_refuses_too_few_pictures():
    with pytest.raises(ValueError, match="4 pictures in 4 groups says nothing"):
        eta_squared(torch.randn(4, 2), torch.arange(4))


def test_entropy_of_uniform_is_log2_of_the_number_and_of_one_is_zero():
    assert entropy_bits(dict.fromkeys("abcdefghijkl", 0.3)) == pytest.approx(math.log2(12))
    assert entropy_bits({"a": 0.4, "b": 0.0, "c": 0.0}) == 0.0
    assert entropy_bits({"a": 0.0, "b": 0.0}) == 1.0


@pytest.mark.parametrize(
    ("shares", "role"),
    [
        ({"color": 0.8, "shape": 0.01, "texture": 0.0}, HeadRole.ATTRIBUTE),
        ({"color": 0.3, "shape": 0.3, "texture": 0.3}, HeadRole.GENERALIZATION),
        ({"color": 0.02, "shape": 0.0, "texture": 0.0}, HeadRole.GENERALIZATION),  # carries nothing that is known
        ({"color": 0.5, "shape": 0.17, "texture": 0.03}, HeadRole.MIXED),
    ],
)
def test_role_of_follows_entropy_and_the_share_explained(shares, role):
    assert role_of(shares).role is role


def test_planted_heads_are_found():
    generator = torch.Generator().manual_seed(1)
    n = 600
    color, shape = (torch.randint(0, 4, (n,), generator=generator) for _ in range(2))
    texture = torch.where(torch.arange(n) % 2 == 0, torch.randint(0, 4, (n,), generator=generator), -1)
    direction = torch.randn(3, 4, 8, generator=generator)
    noise = 0.1 * torch.randn(n, 1, 2, 8, generator=generator)
    everything = direction[0][color] + direction[1][shape] + direction[2][texture.clamp(min=0)]
    heads = noise + torch.stack([direction[0][color], everything], 1)[:, None]
    labels = {"color": color, "shape": shape, "texture": texture}
    role_map = probe_role_map(heads, labels, layers=(3,), model=None)
    assert (role_map.role(3, 0).role, role_map.role(3, 0).attribute) == (HeadRole.ATTRIBUTE, "color")
    assert role_map.role(3, 1).role is HeadRole.GENERALIZATION
    assert role_map == probe_role_map(heads, labels, layers=(3,), model=None)


def test_probe_refuses_a_wrong_number_of_layers():
    with pytest.raises(ValueError, match=r"heads must be \[N, 2, H, E\]"):
        probe_role_map(torch.zeros(5, 1, 2, 3), {}, layers=(0, 1), model=None)
