"""Optimizers, and the exact learning rates of the contract's schedules."""

import collections

import pytest
import torch
from torch import nn

from dear_plugin.engine import build_lr_scheduler, build_optimizer, get_cfg_default


def settings(**values):
    cfg = get_cfg_default()
    cfg.merge_from_list([item for key, value in values.items() for item in (f"OPTIM.{key}", value)])
    return cfg.OPTIM


def rates(optim_cfg, epochs=None):
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, optim_cfg)
    scheduler = build_lr_scheduler(optimizer, optim_cfg)
    found = []
    for _ in range(epochs or optim_cfg.MAX_EPOCH):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


CONSTANT = {"NAME": "sgd", "LR_SCHEDULER": "cosine", "WARMUP_EPOCH": 1, "WARMUP_TYPE": "constant"}
# dassl_contract.md, section 7: measured on a real Dassl.
MEASURED = [
    ({"LR": 0.0035, "MAX_EPOCH": 5}, [1e-5, 0.0035, 0.003166, 0.002291, 0.001209]),
    ({"LR": 0.0026, "MAX_EPOCH": 2}, [1e-5, 0.0026]),
    (
        {"LR": 0.002, "MAX_EPOCH": 10},
        [1e-5, 0.002, 0.001951, 0.001809, 0.001588, 0.001309, 0.001, 0.000691, 0.0004122, 0.000191],
    ),
    ({"LR": 0.002, "MAX_EPOCH": 1}, [1e-5]),
    (
        {"LR": 0.002, "MAX_EPOCH": 8, "WARMUP_EPOCH": 3, "WARMUP_TYPE": "linear"},
        [1e-5, 0.000667, 0.001333, 0.002, 0.001924, 0.001707, 0.001383, 0.001],
    ),
    ({"LR": 0.002, "MAX_EPOCH": 5, "WARMUP_RECOUNT": False}, [1e-5, 0.002, 0.001447, 0.000764, 0.000211]),
]


@pytest.mark.parametrize(("changes", "wanted"), MEASURED)
def test_measured_rates(changes, wanted):
    assert rates(settings(**{**CONSTANT, **changes})) == pytest.approx(wanted, rel=1e-3)


def test_last_rate_of_a_long_run():
    assert rates(settings(**CONSTANT, LR=0.002, MAX_EPOCH=200))[-1] == pytest.approx(4.93e-7, rel=1e-2)


def test_steps():
    assert rates(settings(LR=1.0, MAX_EPOCH=4, STEPSIZE=(2,))) == pytest.approx([1, 1, 0.1, 0.1])
    assert rates(settings(LR=1.0, MAX_EPOCH=3)) == [1, 1, 1]  # -1: at MAX_EPOCH
    assert rates(settings(LR=1.0, MAX_EPOCH=4, STEPSIZE=(1, 3), LR_SCHEDULER="multi_step")) == pytest.approx(
        [1, 0.1, 0.1, 0.01]
    )


@pytest.mark.parametrize("changes", [CONSTANT, {"LR_SCHEDULER": "multi_step", "STEPSIZE": (2, 3)}])
def test_schedule_state_is_plain_and_continues(changes, tmp_path):
    from dear_plugin.engine.schedules import plain_state

    optim_cfg = settings(**changes, LR=0.1, MAX_EPOCH=5)
    whole = rates(optim_cfg)
    first = build_optimizer(model := nn.Linear(2, 2), optim_cfg)
    scheduler = build_lr_scheduler(first, optim_cfg)
    for _ in range(2):
        first.step()
        scheduler.step()
    torch.save({"o": first.state_dict(), "s": plain_state(scheduler)}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert not any(isinstance(value, collections.Counter) for value in state["s"].values())
    second = build_optimizer(model, optim_cfg)
    again = build_lr_scheduler(second, optim_cfg)
    second.load_state_dict(state["o"])
    again.load_state_dict(state["s"])
    found = []
    for _ in range(3):
        found.append(second.param_groups[0]["lr"])
        second.step()
        again.step()
    assert found == whole[2:]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adam", "Adam"),
        ("amsgrad", "Adam"),
        ("sgd", "SGD"),
        ("rmsprop", "RMSprop"),
        ("radam", "RAdam"),
        ("adamw", "AdamW"),
    ],
)
def test_optimizers(name, kind):
    optimizer = build_optimizer(nn.Linear(2, 2), settings(NAME=name, LR=0.5))
    assert type(optimizer).__name__ == kind
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.5 and group["weight_decay"] == 5e-4
    assert group.get("amsgrad", False) == (name == "amsgrad")
    assert group.get("momentum", 0.9) == 0.9


@pytest.mark.builtin
def test_bad_names_and_nothing_to_train():
    with pytest.raises(ValueError, match="optimizer 'adma' is unknown; did you mean 'adam'"):
        build_optimizer(nn.Linear(2, 2), settings(NAME="adma"))
    optimizer = build_optimizer(nn.Linear(2, 2), settings())
    with pytest.raises(ValueError, match="schedule 'cosin' is unknown; did you mean 'cosine'"):
        build_lr_scheduler(optimizer, settings(LR_SCHEDULER="cosin"))
    with pytest.raises(ValueError, match="Linear has no trainable parameter"):
        build_optimizer(nn.Linear(2, 2).requires_grad_(False), settings())


@pytest.mark.builtin
def test_staged_rates():
    model = nn.ModuleDict({"old": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    optimizer = build_optimizer(model, settings(STAGED_LR=True, NEW_LAYERS=("new",), LR=1.0))
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 1.0]
    with pytest.raises(ValueError, match="layer 'nev' is unknown; did you mean 'new'"):
        build_optimizer(model, settings(STAGED_LR=True, NEW_LAYERS=("nev",)))
