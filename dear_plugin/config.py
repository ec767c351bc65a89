"""DearConfig: every knob of the method with its default, its unit and its source."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dear_plugin.messages import check_fields, nearest

# Paper, section on concept clusters: the five core attributes.
CORE_ATTRIBUTES = ("color", "shape", "texture", "object", "location")

# Fields that change what a trained adapter computes; the others matter for training alone.
ADAPTER_FIELDS = (
    "attributes",
    "first_layer",
    "text_first_layer",
    "text_tokens",
    "beta",
    "token_mixing",
    "latent_width",
    "attribute_projection",
    "per_layer_maps",
    "role_mask",
)


@dataclass(frozen=True)
class DearConfig:
    """All settings of DeAR; layers count from 0, None means "derived from the model" (see RoleCLIP)."""

    attributes: tuple[str, ...] = CORE_ATTRIBUTES  # A attribute tokens (paper: the five core attributes)
    first_layer: int | None = None  # vision layer where tokens enter (paper: 8 of 12); None: the role map's first
    text_first_layer: int | None = None  # text layer where tokens enter; None: same share of depth (ours)
    text_tokens: int | None = None  # K; None: one per attribute (ours)
    beta: float = 0.7  # weight of the learnable token when mixed with its output (rule: paper; value: ours)
    token_mixing: bool = True  # tokens read each other in isolated heads (paper); False: itself alone (ours)
    latent_width: int = 512  # width of the latent shared by both towers (ours)
    attribute_projection: str = "trained"  # "trained": a copy of visual.proj that learns; "frozen": proj itself (ours)
    per_layer_maps: bool = False  # one latent-to-token map per layer, not one per tower (ours)
    role_mask: bool = True  # False: no role mask, every head mixed (paper, ablation)
    cls_weight: float = 0.7  # alpha of the CLS feature at the start; the attributes share the rest (ours)
    lambda_reg: float = 1.0  # weight of L_reg (term: paper; value: ours)
    lambda_fusion: float = 0.1  # weight of L_fusion (term: paper; value: ours)
    class_chunk: int | None = None  # classes per text pass with recomputation; None: all at once (ours)
    recompute: bool = False  # vision layers with tokens are computed again for the gradient: less memory (ours)

    def __post_init__(self) -> None:
        if isinstance(self.attributes, str) or not isinstance(self.attributes, Iterable):
            raise ValueError(f"attributes must be a list of names, got {self.attributes!r}.")
        object.__setattr__(self, "attributes", tuple(self.attributes))
        self._check_attributes()
        for name in ("first_layer", "text_first_layer", "text_tokens"):
            self._check_whole(name, least=0, optional=True)
        self._check_whole("class_chunk", least=1, optional=True)
        self._check_whole("latent_width", least=1)
        for name in ("beta", "cls_weight", "lambda_reg", "lambda_fusion"):
            self._check_real(name)
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must lie in [0, 1], got {self.beta}.")
        if not 0.0 < self.cls_weight < 1.0:
            raise ValueError(f"cls_weight must lie strictly between 0 and 1, got {self.cls_weight}.")
        for name in ("lambda_reg", "lambda_fusion"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative, got {getattr(self, name)}.")
        for name in ("token_mixing", "per_layer_maps", "role_mask", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}.")
        if self.attribute_projection not in ("trained", "frozen"):
            raise ValueError(f"attribute_projection must be 'trained' or 'frozen', got {self.attribute_projection!r}.")

    def _check_attributes(self) -> None:
        for name in self.attributes:
            if not isinstance(name, str) or not name:
                raise ValueError(f"attributes must be names, got {name!r}.")
            if self.attributes.count(name) > 1:
                raise ValueError(f"attribute {name!r} appears twice in attributes={list(self.attributes)}.")

    def _check_whole(self, name: str, *, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}.")

    def _check_real(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}.")
        object.__setattr__(self, name, float(value))

    def check_known(self, known: Iterable[str]) -> None:
        """Refuse an attribute that is neither a core attribute nor one that some head of the role map writes."""
        known = [*CORE_ATTRIBUTES, *(a for a in known if a not in CORE_ATTRIBUTES)]
        for name in self.attributes:
            if name not in known:
                raise ValueError(
                    f"unknown attribute {name!r}.{nearest(name, known)} Known: {', '.join(known)} "
                    "(the core attributes and those of the role map)."
                )

    def changed(self, **values: Any) -> "DearConfig":
        return replace(self, **values)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "attributes": list(self.attributes)}

    @classmethod
    def from_dict(cls, data: Any) -> "DearConfig":
        """Strict: a field that is missing keeps its default, an unknown one is refused."""
        data = check_fields(data, required=(), optional=[f.name for f in fields(cls)], where="DearConfig")
        return cls(**data)
