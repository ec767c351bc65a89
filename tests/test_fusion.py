"""Task-adaptive fusion and the loss terms against their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F

from dear_plugin.encoder import ImageFeatures
from dear_plugin.fusion import TaskAdaptiveFusion, loss_terms


def _features():
    torch.manual_seed(0)
    return torch.randn(4, 3, 8), torch.randn(5, 8)


def test_weights_start_as_told():
    weights = TaskAdaptiveFusion(("color", "shape", "texture"), 0.7).weights()
    assert torch.allclose(weights, torch.tensor([0.7, 0.1, 0.1, 0.1]))
    assert torch.equal(TaskAdaptiveFusion(0).weights(), torch.ones(1))
    with pytest.raises(ValueError, match="cls_weight must lie strictly between 0 and 1, got 1.0"):
        TaskAdaptiveFusion(2, 1.0)


def test_logits_are_the_weighted_sum_of_cosines():
    features, text = _features()
    fusion = TaskAdaptiveFusion(2, 0.5)
    fusion.logits_alpha.data = torch.tensor([0.3, -0.2, 1.0])
    alpha = torch.tensor([0.3, -0.2, 1.0]).softmax(0)
    wanted = sum(
        alpha[k] * 20 * F.cosine_similarity(features[:, k, None], text[None], dim=-1) for k in range(3)
    )
    assert torch.allclose(fusion(features, text, 20.0), wanted, atol=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(fusion(features, text, 20.0), wanted, atol=1e-5), "fp32 under autocast too"
    with pytest.raises(ValueError, match="fusion has 3 weights .* got 2 features"):
        fusion(features[:, :2], text, 1.0)


def test_one_feature_is_plain_clip():
    features, text = _features()
    logits = TaskAdaptiveFusion(0)(features[:, :1], text, 10.0)
    assert torch.allclose(logits, 10 * F.normalize(features[:, 0], dim=-1) @ F.normalize(text, dim=-1).t(), atol=1e-5)


def test_loss_terms_by_hand():
    features, text = _features()
    labels = torch.tensor([0, 1, 2, 3])
    fusion = TaskAdaptiveFusion(2, 0.7)
    image = ImageFeatures(features[:, 0], features[:, 1:], features[:, 1])
    logits = fusion(features, text, 10.0)
    terms = loss_terms(
        logits=logits, labels=labels, image=image, text=text, frozen_text=text.flip(0), fusion=fusion,
        lambda_reg=2.0, lambda_fusion=0.5,
    )
    image_cos = F.cosine_similarity(features[:, 0], features[:, 1]).mean()
    reg = (1 - image_cos) + (1 - F.cosine_similarity(text, text.flip(0)).mean())
    assert torch.allclose(terms["ce"], F.cross_entropy(logits, labels))
    assert torch.allclose(terms["reg"], reg, atol=1e-6)
    assert float(terms["fusion"].detach()) == pytest.approx(-math.log(0.7), abs=1e-6)
    assert torch.allclose(terms["total"], terms["ce"] + 2.0 * terms["reg"] + 0.5 * terms["fusion"])
    assert list(terms) == ["ce", "reg", "fusion", "total"]


def test_reg_needs_frozen_features_unless_it_is_off():
    features, text = _features()
    fusion = TaskAdaptiveFusion(2)
    values = dict(
        logits=fusion(features, text, 1.0), labels=torch.zeros(4, dtype=torch.long), text=text, frozen_text=None,
        image=ImageFeatures(features[:, 0], features[:, 1:]), fusion=fusion, lambda_fusion=0.0,
    )
    with pytest.raises(ValueError, match="lambda_reg is 1.0, but frozen features are missing"):
        loss_terms(**values, lambda_reg=1.0)
    terms = loss_terms(**values, lambda_reg=0.0)
    assert terms["reg"] == 0 and torch.equal(terms["total"], terms["ce"])
