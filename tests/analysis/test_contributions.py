"""The exact decomposition of the CLS feature: parts sum to it, and a silenced head contributes nothing."""

import pytest
import torch
from toys import GEOMETRIES, stock_image, toy_clip, toy_images

from dear_plugin.analysis.contributions import head_contributions
from dear_plugin.towers import vision_tower


@pytest.mark.parametrize("count", [1, 2, None])
def test_parts_sum_to_the_cls_feature(geometry, count):
    clip, images = toy_clip(geometry), toy_images(geometry)
    tower = vision_tower(clip)
    layers = None if count is None else range(tower.layers - count, tower.layers)
    with torch.no_grad():
        wanted = stock_image(clip, images)
    parts = head_contributions(tower, images, layers)
    assert parts.heads.shape == (3, count or tower.layers, GEOMETRIES[geometry].heads, GEOMETRIES[geometry].embed)
    error = (parts.total() - wanted).norm() / wanted.norm()
    assert error < 1e-5


# OpenAI's own LayerNorm computes in fp32 whatever it is given, so its models cannot run in float64 at all.
@pytest.mark.parametrize("name", [name for name, g in GEOMETRIES.items() if g.library != "openai"])
def test_the_sum_is_exact_in_float64(name):
    clip, images = toy_clip(name).double(), toy_images(name).double()
    with torch.no_grad():
        wanted = stock_image(clip, images)
    error = (head_contributions(vision_tower(clip), images).total() - wanted).norm() / wanted.norm()
    assert error < 1e-12


def test_a_head_whose_output_weights_are_zero_contributes_nothing_and_the_others_something(geometry):
    clip, images = toy_clip(geometry), toy_images(geometry)
    tower = vision_tower(clip)
    out = tower.blocks[-1].attn.out_proj.weight
    width = out.shape[1] // tower.heads
    with torch.no_grad():
        out[:, :width] = 0.0
    heads = head_contributions(tower, images, [tower.layers - 1]).heads[:, 0]
    assert heads[:, 0].abs().max() == 0.0
    assert (heads[:, 1:].flatten(2).abs().amax((0, 2)) > 1e-3).all()


def test_head_sizes_do_not_hide_a_swapped_order():
    """Zeroing what head 1 reads (its values) must empty head 1 alone."""
    clip, images = toy_clip("open_clip-narrow-heads"), toy_images("open_clip-narrow-heads")
    tower = vision_tower(clip)
    attention, width = tower.blocks[-1].attn, tower.width // tower.heads
    rows = slice(2 * tower.width + width, 2 * tower.width + 2 * width)
    with torch.no_grad():
        attention.in_proj_weight[rows] = 0.0
        attention.in_proj_bias[rows] = 0.0
    size = head_contributions(tower, images, [tower.layers - 1]).heads[:, 0].abs().amax((0, 2))
    assert size[1] == 0.0 and (size[[0, 2, 3]] > 1e-3).all()


def test_layers_with_a_gap_are_refused():
    tower = vision_tower(toy_clip("open_clip"))
    with pytest.raises(ValueError, match=r"layers \[0, 2\] cannot be decomposed: wanted the last layers of 3"):
        head_contributions(tower, toy_images("open_clip"), [0, 2])
