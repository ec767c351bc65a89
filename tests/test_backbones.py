"""Loading a CLIP by name and from every kind of file, its tokenizer, and the packed form of tiny."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from toys import close

from dear_plugin import backbones, identity, load_backbone, wrap_clip_with_roles
from dear_plugin.backbones import Tokenizer, build_openai_clip, image_values, pack_tiny, unpack_tiny
from dear_plugin.resolve import resolve_roles
from dear_plugin.roles import RoleMap
from dear_plugin.towers import vision_tower

VOCABULARY = 49408
TEXTS = ["a red circle", "a photo of a cat, a type of pet."]


@pytest.fixture(scope="module")
def state():
    """A random CLIP in OpenAI's keys and with its head width of 64."""
    torch.manual_seed(0)
    return _openai_model().state_dict()


def _openai_model():
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    vision = CLIPVisionCfg(layers=2, width=128, patch_size=16, image_size=48)
    text = CLIPTextCfg(context_length=77, vocab_size=VOCABULARY, width=64, heads=1, layers=2)
    return CLIP(32, vision, text, quick_gelu=True).eval()


@torch.no_grad()
def test_geometry_is_inferred_and_nothing_is_rounded(state):
    model = build_openai_clip(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    found = identity(model)
    assert (found.layers, found.heads, found.width, found.resolution, found.activation) == (2, 2, 128, 48, "quick_gelu")
    half = build_openai_clip({k: v.half() for k, v in state.items()}, precision="bf16")
    assert half.visual.conv1.weight.dtype == torch.bfloat16
    images = torch.randn(2, 3, 48, 48)
    assert close(half.encode_image(images.bfloat16()).float(), model.encode_image(images), 0.05)


class _Archived(torch.nn.Module):
    """OpenAI's .pt files are TorchScript archives with three numbers beside the weights."""

    def __init__(self, state):
        super().__init__()
        numbers = {"input_resolution": torch.tensor(48), "vocab_size": torch.tensor(VOCABULARY)}
        for key, value in {**state, **numbers}.items():
            owner = self
            *path, name = key.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_every_kind_of_file_gives_the_same_model(state, tmp_path):
    torch.save(state, tmp_path / "state.pt")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, tmp_path / "checkpoint.pt")
    save_file(state, tmp_path / "state.safetensors")
    torch.jit.save(torch.jit.script(_Archived(state)), str(tmp_path / "archive.pt"))
    images = torch.randn(2, 3, 48, 48)
    wanted = build_openai_clip(state).requires_grad_(False)  # torch picks kernels by this flag
    for name in ("state.pt", "checkpoint.pt", "state.safetensors", "archive.pt"):
        backbone = load_backbone(tmp_path / name)
        assert torch.equal(backbone.model.encode_image(images), wanted.encode_image(images)), name
        ids = backbone.tokenize(TEXTS)
        assert torch.equal(backbone.model.encode_text(ids), wanted.encode_text(ids)), name
        assert (backbone.input_resolution, backbone.mean) == (48, backbones.OPENAI_MEAN)
        assert backbone.name == name.split(".")[0] and not backbone.model.training
        assert not any(p.requires_grad for p in backbone.model.parameters())


def test_files_that_are_no_clip_are_refused(state, tmp_path):
    torch.save(state, tmp_path / "whole.pt")
    data = (tmp_path / "whole.pt").read_bytes()
    (tmp_path / "cut.pt").write_bytes(data[:100_000])
    with pytest.raises(ValueError, match=r"cut.pt .* damaged"):
        load_backbone(tmp_path / "cut.pt")
    (tmp_path / "empty.pt").write_bytes(b"")
    with pytest.raises(ValueError, match="empty.pt is empty"):
        load_backbone(tmp_path / "empty.pt")
    (tmp_path / "cut.safetensors").write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match=r"cut.safetensors is damaged or of an unknown kind \(22 bytes, sha256 "):
        load_backbone(tmp_path / "cut.safetensors")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds a list, not a state dict"):
        load_backbone(tmp_path / "list.pt")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="other.pt: state dict is not in OpenAI's CLIP layout: it has no visual.conv1"):
        load_backbone(tmp_path / "other.pt")
    torch.save({"visual.layer1.0.conv1.weight": torch.zeros(1)}, tmp_path / "rn.pt")
    with pytest.raises(ValueError, match="rn.pt: the file is a ResNet CLIP: roles need attention heads"):
        load_backbone(tmp_path / "rn.pt")
    with pytest.raises(ValueError, match="no visual.conv1.weight, visual.attnpool.positional_embedding"):
        load_backbone(tmp_path / "rn.pt", resnet=True)
    torch.save({"text_model.final_layer_norm.bias": torch.zeros(1)}, tmp_path / "hf.pt")
    with pytest.raises(ValueError, match="It is in Hugging Face's: load it with transformers.CLIPModel"):
        load_backbone(tmp_path / "hf.pt")
    torch.save({k: v for k, v in state.items() if k != "ln_final.bias"}, tmp_path / "hole.pt")
    with pytest.raises(ValueError, match=r"does not fit CLIP's layout: [\s\S]*ln_final.bias"):
        load_backbone(tmp_path / "hole.pt")
    with pytest.raises(ValueError, match="is a folder: give the weight file itself"):
        load_backbone(tmp_path)


def test_a_file_that_would_run_code_is_refused(tmp_path):
    torch.save({"model": _openai_model().visual.conv1}, tmp_path / "pickled.pt")
    with pytest.raises(ValueError, match="holds more than tensors and is not loaded for safety"):
        load_backbone(tmp_path / "pickled.pt")


def test_names_are_checked(monkeypatch):
    with pytest.raises(ValueError, match=r"unknown backbone 'ViT-B/61'.*Did you mean 'ViT-B/16'\?"):
        load_backbone("ViT-B/61")
    with pytest.raises(ValueError, match="RN50 is a ResNet CLIP"):
        load_backbone("RN50")
    with pytest.raises(ValueError, match="wanted open_clip:<name>/<tag>"):
        load_backbone("open_clip:ViT-B-16")
    with pytest.raises(ValueError, match="open_clip has no model 'ViT-B-61'"):
        load_backbone("open_clip:ViT-B-61/openai")
    with pytest.raises(ValueError, match="open_clip has no weights 'nope' for ViT-B-16, but: openai"):
        load_backbone("open_clip:ViT-B-16/nope")
    with pytest.raises(ValueError, match="precision must be one of fp32, fp16, bf16, got 'half'"):
        load_backbone("tiny", precision="half")


def test_a_cached_file_with_another_checksum_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / ".cache" / "clip").mkdir(parents=True)
    for name in ("ViT-B-16.pt", "RN50.pt", "ViT-L-14-336px.pt"):
        (tmp_path / ".cache" / "clip" / name).write_bytes(b"half a download")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match=r"ViT-B-16.pt has sha256 .*, OpenAI's .* has 5806e77cd80f.*network copy"):
        load_backbone("ViT-B/16")
    with pytest.raises(ValueError, match="OpenAI's RN50.pt has afeb0e10f9e5"):
        load_backbone("RN50", resnet=True)
    with pytest.raises(ValueError, match="OpenAI's ViT-L-14-336px.pt has 3035c92b3509"):
        load_backbone("ViT-L/14@336px")


def test_without_network_the_error_says_what_to_do(monkeypatch, tmp_path):
    import open_clip

    def no_network(*args, **kwargs):
        raise OSError("no route to host\nand more")

    monkeypatch.setattr(open_clip, "create_model", no_network)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"not be fetched \(OSError: no route to host\). Without"):
        load_backbone("ViT-B/16")


# -- tiny -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_tiny_packs_and_unpacks(state, tmp_path, monkeypatch):
    used = sorted({int(i) for i in Tokenizer()(TEXTS).flatten()})
    packed = pack_tiny(state, used)
    assert packed["token_embedding.weight"].shape == (len({*used, 49406, 49407}), 64)
    assert {v.dtype for k, v in packed.items() if k != "token_embedding.rows"} == {torch.float16}
    again = unpack_tiny(packed)
    for key, value in state.items():
        rows = packed["token_embedding.rows"] if key == "token_embedding.weight" else ...
        assert torch.equal(again[key][rows], value[rows].half().float()), key
    assert torch.equal(unpack_tiny(packed)["token_embedding.weight"], again["token_embedding.weight"]), "seeded"

    save_file(packed, tmp_path / "tiny_clip.safetensors")
    monkeypatch.setattr(backbones, "ASSETS", tmp_path)
    backbone = load_backbone("tiny")
    assert backbone.name == backbone.identity.name == "tiny"
    rounded = build_openai_clip({k: v.half().float() for k, v in state.items()}).requires_grad_(False)
    ids = backbone.tokenize(TEXTS)
    assert torch.equal(backbone.model.encode_text(ids), rounded.encode_text(ids))
    wrap_clip_with_roles(backbone.model, RoleMap.uniform("mixed", layers=[1], heads=2))

    (tmp_path / "tiny_clip.json").write_text('{"sha256": "0123"}')
    with pytest.raises(ValueError, match="tiny_clip.safetensors is damaged: sha256 .*, wanted 0123"):
        load_backbone("tiny")
    with pytest.raises(ValueError, match="packed CLIP has no token_embedding.rows"):
        unpack_tiny(state)


def test_a_missing_tiny_says_who_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(backbones, "ASSETS", tmp_path)
    with pytest.raises(FileNotFoundError, match="scripts/train_tiny_clip.py makes it"):
        load_backbone("tiny")


# -- text and images --------------------------------------------------------------------------------------------


def test_the_tokenizer_is_clips():
    import open_clip

    tokenize = Tokenizer()
    assert torch.equal(tokenize(TEXTS), open_clip.tokenize(TEXTS))
    assert tokenize("one text").shape == (1, 77) and tokenize([]).shape == (0, 77)
    assert tokenize.length("a red circle") == 5


def test_a_text_that_is_too_long_is_refused_with_its_length():
    tokenize = Tokenizer()
    fits, long = " ".join(["cat"] * 75), " ".join(["cat"] * 76)
    assert tokenize(fits)[0, -1] == 49407
    with pytest.raises(ValueError, match=r"text too long: 'cat cat .*\.\.\.' has 78 tokens .*, the limit is 77"):
        tokenize(["short", long])
    cut = tokenize(long, truncate=True)
    assert cut[0, -1] == 49407 and torch.equal(cut, tokenize(fits))
    with pytest.raises(TypeError, match="a text must be a str, got int: 3"):
        tokenize([3])


def test_image_values_come_from_the_model_or_are_openais():
    model = _openai_model()
    assert image_values(model) == (48, backbones.OPENAI_MEAN, backbones.OPENAI_STD)
    model.visual.image_mean, model.visual.image_std = [0.5, 0.5, 0.5], [0.2, 0.2, 0.2]
    assert image_values(model) == (48, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2))


def test_the_package_imports_cheaply_and_needs_no_optional_library(root):
    code = (
        "import sys, dear_plugin; heavy = {'torch', 'open_clip', 'clip', 'yacs', 'dassl', 'trainers', 'datasets'};"
        "print(sorted(heavy & set(sys.modules)), dear_plugin.__version__);"
        "dear_plugin.RoleCLIP; dear_plugin.load_backbone;"
        "print(sorted((heavy - {'torch'}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[] 0.1.0", "[]"]


def test_every_public_name_exists():
    import dear_plugin

    for name in dear_plugin.__all__:
        assert getattr(dear_plugin, name) is not None
    with pytest.raises(AttributeError, match="dear_plugin has no 'RoleClip'; its public names are:"):
        dear_plugin.RoleClip  # noqa: B018


def test_of_two_maps_for_the_same_weights_auto_takes_the_first_by_name():
    clip = load_backbone("tiny").model
    assert resolve_roles("auto", clip, vision_tower(clip)).content_hash() == RoleMap.load("tiny").content_hash()
    by_name = resolve_roles("tiny_entropy", clip, vision_tower(clip))
    assert by_name.method == "concept-entropy" and by_name.content_hash() != RoleMap.load("tiny").content_hash()
