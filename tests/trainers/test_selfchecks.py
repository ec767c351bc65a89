"""What must hold for each method by its mathematics: identities with zero-shot CLIP, toy losses, weights, counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from tiny_world import LAYERS, SIZE, build, trained_state

from dear_plugin.config import DearConfig
from dear_plugin.encoder import run_with_tokens
from dear_plugin.engine.clip_method import Precision
from dear_plugin.tokens import TokenSchedule
from dear_plugin.towers import take_positions, vision_tower
from dear_plugin.trainable import DearAdapter
from trainers import cocoop, coop, maple, mmrl, promptsrc
from trainers.deep_prompts import IN_VISION

NO_WARMUP = {"OPTIM.WARMUP_EPOCH": 0}


@pytest.fixture
def images():
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def made(world, tmp_path):
    """made(trainer, KEY=value, ...) -> a trainer that is built and not trained."""
    return lambda trainer, **options: build(world.cfg(trainer, tmp_path / trainer, **options))


def plain_text(trainer, sentences: list[str]) -> torch.Tensor:
    with torch.no_grad():
        return trainer.clip.encode_text(trainer.tokenize(sentences))


def plain_logits(trainer, images, template: str) -> torch.Tensor:
    with torch.no_grad():
        text = F.normalize(plain_text(trainer, [template.format(name) for name in trainer.classnames]), dim=-1)
        image = F.normalize(trainer.clip.encode_image(images), dim=-1)
        return trainer.clip.logit_scale.exp() * image @ text.T


def agree(a, b, tolerance=2e-5):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


# -- number of trained parameters for ViT-B/16 -----------------------------------------------------------------------


def vit_b16(**more):
    """A stand-in with the widths of ViT-B/16's towers: counting needs no weights."""
    text = SimpleNamespace(
        width=512, embed_dim=512, layers=12, token_embedding=lambda ids: torch.zeros(*ids.shape, 512),
        positional_embedding=torch.zeros(77, 512), end_index=lambda ids: ids.argmax(-1), **more)
    proj = torch.empty(768, 512, device="meta")
    vision = SimpleNamespace(width=768, embed_dim=512, layers=12, proj=proj, device=torch.device("meta"))
    return text, vision


def tokenize(texts):
    ids = torch.zeros(len(texts), 77, dtype=torch.long)
    ids[:, 9] = 1
    return ids


def count_of(method: str) -> int:
    text, vision = vit_b16()
    names = ["a", "b", "c"]
    with torch.device("meta"):
        start = torch.empty(4, 512)
    made = {
        "CoOp": lambda: coop.PromptLearner(text, tokenize, names, n_ctx=4, ctx_init="a photo of a"),
        "CoOp, 16 vectors": lambda: coop.PromptLearner(text, tokenize, names, n_ctx=16),
        "CoOp, 16 vectors a class": lambda: coop.PromptLearner(text, tokenize, names, n_ctx=16, class_specific=True),
        "CoCoOp": lambda: cocoop.ConditionalPromptLearner(text, tokenize, names, n_ctx=4, ctx_init="a photo of a"),
        "MaPLe": lambda: maple.CoupledPrompts(start[:2], depth=9, vision_width=768),
        "MaPLe, cross": lambda: maple.CoupledPrompts(start[:2], depth=3, vision_width=768),
        "PromptSRC": lambda: promptsrc.DeepPrompts(start, text_depth=9, vision=(9, 4, 768)),
        "PromptSRC, cross": lambda: promptsrc.DeepPrompts(start, text_depth=3, vision=(3, 4, 768)),
        "MMRL": lambda: mmrl.RepresentationLearner(vision, text, count=5, width=512, layers=(7, 7)),
        "MMRL, EuroSAT": lambda: mmrl.RepresentationLearner(vision, text, count=5, width=2048, layers=(7, 7)),
        "DeAR": lambda: DearAdapter(DearConfig(first_layer=8, text_first_layer=8, text_tokens=5), vision, text),
    }[method]
    if method.startswith("Co"):
        return sum(p.numel() for p in made().parameters())
    with torch.device("meta"):
        return sum(p.numel() for p in made().parameters())


COUNTS = {
    "CoOp": 2_048, "CoOp, 16 vectors": 8_192, "CoOp, 16 vectors a class": 3 * 8_192, "CoCoOp": 35_360,
    "MaPLe": 3_555_072, "MaPLe, cross": 1_185_024, "PromptSRC": 46_080, "PromptSRC, cross": 15_360,
    "MMRL": 4_992_256, "MMRL, EuroSAT": 18_762_496, "DeAR": 1_051_142,
}


@pytest.mark.parametrize("method", sorted(COUNTS))
def test_number_of_trained_parameters(method, root):
    assert count_of(method) == COUNTS[method]
    if "a class" not in method:
        page = (root / "docs" / "methods.md").read_text(encoding="utf-8")
        assert f"{COUNTS[method]:,}" in page, "and the page says it"


# -- CoOp and CoCoOp -------------------------------------------------------------------------------------------------


def test_coop_starts_as_zero_shot(made, images):
    trainer = made("CoOp")
    assert agree(trainer.model_inference(images), plain_logits(trainer, images, "a photo of a {}."))


def test_cocoop_without_its_network_is_coop(made, images):
    conditional, plain = made("CoCoOp"), made("CoOp")
    with torch.no_grad():
        assert not agree(conditional.model_inference(images), plain.model_inference(images)), "it works from the start"
        conditional.prompt_learner.meta_net.linear2.weight.zero_()
        conditional.prompt_learner.meta_net.linear2.bias.zero_()
        assert agree(conditional.model_inference(images), plain.model_inference(images))


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 4000])
def test_chunks_change_nothing(made, images, chunk):
    labels = torch.tensor([0, 2, 1])

    def run(size):
        trainer = made("CoCoOp", **NO_WARMUP)
        trainer.cfg.defrost()
        trainer.cfg.TRAINER.COCOOP.CHUNK = size
        logits = trainer.pair_logits(images)
        F.cross_entropy(logits, labels).backward()
        return logits.detach(), [p.grad for p in trainer.prompt_learner.parameters()]

    (logits, grads), (wanted, wanted_grads) = run(chunk), run(0)
    assert agree(logits, wanted) and all(agree(a, b) for a, b in zip(grads, wanted_grads, strict=True))


# -- MaPLe and PromptSRC ---------------------------------------------------------------------------------------------


def causal_copies(trainer, count: int, depth: int) -> torch.Tensor:
    """[depth, count, D]: the words' embeddings, then what the frozen model has at their positions before each layer."""
    tower, text = trainer.text_tower, trainer.sentences
    with torch.no_grad():
        rows = [tower.token_embedding(trainer.tokenize(text.sentences)[:1, 1 : 1 + count])[0]]
        for layer in range(1, depth):
            rows.append(tower.run(text.hidden, 0, layer)[0, 1 : 1 + count])
    return torch.stack(rows)


@pytest.mark.parametrize(("method", "count"), [("MaPLe", 2), ("PromptSRC", 4)])
def test_causal_copies_give_zero_shot_text(made, method, count):
    """Context positions read only the start token and each other, so their states are the same for every class."""
    trainer = made(method)
    with torch.no_grad():
        trainer.learner.text.copy_(causal_copies(trainer, count, len(trainer.learner.text)))
        wanted = plain_text(trainer, [f"a photo of a {name}." for name in trainer.classnames])
        assert agree(trainer.class_text_features(), wanted)
        trainer.learner.text[-1].neg_()  # (a constant would not do: the layer norm takes it out)
        assert not agree(trainer.class_text_features(), wanted, 1e-3)


def test_maple_at_the_input_only_starts_as_zero_shot_text(made, world, tmp_path):
    trainer = build(world.cfg("MaPLe", tmp_path, extra=["TRAINER.MAPLE.PROMPT_DEPTH", 1]))
    assert agree(trainer.class_text_features(), plain_text(trainer, trainer.sentences.sentences))
    assert trainer.prompts() == [f"a photo of a {name}." for name in trainer.classnames], "words that stay are words"


@pytest.mark.parametrize("method", ["MaPLe", "PromptSRC"])
def test_unread_vision_prompts_change_nothing(made, images, method):
    trainer = made(method)
    tower, learner = trainer.vision_tower, trainer.learner
    prompts = learner.for_vision() if method == "MaPLe" else learner.vision
    x = tower.embed(images)
    length, count = x.shape[1] + prompts.shape[1], prompts.shape[1]
    allow = torch.ones(length, length, dtype=torch.bool)
    allow[:-count, -count:] = False
    masked, _ = run_with_tokens(tower, x, prompts, IN_VISION, allow=dict.fromkeys(range(LAYERS), allow))
    plain = trainer.clip.encode_image(images)
    assert agree(tower.project(masked[:, 0]), plain, 1e-4)
    seen, _ = run_with_tokens(tower, x, prompts, IN_VISION)
    assert seen.shape == x.shape and not agree(tower.project(seen[:, 0]), plain, 1e-4)


@pytest.mark.parametrize(("frozen_first", "wanted"), [(True, 0.065406), (False, 0.071921)])
def test_promptsrc_toy_divergence(frozen_first, wanted):
    features = torch.eye(2)[:1], torch.eye(2)
    terms = promptsrc.loss_terms(
        logits=torch.zeros(1, 2), labels=torch.tensor([0]), image=features[0], text=features[1],
        frozen_image=features[0], frozen_text=features[1], scale=torch.tensor(3.0).log(), text_weight=25,
        image_weight=10, frozen_first=frozen_first)
    assert terms["kl"].item() == pytest.approx(wanted, abs=1e-6)
    assert terms["text"].item() == terms["image"].item() == 0.0
    assert terms["ce"].item() == pytest.approx(0.693147, abs=1e-6)


def test_promptsrc_without_prompts_is_held_by_nothing(made, images):
    trainer = made("PromptSRC")
    image, text = trainer.clip.encode_image(images), trainer.teacher_text()
    scale = trainer.clip.logit_scale.exp()
    logits = scale * F.normalize(image, dim=-1) @ F.normalize(text, dim=-1).T
    terms = promptsrc.loss_terms(
        logits=logits, labels=torch.tensor([0, 1, 2]), image=image, text=text, frozen_image=image, frozen_text=text,
        scale=scale, text_weight=25, image_weight=10)
    assert max(abs(terms[name].item()) for name in ("text", "image", "kl")) < 1e-6


@pytest.mark.parametrize(("mean", "std", "epochs", "wanted"), [
    (15, 1, 20, {15: .398942, 14: .241971, 16: .241971, 13: .053991, 17: .053991, 18: .00443185, 20: 1.4867e-6}),
    (6, 10, 20, {6: .062779, 1: .055402, 20: .023562}),
    (30, 30, 50, {30: .022535}),
    (45, 5, 50, {45: .092269}),
])
def test_gaussian_weights(mean, std, epochs, wanted):
    weights = promptsrc.gaussian_weights(mean, std, epochs)
    assert sum(weights) == pytest.approx(1.0) and len(weights) == epochs
    for epoch, value in wanted.items():
        assert weights[epoch - 1] == pytest.approx(value, rel=1e-4)


def test_gaussian_weights_of_far_means_and_bad_widths():
    assert promptsrc.gaussian_weights(500, 1, 3)[-1] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="GPA_STD is 0; wanted more than 0"):
        promptsrc.gaussian_weights(1, 0, 3)


def test_the_average_of_equal_prompts_is_the_prompt(made):
    trainer = made("PromptSRC")
    trainer.max_epoch = 2
    before = trained_state(trainer)
    for trainer.epoch in range(2):
        trainer._add_to_average()
    after = trained_state(trainer)
    assert all(torch.allclose(after[name], value, rtol=1e-7, atol=0) for name, value in before.items())


def test_teacher_templates():
    sentences = promptsrc.teacher_templates([])
    assert len(sentences) == len(set(sentences)) == 60 and sentences[0] == "a photo of a {}."
    with pytest.raises(ValueError, match="has no {}"):
        promptsrc.teacher_templates(["a photo"])


def test_promptsrc_without_vision_prompts(world, tmp_path, images):
    pairs = {"PROMPT_DEPTH_VISION": 0, "PROMPT_DEPTH_TEXT": 1}
    extra = [part for key, value in pairs.items() for part in (f"TRAINER.PROMPTSRC.{key}", value)]
    trainer = build(world.cfg("PromptSRC", tmp_path, extra=extra))
    assert agree(trainer.model_inference(images), plain_logits(trainer, images, "a photo of a {}."))


@pytest.mark.parametrize(("method", "pairs", "message"), [
    ("MaPLe", ["TRAINER.MAPLE.PROMPT_DEPTH", 4], "PROMPT_DEPTH is 4; wanted 1 to 3, the layers of the text tower"),
    ("MaPLe", ["TRAINER.MAPLE.PROMPT_DEPTH", 0], "PROMPT_DEPTH is 0; wanted 1 to 3"),
    ("MaPLe", ["TRAINER.MAPLE.CTX_INIT", "photo"], "N_CTX is 2, but the initial words 'photo' have 1 tokens"),
    ("PromptSRC", ["TRAINER.PROMPTSRC.PROMPT_DEPTH_VISION", 9], "wanted 0 to 3, the layers of the vision tower"),
    ("MMRL", ["TRAINER.MMRL.REP_LAYERS", [1, 3]], "wanted a row of layers of the vision tower, 1 to 3"),
    ("MMRL", ["TRAINER.MMRL.REP_LAYERS", [2, 3], "TRAINER.MMRL.TEXT_REP_LAYERS", [3, 4]], "of the text tower, 1 to 3"),
    ("MMRL", ["TRAINER.MMRL.REP_LAYERS", [3], "TRAINER.MMRL.TEXT_REP_LAYERS", [3], "TRAINER.MMRL.TEST_LOGITS", "both"],
     "TEST_LOGITS is 'both'; allowed: auto, fused, class"),
    ("CoCoOp", ["TRAINER.COCOOP.PREC", "half"], "PREC is 'half'; allowed: fp32, amp, fp16"),
])
def test_settings_that_cannot_be(world, tmp_path, method, pairs, message):
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        build(world.cfg(method, tmp_path, extra=pairs))


def test_more_vectors_than_words_start_at_random(world, tmp_path):
    trainer = build(world.cfg("MaPLe", tmp_path, extra=["TRAINER.MAPLE.PROMPT_DEPTH", 2, "TRAINER.MAPLE.N_CTX", 5]))
    assert trainer.prompts()[0].startswith("X X X X X ") and trainer.learner.text.shape == (2, 5, 64)


# -- MMRL ------------------------------------------------------------------------------------------------------------


def test_mmrl_sequences_and_unread_tokens(made, images):
    trainer = made("MMRL")
    vision, text, learner = trainer.vision_tower, trainer.text_tower, trainer.learner
    prefix, first = trainer.text_prefix(), trainer.in_text.first_layer
    tokens = learner.mapped(learner.to_text)
    entered = trainer.in_text.enter(prefix.hidden, tokens)
    assert entered.shape[1] == prefix.hidden.shape[1] + 5 and torch.equal(entered[0, 1:6], tokens[0])
    length = entered.shape[1]
    allow = torch.ones(length, length, dtype=torch.bool).tril()
    allow[:, 1:6] = torch.eye(length, dtype=torch.bool)[:, 1:6]
    x, _ = run_with_tokens(
        text, prefix.hidden, tokens, trainer.in_text, start=first, allow=dict.fromkeys(range(LAYERS), allow))
    assert agree(text.project(take_positions(x, prefix.end)), prefix.frozen, 1e-4)
    assert agree(prefix.frozen, plain_text(trainer, trainer.prompts()))
    x, length = trainer.trunk(images), vision.sequence_length + 5
    allow = torch.ones(length, length, dtype=torch.bool)
    allow[:, 1:6] = torch.eye(length, dtype=torch.bool)[:, 1:6]
    x, outputs = run_with_tokens(
        vision, x, learner.mapped(learner.to_vision), trainer.in_vision, start=trainer.in_vision.first_layer,
        allow=dict.fromkeys(range(LAYERS), allow))
    assert agree(vision.project(x[:, 0]), trainer.clip.encode_image(images), 1e-4) and outputs.shape == (3, 5, 128)


def test_mmrl_enters_at_the_published_layers_of_vit_b16():
    tower = SimpleNamespace(layers=12, where="vision tower")
    assert mmrl.schedule_for([6, 7, 8, 9, 10, 11, 12], tower, key="K") == TokenSchedule(5, position=1, then="replace")


def test_mmrl_toy_loss():
    one = torch.tensor([[1.0, 0.0]])
    at = lambda cosine: torch.tensor([[cosine, (1 - cosine**2) ** 0.5]])  # noqa: E731
    logits = lambda ce: torch.tensor([[0.0, float(torch.tensor(ce).expm1().log())]])  # noqa: E731
    terms = mmrl.loss_terms(
        class_logits=logits(1.0), token_logits=logits(2.0), labels=torch.tensor([0]), image=at(0.9), text=at(0.8),
        frozen_image=one, frozen_text=one, alpha=0.7, reg_weight=0.5)
    assert terms["total"].item() == pytest.approx(1.45, abs=1e-5)


def test_mmrl_alpha_of_one_is_the_class_token(made, images):
    trainer = made("MMRL", **{"TRAINER.MMRL.ALPHA": 1.0})
    fused = trainer.model_inference(images)
    trainer.trained_on = ("another", "all")
    assert trainer.scored == "class" and torch.equal(trainer.model_inference(images), fused)


@pytest.mark.parametrize(("setting", "here", "trained", "wanted"), [
    ("auto", ("DTD", "base"), ("DTD", "base"), "fused"),
    ("auto", ("DTD", "new"), ("DTD", "base"), "class"),
    ("auto", ("DTD", "all"), ("DTD", "base"), "class"),
    ("auto", ("DTD", "new"), ("DTD", "all"), "fused"),
    ("auto", ("DTD", "all"), ("ImageNet", "all"), "class"),
    ("auto", ("ImageNetV2", "all"), ("ImageNet", "all"), "class"),  # published, though its classes were trained on
    ("fused", ("DTD", "new"), ("DTD", "base"), "fused"),
    ("class", ("DTD", "base"), ("DTD", "base"), "class"),
])
def test_which_logits_mmrl_scores(setting, here, trained, wanted):
    assert mmrl.scored_logits(setting, here, trained) == wanted


def test_mmrl_logit_scale(made, images):
    published, own = made("MMRL", **{"TRAINER.MMRL.LOGIT_SCALE": 100}), made("MMRL")
    ratio = published.model_inference(images) / own.model_inference(images)
    assert torch.allclose(ratio, 100 / own.clip.logit_scale.exp().expand_as(ratio), rtol=1e-4)


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "node"), [
    ("CoOp", "COOP"), ("CoCoOp", "COCOOP"), ("MaPLe", "MAPLE"), ("PromptSRC", "PROMPTSRC"), ("MMRL", "MMRL"),
    ("DeAR", "DEAR")])
def test_a_step_under_amp(made, images, method, node):
    exact, mixed = made(method), made(method, **{f"TRAINER.{node}.PREC": "amp"})
    for trainer in (exact, mixed):
        trainer.set_model_mode("train")
        trainer.num_batches, trainer.batch_idx, trainer.epoch = 9, 0, 0
    batch = {"img": images, "label": torch.tensor([0, 1, 2])}
    losses = [trainer.forward_backward(batch)["loss"] for trainer in (exact, mixed)]
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all()
               for model in mixed._models.values() for p in model.parameters())


@pytest.mark.parametrize("method", ["CoOp", "CoCoOp", "MaPLe", "PromptSRC", "MMRL", "DeAR"])
def test_a_step_with_the_frozen_weights_in_half(made, images, method, monkeypatch):
    """What PREC fp16 is on a GPU, here with bf16, which a CPU can compute."""
    exact = made(method)
    monkeypatch.setattr(Precision, "backbone", property(lambda self: "bf16"))
    half = made(method)
    assert vision_tower(half.clip).dtype == torch.bfloat16
    losses = []
    for trainer in (exact, half):
        trainer.set_model_mode("train")
        trainer.num_batches, trainer.batch_idx, trainer.epoch = 9, 0, 0
        losses.append(trainer.forward_backward({"img": images, "label": torch.tensor([0, 1, 2])})["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)
    assert all(p.dtype == torch.float32 for model in half._models.values() for p in model.parameters())
    assert half.model_inference(images).dtype == half.zero_shot_logits(images).dtype == torch.float32
