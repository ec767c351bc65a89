"""Foreign trainers on a RoleCLIP: code written the way CoOp's family writes it, with the clip_model swapped."""

import ast
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toys import CONTEXT, GEOMETRIES, close, stock_text, toy_clip, toy_ids, toy_images, wrapped


class ForeignTextEncoder(nn.Module):
    """Takes parts of a clip_model away and calls them in the host's axis order, as prompt learners do."""

    def __init__(self, clip_model, sequence_first: bool, give_mask: bool = False):
        super().__init__()
        self.transformer = clip_model.transformer
        self.positional_embedding = clip_model.positional_embedding
        self.ln_final = clip_model.ln_final
        self.text_projection = clip_model.text_projection
        self.dtype = clip_model.dtype
        self.sequence_first = sequence_first
        self.mask = clip_model.attn_mask if give_mask else None

    def forward(self, prompts, ids):
        x = prompts + self.positional_embedding.type(self.dtype)
        x = x.permute(1, 0, 2) if self.sequence_first else x
        x = self.transformer(x) if self.mask is None else self.transformer(x, attn_mask=self.mask)
        x = x.permute(1, 0, 2) if self.sequence_first else x
        x = self.ln_final(x).type(self.dtype)
        return x[torch.arange(x.shape[0]), ids.argmax(dim=-1)] @ self.text_projection


class ForeignModel(nn.Module):
    """A learnable context, the foreign text encoder, and `clip_model.visual` as the image encoder."""

    def __init__(self, clip_model, ids, sequence_first):
        super().__init__()
        with torch.no_grad():
            embedding = clip_model.token_embedding(ids).type(clip_model.dtype)
        self.context = nn.Parameter(torch.zeros(1, 1, embedding.shape[-1]))
        self.register_buffer("embedding", embedding)
        self.ids = ids
        self.image_encoder = clip_model.visual
        self.text_encoder = ForeignTextEncoder(clip_model, sequence_first)
        self.logit_scale = clip_model.logit_scale
        self.dtype = clip_model.dtype

    def forward(self, image):
        start, first, rest = self.embedding[:, :1], self.embedding[:, 1:2], self.embedding[:, 2:]
        prompts = torch.cat([start, first + self.context, rest], dim=1)
        text = F.normalize(self.text_encoder(prompts, self.ids), dim=-1)
        image = F.normalize(self.image_encoder(image.type(self.dtype)), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


def _sequence_first(name):
    return GEOMETRIES[name].library == "openai"


@torch.no_grad()
def test_a_foreign_text_encoder_gives_the_features_of_encode_text(geometry):
    role_clip, ids = wrapped(geometry), toy_ids()
    encoder = ForeignTextEncoder(role_clip, _sequence_first(geometry))
    features = encoder(role_clip.token_embedding(ids).type(role_clip.dtype), ids)
    assert close(features, role_clip.encode_text(ids))
    assert not close(features, stock_text(role_clip.clip, ids), 1e-3)
    with role_clip.disabled():
        again = encoder(role_clip.token_embedding(ids), ids)
        assert torch.equal(again, stock_text(role_clip.clip, ids)), "without tokens: the host, bit for bit"
    if hasattr(role_clip, "attn_mask"):
        masked = ForeignTextEncoder(role_clip, False, give_mask=True)
        assert close(masked(role_clip.token_embedding(ids), ids), features)


def test_a_foreign_model_trains_its_context_and_the_adapter(geometry):
    role_clip, images, ids = wrapped(geometry), toy_images(geometry), toy_ids()
    assert role_clip.visual.input_resolution == GEOMETRIES[geometry].resolution
    model = ForeignModel(role_clip, ids, _sequence_first(geometry))
    plain = role_clip(images, ids)[0]
    assert torch.allclose(model(images), plain, atol=1e-4)
    frozen = {k: v.clone() for k, v in role_clip.clip.state_dict().items()}
    for name, parameter in model.named_parameters():
        if "context" not in name:  # prompt learners freeze by name, the adapter included
            parameter.requires_grad_(False)
    optimiser = torch.optim.SGD([model.context, *role_clip.trainable_parameters()], lr=0.1)
    model.train()
    F.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
    assert model.context.grad.any() and role_clip.adapter.tokens.latents.grad.any()
    optimiser.step()
    assert all(torch.equal(v, frozen[k]) for k, v in role_clip.clip.state_dict().items())
    model.to(torch.float32).eval()
    assert not torch.allclose(model(images), plain, atol=1e-3)


@torch.no_grad()
def test_another_text_mask_is_kept_around_the_tokens():
    role_clip, ids = wrapped("open_clip"), toy_ids()
    x = role_clip.token_embedding(ids) + role_clip.positional_embedding
    blocked = torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1)
    causal = role_clip.transformer(x)
    assert torch.allclose(role_clip.transformer(x, attn_mask=blocked), causal, atol=1e-5)
    blocked[3:, 2] = True  # nobody after position 2 reads it
    out = role_clip.transformer(x, attn_mask=blocked)
    assert not torch.allclose(out, causal, atol=1e-3)
    changed = x.clone()
    changed[:, 2] += 1
    assert torch.equal(role_clip.transformer(changed, attn_mask=blocked)[:, 3:], out[:, 3:])
    with pytest.raises(ValueError, match="attn_mask must hold 0 and -inf alone"):
        role_clip.transformer(x, attn_mask=torch.full((CONTEXT, CONTEXT), 0.5))


def test_a_wrong_axis_order_is_refused():
    role_clip = wrapped("openai")
    with pytest.raises(ValueError, match=r"transformer takes \[L, C, D\] \(sequence first\) with L up to 16, got"):
        role_clip.transformer(torch.zeros(40, CONTEXT, 64))
    with pytest.raises(ValueError, match=r"transformer takes \[C, L, D\] with L up to 16, got"):
        wrapped("open_clip").transformer(torch.zeros(CONTEXT, 40, 64))


def test_values_of_the_host_are_handed_through(geometry):
    role_clip = wrapped(geometry)
    clip, text = role_clip.clip, role_clip.text_tower.host
    assert role_clip.logit_scale is clip.logit_scale and role_clip.context_length == CONTEXT
    assert role_clip.token_embedding is text.token_embedding and role_clip.ln_final is text.ln_final
    visual = role_clip.host.visual
    assert role_clip.visual.conv1 is visual.conv1 and role_clip.visual.output_dim == visual.output_dim
    assert hasattr(role_clip, "attn_mask") == hasattr(text, "attn_mask")
    assert role_clip.dtype == torch.float32 and not hasattr(role_clip, "lock_image_tower")
    with pytest.raises(AttributeError, match="no_such_thing"):
        role_clip.no_such_thing  # noqa: B018


@torch.no_grad()
def test_a_half_model_on_the_cpu_serves_foreign_code_too():
    with pytest.warns(UserWarning, match="half precision on the CPU"):
        role_clip = wrapped("openai", clip=toy_clip("openai").half())
    logits = ForeignModel(role_clip, toy_ids(), True)(toy_images("openai").half())
    assert torch.isfinite(logits).all()


def test_what_the_readme_has_people_write_is_what_the_peer_tests_ran(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "tests" / "peers"))
    import edits

    readme = (root / "README.md").read_text(encoding="utf-8")
    pairs = [*edits.TWO_LINES, edits.IMPORT, edits.WRAP, *edits.TRAIN_ADAPTER]
    shown = [line.strip() for _, ours in pairs for line in ours.splitlines()]
    shown += [edits.MMRL_GUARD[1].split(":")[0].strip(), *(there.strip() for there, _ in edits.TWO_LINES)]
    assert [line for line in shown if line not in readme] == []


def test_the_file_that_is_copied_needs_installed_packages_only(root):
    tree = ast.parse((root / "trainers" / "dear.py").read_text(encoding="utf-8"))
    modules = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
               for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))}
    tops = {module.split(".")[0] for module in modules} - set(sys.stdlib_module_names)
    assert tops == {"dear_plugin", "torch", "yacs"}
