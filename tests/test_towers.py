"""Towers against the stock models they are a view on, and what is refused by name."""

import pytest
import torch
from torch import nn
from toys import CONTEXT, GEOMETRIES, stock_image, stock_text, toy_clip, toy_ids, toy_images

from dear_plugin.encoder import run_with_tokens
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import take_positions, text_tower, vision_tower


def test_geometry_is_read_from_the_model(geometry):
    g, clip = GEOMETRIES[geometry], toy_clip(geometry)
    vision, text = vision_tower(clip), text_tower(clip)
    assert (vision.layers, vision.heads, vision.width, vision.embed_dim) == (g.layers, g.heads, g.width, g.embed)
    assert (vision.input_resolution, vision.patch_size) == (g.resolution, g.patch)
    assert vision.sequence_length == 1 + (g.resolution // g.patch) ** 2
    assert (text.layers, text.heads, text.width, text.embed_dim) == (g.text_layers, g.text_heads, g.text_width, g.embed)
    assert text.context_length == CONTEXT and vision.dtype == text.dtype == torch.float32


@torch.no_grad()
def test_the_vision_tower_is_the_stock_model_bit_for_bit(geometry):
    clip, images = toy_clip(geometry), toy_images(geometry)
    tower = vision_tower(clip)
    x = tower.run(tower.embed(images), 0, 1)
    x = tower.run(x, 1, tower.layers)
    assert torch.equal(tower.project(x[:, 0]), stock_image(clip, images))


@torch.no_grad()
def test_the_text_tower_is_the_stock_model_bit_for_bit(geometry):
    clip, ids = toy_clip(geometry), toy_ids()
    tower = text_tower(clip)
    x = tower.run(tower.embed(ids), 0, tower.layers)
    assert torch.equal(tower.project(take_positions(x, tower.end_index(ids))), stock_text(clip, ids))


@torch.no_grad()
def test_text_cut_after_the_longest_end_token_is_the_same(geometry):
    clip, ids = toy_clip(geometry), toy_ids()
    tower = text_tower(clip)
    cut = tower.encode_embedded(tower.embed(ids), tower.end_index(ids))
    assert ids.argmax(-1).max() + 1 < CONTEXT, "something is cut"
    assert torch.allclose(_unit(cut), _unit(stock_text(clip, ids)), atol=1e-6)


@torch.no_grad()
def test_borrowed_blocks_with_an_open_mask_equal_the_stock_blocks(geometry):
    tower = vision_tower(toy_clip(geometry))
    x = tower.embed(toy_images(geometry))
    everything = torch.ones(tower.heads, x.shape[1], x.shape[1], dtype=torch.bool)
    a, b = tower.run(x, 0, tower.layers), tower.run(x, 0, tower.layers, allow=everything)
    assert torch.allclose(a, b, atol=1e-5)


@torch.no_grad()
def test_a_later_text_token_leaves_earlier_positions_alone(geometry):
    tower, ids = text_tower(toy_clip(geometry)), toy_ids()
    changed = ids.clone()
    changed[:, 8] = 7
    for length in (CONTEXT, 12):
        a, b = (tower.run(tower.embed(i[:, :length]), 0, tower.layers) for i in (ids, changed))
        assert torch.equal(a[:, :8], b[:, :8])
        assert not torch.equal(a[:, 8:], b[:, 8:])


def test_an_open_clip_end_token_by_id_is_found():
    clip, ids = toy_clip("open_clip"), toy_ids()
    clip.text_pool_type, clip.text_eos_id = "eos", int(ids.max())
    assert torch.equal(text_tower(clip).end_index(ids), ids.argmax(-1))


def _unit(x):
    return nn.functional.normalize(x, dim=-1)


# -- schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [None, 1])
def test_mix_replace_and_keep(position):
    x, tokens = torch.randn(2, 4, 3), torch.randn(2, 3)
    mix = TokenSchedule(1, position, "mix", 0.7)
    inside = mix.enter(x, tokens)
    assert inside.shape == (2, 6, 3)
    plain, outputs = mix.leave(inside, 2)
    assert torch.equal(plain, x) and torch.equal(outputs, tokens.expand(2, 2, 3))
    moved = inside + 1
    plain, outputs = mix.leave(mix.refresh(moved, tokens, 2), 2)
    assert torch.equal(plain, x + 1)
    assert torch.allclose(outputs, 0.7 * tokens + 0.3 * (tokens + 1))
    replace = TokenSchedule(1, position, "replace")
    assert torch.equal(replace.leave(replace.refresh(moved, tokens, 2), 2)[1], tokens.expand(2, 2, 3))
    keep = TokenSchedule(1, position, "keep")
    assert torch.equal(keep.refresh(moved, tokens, 2), moved)


def test_tokens_by_layer_go_on_by_themselves_after_the_last_row():
    x, tokens = torch.randn(2, 4, 3), torch.randn(2, 2, 3)
    schedule = TokenSchedule(0, None, "replace")
    inside = schedule.enter(x, tokens)
    assert torch.equal(inside[:, 4:], tokens[0].expand(2, 2, 3))
    assert torch.equal(schedule.refresh(inside, tokens, 1)[:, 4:], tokens[1].expand(2, 2, 3))
    assert torch.equal(schedule.refresh(inside, tokens, 2), inside)


def test_tokens_in_place_overwrite_and_stay():
    x, tokens = torch.randn(2, 5, 3), torch.randn(2, 3)
    schedule = TokenSchedule(0, 1, "replace", in_place=True)
    inside = schedule.enter(x, tokens)
    assert torch.equal(inside, torch.cat([x[:, :1], tokens.expand(2, 2, 3), x[:, 3:]], dim=1))
    assert torch.equal(schedule.leave(inside, 2)[0], inside)


def test_schedules_are_checked():
    with pytest.raises(ValueError, match=r"beta must lie in \[0, 1\], got 1.5"):
        TokenSchedule(0, beta=1.5)
    with pytest.raises(ValueError, match="then must be 'mix', 'replace' or 'keep', got 'blend'"):
        TokenSchedule(0, then="blend")
    with pytest.raises(ValueError, match="in_place needs the position"):
        TokenSchedule(0, in_place=True)
    tower = vision_tower(toy_clip())
    with pytest.raises(ValueError, match="tokens enter at layer 3, which is outside the layers 0-2"):
        run_with_tokens(tower, tower.embed(toy_images()), torch.zeros(1, 128), TokenSchedule(3))


# -- what is refused --------------------------------------------------------------------------------------------


def test_a_resnet_is_refused():
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    text = CLIPTextCfg(context_length=8, vocab_size=8, width=64, heads=1, layers=1)
    clip = CLIP(32, CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, image_size=32), text)
    with pytest.raises(ValueError, match="the vision tower is a ResNet .* no attention heads to give roles to"):
        vision_tower(clip)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"pool_type": "avg"}, "pools by 'avg'"),
        ({"attentional_pool": True, "attn_pooler_heads": 2}, "an attn_pool, not by its CLS token"),
        ({"output_tokens": True}, "output_tokens=True"),
        ({"qk_norm": True}, "layer 0, attn uses ln_q"),
    ],
)
def test_unlike_vision_towers_are_refused_by_the_part(options, message):
    with pytest.raises(ValueError, match=message):
        vision_tower(toy_clip("open_clip", **options))


def test_unlike_text_towers_are_refused_by_the_part():
    clip = toy_clip("open_clip")
    clip.text_pool_type = "last"
    with pytest.raises(ValueError, match="text tower pools by 'last'"):
        text_tower(clip)
    clip = toy_clip("open_clip")
    clip.attn_mask = None
    with pytest.raises(ValueError, match="no causal mask"):
        text_tower(clip)
    clip = toy_clip("open_clip")
    clip.ln_final = None
    with pytest.raises(ValueError, match="text tower .* has no ln_final"):
        text_tower(clip)


def test_wrapped_and_scripted_models_are_refused():
    with pytest.raises(ValueError, match="inside DataParallel: give its .module"):
        vision_tower(nn.DataParallel(toy_clip()))
    with pytest.raises(ValueError, match="load it with jit=False"):
        vision_tower(torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="a Linear has no `visual`"):
        vision_tower(nn.Linear(2, 2))
    clip = toy_clip()
    clip.visual.transformer.resblocks[1].ln_2 = None
    del clip.visual.transformer.resblocks[1].ln_2
    with pytest.raises(ValueError, match="vision tower, layer 1: a ResidualAttentionBlock has no ln_2"):
        vision_tower(clip)


def test_wrong_inputs_are_refused():
    clip = toy_clip()
    with pytest.raises(TypeError, match=r"images must be a tensor \[N, 3, 48, 48\] .* got str"):
        vision_tower(clip).embed("image.png")
    with pytest.raises(ValueError, match=r"shape \[N, 3, 48, 48\], got \[2, 3, 32, 32\]"):
        vision_tower(clip).embed(torch.zeros(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"token ids \[C, L\] of whole numbers, got \[2, 3\]"):
        text_tower(clip).embed(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="text has 17 positions, the tower has 16"):
        text_tower(clip).embed(torch.zeros(2, 17, dtype=torch.long))
