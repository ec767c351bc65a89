"""Training a RoleCLIP: what moves, what stays, and that nothing becomes NaN."""

import contextlib

import pytest
import torch
from toys import toy_ids, toy_images, uniform_map, wrapped

from dear_plugin import loss_terms

LABELS = torch.tensor([0, 1, 2, 3])


def train(role_clip, images, ids, *, steps, autocast=contextlib.nullcontext, lr=1e-2, device="cpu"):
    """A plain DeAR loop; returns the totals."""
    scaler = torch.amp.GradScaler(device, enabled=False)
    optimiser = torch.optim.AdamW(role_clip.trainable_parameters(), lr=lr, weight_decay=1e-2)
    totals = []
    labels = LABELS.to(images.device)
    for _ in range(steps):
        with autocast():
            prefix = role_clip.cached_prefix(ids)
            image, text = role_clip.image_features(images, frozen=True), role_clip.text_features(prefix)
            terms = loss_terms(
                logits=role_clip.class_logits(image, text), labels=labels, image=image, text=text,
                frozen_text=prefix.frozen, fusion=role_clip.adapter.fusion, lambda_reg=1.0, lambda_fusion=0.1,
            )
        optimiser.zero_grad()
        scaler.scale(terms["total"]).backward()
        scaler.step(optimiser)
        scaler.update()
        totals.append(float(terms["total"].detach()))
    return totals


def _finite(role_clip, totals):
    return all(map(torch.isfinite, map(torch.tensor, totals))) and all(
        bool(torch.isfinite(p).all()) for p in role_clip.adapter.parameters()
    )


def test_fifty_steps_in_fp32_move_the_adapter_alone(geometry):
    role_clip = wrapped(geometry)
    frozen = {k: v.clone() for k, v in role_clip.clip.state_dict().items()}
    start = {k: v.clone() for k, v in role_clip.adapter.state_dict().items()}
    totals = train(role_clip, toy_images(geometry, 4), toy_ids(), steps=50)
    assert _finite(role_clip, totals) and totals[-1] < totals[0]
    assert all(torch.equal(v, frozen[k]) for k, v in role_clip.clip.state_dict().items())
    assert all(p.grad is None for p in role_clip.clip.parameters())
    moved = {k for k, v in role_clip.adapter.state_dict().items() if not torch.equal(v, start[k])}
    assert moved == set(start), "every part of the adapter learns"


def test_fifty_steps_under_bf16_autocast(geometry):
    role_clip = wrapped(geometry)
    autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)  # noqa: E731
    totals = train(role_clip, toy_images(geometry, 4), toy_ids(), steps=50, autocast=autocast)
    assert _finite(role_clip, totals) and totals[-1] < totals[0]
    assert {p.dtype for p in role_clip.adapter.parameters()} == {torch.float32}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA: run on a machine with a GPU")
@pytest.mark.parametrize("mode", ["fp16 autocast", "bf16 autocast", "fp16 model"])
def test_fifty_steps_on_cuda(geometry, mode):
    from open_clip.model import convert_weights_to_lp

    role_clip = wrapped(geometry)
    if mode == "fp16 model":
        if geometry != "open_clip":
            pytest.skip("one geometry is enough for a model in half")
        convert_weights_to_lp(role_clip.clip, torch.float16)
    role_clip.to("cuda")
    dtype = torch.bfloat16 if mode.startswith("bf16") else torch.float16
    autocast = lambda: torch.autocast("cuda", dtype=dtype)  # noqa: E731
    totals = train(
        role_clip, toy_images(geometry, 4).to("cuda"), toy_ids().to("cuda"), steps=50, autocast=autocast, device="cuda"
    )
    assert _finite(role_clip, totals) and totals[-1] < totals[0]


@pytest.mark.parametrize(
    "options",
    [
        {"per_layer_maps": True},
        {"attribute_projection": "frozen"},
        {"token_mixing": False},
        {"role_mask": False},
        {"attributes": (), "text_tokens": 4},
        {"attributes": ("shape",), "text_tokens": 3},
        {"attributes": ("shape", "color"), "text_tokens": 1},
        {"text_tokens": 0},
        {"beta": 0.0},
        {"beta": 1.0},
        {"class_chunk": 2},
    ],
    ids=str,
)
def test_every_setting_trains(options):
    role_clip = wrapped("open_clip", **options)
    totals = train(role_clip, toy_images(n=4), toy_ids(), steps=5)
    assert _finite(role_clip, totals) and totals[-1] < totals[0]


def test_without_tokens_of_either_kind_only_fusion_is_left():
    role_clip = wrapped("open_clip", attributes=(), text_tokens=0)
    assert [tuple(p.shape) for p in role_clip.trainable_parameters() if p.numel()] == [(1,)]


def test_ablations_by_uniform_maps_train():
    for role in ("mixed", "generalization"):
        role_clip = wrapped("open_clip", uniform_map("open_clip", role))
        assert _finite(role_clip, train(role_clip, toy_images(n=4), toy_ids(), steps=3))


def test_the_trunk_keeps_no_graph():
    role_clip = wrapped("open_clip")
    prefix = role_clip.text_prefix(toy_ids())
    assert not any(t.requires_grad for t in prefix if t.is_floating_point())
    features = role_clip.image_features(toy_images(), frozen=True)
    assert features.cls.requires_grad and not features.frozen_cls.requires_grad


def test_gradients_reach_the_image_where_the_caller_asks():
    images = toy_images().requires_grad_()
    wrapped("open_clip").encode_image(images).sum().backward()
    assert images.grad.any()
