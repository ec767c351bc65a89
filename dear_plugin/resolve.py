"""From what the caller asked to what fits this CLIP: which role map, which layers, how many text tokens."""

import os
import warnings
from typing import Any

from dear_plugin.config import DearConfig
from dear_plugin.model_identity import identity
from dear_plugin.roles import RoleMap, shipped_map_names
from dear_plugin.towers import TextTower, VisionTower


def resolve_roles(roles: RoleMap | str | os.PathLike, clip: Any, vision: VisionTower) -> RoleMap:
    """A RoleMap that fits the model, from a map, a path, the name of a shipped map, or "auto"."""
    if not isinstance(roles, (RoleMap, str, os.PathLike)):
        raise TypeError(f'roles must be a RoleMap, a path, a name or "auto", got {type(roles).__name__}.')
    if isinstance(roles, str) and roles == "auto":
        return _shipped_map_of(clip)
    role_map = roles if isinstance(roles, RoleMap) else RoleMap.load(roles)
    check_fit(role_map, clip, vision)
    return role_map


def check_fit(role_map: RoleMap, clip: Any, vision: VisionTower) -> None:
    """Refuse a map of another geometry or of another model, naming what disagrees."""
    if role_map.heads != vision.heads:
        raise ValueError(f"role map has {role_map.heads} heads a layer, the vision tower has {vision.heads}.")
    if role_map.layers[-1] >= vision.layers:
        raise ValueError(
            f"role map names layer {role_map.layers[-1]}, the vision tower has layers 0-{vision.layers - 1}."
        )
    if role_map.model is None:
        _check_intended(role_map, clip)
        return
    different = role_map.model.difference(identity(clip))
    if different:
        label = role_map.model.name or role_map.model.family
        raise ValueError(
            f"role map of another model ({label}); the map's against this model's {'; '.join(different)}. "
            "Roles belong to the very weights they were found on: make a map for this model, or use its own."
        )


def _check_intended(role_map: RoleMap, clip: Any) -> None:
    """A map without a hash of its weights may still name their geometry; its use is announced."""
    intended = role_map.parameters.get("intended")
    if not intended:
        return
    here, name = identity(clip), role_map.parameters.get("backbone", "another model")
    different = [f"{key}: {value!r} against {getattr(here, key)!r}" for key, value in intended.items()
                 if getattr(here, key) != value]
    if different:
        raise ValueError(f"role map of another model ({name}); the map's against this model's {'; '.join(different)}.")
    warnings.warn(f"role map of {name} by {role_map.method}: {role_map.parameters.get('source', 'source not stated')}. "
                  "It names no hash of the weights, so only the geometry was compared.", stacklevel=2)


def _shipped_map_of(clip: Any) -> RoleMap:
    here, names = identity(clip), shipped_map_names()
    for name in names:
        role_map = RoleMap.load(name)
        if role_map.model is not None and not role_map.model.difference(here):
            return role_map
    raise ValueError(
        f'roles="auto": no shipped role map fits this model (sha256 {here.sha256[:12]}..., {here.layers} layers of '
        f"{here.heads} heads, {here.activation}); shipped: {', '.join(names) or 'none'}. Make one with "
        "scripts/probe_heads.py and pass its path, or pass RoleMap.uniform(role, layers=..., heads=...)."
    )


def resolve_config(config: DearConfig, role_map: RoleMap, vision: VisionTower, text: TextTower) -> DearConfig:
    """The config with first_layer, text_first_layer and text_tokens filled in, checked against model and map."""
    config.check_known(role_map.attributes())
    first = role_map.layers[0] if config.first_layer is None else config.first_layer
    if not 0 <= first < vision.layers:
        raise ValueError(f"first_layer is {first}, the vision tower has layers 0-{vision.layers - 1} (counted from 0).")
    missing = [layer for layer in range(first, vision.layers) if layer not in role_map.layers]
    if missing and config.role_mask:
        raise ValueError(
            f"first_layer {first} needs roles for layers {first}-{vision.layers - 1}, the role map has "
            f"{list(role_map.layers)}: layer {missing[0]} is missing."
        )
    text_first = config.text_first_layer
    if text_first is None:
        # At the same share of the depth as in the vision tower (the same layer where both are equally deep, as in
        # ViT-B/16). On tiny, with half as many text layers, the same number of layers left would be the whole tower,
        # and new classes then lost up to 30 points on some seeds (measured).
        text_first = first * text.layers // vision.layers
    if not 0 <= text_first < text.layers:
        raise ValueError(f"text_first_layer is {text_first}, the text tower has layers 0-{text.layers - 1}.")
    count = len(config.attributes) if config.text_tokens is None else config.text_tokens
    return config.changed(first_layer=first, text_first_layer=text_first, text_tokens=count)
