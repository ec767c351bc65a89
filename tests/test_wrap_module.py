"""RoleCLIP as a module: copies, state dict, run modes, casts."""

import copy
import pickle
import warnings

import pytest
import torch
from toys import close, stock_image, toy_clip, toy_ids, toy_images, wrapped

# -- the model as a module --------------------------------------------------------------------------------------


def test_gradients_reach_the_adapter_alone_whatever_the_flags_of_the_clip(geometry):
    for asks in (True, False):
        clip = toy_clip(geometry).requires_grad_(asks)
        role_clip = wrapped(geometry, clip=clip, class_chunk=2)
        features = role_clip.image_features(toy_images(geometry), frozen=True)
        text = role_clip.text_features(role_clip.text_prefix(toy_ids()))
        logits = role_clip.class_logits(features, text).sum() + role_clip(toy_images(geometry), toy_ids())[0].sum()
        logits.backward()
        assert all(p.grad is None and p.requires_grad == asks for p in clip.parameters())
        assert all(p.grad is not None for p in role_clip.trainable_parameters())


def test_trainable_parameters_are_the_adapters(geometry):
    role_clip = wrapped(geometry)
    for parameter in role_clip.parameters():
        parameter.requires_grad_(False)  # a foreign trainer freezes all it does not know by name
    assert {id(p) for p in role_clip.trainable_parameters()} == {id(p) for p in role_clip.adapter.parameters()}
    assert all(p.requires_grad for p in role_clip.adapter.parameters())
    assert not any(p.requires_grad for p in role_clip.clip.parameters())
    frozen = wrapped(geometry, attribute_projection="frozen")
    assert frozen.adapter.attribute_projection is None
    assert frozen.encode_image_attributes(toy_images(geometry)).shape[1] == 5


@torch.no_grad()
def test_copies_and_pickles_compute_the_same(geometry):
    role_clip, images, ids = wrapped(geometry), toy_images(geometry), toy_ids()
    wanted = role_clip(images, ids)[0]
    role_clip.cached_text_features(ids)
    for other in (copy.deepcopy(role_clip), pickle.loads(pickle.dumps(role_clip))):
        assert torch.equal(other(images, ids)[0], wanted)
        other.adapter.tokens.latents.add_(1.0)
        assert not torch.equal(other(images, ids)[0], wanted)
        assert torch.equal(other.cached_text_features(ids), other.encode_text(ids))
        assert other.vision_tower.visual.conv1 is other.host.visual.conv1, "its towers look at its own copy"
    assert torch.equal(role_clip(images, ids)[0], wanted)


@torch.no_grad()
def test_state_dict_holds_the_hosts_keys_and_loads_again(geometry):
    role_clip, images, ids = wrapped(geometry), toy_images(geometry), toy_ids()
    state = role_clip.state_dict()
    assert {k for k in state if not k.startswith("adapter.")} == set(role_clip.clip.state_dict())
    assert {k[8:] for k in state if k.startswith("adapter.")} == set(role_clip.adapter.state_dict())
    other = wrapped(geometry, clip=toy_clip(geometry, seed=5))
    other.adapter.tokens.latents.add_(1.0)
    other.load_state_dict(state)
    assert torch.equal(other(images, ids)[0], role_clip(images, ids)[0])
    inside = torch.nn.ModuleDict({"model": role_clip})
    inside.load_state_dict(inside.state_dict())
    assert all(k.startswith("model.") and not k.startswith("model.clip.") for k in inside.state_dict())


@torch.no_grad()
def test_models_that_arrive_in_training_mode_run_in_eval_mode():
    # A dropout of 0.5 among the patches would halve the sequence.
    clip, images = toy_clip("open_clip", patch_dropout=0.5), toy_images()
    wanted = wrapped("open_clip", clip=clip).encode_image(images)
    plain = stock_image(clip, images)
    clip.train()
    role_clip = wrapped("open_clip", clip=clip)
    role_clip.train()
    assert torch.equal(role_clip.encode_image(images), wanted)
    with role_clip.disabled():
        assert torch.equal(role_clip.encode_image(images), plain)
    assert clip.training and clip.visual.patch_dropout.training, "the caller's flags are given back"


def test_nothing_is_added_to_the_hosts_modules(geometry):
    clip = toy_clip(geometry)
    before = {name: sorted(vars(module)) for name, module in clip.named_modules()}
    role_clip = wrapped(geometry, clip=clip)
    role_clip(toy_images(geometry), toy_ids())[0].sum().backward()
    assert role_clip.clip is clip
    assert {name: sorted(vars(module)) for name, module in clip.named_modules()} == before


def test_data_parallel_is_refused_with_the_reason():
    role_clip = wrapped("open_clip")
    with pytest.raises(RuntimeError, match="does not run under nn.DataParallel: replicas"):
        role_clip._replicate_for_data_parallel()


# -- precision --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_half_model_on_the_cpu_is_computed_in_fp32_with_one_notice(geometry):
    clip, images, ids = toy_clip(geometry).half(), toy_images(geometry).half(), toy_ids()
    with pytest.warns(UserWarning, match="half precision on the CPU") as notices:
        role_clip = wrapped(geometry, clip=clip)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image, text = role_clip.encode_image(images), role_clip.encode_text(ids)
        role_clip(images, ids)
    assert len(notices) == 1
    assert image.dtype == text.dtype == torch.float16
    assert role_clip.encode_image_attributes(images).dtype == torch.float16
    assert role_clip.visual(images).dtype == torch.float16 and role_clip.visual(images.float()).dtype == torch.float32
    assert role_clip.dtype == torch.float32
    assert all(p.dtype == torch.float16 for p in clip.parameters()), "the caller's model is as it was"
    exact = wrapped(geometry, clip=copy.deepcopy(clip).float())
    assert close(image.float(), exact.encode_image(images.float()), 2e-3)


@torch.no_grad()
def test_casts_leave_the_adapter_in_fp32(geometry):
    images, ids = toy_images(geometry), toy_ids()
    role_clip = wrapped(geometry)
    wanted = role_clip.encode_image(images)
    with pytest.warns(UserWarning, match="half precision on the CPU"):
        role_clip.half()
    assert {p.dtype for p in role_clip.adapter.parameters()} == {torch.float32}
    assert role_clip.encode_image(images.half()).dtype == torch.float16
    assert close(role_clip.encode_image(images.half()).float(), wanted, 2e-3)
    role_clip.float()
    assert torch.equal(role_clip.encode_image(images), wanted), "nothing was rounded on the way"
    role_clip.bfloat16()
    assert {p.dtype for p in role_clip.adapter.parameters()} == {torch.float32}
    assert {p.dtype for p in role_clip.clip.parameters()} == {torch.bfloat16}
    if not geometry.startswith("openai"):  # OpenAI's LayerNorm wants fp32 weights: its own .bfloat16() does not run
        assert role_clip.encode_image(images).dtype == role_clip.encode_text(ids).dtype == torch.bfloat16
    role_clip.adapter.tokens.half()
    role_clip.adapter.fusion.to(torch.float64)
    assert {p.dtype for p in role_clip.adapter.parameters()} == {torch.float32}
