"""The yacs configuration tree: yacs' literal rules, whole numbers taken for fractions, the nearest key named."""

from __future__ import annotations

import copy
from ast import literal_eval
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yacs.config import CfgNode

from dear_plugin.engine.config_defaults import DEFAULTS
from dear_plugin.engine.registry import closest


class ConfigNode(CfgNode):
    """A CfgNode whose merges explain themselves. Nodes of plain yacs may be hung into it."""

    def merge_from_file(self, cfg_filename: str | Path) -> None:
        """Merge a YAML file. An unknown key, a wrong type or broken YAML is a ValueError that names the file."""
        path = Path(cfg_filename)
        if not path.is_file():
            raise FileNotFoundError(f"no config file {path}{_nearest_file(path)}")
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if values is not None and not isinstance(values, Mapping):
            raise ValueError(f"{path} holds {type(values).__name__}; wanted KEY: value lines")
        self._merge(values or {}, str(path))

    def merge_from_other_cfg(self, cfg_other: Mapping) -> None:
        self._merge(cfg_other, "config")

    def merge_from_list(self, cfg_list: Sequence) -> None:
        """Merge [KEY, value, KEY, value, ...], as given at the end of a command line."""
        if len(cfg_list) % 2:
            raise ValueError(f"overrides come in pairs KEY VALUE, after all flags; got {' '.join(map(str, cfg_list))}")
        for key, value in zip(cfg_list[0::2], cfg_list[1::2], strict=True):
            nested: Any = value
            for part in reversed(str(key).split(".")):
                nested = {part: nested}
            self._merge(nested, "command line")

    def _merge(self, values: Mapping, where: str) -> None:
        if self.is_frozen():
            raise AttributeError("the config is frozen; change it before training starts")
        _merge_into(values, self, root=self, prefix="", where=where)


def _merge_into(values: Mapping, node: CfgNode, *, root: CfgNode, prefix: str, where: str) -> None:
    for key, raw in values.items():
        name = f"{prefix}{key}"
        if key not in node:
            if not node.is_new_allowed():
                full = next((f"{name}.{rest}" for rest, _ in flatten(raw)), name) if isinstance(raw, Mapping) else name
                near = closest(full, dict(flatten(root)))
                raise ValueError(f"{where}: unknown config key {full}; did you mean {near}?")
            node[key] = ConfigNode(raw) if isinstance(raw, Mapping) else decode(raw)
        elif isinstance(node[key], CfgNode):
            if raw is None:  # a group of which every line is commented out
                continue
            if not isinstance(raw, Mapping):
                raise ValueError(
                    f"{where}: {name} is a group ({', '.join(node[key]) or 'empty'}); got the value {raw!r}"
                )
            _merge_into(raw, node[key], root=root, prefix=name + ".", where=where)
        else:
            node[key] = _convert(decode(raw), node[key], name=name, where=where)


def decode(value: Any) -> Any:
    """A string that reads as a Python literal becomes its value (`1e-5` and `(224, 224)` in YAML do), others stay."""
    if not isinstance(value, str):
        return copy.deepcopy(value)
    try:
        return literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _convert(new: Any, old: Any, *, name: str, where: str) -> Any:
    if new is None or old is None or type(new) is type(old):
        return new
    if isinstance(old, tuple) and isinstance(new, list):
        return tuple(new)
    if isinstance(old, list) and isinstance(new, tuple):
        return list(new)
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        return float(new)
    shown = f"group {dict(new)!r}" if isinstance(new, Mapping) else f"{type(new).__name__} {new!r}"
    raise ValueError(f"{where}: {name} is {shown}; wanted {type(old).__name__}, e.g. {old!r}")


def _nearest_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    name = closest(path.stem, [other.stem for other in path.parent.glob("*.yaml")])
    return f"; did you mean {path.with_name(name + '.yaml')}?" if name else ""


def get_cfg_default() -> ConfigNode:
    """A fresh tree of defaults."""
    return ConfigNode(copy.deepcopy(DEFAULTS))


def own_tree(cfg: CfgNode) -> ConfigNode:
    """A copy of a yacs tree (a real Dassl's defaults, say) whose merges follow the rules of this module."""

    def convert(node: Any) -> Any:
        return {k: convert(v) for k, v in node.items()} if isinstance(node, CfgNode) else copy.deepcopy(node)

    return ConfigNode(convert(cfg))


def flatten(cfg: Mapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("A.B.C", value) of every leaf in order; tuples as lists, as JSON has them."""
    for key, value in cfg.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", list(value) if isinstance(value, tuple) else value


def has_key(cfg: Mapping, name: str) -> bool:
    """Whether "A.B.C" is in the tree."""
    return any(key == name for key, _ in flatten(cfg))


# Keys of ours beside the contract's, which a real Dassl's tree lacks, with their defaults.
OWN_KEYS: dict[str, Any] = {
    # Where the augmentation of a training image is seeded: "worker": in the worker process, as in Dassl; "image": from
    # seed, epoch and image alone, so that the number of workers and of processes changes nothing.
    "DATALOADER.AUGMENT_SEED": "worker",
    "DATALOADER.FEATURE_CACHE": "",  # folder for what the frozen layers make of images without augmentation
    "DATALOADER.FEATURE_CACHE_GIB": 10.0,
    "MODEL.COMPILE": False,  # DeAR: torch.compile for the images' side of a training step
}


def add_own_keys(cfg: CfgNode) -> None:
    for key, value in OWN_KEYS.items():
        group, leaf = key.split(".")
        cfg[group][leaf] = value


def own(cfg: Mapping, name: str) -> Any:
    """The value of a key of OWN_KEYS; its default where the tree was made without them."""
    group, leaf = name.split(".")
    return cfg[group].get(leaf, OWN_KEYS[name])
