"""Ablations: nothing replaced changes nothing, silent heads cost nothing, chance stops, splits are disjoint."""

import pytest
import torch
from toys import toy_clip, toy_images

from dear_plugin.analysis.causal import (
    Ablation,
    AttributeTask,
    causal_agreement,
    causal_check,
    chance_pct,
    require_disjoint,
    untouched_scores,
)
from dear_plugin.roles import HeadInfo, HeadRole, RoleMap
from dear_plugin.towers import vision_tower

LAYERS = (1, 2)


def ablation(name="open_clip"):
    tower = vision_tower(toy_clip(name))
    return Ablation(tower, LAYERS, toy_images(name, 12), toy_images(name, 10, seed=5), batch_size=5)


def test_no_head_replaced_is_the_untouched_feature():
    found = ablation()
    with torch.no_grad():
        wanted = toy_clip("open_clip").encode_image(toy_images("open_clip", 12))
    for effect in ("direct", "total"):
        assert torch.allclose(found.without([], effect=effect), wanted, atol=1e-5)


def test_replacing_a_head_that_writes_nothing_changes_nothing_and_its_neighbour_something():
    """Zero the head's weights: replacing it is then no change, and its neighbour's replacement is one."""
    clip = toy_clip("open_clip")
    tower = vision_tower(clip)
    width = tower.width // tower.heads
    with torch.no_grad():
        tower.blocks[2].attn.out_proj.weight[:, :width] = 0.0
    found = Ablation(tower, LAYERS, toy_images("open_clip", 6), toy_images("open_clip", 6, seed=5))
    for effect in ("direct", "total"):
        assert torch.allclose(found.without([(2, 0)], effect=effect), found.features, atol=1e-5)
        assert not torch.allclose(found.without([(2, 1)], effect=effect), found.features, atol=1e-3)


def tasks_of(found):
    """Labels that the untouched model gets right by construction: its own nearest of six directions."""
    text = torch.nn.functional.normalize(found.features[:6] - found.features.mean(0), dim=-1)
    labels = (torch.nn.functional.normalize(found.features, dim=-1) @ text.T).argmax(1)
    return [AttributeTask("color", labels, text)]


def toy_map():
    infos = {(x, h): HeadInfo(HeadRole.GENERALIZATION, "color") for x in LAYERS for h in range(2)}
    infos[2, 0] = HeadInfo(HeadRole.ATTRIBUTE, "color")
    return RoleMap.from_heads(infos)


def test_a_check_reports_every_head_and_groups_beside_random_draws():
    found = ablation()
    report = causal_check(found, tasks_of(found), toy_map(), scale=20.0, draws=3, seed=1)
    assert report.untouched["color"].accuracy_pct == 100.0
    assert set(report.heads["direct"]) == {(1, 0), (1, 1), (2, 0), (2, 1)}
    group = next(g for g in report.groups["total"] if g["name"] == "attribute: color")
    assert group["heads"] == [(2, 0)] and len(group["random"]) == 3
    assert all((2, 0) not in d["heads"] for d in group["random"])
    shares = dict.fromkeys(report.heads["direct"], {"color": 1.0})
    assert causal_agreement(report, toy_map(), shares)["attribute_heads_confirmed"] == 1
    assert report == causal_check(found, tasks_of(found), toy_map(), scale=20.0, draws=3, seed=1)


def test_at_chance_it_stops_and_says_so():
    g = torch.Generator().manual_seed(0)
    features, text = torch.randn(300, 8, generator=g), torch.randn(5, 8, generator=g)
    labels = torch.randint(0, 5, (300,), generator=g)
    with pytest.raises(ValueError, match="at chance on every attribute .color .*the causal check stops"):
        untouched_scores(features, [AttributeTask("color", labels, text)], scale=10.0)
    good = AttributeTask("shape", (features @ torch.nn.functional.normalize(text, dim=-1).T).argmax(1), text)
    _, usable, lost = untouched_scores(features, [AttributeTask("color", labels, text), good], scale=10.0)
    assert [t.name for t in usable] == ["shape"] and lost == ("color",)


def test_chance_is_the_larger_of_guessing_evenly_and_always_the_same():
    assert chance_pct(torch.tensor([0, 1, 2, 3]), 4) == 25.0
    assert chance_pct(torch.tensor([0, 0, 0, 1, -1]), 4) == 75.0


def test_overlapping_sets_are_refused():
    require_disjoint(roles=["a"], means=["b"])
    with pytest.raises(ValueError, match="1 pictures are both in roles and in means"):
        require_disjoint(roles=["a", "b"], means=["b"])
