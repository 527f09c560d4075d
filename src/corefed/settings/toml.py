"""Tables of TOML files as frozen dataclasses, and back with every key explained."""

from __future__ import annotations

import dataclasses
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from corefed.base.errors import UserError, did_you_mean
from corefed.settings.fields import check, from_flat, list_settings, to_flat
from corefed.settings.values import parse, to_toml_value

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def read(path: Path, missing: str = "") -> dict[str, Any]:
    """The content of a TOML file; `missing` completes the sentence for one that is not there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise UserError(f"There is no {path}; {missing}.") from None
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error


def table(content: Mapping[str, Any], cls: type[T], where: str) -> T:
    """The keys of a table as the fields of `cls`, checked; other keys are refused."""
    settings = list_settings(cls)
    kinds = {each.name: each.kind for each in settings}
    values: dict[str, Any] = {}
    for written, value in content.items():
        key = written.replace("-", "_")
        if key not in kinds:
            hint = did_you_mean(key, kinds, otherwise=f"there are {', '.join(kinds)}")
            raise UserError(f"There is no setting {written!r} in {where}{hint}")
        values[key] = parse(key, value, kinds[key], where)
    for each in settings:
        if each.default is dataclasses.MISSING and each.name not in values:
            raise UserError(f"{where} has no {each.name!r}.")
    found = from_flat(cls, values)
    check(found, where)
    return found


def groups(content: Mapping[str, Any], names: tuple[str, ...], where: str) -> dict[str, Any]:
    """The tables of a file by name, empty if absent; '' has the keys before the first table."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for key in tables.keys() - set(names):
        raise UserError(f"{where} has a table [{key}]; it may have {', '.join(names)}.")
    plain = {key: value for key, value in content.items() if key not in tables}
    return {"": plain, **{name: tables.get(name, {}) for name in names}}


def written(settings: Any) -> str:
    """A dataclass as TOML, each key under a comment that says what it is."""
    lines = []
    values = to_flat(settings)
    for each in list_settings(type(settings)):
        choices = f" ({each.type_words})" if each.choices else ""
        lines += textwrap.wrap(each.help + choices, 98, initial_indent="# ", subsequent_indent="# ")
        lines.append(f"{each.name} = {to_toml_value(values[each.name])}")
    return "\n".join(lines) + "\n"
