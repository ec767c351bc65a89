"""DeAR: adapt a frozen CLIP by deciding, per attention head, which tokens may talk to each other.

Shapes are written in fixed letters everywhere:
N images, L tokens, D width, H heads, P patches, A attribute tokens, K text tokens, C classes, E embedding.
Layers and heads count from 0.
"""

from importlib import import_module
from typing import Any

from dear_plugin.version import __version__

# Public name -> module that holds it. Imported on first use, so that `import dear_plugin` stays cheap.
_PUBLIC = {
    "HeadRole": "roles",
    "HeadInfo": "roles",
    "RoleMap": "roles",
    "ModelIdentity": "model_identity",
    "identity": "model_identity",
    "TokenLayout": "masks",
    "build_role_mask": "masks",
    "DearConfig": "config",
    "CORE_ATTRIBUTES": "config",
    "RoleCLIP": "wrap",
    "wrap_clip_with_roles": "wrap",
    "wrap_clip_with_config": "wrap",
    "wrap_clip_with_adapter": "adapter",
    "save_adapter": "adapter",
    "load_adapter": "adapter",
    "TaskAdaptiveFusion": "fusion",
    "loss_terms": "fusion",
    "Backbone": "backbones",
    "load_backbone": "backbones",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"dear_plugin has no {name!r}; its public names are: {', '.join(sorted(_PUBLIC))}")
    module = import_module(f"dear_plugin.{_PUBLIC[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
