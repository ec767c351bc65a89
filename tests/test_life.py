"""Life around the adapter: several on one CLIP, gradient checkpointing, export, changed hosts, cheap imports."""

import ast
import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from toys import close, stock_image, toy_clip, toy_ids, toy_images, uniform_map, varied_map, wrapped

from dear_plugin import wrap_clip_with_roles
from dear_plugin.encoder import TextPrefix

NAMES = ["openai", "open_clip", "hf"]


def _gradients(role_clip, name):
    for parameter in role_clip.adapter.parameters():
        parameter.grad = None
    logits = role_clip.class_logits(role_clip.image_features(toy_images(name)), role_clip.encode_text(toy_ids()))
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2])).backward()
    return [parameter.grad.clone() for parameter in role_clip.adapter.parameters()]


# -- several adapters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_two_adapters_on_one_clip_do_not_meet(name):
    clip, images, ids = toy_clip(name), toy_images(name), toy_ids()
    one = wrapped(name, clip=clip)
    other = wrapped(name, uniform_map(name, "mixed"), clip=clip, attributes=("color",), text_tokens=2, beta=0.3)
    alone = [wrapped(name), wrapped(name, uniform_map(name, "mixed"), attributes=("color",), text_tokens=2, beta=0.3)]
    assert one.clip is other.clip is clip
    for _ in range(2):  # in turn, so that whatever one left behind would show in the other
        for shared, lonely in zip((one, other), alone, strict=True):
            assert torch.equal(shared(images, ids)[0], lonely(images, ids)[0])
            for a, b in zip(_gradients(shared, name), _gradients(lonely, name), strict=True):
                assert torch.equal(a, b)
    with torch.no_grad(), one.disabled():
        assert torch.equal(one.encode_image(images), stock_image(clip, images))
        assert torch.equal(other(images, ids)[0], alone[1](images, ids)[0]), "the other one is still on"
    optimiser = torch.optim.SGD(one.trainable_parameters(), lr=0.5)
    before = other(images, ids)[0]
    cached = other.cached_text_features(ids)
    _gradients(one, name)
    optimiser.step()
    assert torch.equal(other(images, ids)[0], before) and other.cached_text_features(ids) is cached
    assert not torch.equal(one(images, ids)[0], alone[0](images, ids)[0])


@torch.no_grad()
def test_adapters_of_one_clip_save_load_and_copy_by_themselves(tmp_path):
    clip, images = toy_clip(), toy_images()
    one, other = wrapped("open_clip", clip=clip), wrapped("open_clip", uniform_map("open_clip", "mixed"), clip=clip)
    other.adapter.tokens.latents.add_(1.0)
    for name, role_clip in (("one", one), ("other", other)):
        role_clip.save_adapter(tmp_path / name)
    wanted = [one.encode_image(images), other.encode_image(images)]
    one.adapter.tokens.latents.zero_()
    one.load_adapter(tmp_path / "one")
    assert torch.equal(one.encode_image(images), wanted[0]) and torch.equal(other.encode_image(images), wanted[1])
    with pytest.raises(ValueError, match="role_map differs"):
        one.load_adapter(tmp_path / "other")
    copied_one, copied_other = copy.deepcopy([one, other])
    assert copied_one.clip is copied_other.clip is not clip, "together they share one copy"
    assert torch.equal(copied_other.encode_image(images), wanted[1])


# -- gradient checkpointing -------------------------------------------------------------------------------------


def _kept(run) -> int:
    """Bytes that autograd saves in `run`."""
    sizes = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.setdefault((t.data_ptr(), t.numel()), t.numel() * t.element_size()) and t, lambda t: t
    ):
        run()
    return sum(sizes.values())


@pytest.mark.parametrize("asks", [True, False])
def test_recomputing_gives_the_same_gradients_and_keeps_less(geometry, asks):
    plain = wrapped(geometry, clip=toy_clip(geometry).requires_grad_(asks))
    less = wrapped(geometry, clip=toy_clip(geometry).requires_grad_(asks), recompute=True, class_chunk=2)
    less.clip.train()  # by the time of the backward pass these flags are the caller's again
    for a, b in zip(_gradients(plain, geometry), _gradients(less, geometry), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)
    assert all(p.grad is None and p.requires_grad == asks for p in less.clip.parameters())
    images = toy_images(geometry)
    assert _kept(lambda: less.image_features(images)) < 0.6 * _kept(lambda: plain.image_features(images))
    with torch.no_grad():
        assert torch.equal(less.encode_image(images), plain.encode_image(images))


# -- compile and export -----------------------------------------------------------------------------------------


def test_a_compiled_training_step_has_the_same_gradients():
    torch._dynamo.reset()
    role_clip, images = wrapped("open_clip"), toy_images()
    role_clip.clip.requires_grad_(False)
    found = []
    for run in (role_clip.image_features, torch.compile(role_clip.image_features, backend="aot_eager", fullgraph=True)):
        features = run(images)
        (features.cls.square().mean() + features.attributes.square().mean()).backward()
        found.append([p.grad.clone() for p in role_clip.adapter.parameters() if p.grad is not None])
        role_clip.zero_grad()
    assert len(found[0]) == len(found[1]) == 3
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


class _Call(nn.Module):
    """A method of a RoleCLIP as the module that torch.export wants."""

    def __init__(self, role_clip, method):
        super().__init__()
        self.role_clip, self.method = role_clip, method

    def forward(self, *inputs):
        return getattr(self.role_clip, self.method)(*inputs)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_image_path_is_exported_for_any_batch_and_read_back(name):
    role_clip = wrapped(name)
    role_clip.clip.requires_grad_(False)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(role_clip.visual, (toy_images(name, 4),), dynamic_shapes=({0: batch},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    again = torch.export.load(file).module()
    for n in (1, 3, 7):
        assert close(again(toy_images(name, n)), role_clip.encode_image(toy_images(name, n)), 1e-5)
    role_clip.adapter.tokens.latents.zero_()
    assert not close(again(toy_images(name)), role_clip.encode_image(toy_images(name)), 1e-4), "tokens are in the file"


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_attributes_and_finished_text_are_exported_but_not_text_from_ids():
    role_clip, images, ids = wrapped("open_clip"), toy_images(), toy_ids()
    role_clip.clip.requires_grad_(False)
    program = torch.export.export(_Call(role_clip, "encode_image_attributes"), (images,))
    assert torch.allclose(program.module()(images), role_clip.encode_image_attributes(images), atol=1e-4)
    prefix = role_clip.text_prefix(ids)

    class Finish(nn.Module):
        def __init__(self):
            super().__init__()
            self.role_clip = role_clip

        def forward(self, hidden, end, frozen):
            return self.role_clip.text_features(TextPrefix(hidden, end, frozen))

    program = torch.export.export(Finish(), tuple(prefix))
    assert close(program.module()(*prefix), role_clip.encode_text(ids), 1e-5)
    traced = torch.jit.trace(role_clip.visual, (images,))
    assert close(traced(images), role_clip.encode_image(images), 1e-5)
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(_Call(role_clip, "encode_text"), (ids,))


# -- hosts that something else has changed ----------------------------------------------------------------------


class _Lora(nn.Module):
    """A low-rank change beside a Linear, the way PEFT puts it around an MLP's layers."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@torch.no_grad()
def test_changed_mlps_are_followed_and_parametrised_attention_too():
    class Scaled(nn.Module):
        def forward(self, weight):
            return 1.5 * weight

    images, roles = toy_images(), uniform_map("open_clip", "generalization")
    for place in ("mlp", "out_proj", "in_proj"):
        clip = toy_clip()
        plain = wrapped("open_clip", roles, clip=toy_clip()).encode_image(images)
        block = clip.visual.transformer.resblocks[2]
        if place == "mlp":
            block.mlp.c_fc = _Lora(block.mlp.c_fc)
        elif place == "out_proj":
            parametrize.register_parametrization(block.attn.out_proj, "weight", Scaled())
        else:
            parametrize.register_parametrization(block.attn, "in_proj_weight", Scaled())
        adapted = wrapped("open_clip", roles, clip=clip).encode_image(images)
        assert not close(adapted, plain, 1e-3), f"{place}: the change is there"
        assert close(adapted, clip.encode_image(images), 1e-5), f"{place}: as the changed CLIP itself has it"


def test_a_change_of_one_layer_is_found_wherever_tokens_are():
    """The comparison at wrapping covers the layers that are borrowed, in both towers, and no others."""
    def doubled(module, args, out):
        return (2 * out[0], *out[1:])

    for at, tower, refused in ((0, "vision", False), (1, "vision", True), (2, "text", True), (0, "text", False)):
        clip = toy_clip()
        owner = clip.visual if tower == "vision" else clip
        owner.transformer.resblocks[at].attn.register_forward_hook(doubled)
        if refused:
            with pytest.raises(ValueError, match=f"{tower} tower, layer {at}: .* does not compute .*off by [0-9]+%"):
                wrapped("open_clip", clip=clip)
        else:
            wrapped("open_clip", clip=clip)


def test_hooks_that_only_look_are_no_reason_to_refuse():
    clip, seen = toy_clip(), []
    clip.visual.transformer.resblocks[2].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    wrapped("open_clip", clip=clip)
    assert seen


def test_the_comparison_draws_no_random_numbers_of_the_caller():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    role_clip = wrapped("open_clip")
    torch.manual_seed(5)
    from dear_plugin.block_check import check_blocks

    check_blocks(role_clip.vision_tower, role_clip.clip, range(3))
    assert torch.equal(torch.rand(3), wanted)


# -- imports ----------------------------------------------------------------------------------------------------


def test_wrapping_imports_torch_and_nothing_heavy_besides(root):
    code = """
import sys
import torch
before = set(sys.modules)
import dear_plugin
for name in dear_plugin.__all__:
    if name not in ("TaskAdaptiveFusion",):
        getattr(dear_plugin, name)
added = {module.split(".")[0] for module in set(sys.modules) - before}
print(sorted(m for m in added if m not in sys.stdlib_module_names and m != "dear_plugin"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    found = ast.literal_eval(done.stdout)
    heavy = {"open_clip", "clip", "dassl", "transformers", "torchvision", "timm", "sklearn", "scipy", "yacs", "peft"}
    assert not heavy & set(found), found


def test_varied_maps_may_differ_between_wrappers():
    clip = toy_clip()
    first = wrap_clip_with_roles(clip, varied_map("open_clip"), latent_width=8)
    second = wrap_clip_with_roles(clip, uniform_map("open_clip", "attribute", "color"), latent_width=8)
    assert first.role_map != second.role_map and set(first.role_masks()) == set(second.role_masks())
    assert not torch.equal(first.role_masks()[2], second.role_masks()[2])
