"""Hugging Face's CLIPModel: what is special about it beside the contracts that all geometries share."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from toys import (
    END,
    GEOMETRIES,
    START,
    close,
    stock_image,
    stock_text,
    toy_clip,
    toy_ids,
    toy_images,
    uniform_map,
    varied_map,
    wrapped,
)

from dear_plugin import RoleMap, identity, wrap_clip_with_adapter, wrap_clip_with_roles
from dear_plugin.hf_clip import openai_layout
from dear_plugin.towers import text_tower, vision_tower

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra: hf)")


def _twin(name: str) -> nn.Module:
    """The same weights in open_clip's classes."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    g = GEOMETRIES[name]
    vision = CLIPVisionCfg(
        layers=g.layers, width=g.width, head_width=g.width // g.heads, patch_size=g.patch, image_size=g.resolution)
    text = CLIPTextCfg(context_length=16, vocab_size=64, width=g.text_width, heads=g.text_heads, layers=g.text_layers)
    twin = CLIP(g.embed, vision, text, quick_gelu=g.quick_gelu).eval()
    missing, unexpected = twin.load_state_dict(openai_layout(toy_clip(name).state_dict()), strict=False)
    assert not missing and not unexpected
    return twin


@torch.no_grad()
@pytest.mark.parametrize("name", ["hf", "hf-narrow-heads"])
def test_the_same_weights_in_open_clip_are_the_same_model(name, tmp_path):
    twin, clip, images, ids = _twin(name), toy_clip(name), toy_images(name), toy_ids()
    assert close(twin.encode_image(images), stock_image(clip, images)), "the layout is right"
    assert close(twin.encode_text(ids), stock_text(clip, ids))
    a, b = identity(clip), identity(twin)
    assert not a.difference(b) and (a.family, b.family) == ("transformers", "open_clip")
    adapted = wrapped(name, clip=twin)
    adapted.save_adapter(tmp_path)
    here = wrap_clip_with_adapter(clip, tmp_path)
    assert close(here.encode_image(images), adapted.encode_image(images))
    assert close(here.encode_text(ids), adapted.encode_text(ids))


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_towers_are_bit_for_bit_under_both_attention_implementations(implementation):
    clip, images, ids = toy_clip("hf"), toy_images("hf"), toy_ids()
    clip.set_attn_implementation(implementation)
    vision, text = vision_tower(clip), text_tower(clip)
    x = vision.run(vision.embed(images), 0, vision.layers)
    assert torch.equal(vision.project(x[:, 0]), stock_image(clip, images))
    x = text.run(text.embed(ids), 0, text.layers)
    assert torch.equal(text.project(x[torch.arange(len(ids)), text.end_index(ids)]), stock_text(clip, ids))
    role_clip = wrapped("hf", clip=clip)
    other = wrapped("hf")
    assert close(role_clip.encode_image(images), other.encode_image(images)), "the adapted pass is the same in both"


def test_where_the_text_feature_is_read():
    ids = toy_ids()
    ids[:, 12] = END  # a second end token, as padding with the end token makes it
    legacy, by_id = text_tower(toy_clip("hf")), text_tower(toy_clip("hf-narrow-heads"))
    assert torch.equal(by_id.end_index(ids), (ids == END).int().argmax(-1))
    ids[:, 3] = START
    clip = toy_clip("hf-narrow-heads")
    clip.text_model.eos_token_id = START
    assert text_tower(clip).end_index(ids).tolist() == [0] * len(ids), "the first one, whatever id it is"
    assert torch.equal(legacy.end_index(ids), ids.argmax(-1))


@torch.no_grad()
def test_calls_of_transformers_answer():
    role_clip, images, ids = wrapped("hf"), toy_images("hf"), toy_ids()
    mask = (torch.arange(16) <= ids.argmax(-1)[:, None]).long()
    assert torch.equal(role_clip.get_image_features(pixel_values=images).pooler_output, role_clip.encode_image(images))
    text = role_clip.get_text_features(input_ids=ids, attention_mask=mask).pooler_output
    assert torch.equal(text, role_clip.encode_text(ids))
    outputs = role_clip(pixel_values=images, input_ids=ids, attention_mask=mask)
    assert torch.equal(outputs.logits_per_image, role_clip(images, ids)[0])
    with role_clip.disabled():
        stock = role_clip.clip(pixel_values=images, input_ids=ids)
        assert torch.allclose(role_clip(images, ids).logits_per_text, stock.logits_per_text, atol=1e-5)
        assert torch.equal(role_clip.get_text_features(ids).pooler_output, stock_text(role_clip.clip, ids))
    left = mask.flip(1)
    with pytest.raises(ValueError, match="attention_mask hides positions up to the end token: pad on the right"):
        role_clip.get_text_features(ids, attention_mask=left)
    with pytest.raises(ValueError, match="attention_mask hides positions"):
        role_clip(pixel_values=images, input_ids=ids, attention_mask=left)
    with pytest.raises(TypeError, match=r"takes \(image, text\), or pixel_values, .*; got return_loss, pixel_values"):
        role_clip(pixel_values=images, return_loss=True)
    with pytest.raises(TypeError, match="got one argument alone"):
        role_clip(images)
    assert not hasattr(wrapped("open_clip"), "get_image_features"), "only where the host has them"


@torch.no_grad()
@pytest.mark.parametrize("place", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_changed_projections_are_followed_or_refused(place):
    class Doubled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    class LoraLinear(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    clip, images = toy_clip("hf"), toy_images("hf")
    before = wrapped("hf", clip=clip).encode_image(images)
    attention = clip.vision_model.encoder.layers[2].self_attn
    parametrize.register_parametrization(getattr(attention, place), "weight", Doubled())
    role_clip = wrapped("hf", uniform_map("hf", "generalization"), clip=clip)
    assert not close(before, role_clip.encode_image(images), 1e-3)
    assert close(role_clip.encode_image(images), stock_image(clip, images), 1e-5), "isolated heads: the changed CLIP"
    setattr(attention, place, LoraLinear(128, 128))
    with pytest.raises(ValueError, match=f"vision tower, layer 2, attn.{place} is a LoraLinear of test_hf"):
        wrapped("hf", clip=clip)


def test_other_models_of_transformers_are_refused_by_the_part():
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**small, "image_size": 16, "patch_size": 8}
    text = {**small, "vocab_size": 64, "max_position_embeddings": 16}
    siglip = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    with pytest.raises(ValueError, match="a SiglipModel has no visual_projection: .* CLIPModel is supp.*CLS token"):
        vision_tower(siglip)
    chinese = transformers.ChineseCLIPModel(transformers.ChineseCLIPConfig(
        text_config={**text, "pad_token_id": 0}, vision_config=vision))
    with pytest.raises(ValueError, match="the text tower of a ChineseCLIPModel has no .*: only CLIP's own pre-LN"):
        vision_tower(chinese)
    alone = transformers.CLIPVisionModelWithProjection(transformers.CLIPVisionConfig(**vision, projection_dim=16))
    with pytest.raises(ValueError, match=r"a CLIPVisionModelWithProjection has no `visual`: .* \(both towers\)"):
        vision_tower(alone)


@torch.no_grad()
def test_a_processor_shaped_batch_trains_and_saves(tmp_path):
    with torch.enable_grad():
        role_clip, images, ids = wrapped("hf"), toy_images("hf"), toy_ids()
        optimiser = torch.optim.SGD(role_clip.trainable_parameters(), lr=0.1)
        before = {k: v.clone() for k, v in role_clip.clip.state_dict().items()}
        logits = role_clip.class_logits(role_clip.image_features(images), role_clip.encode_text(ids))
        F.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
        optimiser.step()
    assert all(torch.equal(v, before[k]) for k, v in role_clip.clip.state_dict().items())
    role_clip.save_adapter(tmp_path)
    again = wrap_clip_with_adapter(toy_clip("hf"), tmp_path)
    assert torch.equal(again(images, ids)[0], role_clip(images, ids)[0])


def test_transformers_is_imported_by_nobody_but_its_user(root):
    code = (
        "import sys, torch; from dear_plugin import RoleCLIP, load_adapter, wrap_clip_with_roles, identity;"
        "import dear_plugin.hf_clip, dear_plugin.hosts; print('transformers' in sys.modules, 'clip' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_a_role_map_of_the_same_weights_fits():
    found = varied_map("hf")
    role_map = RoleMap(found.layers, found.heads, found.infos, identity(_twin("hf")))
    assert wrap_clip_with_roles(toy_clip("hf"), role_map).role_map == role_map
