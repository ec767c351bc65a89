"""The life cycle that every trainer keeps: what moves, what is saved, resume, repetition, evaluation on new classes."""

import json

import pytest
import torch
from tiny_world import METHODS, NAMES, SIZE, build, same, trained_state

from dear_plugin.engine.checkpoints import find_checkpoint, load_checkpoint


@pytest.fixture
def images():
    return torch.randn(3, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(3))


def test_only_the_trained_parameters_move(finished):
    trainer = finished.trainer
    now = {key: value for model in trainer._models.values() for key, value in model.named_parameters()}
    assert sum(value.numel() for value in now.values() if value.requires_grad) == METHODS[finished.name][1]
    assert [key for key, value in now.items() if torch.equal(value, finished.start[key])] == [], "every part learns"
    after = trainer.clip.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in finished.clip_before.items()), "CLIP is bit-identical"
    assert all(value.grad is None for value in trainer.clip.parameters())


def test_a_run_is_repeatable(finished, world, tmp_path):
    again = build(world.cfg(finished.name, tmp_path / "again"))
    again.train()
    assert same(trained_state(again), trained_state(finished.trainer))


def test_resume_equals_the_uninterrupted_run(finished, world, tmp_path, monkeypatch):
    first = build(world.cfg(finished.name, tmp_path / "run"))
    after_epoch = first.after_epoch

    def stop() -> None:
        after_epoch()
        raise KeyboardInterrupt

    monkeypatch.setattr(first, "after_epoch", stop)
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = build(world.cfg(finished.name, tmp_path / "run", flags=("--resume",)))
    second.train()
    assert second.start_epoch == 1
    assert same(trained_state(second), trained_state(finished.trainer))
    results = [json.loads((folder / "result.json").read_text()) for folder in (tmp_path / "run", finished.out)]
    assert results[0]["accuracy_pct"] == results[1]["accuracy_pct"]


def test_a_saved_model_gives_the_same_logits(finished, world, tmp_path, images):
    finished.trainer.set_model_mode("eval")
    with torch.no_grad():
        wanted = finished.trainer.model_inference(images)
    fresh = build(world.cfg(finished.name, tmp_path / "eval", SEED=7))
    assert not same(trained_state(fresh), trained_state(finished.trainer)) or finished.name == "CoOp"
    fresh.load_model(str(finished.out))
    fresh.set_model_mode("eval")
    with torch.no_grad():
        assert torch.equal(fresh.model_inference(images), wanted)


def test_new_classes_are_one_flag(finished, world, tmp_path, images):
    new = build(world.cfg(finished.name, tmp_path / "eval", classes="new"))
    accuracy = new.evaluate(str(finished.out))
    assert new.classnames == [name.replace("_", " ") for name in NAMES[3:]] and 0 <= accuracy <= 100
    assert json.loads((tmp_path / "eval" / "result.json").read_text())["total"] == 6
    assert same(trained_state(new), trained_state(finished.trainer)), "the trained tensors are those of the file"
    with torch.no_grad():
        assert new.model_inference(images).shape == (3, 2)


def test_a_checkpoint_holds_nothing_of_the_class_list(finished, world, tmp_path):
    everything = build(world.cfg(finished.name, tmp_path / "all", classes="all"))
    for name, model in everything._models.items():
        stored = load_checkpoint(find_checkpoint(finished.out, name))["state_dict"]
        own = {key: tuple(value.shape) for key, value in model.state_dict().items()}
        assert {key: tuple(value.shape) for key, value in stored.items()} == own
        assert sum(value.numel() for value in stored.values()) == METHODS[finished.name][1], "and nothing else"


def test_logits_follow_the_parameters(finished, images):
    """Text features are cached; a written parameter must not leave old ones in use."""
    trainer = finished.trainer
    model = next(iter(trainer._models.values()))
    before = trained_state(trainer)
    trainer.set_model_mode("eval")
    with torch.no_grad():
        first = trainer.model_inference(images)
        for value in model.parameters():
            value.mul_(1.5)
        assert not torch.equal(trainer.model_inference(images), first)
    model.load_state_dict({key.split(".", 1)[1]: value for key, value in before.items()})
    with torch.no_grad():
        assert torch.equal(trainer.model_inference(images), first)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_saved_model_gives_the_same_logits_under_amp(method, world, tmp_path, images):
    """Frozen parts that are kept must not depend on whether a training or a test asked for them first."""
    options = {f"TRAINER.{method.upper()}.PREC": "amp", "OPTIM.MAX_EPOCH": 1}
    trained = build(world.cfg(method, tmp_path / "train", **options))
    trained.train()
    fresh = build(world.cfg(method, tmp_path / "eval", **options))
    fresh.load_model(str(tmp_path / "train"))
    for trainer in (trained, fresh):
        trainer.set_model_mode("eval")
    with torch.no_grad():
        assert torch.equal(fresh.model_inference(images), trained.model_inference(images))
