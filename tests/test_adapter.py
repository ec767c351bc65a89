"""Saving and loading an adapter: identical logits in a new process, size, and everything that is refused by name."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from toys import close, toy_clip, toy_ids, toy_images, uniform_map, varied_map, wrapped

from dear_plugin import RoleMap, identity, load_adapter, save_adapter, wrap_clip_with_adapter, wrap_clip_with_roles

NEW_PROCESS = """
import sys
import torch
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/tests"]
torch.set_num_threads(1)
from toys import toy_clip, toy_ids, toy_images
from dear_plugin import wrap_clip_with_adapter
name, folder = sys.argv[2:4]
role_clip = wrap_clip_with_adapter(toy_clip(name), folder)
with torch.no_grad():
    image, text = role_clip.image_features(toy_images(name)), role_clip.encode_text(toy_ids())
    torch.save([role_clip.class_logits(image, text), *role_clip(toy_images(name), toy_ids())], folder + "/logits.pt")
"""


def _logits(role_clip, name):
    image, text = role_clip.image_features(toy_images(name)), role_clip.encode_text(toy_ids())
    return [role_clip.class_logits(image, text), *role_clip(toy_images(name), toy_ids())]


def _disturb(role_clip):
    with torch.no_grad():
        for parameter in role_clip.adapter.parameters():
            parameter.add_(torch.randn_like(parameter))


@torch.no_grad()
@pytest.mark.parametrize("name", ["openai", "open_clip-narrow-heads"])
def test_a_new_process_gives_identical_logits(tmp_path, root, name):
    role_clip = wrapped(name, token_mixing=False, beta=0.4)
    _disturb(role_clip)
    role_clip.save_adapter(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", NEW_PROCESS, str(root), name, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    for here, there in zip(_logits(role_clip, name), found, strict=True):
        assert torch.equal(here, there)


@torch.no_grad()
def test_load_into_a_fresh_wrapper(tmp_path, geometry):
    role_clip = wrapped(geometry)
    _disturb(role_clip)
    assert sorted(p.name for p in save_adapter(role_clip, tmp_path / "a").iterdir()) == [
        "adapter.json",
        "adapter.safetensors",
    ]
    other = wrapped(geometry)
    other.cached_text_features(toy_ids())
    load_adapter(other, tmp_path / "a")
    for here, there in zip(_logits(role_clip, geometry), _logits(other, geometry), strict=True):
        assert torch.equal(here, there)
    assert close(other.cached_text_features(toy_ids()), role_clip.encode_text(toy_ids()))


def test_what_is_in_the_files(tmp_path):
    role_clip = wrapped("open_clip")
    role_clip.save_adapter(tmp_path)
    state = load_file(tmp_path / "adapter.safetensors")
    assert set(state) == set(role_clip.adapter.state_dict()) and {t.dtype for t in state.values()} == {torch.float32}
    description = json.loads((tmp_path / "adapter.json").read_text())
    assert description["schema"] == 1 and description["config"]["beta"] == 0.7
    assert description["preprocessing"] == {
        "size": 48,
        "mean": [0.48145466, 0.4578275, 0.40821073],
        "std": [0.26862954, 0.26130258, 0.27577711],
    }
    assert RoleMap.from_dict(description["role_map"]) == role_clip.role_map
    assert description["model"]["sha256"] == identity(role_clip.clip).sha256
    assert {"dear_plugin", "torch"} <= set(description["versions"])


def test_the_file_of_a_vit_b_16_stays_under_5_mb(tmp_path):
    from safetensors.torch import save

    from dear_plugin.config import DearConfig
    from dear_plugin.trainable import DearAdapter

    class Tower:  # ViT-B/16's numbers, without its weights
        device = torch.device("cpu")

        def __init__(self, layers, width):
            self.layers, self.width, self.proj = layers, width, torch.zeros(width, 512)

    config = DearConfig(first_layer=8, text_first_layer=8, text_tokens=5)
    adapter = DearAdapter(config, Tower(12, 768), Tower(12, 512))
    # latents 5 x 512, maps 512 x 768 and 512 x 512, projection 768 x 512, fusion 6
    assert sum(p.numel() for p in adapter.parameters()) == 2560 + 393216 + 262144 + 393216 + 6
    assert len(save(adapter.state_dict())) < 5_000_000


# -- refused by name --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path):
    wrapped("open_clip").save_adapter(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attributes": ("color", "shape")}, r"attributes: \('color', 'shape', .*\) against \('color', 'shape'\)"),
        ({"first_layer": 2}, "first_layer: 1 against 2"),
        ({"text_tokens": 3}, "text_tokens: 5 against 3"),
        ({"beta": 0.5}, "beta: 0.7 against 0.5"),
        ({"token_mixing": False}, "token_mixing: True against False"),
        ({"attribute_projection": "frozen"}, "attribute_projection: 'trained' against 'frozen'"),
        ({"text_first_layer": 0}, "text_first_layer: 1 against 0"),
    ],
)
def test_other_settings_are_refused_with_both_values(saved, options, message):
    role_clip = wrapped("open_clip", **options)
    before = {k: v.clone() for k, v in role_clip.adapter.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        role_clip.load_adapter(saved)
    assert all(torch.equal(v, before[k]) for k, v in role_clip.adapter.state_dict().items()), "nothing half loaded"


def test_another_latent_width_is_refused(saved):
    role_clip = wrap_clip_with_roles(toy_clip(), varied_map("open_clip"), latent_width=32)
    with pytest.raises(ValueError, match="latent_width: 24 against 32"):
        role_clip.load_adapter(saved)


def test_another_backbone_is_refused(saved):
    other = wrapped("open_clip", clip=toy_clip("open_clip", seed=8))
    with pytest.raises(ValueError, match="made for another backbone; .* sha256: '.*' against '"):
        other.load_adapter(saved)
    with pytest.raises(ValueError, match="made for another backbone; .* heads: 2 against 4; width: 128 against 64"):
        wrap_clip_with_adapter(toy_clip("open_clip-narrow-heads"), saved)
    twin = toy_clip("open_clip")
    for block in twin.visual.transformer.resblocks:
        block.mlp.gelu = torch.nn.GELU()
    with pytest.raises(ValueError, match="activation: 'quick_gelu' against 'gelu'"):
        wrapped("open_clip", clip=twin).load_adapter(saved)


def test_another_geometry_is_refused(saved):
    other = wrapped("open_clip-narrow-heads", text_first_layer=1)
    with pytest.raises(ValueError, match="made for another backbone; .* heads: 2 against 4"):
        other.load_adapter(saved)


def test_the_same_weights_in_the_other_library_are_accepted(tmp_path):
    openai, open_clip = toy_clip("openai"), toy_clip("open_clip")
    open_clip.load_state_dict(openai.state_dict())
    first = wrapped("openai", varied_map("openai"), clip=openai)
    first.save_adapter(tmp_path)
    second = wrap_clip_with_adapter(open_clip, tmp_path)
    assert close(first.encode_image(toy_images("openai")), second.encode_image(toy_images("openai")), 1e-5)
    assert close(first.encode_text(toy_ids()), second.encode_text(toy_ids()), 1e-5)


def test_another_role_map_is_refused(saved):
    with pytest.raises(ValueError, match=r"role_map differs, first at layer 1, head 0: attribute \(color\) aga"):
        wrapped("open_clip", uniform_map("open_clip", "mixed")).load_adapter(saved)


def test_damaged_files_are_one_sentence(saved):
    role_clip, weights, description = wrapped("open_clip"), saved / "adapter.safetensors", saved / "adapter.json"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"adapter.safetensors is damaged, .* bytes of sha256 .*, wanted"):
        role_clip.load_adapter(saved)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no adapter in .*: adapter.safetensors is missing"):
        role_clip.load_adapter(saved)
    weights.write_bytes(whole)
    text = description.read_text()
    description.write_text(text[:100])
    with pytest.raises(ValueError, match="adapter.json is damaged"):
        role_clip.load_adapter(saved)
    description.write_text(text.replace('"schema": 1', '"schema": 9', 1))
    with pytest.raises(ValueError, match="schema 9, this dear_plugin reads schema 1"):
        role_clip.load_adapter(saved)
    description.write_text(text.replace('"config"', '"confg"', 1))
    with pytest.raises(ValueError, match=r"unknown field 'confg'. Did you mean 'config'\?"):
        role_clip.load_adapter(saved)
    with pytest.raises(FileNotFoundError, match="adapter.safetensors is missing"):
        role_clip.load_adapter(saved / "nowhere")


def test_tensors_that_do_not_fit_are_listed(saved):
    import hashlib

    from safetensors.torch import save

    role_clip = wrapped("open_clip")
    state = role_clip.adapter.state_dict()
    state["extra"] = state.pop("fusion.logits_alpha")
    state["tokens.latents"] = torch.zeros(2, 24)
    data = save(state)
    (saved / "adapter.safetensors").write_bytes(data)
    description = json.loads((saved / "adapter.json").read_text())
    description["weights_sha256"] = hashlib.sha256(data).hexdigest()
    (saved / "adapter.json").write_text(json.dumps(description))
    message = (
        r"missing fusion.logits_alpha; unexpected extra; tokens.latents has shape \[2, 24\], wanted \[5, 24\]"
    )
    with pytest.raises(ValueError, match=message):
        role_clip.load_adapter(saved)


def test_saving_over_an_adapter_replaces_it_whole(saved):
    role_clip = wrapped("open_clip")
    _disturb(role_clip)
    role_clip.save_adapter(saved)
    other = wrapped("open_clip")
    other.load_adapter(saved)
    assert torch.equal(other.adapter.tokens.latents, role_clip.adapter.tokens.latents)
    assert sorted(p.name for p in saved.iterdir()) == ["adapter.json", "adapter.safetensors"]
