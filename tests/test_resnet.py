"""ResNet CLIPs: loaded by file and by name for methods on the text side, refused where heads matter."""

import json

import pytest
import torch
from test_tiny_runs import call, pictures  # noqa: F401 (a fixture)
from toys import close

from dear_plugin import RoleMap, load_backbone, wrap_clip_with_roles
from dear_plugin.backbones import build_openai_clip

TAKES = ["ZeroshotCLIP", "CoOp", "CoCoOp"]
REFUSES = ["DeAR", "MaPLe", "PromptSRC", "MMRL"]


def _resnet():
    """OpenAI's modified ResNet with one block a stage, 64 pixels, and a text tower of 77 positions."""
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=(1, 1, 1, 1), width=8, image_size=64)
    clip = CLIP(32, vision, CLIPTextCfg(width=64, heads=1, layers=2), quick_gelu=True).eval()
    with torch.no_grad():
        for value in clip.state_dict().values():
            if value.is_floating_point() and value.dim() == 1:  # norms and their running statistics too
                value.add_(0.1 * torch.rand_like(value))
    return clip


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "small-rn.pt"
    torch.save(_resnet().state_dict(), path)
    return path


@torch.no_grad()
def test_a_file_gives_the_model_and_no_identity(weights):
    backbone, wanted = load_backbone(weights, resnet=True), _resnet().requires_grad_(False)
    images, ids = torch.randn(2, 3, 64, 64), backbone.tokenize(["a red cup", "a star"])
    assert torch.equal(backbone.model.encode_image(images), wanted.encode_image(images))
    assert torch.equal(backbone.model.encode_text(ids), wanted.encode_text(ids))
    assert (backbone.input_resolution, backbone.identity, backbone.name) == (64, None, "small-rn")
    half = build_openai_clip(wanted.state_dict(), precision="bf16", resnet=True)
    assert close(half.encode_image(images.bfloat16()).float(), wanted.encode_image(images), 0.05)


SMALL = (32, 64, (1, 1, 1, 1), 8, None, 77, 49408, 64, 1, 2)  # OpenAI's arguments
RN50 = (1024, 224, (3, 4, 6, 3), 64, None, 77, 49408, 512, 8, 12)


@torch.no_grad()
@pytest.mark.parametrize("numbers", [SMALL, pytest.param(RN50, marks=pytest.mark.slow)], ids=["small", "RN50"])
def test_openais_own_resnet_is_the_same_model(tmp_path, numbers):
    openai = pytest.importorskip("clip.model", reason="OpenAI's clip is not installed (tests only)")
    torch.manual_seed(0)
    theirs = openai.CLIP(*numbers).eval()
    torch.save(theirs.state_dict(), tmp_path / "rn.pt")
    ours = load_backbone(tmp_path / "rn.pt", resnet=True)
    assert ours.input_resolution == numbers[1]
    images, ids = torch.randn(2, 3, numbers[1], numbers[1]), ours.tokenize(["a red cup", "a star"])
    assert close(ours.model.encode_image(images), theirs.encode_image(images), 1e-5)
    assert close(ours.model.encode_text(ids), theirs.encode_text(ids), 1e-5)


def test_names_reach_the_loader_only_where_a_resnet_is_taken(monkeypatch, tmp_path):
    import open_clip

    asked = []

    def create(name, **options):
        asked.append((name, options["pretrained"]))
        return _resnet()

    monkeypatch.setattr(open_clip, "create_model", create)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RN50", "RN101", "RN50x4", "RN50x16", "RN50x64", "open_clip:RN50/yfcc15m"):
        with pytest.raises(ValueError, match="is a ResNet CLIP: roles need attention heads, use a ViT .*CoOp, CoCoOp"):
            load_backbone(name)
    assert not asked, "refused before any download"
    assert load_backbone("RN50", resnet=True).identity is None
    assert load_backbone("open_clip:RN50/yfcc15m", resnet=True).input_resolution == 64
    assert asked == [("RN50", "openai"), ("RN50", "yfcc15m")]
    with pytest.raises(ValueError, match=r"unknown backbone 'RN5'.*Did you mean 'RN50'\?"):
        load_backbone("RN5", resnet=True)


def test_a_loaded_resnet_is_refused_by_the_wrapper(weights):
    clip = load_backbone(weights, resnet=True).model
    with pytest.raises(ValueError, match=r"the vision tower is a ResNet \(ModifiedResNet\), .* no attention heads"):
        wrap_clip_with_roles(clip, RoleMap.uniform("mixed", layers=[1], heads=2))


@pytest.mark.parametrize("trainer", TAKES)
def test_methods_on_the_text_side_run(pictures, weights, tmp_path, trainer):  # noqa: F811
    assert call(pictures, tmp_path / "out", "MODEL.BACKBONE.NAME", str(weights), "OPTIM.MAX_EPOCH", "1",
                "DATASET.SUBSAMPLE_CLASSES", "base", trainer=trainer) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["trainer"] == trainer and result["backbone"] == str(weights)


@pytest.mark.parametrize("trainer", REFUSES)
@pytest.mark.parametrize("name", ["RN50", "file"])
def test_methods_with_tokens_in_the_vision_tower_refuse(pictures, weights, tmp_path, capfd, trainer, name):  # noqa: F811
    backbone = str(weights) if name == "file" else name
    assert call(pictures, tmp_path / "out", "MODEL.BACKBONE.NAME", backbone, trainer=trainer) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and 'is a ResNet CLIP: roles need attention heads, use a ViT such as "ViT-B/16"' in lines[0]
