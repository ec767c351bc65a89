"""Keys of a RoleCLIP's state dict: the host's read as they do in the host itself, the adapter's as adapter.*."""

from typing import Any

from torch import nn


def hide_clip_prefix(module: nn.Module) -> None:
    """Drop "clip." from the keys that `module` saves, and add it again to those it loads."""
    module.register_state_dict_post_hook(_drop_clip_prefix)
    module.register_load_state_dict_pre_hook(_add_clip_prefix)


def _drop_clip_prefix(module: nn.Module, state: dict, prefix: str, local_metadata: dict) -> None:
    start = f"{prefix}clip."
    for key in [k for k in state if k.startswith(start)]:
        state[prefix + key[len(start) :]] = state.pop(key)


def _add_clip_prefix(module: nn.Module, state: dict, prefix: str, *args: Any) -> None:
    own = (f"{prefix}clip.", f"{prefix}adapter.")
    for key in [k for k in state if k.startswith(prefix) and not k.startswith(own)]:
        state[f"{prefix}clip.{key[len(prefix) :]}"] = state.pop(key)
