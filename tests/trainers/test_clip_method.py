"""Shared parts of the CLIP trainers: the memory estimate, precision by name, logits that stay fp32."""

import pytest
import torch
from tiny_world import build, distance, trained_state
from toys import toy_clip

from dear_plugin.engine.clip_method import Precision, activation_bytes, cosine_logits
from dear_plugin.towers import vision_tower


def test_memory_estimate_is_near_what_autograd_keeps(geometry):
    clip = toy_clip(geometry).requires_grad_(False)
    tower = vision_tower(clip)
    x = torch.randn(4, tower.sequence_length + 5, tower.width, requires_grad=True)
    kept = {}
    weights = {p.untyped_storage().data_ptr() for p in clip.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        packed = tensor.numel() == 3 * tower.width**2  # of a Hugging Face model: a weight, if made anew, no activation
        if storage.data_ptr() not in weights and not packed:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        allow = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        out = tower.run(x, 0, tower.layers, allow=allow)  # noqa: F841 - kept alive, so that no address is used twice
    estimate = activation_bytes(tower, sequences=4, length=x.shape[1], layers=tower.layers)
    assert 0.6 < sum(kept.values()) / estimate < 1.4


def test_fp16_on_a_cpu_is_fp32_with_one_notice(capsys):
    precision = Precision("fp16", torch.device("cpu"), key="TRAINER.COOP.PREC")
    assert (precision.name, precision.backbone) == ("fp32", "fp32")
    assert capsys.readouterr().out == "TRAINER.COOP.PREC fp16 is computed in fp32 on a CPU\n"
    with pytest.raises(ValueError, match="TRAINER.COOP.PREC is 'fp8'; allowed: fp32, amp, fp16"):
        Precision("fp8", torch.device("cpu"), key="TRAINER.COOP.PREC")


def test_amp_on_a_cpu_is_bf16_autocast_and_steps():
    precision = Precision("amp", torch.device("cpu"), key="x")
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with precision.autocast():
        out = torch.ones(2, 4) @ weight
        assert out.dtype == torch.bfloat16
        loss = out.float().sum()
    precision.backward_and_step(loss, optimizer)
    assert weight.dtype == torch.float32 and torch.allclose(weight, torch.full((4, 4), 0.8))


def test_cosine_logits_stay_fp32_under_autocast():
    generator = torch.Generator().manual_seed(0)
    image, text = torch.randn(3, 64, generator=generator), torch.randn(5, 64, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        logits = cosine_logits(image, text, torch.tensor(100.0))
    assert torch.equal(logits, cosine_logits(image, text, torch.tensor(100.0))) and logits.dtype == torch.float32


def test_a_compiled_step_is_the_same_step(world, tmp_path, monkeypatch):
    """MODEL.COMPILE, here with the backend that traces and lowers but writes no C++ (inductor takes a minute)."""
    compiled: list[object] = []
    compile_ = torch.compile

    def traced(function):
        compiled.append(function)
        return compile_(function, backend="aot_eager")

    plain = build(world.cfg("DeAR", tmp_path / "plain"))
    monkeypatch.setattr(torch, "compile", traced)
    fast = build(world.cfg("DeAR", tmp_path / "fast", **{"MODEL.COMPILE": True}))
    assert compiled == [fast.role_clip.image_features]
    for trainer in (plain, fast):
        trainer.train()
    assert distance(trained_state(plain), trained_state(fast)) < 1e-4
