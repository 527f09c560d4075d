"""A setting's value, from text or TOML to its annotated type, and back to TOML."""

from __future__ import annotations

import json
from typing import Any, Literal, get_args, get_origin

from corefed.base.errors import UserError


def parse(key: str, value: object, kind: Any, where: str) -> object:
    """`value`, as text or as TOML gives it, in the type of its annotation."""
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise UserError(
                f"{key} ({where}) is {value!r}; it must be {' or '.join(map(repr, choices))}."
            )
        return value
    if get_origin(kind) is tuple:
        parts = _items(value)
        return tuple(parse(key, part, get_args(kind)[0], where) for part in parts)
    if kind not in _SCALARS:
        raise TypeError(f"{key}: a setting cannot be a {kind}")
    words, convert = _SCALARS[kind]
    try:
        return convert(value)
    except ValueError:
        raise UserError(f"{key} ({where}) must be {words}, not {value!r}.") from None


def to_toml_value(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(to_toml_value, value)) + "]"
    # JSON's true, numbers and strings are TOML's; only DEL must be escaped in addition.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _items(value: object) -> list[object]:
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")] if value.strip() else []
    return list(value) if isinstance(value, list | tuple) else [value]


def _as_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise ValueError
    return value == "true"


def _as_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError
    return int(value)


def _as_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError
    return float(value)


def _as_str(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


_SCALARS: dict[Any, tuple[str, Any]] = {
    bool: ("true or false", _as_bool),
    int: ("a whole number", _as_int),
    float: ("a number", _as_float),
    str: ("text", _as_str),
}
