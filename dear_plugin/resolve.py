"""From what the caller asked to what fits this CLIP: which role map, which layers, how many text tokens."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from dear_plugin.config import DearConfig
from dear_plugin.model_identity import ModelIdentity, identity
from dear_plugin.roles import RoleMap, shipped_map_names
from dear_plugin.towers import TextTower, VisionTower


def resolve_roles(roles: RoleMap | str | os.PathLike, clip: Any, vision: VisionTower) -> RoleMap:
    """A RoleMap that fits the model, from a map, a path, the name of a shipped map, or "auto".

    "auto": the shipped map that carries the identity of these very weights; of several the first by name (so `tiny`
    before `tiny_entropy`). A map that names only a geometry is never taken so: give its name.
    """
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
        raise ValueError(f"role map has {role_map.heads} heads a layer, the vision tower has {vision.heads}. "
                         + _advice(identity(clip)))
    if role_map.layers[-1] >= vision.layers:
        raise ValueError(
            f"role map names layer {role_map.layers[-1]}, the vision tower has layers 0-{vision.layers - 1}. "
            + _advice(identity(clip))
        )
    if role_map.model is None:
        _check_intended(role_map, clip)
        return
    here = identity(clip)
    different = role_map.model.difference(here)
    if different:
        label = role_map.model.name or role_map.model.family
        raise ValueError(
            f"role map of another model ({label}); the map's against this model's {'; '.join(different)}. "
            "Roles belong to the very weights they were found on. " + _advice(here)
        )


def _check_intended(role_map: RoleMap, clip: Any) -> None:
    """A map without a hash of its weights may still name their geometry; its use is announced."""
    intended = role_map.parameters.get("intended")
    if not intended:
        return
    here, name = identity(clip), role_map.parameters.get("backbone", "another model")
    different = _geometry_difference(intended, here)
    if different:
        raise ValueError(f"role map of another model ({name}); the map's against this model's {'; '.join(different)}. "
                         + _advice(here))
    warnings.warn(f"role map of {name} by {role_map.method}: {role_map.parameters.get('source', 'source not stated')}. "
                  "It names no hash of the weights, so only the geometry was compared.", stacklevel=2)


def _geometry_difference(intended: Mapping[str, Any], here: ModelIdentity) -> list[str]:
    return [f"{key}: {value!r} against {getattr(here, key)!r}" for key, value in intended.items()
            if getattr(here, key) != value]


def fitting_maps(here: ModelIdentity) -> list[str]:
    """Names of the shipped maps for this model: by its identity, or by geometry where a map has no hash of weights."""
    fitting = []
    for name in shipped_map_names():
        role_map = RoleMap.load(name)
        intended = role_map.parameters.get("intended")
        if role_map.model is not None:
            fits = not role_map.model.difference(here)
        else:
            fits = bool(intended) and not _geometry_difference(intended, here)
        fitting += [name] if fits else []
    return fitting


def _advice(here: ModelIdentity) -> str:
    fitting = fitting_maps(here)
    shipped = f"shipped and fitting: {', '.join(fitting)}" if fitting else "none of the shipped ones fits"
    return (f"Give another map (roles=, TRAINER.DEAR.ROLES): {shipped}; scripts/analyze_heads.py makes one, all-mixed "
            "and all-generalization (RoleMap.uniform) need none.")


def _shipped_map_of(clip: Any) -> RoleMap:
    here = identity(clip)
    for name in shipped_map_names():  # sorted
        role_map = RoleMap.load(name)
        if role_map.model is not None and not role_map.model.difference(here):
            return role_map
    raise ValueError(
        f'roles="auto": no shipped role map carries the identity of this model (sha256 {here.sha256[:12]}..., '
        f"{here.layers} layers of {here.heads} heads, {here.activation}). " + _advice(here)
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
