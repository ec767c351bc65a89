"""Attention with borrowed weights against the stock modules."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from toys import GEOMETRIES, toy_clip

from dear_plugin.attention import attention_weights, masked_attention, projections
from dear_plugin.hf_clip import HfAttention
from dear_plugin.towers import vision_tower


def _attention(name):
    torch.manual_seed(3)
    attention = vision_tower(toy_clip(name)).blocks[0].attn
    return attention, torch.randn(2, 7, GEOMETRIES[name].width)


def _stock(attention, x, mask=None):
    if isinstance(attention, HfAttention):
        return attention.attention(x, None if mask is None else mask[None])[0]
    if not isinstance(attention, nn.MultiheadAttention):
        return attention(x, attn_mask=mask)
    order = (lambda t: t) if attention.batch_first else (lambda t: t.transpose(0, 1))
    y = order(x)
    return order(attention(y, y, y, need_weights=False, attn_mask=mask)[0])


def test_without_a_mask_it_is_the_stock_attention(geometry):
    attention, x = _attention(geometry)
    everything = torch.ones(attention.num_heads, 7, 7, dtype=torch.bool)
    for allow in (None, everything, everything[0]):
        assert torch.allclose(masked_attention(projections(attention), x, allow), _stock(attention, x), atol=1e-6)


def test_a_mask_per_head_equals_the_stock_one_sample_at_a_time(geometry):
    attention, x = _attention(geometry)
    heads = attention.num_heads
    allow = torch.rand(heads, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    allow |= torch.eye(7, dtype=torch.bool)
    out = masked_attention(projections(attention), x, allow)
    for n in range(len(x)):
        blocked = torch.zeros(heads, 7, 7).masked_fill(~allow, float("-inf"))
        assert torch.allclose(out[n : n + 1], _stock(attention, x[n : n + 1], blocked), atol=1e-6)


def test_weights_are_probabilities_that_respect_the_mask(geometry):
    attention, x = _attention(geometry)
    allow = torch.ones(attention.num_heads, 7, 7, dtype=torch.bool).tril()
    weights = attention_weights(projections(attention), x, allow)
    assert weights.shape == (2, attention.num_heads, 7, 7)
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-6)
    assert (weights[:, ~allow] == 0).all()
    causal = masked_attention(projections(attention), x, causal=True)
    assert torch.allclose(causal, masked_attention(projections(attention), x, allow), atol=1e-6)


@pytest.mark.parametrize("part", ["in_proj_weight", "out_proj"])
def test_parametrised_weights_are_followed(part):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    attention, x = _attention("open_clip")
    before = masked_attention(projections(attention), x)
    owner, name = (attention.out_proj, "weight") if part == "out_proj" else (attention, part)
    parametrize.register_parametrization(owner, name, Doubled())
    after = masked_attention(projections(attention), x)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, _stock(attention, x), atol=1e-6)


def test_replaced_weights_are_followed():
    attention, x = _attention("openai")
    before = masked_attention(projections(attention), x)
    attention.out_proj.weight = nn.Parameter(torch.zeros_like(attention.out_proj.weight))
    assert torch.equal(masked_attention(projections(attention), x), attention.out_proj.bias.expand_as(before))


def test_modules_that_do_more_than_their_weights_say_are_refused():
    class LoraLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    attention, _ = _attention("open_clip")
    attention.out_proj = LoraLinear(128, 128)
    with pytest.raises(ValueError, match="layer 2, attn.out_proj is a LoraLinear of test_attention, not"):
        projections(attention, where="layer 2, attn")

    with pytest.raises(ValueError, match="is a Linear without in_proj_weight"):
        projections(nn.Linear(2, 2))

    class Own(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    with pytest.raises(ValueError, match="is a Own with its own forward"):
        projections(Own(8, 2))
    with pytest.raises(ValueError, match="separate query, key and value weights"):
        projections(nn.MultiheadAttention(8, 2, kdim=4))
    with pytest.raises(ValueError, match="uses bias_k"):
        projections(nn.MultiheadAttention(8, 2, add_bias_kv=True))


def test_wrong_masks_are_refused():
    attention, x = _attention("open_clip")
    with pytest.raises(ValueError, match=r"boolean \(True = may read\), got torch.float32"):
        masked_attention(projections(attention), x, torch.zeros(7, 7))
    with pytest.raises(ValueError, match=r"shape \(3, 7, 7\), wanted \(7, 7\) or \(2, 7, 7\)"):
        masked_attention(projections(attention), x, torch.ones(3, 7, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="either allow or causal"):
        masked_attention(projections(attention), x, torch.ones(7, 7, dtype=torch.bool), causal=True)
