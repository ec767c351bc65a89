"""Published checkpoints: read under their own names, nothing of the class list taken, everything else strict."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_world import METHODS, SIZE, build, same, trained_state

from dear_plugin.engine.checkpoints import save_checkpoint
from trainers.published import cocoop_keys, coop_keys, maple_keys, mmrl_keys, promptsrc_keys

KEYS = {
    "CoOp": coop_keys(), "CoCoOp": cocoop_keys(), "MaPLe": maple_keys(depth=2),
    "PromptSRC": promptsrc_keys(text_depth=2, vision_depth=3), "MMRL": mmrl_keys(layers=2),
}
# The reader of MMRL's published files knows one list of layers, as the published code does.
EXTRA = {"MMRL": ["TRAINER.MMRL.REP_LAYERS", [2, 3], "TRAINER.MMRL.TEXT_REP_LAYERS", [], "TRAINER.MMRL.REP_DIM", 16]}
WHOLE_MODEL = ("MaPLe", "PromptSRC", "MMRL")
CLASS_BOUND = {
    "CoOp": ("token_prefix", "token_suffix"), "CoCoOp": ("token_prefix", "token_suffix"),
    "MaPLe": ("prompt_learner.token_prefix", "prompt_learner.token_suffix"),
    "PromptSRC": ("prompt_learner.token_prefix", "prompt_learner.token_suffix"),
    "MMRL": ("prompt_embeddings", "representation_learner.prompt_embeddings"),
}


def published(method: str, trainer) -> dict[str, torch.Tensor]:
    """A file as the published code writes it, in half, with seeded trained values."""
    (model,) = trainer._models.values()
    own, draw = model.state_dict(), torch.Generator().manual_seed(23)
    shape = {theirs: own[ours].shape if row is None else own[ours][row].shape
             for theirs, (ours, row) in KEYS[method].items()}
    state = {name: torch.randn(size, generator=draw).half() for name, size in shape.items()}
    state |= {name: torch.zeros(3, 7, 64).half() for name in CLASS_BOUND[method]}
    if method in WHOLE_MODEL:
        for name, value in trainer.clip.state_dict().items():
            if name.startswith("visual."):
                state["image_encoder." + name.removeprefix("visual.")] = value.half()
            elif name != "logit_scale" and not name.startswith("token_embedding"):
                state["text_encoder." + name] = value.half()
        state["logit_scale"] = trainer.clip.logit_scale.detach()
    if method == "PromptSRC":
        state |= {"prompt_learner.ZS_image_encoder." + name.removeprefix("visual."): value
                  for name, value in trainer.clip.state_dict().items() if name.startswith("visual.")}
    return state


@pytest.fixture(params=sorted(KEYS))
def method(request) -> str:
    return request.param


@pytest.fixture
def made(world, tmp_path):
    return lambda method, out="t", **options: build(
        world.cfg(method, tmp_path / out, extra=EXTRA.get(method, METHODS[method][0]), **options))


def test_a_published_folder_is_evaluated_as_it_is(method, made, tmp_path, capsys):
    trainer = made(method, out="eval", classes="new")
    (name,) = trainer._models
    state = published(method, trainer)
    save_checkpoint({"state_dict": state, "epoch": 5, "optimizer": None, "scheduler": None, "val_result": None},
                    tmp_path / "theirs" / name)
    capsys.readouterr()
    trainer.evaluate(str(tmp_path / "theirs"), epoch=5)
    shown = capsys.readouterr().out
    assert f"dropped {', '.join(sorted(CLASS_BOUND[method]))}; took {len(KEYS[method])} trained tensors" in shown
    assert ("from which the file's differ by at most 0.00" in shown) == (method in WHOLE_MODEL)
    (model,) = trainer._models.values()
    own = model.state_dict()
    for theirs, (ours, row) in KEYS[method].items():
        found = own[ours] if row is None else own[ours][row]
        assert found.dtype == torch.float32 and torch.equal(found, state[theirs].float())
    assert json.loads((tmp_path / "eval" / "result.json").read_text())["total"] == 6


def test_a_tensor_too_few_or_too_many_is_refused(method, made):
    trainer = made(method)
    (name,) = trainer._models
    before, state = trained_state(trainer), published(method, trainer)
    last = list(KEYS[method])[-1]
    with pytest.raises(ValueError, match=f"does not fit: missing {last}"):
        trainer.load_adapter_state(name, {key: value for key, value in state.items() if key != last})
    with pytest.raises(ValueError, match="does not fit: unexpected prompt_learner.compound_prompts_text.7"):
        trainer.load_adapter_state(name, state | {"prompt_learner.compound_prompts_text.7": torch.zeros(2, 64)})
    assert same(trained_state(trainer), before)


@pytest.mark.parametrize("method", WHOLE_MODEL)
def test_a_file_of_another_clip_is_refused(method, made):
    trainer = made(method)
    (name,) = trainer._models
    state = published(method, trainer)
    state["text_encoder.text_projection"] = state["text_encoder.text_projection"] * 1.2
    with pytest.raises(ValueError, match="text_encoder.text_projection in the file is not this backbone's"):
        trainer.load_adapter_state(name, state)


def test_as_many_classes_are_not_the_same_classes(made):
    """Dropped by name: the file's prefix has the shape that ours would have."""
    trainer = made("CoOp")
    state = published("CoOp", trainer)
    state["token_suffix"] = torch.full_like(trainer.prompt_learner.after, 9.0)
    trainer.load_adapter_state("prompt_learner", state)
    assert not (trainer.prompt_learner.after == 9.0).any()


def test_mmrl_takes_the_width_of_the_file(made, world, tmp_path):
    narrow = made("MMRL")
    state = published("MMRL", narrow)
    wide = build(world.cfg("MMRL", tmp_path / "wide", extra=[*EXTRA["MMRL"], "TRAINER.MMRL.REP_DIM", 48]))
    assert wide.learner.tokens.shape == (5, 48)
    wide.load_adapter_state("MultiModalRepresentationLearner", state)
    narrow.load_adapter_state("MultiModalRepresentationLearner", state)
    assert wide.learner.tokens.shape == (5, 16)
    images = torch.randn(2, 3, SIZE, SIZE)
    assert torch.equal(wide.model_inference(images), narrow.model_inference(images))
