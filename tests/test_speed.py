"""Every speed switch gives the same numbers: features, losses, gradients."""

from dataclasses import fields

import pytest
import torch
from toys import GEOMETRIES, close, stock_image, stock_text, toy_clip, toy_ids, toy_images, varied_map, wrapped

from dear_plugin import loss_terms
from dear_plugin.attention import masked_attention, projections
from dear_plugin.encoder import read_with_tokens, run_with_tokens
from dear_plugin.head_groups import HeadGroups, as_groups, head_groups
from dear_plugin.speed import Speed, speed, switched
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import read_plain, take_positions, text_tower, vision_tower

SWITCHES = [field.name for field in fields(Speed)]


def gradients(role_clip, images, ids):
    """A whole DeAR loss: its terms, features and the gradient of every trained parameter."""
    role_clip.text_cache.clear()
    role_clip.adapter.zero_grad()
    prefix = role_clip.text_prefix(ids)
    image, text = role_clip.image_features(images, frozen=True), role_clip.text_features(prefix)
    terms = loss_terms(
        logits=role_clip.class_logits(image, text), labels=torch.arange(len(images)), image=image, text=text,
        frozen_text=prefix.frozen, fusion=role_clip.adapter.fusion, lambda_reg=1.0, lambda_fusion=0.1)
    terms["total"].backward()
    return image, text, prefix.frozen, terms, {n: p.grad.clone() for n, p in role_clip.adapter.named_parameters()}


@pytest.mark.parametrize("switch", SWITCHES)
def test_a_switch_changes_nothing_that_is_computed(geometry, switch):
    role_clip = wrapped(geometry, text_first_layer=GEOMETRIES[geometry].text_layers - 1)
    images, ids = toy_images(geometry), toy_ids()
    one = gradients(role_clip, images, ids)
    with switched(**{switch: not getattr(speed(), switch)}):
        other = gradients(role_clip, images, ids)
    for a, b in zip([*one[0], *one[1:3]], [*other[0], *other[1:3]], strict=True):
        assert close(a, b)
    for name, value in one[3].items():
        assert float(value.detach()) == pytest.approx(float(other[3][name].detach()), rel=1e-5, abs=1e-7), name
    for name, grad in one[4].items():
        assert torch.allclose(grad, other[4][name], rtol=1e-4, atol=1e-5 * float(grad.abs().max()) + 1e-9), name


def test_switches_come_back_and_unknown_ones_are_refused():
    before = speed()
    with pytest.raises(RuntimeError, match="stop"), switched(last_rows=False):
        assert not speed().last_rows
        raise RuntimeError("stop")
    assert speed() is before
    with pytest.raises(TypeError, match="turbo"), switched(turbo=True):
        pass


def test_the_last_layer_does_less(geometry, monkeypatch):
    """What makes it faster: the last MLP sees the rows that are read, not the patches."""
    role_clip, seen = wrapped(geometry), []
    mlp = role_clip.vision_tower.blocks[-1].mlp
    mlp.register_forward_hook(lambda module, args, out: seen.append(args[0].shape[1]))
    role_clip.image_features(toy_images(geometry), frozen=True)
    assert sorted(seen) == [1, 1 + len(role_clip.config.attributes)]


@pytest.mark.parametrize("schedule", [
    TokenSchedule(1, None, "mix", 0.7), TokenSchedule(2, 1, "replace"), TokenSchedule(0, 1, "replace", in_place=True),
    TokenSchedule(0, 3, "keep"),
])  # fmt: skip
@torch.no_grad()
def test_reading_rows_equals_running_all(geometry, schedule):
    clip = toy_clip(geometry)
    for tower, x, read in (
        (vision_tower(clip), vision_tower(clip).embed(toy_images(geometry)), 0),
        (text_tower(clip), text_tower(clip).embed(toy_ids()), toy_ids().argmax(-1)),
    ):
        if schedule.first_layer >= tower.layers:
            continue
        tokens = torch.randn(2, tower.width)
        whole, outputs = run_with_tokens(tower, x, tokens, schedule)
        wanted = take_positions(whole, read) if isinstance(read, torch.Tensor) else whole[:, read]
        row, inside = read_with_tokens(tower, x, tokens, schedule, read=read)
        alone, none = read_with_tokens(tower, x, tokens, schedule, read=read, outputs=False)
        assert torch.allclose(row, wanted, atol=1e-5) and torch.allclose(alone, wanted, atol=1e-5) and none is None
        assert torch.allclose(inside, outputs, atol=1e-5)


@torch.no_grad()
def test_reading_a_row_of_the_stock_tower(geometry):
    clip, images, ids = toy_clip(geometry), toy_images(geometry), toy_ids()
    vision, text = vision_tower(clip), text_tower(clip)
    assert close(vision.project(read_plain(vision, vision.embed(images), 0)), stock_image(clip, images))
    assert close(text.project(read_plain(text, text.embed(ids), text.end_index(ids))), stock_text(clip, ids))


# -- heads in groups --------------------------------------------------------------------------------------------


@torch.no_grad()
def test_groups_of_heads_equal_the_mask(geometry):
    role_clip = wrapped(geometry)
    for layer, mask in role_clip.role_masks().items():
        weights = projections(role_clip.vision_tower.blocks[layer].attn)
        x = torch.randn(2, role_clip.layout.length, role_clip.vision_tower.width)
        groups = head_groups(mask)
        assert len(groups.groups) == len({tuple(m.flatten().tolist()) for m in mask})
        assert torch.allclose(masked_attention(weights, x, groups), masked_attention(weights, x, mask), atol=1e-6)


def test_a_mask_that_is_no_split_into_blocks_stays_a_mask():
    causal = torch.ones(1, 4, 4).tril() > 0
    assert head_groups(causal) is None
    assert as_groups({2: causal}, {})[2] is causal


def test_groups_are_made_anew_for_another_mask():
    mask, known = torch.ones(2, 3, 3) > 0, {}
    first = as_groups({0: mask}, known)[0]
    assert isinstance(first, HeadGroups) and as_groups({0: mask}, known)[0] is first
    assert as_groups({0: mask.clone()}, known)[0] is not first


def test_rows_that_differ_between_samples_go_without_a_mask():
    clip = toy_clip()
    weights = projections(clip.visual.transformer.resblocks[0].attn)
    with pytest.raises(ValueError, match="rows that differ between samples"):
        masked_attention(weights, torch.randn(2, 5, 128), torch.ones(5, 5) > 0, rows=torch.tensor([[0], [1]]))


def test_an_attribute_head_is_one_block_and_single_tokens():
    role_clip = wrapped("open_clip", varied_map("open_clip"))
    layer, mask = next(iter(role_clip.role_masks().items()))
    objects, tokens = role_clip.layout.objects, len(role_clip.config.attributes)
    group = next(g for g in head_groups(mask).groups if 0 in g.heads.tolist())  # head 0 is a color head
    assert [len(block) for block in group.blocks] == [objects + 1]
    assert group.alone.tolist() == list(range(objects + 1, objects + tokens)), layer
