"""Save and load what DeAR trained: adapter.safetensors and adapter.json, strict, with a readable mismatch report."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dear_plugin.config import ADAPTER_FIELDS, DearConfig
from dear_plugin.messages import check_fields
from dear_plugin.model_identity import ModelIdentity, identity
from dear_plugin.roles import RoleMap, write_json_atomically
from dear_plugin.version import __version__
from dear_plugin.wrap import RoleCLIP, wrap_clip_with_config

SCHEMA = 1
WEIGHTS, DESCRIPTION = "adapter.safetensors", "adapter.json"
_FIELDS = ("schema", "config", "role_map", "model", "preprocessing", "weights_sha256", "versions")


def save_adapter(role_clip: RoleCLIP, directory: str | os.PathLike, *, name: str | None = None) -> Path:
    """Write the adapter of a RoleCLIP into `directory`; each file appears whole or not at all.

    `name`: the backbone's name, kept for the reader. Nothing in the files depends on a class list.
    """
    from safetensors.torch import save

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {key: value.detach().cpu().contiguous() for key, value in role_clip.adapter.state_dict().items()}
    weights = save(state, metadata={"format": "pt"})
    description = {
        "schema": SCHEMA,
        "config": role_clip.config.to_dict(),
        "role_map": role_clip.role_map.to_dict(),
        "model": identity(role_clip.clip, name=name or _name_of(role_clip)).to_dict(),
        "preprocessing": preprocessing(role_clip.clip),
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "versions": {"dear_plugin": __version__, "torch": torch.__version__, "python": platform.python_version()},
    }
    temporary = directory / f".{WEIGHTS}.{os.getpid()}.tmp"
    temporary.write_bytes(weights)
    os.replace(temporary, directory / WEIGHTS)
    # The description comes last and carries the hash of the weights, so a broken pair is noticed.
    write_json_atomically(directory / DESCRIPTION, description)
    return directory


def load_adapter(role_clip: RoleCLIP, directory: str | os.PathLike) -> None:
    """Load an adapter into a RoleCLIP of the same backbone, settings and role map; anything else is refused by name."""
    description, state = read_adapter(directory)
    where = Path(directory) / DESCRIPTION
    _check_config(DearConfig.from_dict(description["config"]), role_clip.config, where)
    model = ModelIdentity.from_dict(description["model"])
    different = model.difference(identity(role_clip.clip))
    if different:
        raise ValueError(f"{where}: made for another backbone; the file's against this model's {'; '.join(different)}.")
    _check_role_map(RoleMap.from_dict(description["role_map"]), role_clip.role_map, where)
    _load_strictly(role_clip.adapter, state, Path(directory) / WEIGHTS)
    role_clip.text_cache.clear()


def wrap_clip_with_adapter(clip_model: nn.Module, directory: str | os.PathLike) -> RoleCLIP:
    """Wrap a CLIP the way a saved adapter was trained (its settings, its role map) and load the adapter."""
    description, _ = read_adapter(directory)
    model = ModelIdentity.from_dict(description["model"])
    different = model.difference(identity(clip_model))
    if different:
        raise ValueError(
            f"{Path(directory) / DESCRIPTION}: made for another backbone; the file's against this model's "
            f"{'; '.join(different)}."
        )
    role_map = RoleMap.from_dict(description["role_map"])
    role_clip = wrap_clip_with_config(clip_model, role_map, DearConfig.from_dict(description["config"]))
    load_adapter(role_clip, directory)
    return role_clip


def read_adapter(directory: str | os.PathLike) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """The description and the tensors of a saved adapter, checked for damage."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    directory = Path(directory)
    for name in (WEIGHTS, DESCRIPTION):
        if not (directory / name).is_file():
            raise FileNotFoundError(f"no adapter in {directory}: {name} is missing (save_adapter writes it).")
    where = directory / DESCRIPTION
    try:
        description = json.loads(where.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"adapter description {where} is damaged: {error}.") from None
    if isinstance(description, Mapping) and description.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"{where}: schema {description['schema']!r}, this dear_plugin reads schema {SCHEMA}.")
    description = check_fields(description, required=_FIELDS, where=str(where))
    data = (directory / WEIGHTS).read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != description["weights_sha256"]:
        raise ValueError(
            f"adapter file {directory / WEIGHTS} is damaged, or belongs to another {DESCRIPTION}: "
            f"{len(data)} bytes of sha256 {found[:12]}..., wanted {description['weights_sha256'][:12]}..."
        )
    try:
        return description, load(data)
    except SafetensorError as error:
        raise ValueError(f"adapter file {directory / WEIGHTS} is no safetensors file: {error}.") from None


def preprocessing(clip: nn.Module) -> dict[str, Any]:
    """What the image transform needs: size in pixels, mean and std per channel."""
    from dear_plugin.backbones import image_values

    size, mean, std = image_values(clip)
    return {"size": size, "mean": list(mean), "std": list(std)}


def _name_of(role_clip: RoleCLIP) -> str | None:
    return None if role_clip.role_map.model is None else role_clip.role_map.model.name


def _check_config(saved: DearConfig, here: DearConfig, where: Path) -> None:
    different = [
        f"{name}: {getattr(saved, name)!r} against {getattr(here, name)!r}"
        for name in ADAPTER_FIELDS
        if getattr(saved, name) != getattr(here, name)
    ]
    if different:
        raise ValueError(
            f"{where}: trained with other settings; the file's against this model's {'; '.join(different)}. "
            "Wrap with the file's settings: wrap_clip_with_adapter(clip_model, directory)."
        )


def _check_role_map(saved: RoleMap, here: RoleMap, where: Path) -> None:
    """Roles decide what the adapter computes; method and evidence do not."""
    if (saved.layers, saved.heads) != (here.layers, here.heads):
        raise ValueError(
            f"{where}: role_map of layers {list(saved.layers)} with {saved.heads} heads against layers "
            f"{list(here.layers)} with {here.heads} heads."
        )
    for layer in saved.layers:
        for head in range(saved.heads):
            a, b = saved.role(layer, head), here.role(layer, head)
            if (a.role, a.attribute) != (b.role, b.attribute):
                raise ValueError(
                    f"{where}: role_map differs, first at layer {layer}, head {head}: "
                    f"{a.role.value} ({a.attribute}) against {b.role.value} ({b.attribute})."
                )


def _load_strictly(module: nn.Module, state: dict[str, Tensor], where: Path) -> None:
    wanted = module.state_dict()
    problems = [f"missing {key}" for key in wanted if key not in state]
    problems += [f"unexpected {key}" for key in state if key not in wanted]
    problems += [
        f"{key} has shape {list(state[key].shape)}, wanted {list(wanted[key].shape)}"
        for key in wanted
        if key in state and state[key].shape != wanted[key].shape
    ]
    if problems:
        raise ValueError(f"{where} does not fit this adapter: {'; '.join(problems)}.")
    module.load_state_dict(state)
