"""Head roles: what each attention head of the deep vision layers is for, kept as JSON."""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from dear_plugin.messages import check_fields, nearest
from dear_plugin.model_identity import ModelIdentity

SCHEMA = 1
SHIPPED_MAPS = Path(__file__).parent / "assets" / "roles"


class HeadRole(str, Enum):  # noqa: UP042 (StrEnum needs Python 3.11)
    """Role of a head by its concept entropy (paper, section on head roles): low, between, high."""

    ATTRIBUTE = "attribute"
    MIXED = "mixed"
    GENERALIZATION = "generalization"

    @classmethod
    def parse(cls, value: Any) -> "HeadRole":
        try:
            return cls(value)
        except ValueError:
            names = [role.value for role in cls]
            hint = nearest(value, names)
            raise ValueError(f"unknown head role {value!r}.{hint} Roles: {', '.join(names)}.") from None


@dataclass(frozen=True)
class HeadInfo:
    """One head: its role, its dominant attribute (needed for an attribute head), its entropy in bits, and why."""

    role: HeadRole
    attribute: str | None = None
    entropy_bits: float | None = None
    evidence: dict | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", HeadRole.parse(self.role))
        if self.attribute is not None and (not isinstance(self.attribute, str) or not self.attribute):
            raise ValueError(f"attribute of a head must be a name or null, got {self.attribute!r}.")
        if self.role is HeadRole.ATTRIBUTE and self.attribute is None:
            raise ValueError('an attribute head needs an attribute: a core attribute\'s name, or "other".')
        entropy = self.entropy_bits
        if entropy is not None:
            if isinstance(entropy, bool) or not isinstance(entropy, (int, float)) or not math.isfinite(entropy):
                raise ValueError(f"entropy_bits must be a finite number of bits or null, got {entropy!r}.")
            if entropy < 0:
                raise ValueError(f"entropy_bits cannot be negative, got {entropy!r}.")


@dataclass(frozen=True)
class RoleMap:
    """(layer, head) -> HeadInfo for some layers of one vision tower.

    `infos[i][h]` belongs to layer `layers[i]` and head h. `model` is None when the map fits any model of that geometry.
    """

    layers: tuple[int, ...]
    heads: int
    infos: tuple[tuple[HeadInfo, ...], ...]
    model: ModelIdentity | None = None
    method: str = "manual"
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(int(layer) for layer in self.layers))
        object.__setattr__(self, "infos", tuple(tuple(row) for row in self.infos))
        object.__setattr__(self, "parameters", dict(self.parameters))
        if not self.layers:
            raise ValueError("a role map needs at least one layer.")
        if list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers of a role map must rise from 0 upwards without repeats, got {list(self.layers)}.")
        if isinstance(self.heads, bool) or not isinstance(self.heads, int) or self.heads < 1:
            raise ValueError(f"heads of a role map must be a whole number of at least 1, got {self.heads!r}.")
        shape = [len(row) for row in self.infos]
        if shape != [self.heads] * len(self.layers):
            raise ValueError(f"a role map of {len(self.layers)} layers needs {self.heads} heads in each, got {shape}.")
        if self.model is not None:
            self._check_model()

    def _check_model(self) -> None:
        if self.layers[-1] >= self.model.layers:
            raise ValueError(f"role map names layer {self.layers[-1]}, its model has layers 0-{self.model.layers - 1}.")
        if self.heads != self.model.heads:
            raise ValueError(f"role map has {self.heads} heads a layer, its model has {self.model.heads}.")

    @classmethod
    def uniform(
        cls, role: HeadRole | str, *, layers: Iterable[int], heads: int, attribute: str | None = None
    ) -> "RoleMap":
        """Every head of the given layers in one role: the paper's "all mixed" and "all generalization" ablations."""
        layers = tuple(layers)
        row = (HeadInfo(HeadRole.parse(role), attribute=attribute),) * heads
        parameters = {"role": HeadRole.parse(role).value, "attribute": attribute}
        return cls(layers=layers, heads=heads, infos=(row,) * len(layers), method="uniform", parameters=parameters)

    @classmethod
    def from_heads(
        cls,
        heads: Mapping[tuple[int, int], HeadInfo],
        *,
        model: ModelIdentity | None = None,
        method: str = "manual",
        parameters: Mapping[str, Any] | None = None,
    ) -> "RoleMap":
        """A map from {(layer, head): HeadInfo}; every layer named must have all of its heads."""
        layers = sorted({layer for layer, _ in heads})
        count = 1 + max((head for _, head in heads), default=0)
        for layer in layers:
            missing = [head for head in range(count) if (layer, head) not in heads]
            if missing:
                raise ValueError(f"role map: layer {layer} has no entry for head {missing[0]} (heads 0-{count - 1}).")
        infos = [[heads[layer, head] for head in range(count)] for layer in layers]
        return cls(layers=layers, heads=count, infos=infos, model=model, method=method, parameters=parameters or {})

    def role(self, layer: int, head: int) -> HeadInfo:
        """The head's entry; layers and heads count from 0."""
        if layer not in self.layers:
            raise ValueError(f"role map has no layer {layer}; it has layers {list(self.layers)} (counted from 0).")
        if not 0 <= head < self.heads:
            raise ValueError(f"role map has no head {head}; heads are 0-{self.heads - 1}.")
        return self.infos[self.layers.index(layer)][head]

    def attributes(self) -> tuple[str, ...]:
        """Attributes that some attribute head writes, sorted."""
        named = {i.attribute for row in self.infos for i in row if i.role is HeadRole.ATTRIBUTE}
        return tuple(sorted(a for a in named if a is not None))

    def to_dict(self) -> dict[str, Any]:
        entries = [
            {
                "layer": layer,
                "head": head,
                "role": info.role.value,
                "attribute": info.attribute,
                "entropy_bits": info.entropy_bits,
                "evidence": info.evidence,
            }
            for layer, row in zip(self.layers, self.infos, strict=True)
            for head, info in enumerate(row)
        ]
        return {
            "schema": SCHEMA,
            "model": None if self.model is None else self.model.to_dict(),
            "method": self.method,
            "parameters": dict(self.parameters),
            "layers": list(self.layers),
            "heads": self.heads,
            "roles": entries,
        }

    @classmethod
    def from_dict(cls, data: Any) -> "RoleMap":
        if isinstance(data, Mapping) and data.get("schema", SCHEMA) != SCHEMA:
            raise ValueError(
                f"role map: schema {data['schema']!r}, this version of dear_plugin reads schema {SCHEMA}; "
                "make the map again, or use the dear_plugin that wrote it."
            )
        names = ("schema", "model", "method", "parameters", "layers", "heads", "roles")
        data = check_fields(data, required=names, where="role map")
        layers, heads = _read_geometry(data)
        infos: dict[tuple[int, int], HeadInfo] = {}
        for entry in data["roles"]:
            layer, head, info = _read_entry(entry)
            if layer not in layers or not 0 <= head < heads:
                raise ValueError(
                    f"role map: entry for layer {layer}, head {head} lies outside layers {layers}, heads 0-{heads - 1}."
                )
            if (layer, head) in infos:
                raise ValueError(f"role map: layer {layer}, head {head} appears twice.")
            infos[layer, head] = info
        missing = [(layer, head) for layer in layers for head in range(heads) if (layer, head) not in infos]
        if missing:
            raise ValueError(f"role map: no entry for layer {missing[0][0]}, head {missing[0][1]}.")
        return cls(
            layers=tuple(layers),
            heads=heads,
            infos=tuple(tuple(infos[layer, head] for head in range(heads)) for layer in layers),
            model=None if data["model"] is None else ModelIdentity.from_dict(data["model"]),
            method=str(data["method"]),
            parameters=data["parameters"],
        )

    def content_hash(self) -> str:
        """sha256 (hex) of the map's JSON in canonical form: same content, same hash, on any machine."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode("utf-8")).hexdigest()

    def __hash__(self) -> int:
        return hash(self.content_hash())

    def save(self, path: str | os.PathLike) -> Path:
        """Write the map as JSON; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, self.to_dict())
        return path

    @classmethod
    def load(cls, name_or_path: str | os.PathLike) -> "RoleMap":
        """Read a JSON file, or a map shipped with the package by its name."""
        path = Path(name_or_path)
        if not path.is_file():
            path = SHIPPED_MAPS / f"{name_or_path}.json"
        if not path.is_file():
            names = shipped_map_names()
            raise FileNotFoundError(
                f"no role map {str(name_or_path)!r}: neither a file nor one of the shipped maps "
                f"({', '.join(names) or 'none'}).{nearest(str(name_or_path), names)}"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"role map {path} is not JSON: {error}") from None
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def shipped_map_names() -> list[str]:
    """Names of the role maps that come with the package."""
    return sorted(path.stem for path in SHIPPED_MAPS.glob("*.json"))


def _read_geometry(data: Mapping) -> tuple[list[int], int]:
    layers, heads = data["layers"], data["heads"]
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"role map: layers must be a list of whole numbers, got {layers!r}.")
    if type(heads) is not int or heads < 1:
        raise ValueError(f"role map: heads must be a whole number of at least 1, got {heads!r}.")
    if not isinstance(data["roles"], list):
        raise ValueError(f"role map: roles must be a list of entries, got {type(data['roles']).__name__}.")
    if not isinstance(data["parameters"], Mapping):
        raise ValueError(f"role map: parameters must be a JSON object, got {type(data['parameters']).__name__}.")
    return layers, heads


def _read_entry(entry: Any) -> tuple[int, int, HeadInfo]:
    names = ("layer", "head", "role", "attribute", "entropy_bits", "evidence")
    entry = check_fields(entry, required=names, where="role map, entry of a head")
    layer, head = entry["layer"], entry["head"]
    if type(layer) is not int or type(head) is not int:
        raise ValueError(f"role map: layer and head must be whole numbers, got {layer!r} and {head!r}.")
    try:
        info = HeadInfo(entry["role"], entry["attribute"], entry["entropy_bits"], entry["evidence"])
    except ValueError as error:
        raise ValueError(f"role map, layer {layer}, head {head}: {error}") from None
    return layer, head, info


def write_json_atomically(path: Path, data: Any) -> None:
    """Write JSON beside `path` and rename it over: a reader never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1, ensure_ascii=False, allow_nan=False)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
