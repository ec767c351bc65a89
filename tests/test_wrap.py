"""RoleCLIP: what must be equal to the stock CLIP, which token moves what, caches, refusals."""

import pytest
import torch
import torch.nn.functional as F
from toys import (
    GEOMETRIES,
    close,
    one_core_head,
    stock_image,
    stock_text,
    toy_clip,
    toy_ids,
    toy_images,
    uniform_map,
    varied_map,
    wrapped,
)

from dear_plugin import wrap_clip_with_roles
from dear_plugin.roles import HeadInfo, RoleMap
from dear_plugin.speed import switched

# -- equal to the stock model -----------------------------------------------------------------------------------


@pytest.mark.parametrize("asks, grad", [(True, False), (True, True), (False, False)])
def test_without_tokens_it_is_the_stock_model_bit_for_bit(geometry, asks, grad):
    # Torch picks kernels by requires_grad and by the grad mode: equal in each of them, before and after wrapping.
    clip, images, ids = toy_clip(geometry).requires_grad_(asks), toy_images(geometry), toy_ids()
    with torch.set_grad_enabled(grad):
        image, text = stock_image(clip, images), stock_text(clip, ids)
        role_clip = wrapped(geometry, clip=clip, attributes=(), text_tokens=0)
        for stock in (clip, toy_clip(geometry).requires_grad_(asks)):
            assert torch.equal(role_clip.encode_image(images), image) and torch.equal(stock_image(stock, images), image)
            assert torch.equal(role_clip.encode_text(ids), text) and torch.equal(stock_text(stock, ids), text)
        assert role_clip.encode_image_attributes(images).shape == (len(images), 0, image.shape[1])
        if not grad:
            features = role_clip.image_features(images, frozen=True)
            assert torch.equal(features.cls, image) and torch.equal(features.frozen_cls, image)


@torch.no_grad()
def test_disabled_is_the_stock_model_bit_for_bit_and_nests(geometry):
    clip, images, ids = toy_clip(geometry), toy_images(geometry), toy_ids()
    image, text = stock_image(clip, images), stock_text(clip, ids)
    role_clip = wrapped(geometry, clip=clip)
    adapted = role_clip.encode_image(images)
    with role_clip.disabled():
        with role_clip.disabled():
            pass
        assert torch.equal(role_clip.encode_image(images), image), "the inner block does not switch the outer one off"
        assert torch.equal(role_clip.encode_text(ids), text)
        assert torch.equal(role_clip.visual(images), image)
        logits = clip.logit_scale.exp() * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).t()
        assert torch.allclose(role_clip(images, ids)[0], logits, atol=1e-5)
        features = role_clip.text_features(role_clip.text_prefix(ids))
        plain = role_clip.class_logits(role_clip.image_features(images), features)
        assert torch.allclose(plain, logits, atol=1e-4)
    assert torch.equal(role_clip.encode_image(images), adapted) and not torch.equal(adapted, image)
    with pytest.raises(KeyError):
        with role_clip.disabled():
            raise KeyError("state is restored after an error too")
    assert torch.equal(role_clip.encode_image(images), adapted)


def test_isolated_heads_keep_the_frozen_feature_and_give_tokens_no_gradient(geometry):
    images = toy_images(geometry)
    for roles in (uniform_map(geometry, "generalization"), uniform_map(geometry, "attribute", "other")):
        role_clip = wrapped(geometry, roles)
        features = role_clip.image_features(images, frozen=True)
        assert torch.allclose(features.cls, features.frozen_cls, atol=1e-5)
        features.cls.square().sum().backward()
        for parameter in role_clip.adapter.parameters():
            assert parameter.grad is None or not parameter.grad.any()


def test_with_token_mixing_off_one_core_head_lets_only_its_token_through(geometry):
    role_clip = wrapped(geometry, one_core_head(geometry, "texture"), token_mixing=False, text_tokens=0)
    role_clip.image_features(toy_images(geometry)).cls.square().sum().backward()
    moved = role_clip.adapter.tokens.latents.grad.abs().sum(dim=1) > 0
    assert moved.tolist() == [a == "texture" for a in role_clip.config.attributes]


def test_with_token_mixing_other_tokens_leak_through_the_open_one():
    role_clip = wrapped("open_clip", one_core_head("open_clip", "texture"), text_tokens=0, beta=0.5)
    # The head opens in the last but one layer; tokens mixed there reach CLS only if a later head is open too.
    layers, heads = range(1, 3), 2
    infos = {(layer, h): HeadInfo("generalization") for layer in layers for h in range(heads)}
    infos[2, 0] = HeadInfo("attribute", "texture")
    role_clip = wrapped("open_clip", RoleMap.from_heads(infos), text_tokens=0, beta=0.5)
    role_clip.image_features(toy_images()).cls.square().sum().backward()
    size = role_clip.adapter.tokens.latents.grad.abs().sum(dim=1)
    own = role_clip.config.attributes.index("texture")
    assert (size > 0).all() and size[own] > 2 * size[torch.arange(5) != own].max(), "small, but not zero"


@torch.no_grad()
def test_a_map_of_mixed_heads_is_plain_attention(geometry):
    images = toy_images(geometry)
    masked = wrapped(geometry, uniform_map(geometry, "mixed"))
    bare = wrapped(geometry, varied_map(geometry), role_mask=False)
    assert masked.role_masks() == {} == bare.role_masks()
    assert close(masked.encode_image(images), bare.encode_image(images))
    # The same through the mask itself, which the wrapper leaves out as it blocks nothing.
    everything = {layer: torch.ones(GEOMETRIES[geometry].heads, masked.layout.length, masked.layout.length) > 0
                  for layer in range(masked.config.first_layer, masked.vision_tower.layers)}
    masked.role_masks = lambda: everything
    assert close(masked.encode_image(images), bare.encode_image(images))


@torch.no_grad()
def test_trunk_reuse_equals_the_plain_pass_bit_for_bit(geometry):
    role_clip, images = wrapped(geometry), toy_images(geometry)
    stock = stock_image(role_clip.clip, images)
    features = role_clip.image_features(images, frozen=True)
    assert torch.equal(features.cls, role_clip.encode_image(images))
    assert torch.equal(features.attributes, role_clip.encode_image_attributes(images))
    assert close(features.frozen_cls, stock), "its last layer runs for the CLS row alone"
    with switched(last_rows=False):
        assert torch.equal(role_clip.image_features(images, frozen=True).frozen_cls, stock)


@torch.no_grad()
def test_an_image_alone_equals_it_inside_a_batch(geometry):
    role_clip, images = wrapped(geometry), toy_images(geometry, 4)
    together, shape = role_clip.image_features(images), role_clip.image_features(images).attributes.shape
    for n in range(4):
        alone = role_clip.image_features(images[n : n + 1])
        assert close(alone.cls, together.cls[n : n + 1]) and close(alone.attributes, together.attributes[n : n + 1])
    assert shape == (4, 5, together.cls.shape[1])
    order = torch.tensor([2, 0, 3, 1])
    assert close(role_clip.encode_image(images[order]), together.cls[order])


# -- text -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_cut_and_cached_text_equals_full_text(geometry):
    role_clip, ids = wrapped(geometry), toy_ids()
    text, tokens = role_clip.text_tower, role_clip.adapter.tokens.for_text()
    full = role_clip.run_text(text.embed(ids))  # all positions, no prefix
    full = text.project(full[torch.arange(len(ids)), ids.argmax(-1)])
    prefix = role_clip.text_prefix(ids)
    assert prefix.hidden.shape[1] == int(ids.argmax(-1).max()) + 1 < ids.shape[1]
    assert close(role_clip.text_features(prefix), full)
    assert close(role_clip.encode_text(ids), full)
    assert close(role_clip.cached_text_features(ids), full)
    assert close(prefix.frozen, stock_text(role_clip.clip, ids))
    assert not close(full, prefix.frozen, 1e-3) and tokens.shape[0] == 5, "text tokens do something"


@torch.no_grad()
def test_text_tokens_stand_right_after_the_start_token(geometry):
    role_clip, ids = wrapped(geometry), toy_ids()
    x = role_clip.text_tower.embed(ids)
    adapted, plain = role_clip.run_text(x), role_clip.text_tower.run(x, 0, role_clip.text_tower.layers)
    assert torch.allclose(adapted[:, 0], plain[:, 0], atol=1e-5), "the start token reads none of them"
    assert ((adapted - plain)[:, 1:].abs().amax(dim=-1) > 1e-3).all(), "every later position reads them"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_class_chunks_have_the_same_gradients(geometry, chunk):
    ids, gradients = toy_ids(), []
    for size in (None, chunk):
        role_clip = wrapped(geometry)
        features = role_clip.text_features(role_clip.text_prefix(ids), chunk=size)
        (F.normalize(features, dim=-1) * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        gradients.append([p.grad for p in role_clip.adapter.tokens.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("classes", [1, 15, 16, 17])
def test_text_batches_of_any_size_equal_single_texts(classes):
    # 16 is the context length: a mask on the wrong axis would pass unseen there alone.
    role_clip, ids = wrapped("open_clip"), toy_ids(classes)
    together = role_clip.encode_text(ids)
    alone = torch.cat([role_clip.encode_text(ids[c : c + 1]) for c in range(classes)])
    assert close(together, alone)


# -- caches -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_text_features_are_never_stale(tmp_path):
    role_clip, ids = wrapped("open_clip"), toy_ids()
    prefix, first = role_clip.cached_prefix(ids), role_clip.cached_text_features(ids)
    assert role_clip.cached_prefix(ids) is prefix and role_clip.cached_text_features(ids) is first

    def check(changed=True):
        now = role_clip.cached_text_features(ids)
        assert close(now, role_clip.encode_text(ids))
        assert (not close(now, first, 1e-4)) == changed

    role_clip.save_adapter(tmp_path)
    role_clip.adapter.tokens.latents.add_(1.0)  # as an optimiser writes
    check()
    role_clip.load_adapter(tmp_path)
    check(changed=False)
    role_clip.adapter.tokens.latents.data.mul_(-1.0)  # through .data, which leaves no version
    check()
    role_clip.load_adapter(tmp_path)
    role_clip.clip.transformer.resblocks[0].mlp.c_fc.weight.mul_(1.5)  # a frozen weight, below the prefix
    check()
    assert not torch.equal(role_clip.cached_text_features(ids[:3]), first[:3]), "another class list"
    with role_clip.disabled():
        assert close(role_clip.cached_text_features(ids), stock_text(role_clip.clip, ids))
    before = role_clip.cached_prefix(ids)
    role_clip.bfloat16()
    assert role_clip.cached_prefix(ids) is not before and role_clip.cached_prefix(ids).hidden.dtype == torch.bfloat16


# -- attention maps ---------------------------------------------------------------------------------------------


def test_attention_maps_are_probabilities_under_the_mask(geometry):
    role_clip, images = wrapped(geometry), toy_images(geometry)
    g = GEOMETRIES[geometry]
    before = role_clip.encode_image(images)
    maps = role_clip.attention_maps(images, range(g.layers))
    objects, length = role_clip.layout.objects, role_clip.layout.length
    for layer, weights in maps.items():
        size = length if layer >= g.first_layer else objects
        assert weights.shape == (len(images), g.heads, size, size)
        assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-5)
        if layer in role_clip.role_masks():
            assert (weights[:, ~role_clip.role_masks()[layer]] == 0).all()
    assert torch.equal(role_clip.attention_maps(images, 0), maps[0])
    assert not torch.allclose(maps[0][:, 0], maps[0][:, 1])
    assert torch.equal(role_clip.encode_image(images), before), "looking changes nothing"
    with pytest.raises(ValueError, match=f"no layer 9; the vision tower has layers 0-{g.layers - 1}"):
        role_clip.attention_maps(images, 9)


# -- refusals ---------------------------------------------------------------------------------------------------


def test_attributes_are_checked():
    with pytest.raises(ValueError, match="attribute 'color' appears twice"):
        wrapped("open_clip", attributes=("color", "shape", "color"))
    with pytest.raises(ValueError, match=r"unknown attribute 'colour'. Did you mean 'color'\? Known: color, shape,"):
        wrapped("open_clip", attributes=("colour",))
    with pytest.raises(ValueError, match="attributes must be a list of names, got 'color'"):
        wrapped("open_clip", attributes="color")
    size = uniform_map("open_clip", "attribute", "size")
    assert wrapped("open_clip", size, attributes=("size",)).config.attributes == ("size",)


def test_role_maps_must_fit():
    with pytest.raises(ValueError, match="role map has 3 heads a layer, the vision tower has 2"):
        wrapped("open_clip", RoleMap.uniform("mixed", layers=[1, 2], heads=3))
    with pytest.raises(ValueError, match="role map names layer 11, the vision tower has layers 0-2"):
        wrapped("open_clip", RoleMap.uniform("mixed", layers=[11], heads=2))
    with pytest.raises(ValueError, match=r"needs roles for layers 1-2, the role map has \[1\]: layer 2 is missing"):
        wrapped("open_clip", RoleMap.uniform("mixed", layers=[1], heads=2))
    with pytest.raises(ValueError, match="layer 0 is missing"):
        wrapped("open_clip", uniform_map("open_clip", "mixed"), first_layer=0)
    with pytest.raises(TypeError, match="roles must be a RoleMap, a path, a name"):
        wrap_clip_with_roles(toy_clip(), 3)
    with pytest.raises(ValueError, match='roles="auto": no shipped role map carries the identity .*RoleMap.uniform'):
        wrap_clip_with_roles(toy_clip())


def test_a_role_map_of_another_model_is_refused(tmp_path):
    from dear_plugin import identity

    found = varied_map("open_clip")
    other = RoleMap(found.layers, found.heads, found.infos, identity(toy_clip(seed=9), name="other-vit"))
    with pytest.raises(ValueError, match=r"role map of another model \(other-vit\); .* sha256: '"):
        wrapped("open_clip", other)
    own = RoleMap(found.layers, found.heads, found.infos, identity(toy_clip()))
    assert wrap_clip_with_roles(toy_clip(), own.save(tmp_path / "own.json")).role_map == own
    twin = toy_clip()
    for block in twin.visual.transformer.resblocks:
        block.mlp.gelu = torch.nn.GELU()
    with pytest.raises(ValueError, match="activation: 'quick_gelu' against 'gelu'"):
        wrapped("open_clip", own, clip=twin)


def test_layers_and_counts_are_derived_and_checked():
    config = wrapped("openai-shallow-text").config
    assert (config.first_layer, config.text_first_layer, config.text_tokens) == (2, 0, 5)
    config = wrapped("open_clip-narrow-heads").config
    assert (config.first_layer, config.text_first_layer) == (1, 1), "layer 1 of 3 and of 5: the same share of the depth"
    assert wrapped("open_clip", first_layer=2, text_first_layer=1, text_tokens=7).config.text_first_layer == 1
    with pytest.raises(ValueError, match="text_first_layer is 3, the text tower has layers 0-2"):
        wrapped("open_clip", text_first_layer=3)
    with pytest.raises(ValueError, match="first_layer is 3, the vision tower has layers 0-2"):
        wrapped("open_clip", first_layer=3)
    for option, message in {
        "beta": r"beta must lie in \[0, 1\], got 2.0",
        "latent_width": "latent_width must be a whole number of at least 1, got 2.5",
        "text_tokens": "text_tokens must be a whole number of at least 0, got -1",
        "attribute_projection": "attribute_projection must be 'trained' or 'frozen', got 'none'",
        "token_mixing": "token_mixing must be true or false, got 1",
    }.items():
        value = {"beta": 2.0, "latent_width": 2.5, "text_tokens": -1, "attribute_projection": "none"}.get(option, 1)
        with pytest.raises(ValueError, match=message):
            wrap_clip_with_roles(toy_clip(), uniform_map("open_clip", "mixed"), **{option: value})


def test_a_wrapped_model_is_not_wrapped_again():
    with pytest.raises(ValueError, match="wrapped already"):
        wrap_clip_with_roles(wrapped("open_clip"), uniform_map("open_clip", "mixed"))
