"""Small helpers for error texts: the nearest valid name, and strict reading of dictionaries."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def nearest(name: str, known: Iterable[str]) -> str:
    """" Did you mean 'x'?" when a known name is close to the given one, else an empty string."""
    found = get_close_matches(str(name), [str(k) for k in known], n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def check_fields(data: Any, *, required: Iterable[str], optional: Iterable[str] = (), where: str) -> Mapping:
    """Return `data` when it is a mapping with all required fields and no unknown one, else say what is wrong."""
    required, optional = list(required), list(optional)
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: wanted a JSON object, got {type(data).__name__}.")
    for field in data:
        if field not in required and field not in optional:
            hint = nearest(field, required + optional)
            raise ValueError(f"{where}: unknown field {field!r}.{hint} Known fields: {', '.join(required + optional)}.")
    missing = [field for field in required if field not in data]
    if missing:
        raise ValueError(f"{where}: missing field {', '.join(repr(m) for m in missing)}.")
    return data
