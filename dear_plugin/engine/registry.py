"""Registries by name, with errors that propose the nearest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import SequenceMatcher
from typing import Any


def closest(name: str, known: Iterable[str]) -> str:
    """The known name most like `name`, capitals ignored; "" if there is none at all."""
    return max(known, key=lambda other: SequenceMatcher(None, name.lower(), other.lower()).ratio(), default="")


class Registry:
    """Maps the name of a class or function to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: dict[str, Any] = {}

    def register(self, obj: Any = None, force: bool = False) -> Any:
        """Decorator factory (`@REGISTRY.register()`), or takes the object directly. The key is its `__name__`."""
        if obj is not None:
            return self._add(obj, force)
        return lambda decorated: self._add(decorated, force)

    def _add(self, obj: Any, force: bool) -> Any:
        if obj.__name__ in self._entries and not force:
            raise KeyError(f"{obj.__name__} is already in the {self.name} registry; pass force=True to replace it")
        self._entries[obj.__name__] = obj
        return obj

    def get(self, name: str) -> Any:
        if name not in self._entries:
            raise KeyError(f"{name} is not in the {self.name} registry; did you mean {closest(name, self._entries)}?")
        return self._entries[name]

    def registered_names(self) -> list[str]:
        """Names in order of registration."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries


def check_name(name: str, known: Iterable[str], *, what: str, key: str) -> None:
    """ValueError unless `name` is known: what was got, the nearest name, all names, and the key to change."""
    known = list(known)
    if name in known:
        return
    if not known:
        raise ValueError(f"{what} {name!r} is unknown: none is registered")
    if not name:
        raise ValueError(f"no {what} is given: set {key} to one of {', '.join(known)}")
    raise ValueError(
        f"{what} {name!r} is unknown; did you mean {closest(name, known)!r}? Set {key} to one of: {', '.join(known)}"
    )


def _builder(registry: Registry, key: str, verb: str) -> Callable[..., Any]:
    """build(cfg, **kwargs) for a registry whose entry is named by the config key `key`, e.g. TRAINER.NAME."""

    def build(cfg: Any, **kwargs: Any) -> Any:
        group, leaf = key.split(".")
        name = cfg[group][leaf]
        check_name(name, registry.registered_names(), what=registry.name, key=key)
        if cfg.VERBOSE:
            print(f"Loading {verb}: {name}")
        return registry.get(name)(cfg, **kwargs)

    return build


TRAINER_REGISTRY = Registry("trainer")
DATASET_REGISTRY = Registry("dataset")
EVALUATOR_REGISTRY = Registry("evaluator")
build_trainer = _builder(TRAINER_REGISTRY, "TRAINER.NAME", "trainer")
build_dataset = _builder(DATASET_REGISTRY, "DATASET.NAME", "dataset")
build_evaluator = _builder(EVALUATOR_REGISTRY, "TEST.EVALUATOR", "evaluator")
