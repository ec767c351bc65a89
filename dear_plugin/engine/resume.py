"""The state of a training after an epoch, as plain tensors: models, optimizers, schedules, random generators."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dear_plugin.engine.checkpoints import load_strictly, write_atomically
from dear_plugin.engine.schedules import plain_state

SCHEMA = 1


def generator_states() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and the CUDA devices' generators as tensors and numbers."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_generator_states(states: dict[str, Any]) -> None:
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


def save_state(
    path: Path,
    *,
    epoch: int,
    digest: str,
    models: dict[str, Any],
    optims: dict[str, Any],
    scheds: dict[str, Any],
    best_result: float,
    seconds: float,
    extra: dict[str, Any],
) -> None:
    """Write the state after `epoch` finished epochs, replacing the one before in one move."""
    state = {
        "schema": SCHEMA,
        "epoch": epoch,
        "digest": digest,
        "best_result": best_result,
        "seconds": seconds,
        "models": {name: dict(model.state_dict()) for name, model in models.items()},
        "optims": {name: optim.state_dict() for name, optim in optims.items() if optim is not None},
        "scheds": {name: plain_state(sched) for name, sched in scheds.items() if sched is not None},
        "generators": generator_states(),
        "extra": extra,
    }
    _refuse_objects(state, "state")
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def _refuse_objects(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _refuse_objects(inner, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _refuse_objects(inner, f"{where}[{index}]")
    elif not isinstance(value, (Tensor, int, float, str, bool, type(None))):
        raise ValueError(f"{where} is a {type(value).__name__}; a resume state holds tensors, numbers and strings only")


def read_state(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged file makes torch raise
        raise ValueError(
            f"{path} cannot be read ({str(error).splitlines()[0]}): remove the folder to start again"
        ) from error
    if state.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {state.get('schema')!r}, wanted {SCHEMA}: remove the folder to start again"
        )
    return state


def restore(
    state: dict[str, Any], *, models: dict[str, Any], optims: dict[str, Any], scheds: dict[str, Any], source: str
) -> None:
    """Put a state into live models, optimizers and schedules; generators are left to the caller."""
    for name, model in models.items():
        load_strictly(model, state["models"].get(name, {}), source=f"{source} ({name})")
    for name, saved in state["optims"].items():
        optims[name].load_state_dict(saved)
    for name, saved in state["scheds"].items():
        scheds[name].load_state_dict(saved)
