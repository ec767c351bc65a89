"""Checkpoints in Dassl's folder layout, written atomically as plain tensors and read without unpickling code."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

BEST = "model-best.pth.tar"
_NUMBERED = re.compile(r"model\.pth\.tar-(\d+)$")


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Call `write` with a temporary path in the same folder, then move it: readers see the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(
    state: dict[str, Any],
    save_dir: str | Path,
    is_best: bool = False,
    remove_module_from_keys: bool = True,
    model_name: str = "",
) -> None:
    """Write {state_dict, epoch, optimizer, scheduler, val_result} as `model.pth.tar-<epoch>` (or `model_name`).

    The text file `checkpoint` beside it names it; `is_best` writes a copy as model-best.
    """
    folder = Path(save_dir)
    if remove_module_from_keys:
        state = {**state, "state_dict": without_module(state["state_dict"])}
    name = model_name or f"model.pth.tar-{state['epoch']}"
    for target in [name, BEST] if is_best else [name]:
        write_atomically(folder / target, lambda path: torch.save(state, path))
        print(f"Checkpoint saved to {folder / target}")
    write_atomically(folder / "checkpoint", lambda path: path.write_text(name + "\n", encoding="utf-8"))


def without_module(state: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the leading `module.` of DataParallel."""
    return {key.removeprefix("module."): value for key, value in state.items()}


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint to the CPU: ours, or one that a Dassl wrote with torch's schedulers and optimizers inside."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError):
        return _load_old(path)


def _load_old(path: Path) -> dict[str, Any]:
    """A second try with torch's schedulers and optimizers allowed, still without running code from the file."""
    try:
        with torch.serialization.safe_globals(_old_checkpoint_classes()):  # torch >= 2.6 takes stand-ins by name
            return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, AttributeError, TypeError) as error:
        raise ValueError(
            f"checkpoint {path} cannot be read: it is damaged, or holds objects other than tensors "
            f"({str(error).splitlines()[-1].strip()[:200]})"
        ) from error


def _old_checkpoint_classes() -> list[Any]:
    """What the scheduler entry of Dassl's own checkpoints holds: a torch scheduler with its optimizer."""
    schedules, optim = torch.optim.lr_scheduler, torch.optim
    return [
        *(schedules.CosineAnnealingLR, schedules.StepLR, schedules.MultiStepLR),
        *(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, dict),
        (_as_dict, "collections.defaultdict"),  # the optimizer's state; torch's safe reader fills plain dicts only
    ]


def _as_dict(_factory: Any = None) -> dict:
    return {}


def available_epochs(folder: Path) -> list[int]:
    """Epochs of the numbered checkpoints in a model's folder, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match.group(1)) for path in folder.iterdir() if (match := _NUMBERED.match(path.name)))


def find_checkpoint(directory: str | Path, name: str, epoch: int | None = None) -> Path:
    """The file of model `name`: of `epoch` if given, else model-best if there is one, else the last epoch."""
    directory = Path(directory)
    folder, epochs = directory / name, available_epochs(directory / name)
    best = (folder / BEST).is_file()
    if not directory.is_dir():
        raise FileNotFoundError(f"no model folder {directory}: give the training's output folder as --model-dir")
    if not epochs and not best:
        others = sorted(path.parent.name for path in directory.glob("*/checkpoint"))
        raise FileNotFoundError(
            f"{directory} has no checkpoint of {name}; it holds "
            f"{', '.join(others) if others else 'no model at all'}: check --model-dir and --trainer"
        )
    if epoch is None:
        return folder / (BEST if best else f"model.pth.tar-{epochs[-1]}")
    if epoch not in epochs:
        listed = ", ".join(map(str, epochs)) or "none"
        extra = f"; {BEST} is there too (leave --load-epoch out)" if best else ""
        raise FileNotFoundError(f"{folder} has no checkpoint of epoch {epoch}; epochs there: {listed}{extra}")
    return folder / f"model.pth.tar-{epoch}"


def load_strictly(module: nn.Module, state: Mapping[str, Any], *, source: str) -> None:
    """Load a state dict that must fit exactly; else ValueError with missing, unexpected and differently shaped keys."""
    own = module.state_dict()
    problems = []
    if missing := sorted(own.keys() - state.keys()):
        problems.append(
            f"missing {', '.join(missing[:5])}" + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        )
    if unexpected := sorted(state.keys() - own.keys()):
        problems.append(
            f"unexpected {', '.join(unexpected[:5])}"
            + (f" and {len(unexpected) - 5} more" if len(unexpected) > 5 else "")
        )
    problems += [
        f"{key} has shape {list(state[key].shape)} in the file, {list(own[key].shape)} here"
        for key in own.keys() & state.keys()
        if state[key].shape != own[key].shape
    ]
    if problems:
        raise ValueError(
            f"{source} does not fit this model: {'; '.join(problems)}. Check the trainer, backbone and its settings"
        )
    module.load_state_dict(state)


def load_pretrained_weights(model: nn.Module, weight_path: str | Path) -> None:
    """Shape-tolerant start: takes the entries whose name and shape match, reports the others, warns if none does."""
    loaded = load_checkpoint(weight_path)
    state = without_module(loaded.get("state_dict", loaded))
    own = model.state_dict()
    fits = {key: value for key, value in state.items() if key in own and own[key].shape == value.shape}
    model.load_state_dict({**own, **fits})
    if not fits:
        warnings.warn(f"{weight_path}: no entry fits the model in name and shape; nothing was loaded", stacklevel=2)
        return
    print(f"Loaded {len(fits)} of {len(state)} entries of {weight_path}")
    if discarded := sorted(state.keys() - fits.keys()):
        print(f"Not loaded, for their name or shape: {', '.join(discarded)}")


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        while block := handle.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
