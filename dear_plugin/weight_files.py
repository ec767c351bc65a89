"""Read a state dict from a file of any usual kind: TorchScript archive, torch file, safetensors."""

import hashlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Keys under which training code wraps a model's state dict, and prefixes that wrappers leave on its keys.
_NESTED_KEYS = ("state_dict", "model_state_dict", "model")
_PREFIXES = ("module.", "_orig_mod.")


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """The state dict in `path`; the kind of file is found from its content, then it is read once."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give the weight file itself (.pt or .safetensors).")
    if path.stat().st_size == 0:
        raise ValueError(f"weight file {path} is empty.")
    if path.suffix == ".safetensors":
        state: Any = read_safetensors(path)
    elif _is_torchscript(path):
        state = _read_torchscript(path)
    else:
        state = _read_torch(path)
    for key in _NESTED_KEYS:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
        raise ValueError(f"weight file {path} holds a {type(state).__name__}, not a state dict.")
    state = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    for prefix in _PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            state = {key[len(prefix) :]: value for key, value in state.items()}
    return state


def read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(damaged(path, error)) from None


def _is_torchscript(path: Path) -> bool:
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any("/code/" in name for name in archive.namelist())


def _read_torchscript(path: Path) -> dict[str, Tensor]:
    try:
        return torch.jit.load(str(path), map_location="cpu").state_dict()
    except RuntimeError as error:
        raise ValueError(damaged(path, error)) from None


def _read_torch(path: Path) -> Any:
    try:
        # Never more than tensors: a pickle could run code.
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"weight file {path} holds more than tensors and is not loaded for safety, or it is damaged: "
            f"save the state dict alone with torch.save(model.state_dict(), path). ({_first_line(error)})"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        raise ValueError(damaged(path, error)) from None


def damaged(path: Path, error: Exception) -> str:
    """One sentence about a file that does not read: path, size, hash, what the reader said."""
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    return (
        f"weight file {path} is damaged or of an unknown kind ({len(data)} bytes, sha256 {digest[:16]}...): "
        f"{_first_line(error)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
