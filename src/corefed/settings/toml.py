"""Tables of TOML files as frozen dataclasses, and back with every key explained."""

from __future__ import annotations

import dataclasses
import json
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from corefed.base.errors import UserError, did_you_mean
from corefed.settings.describe import of_class
from corefed.settings.values import parse

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def read(path: Path, missing: str) -> dict[str, Any]:
    """The content of a TOML file; `missing` completes the sentence for one that is not there."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no {path}; {missing}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from error


def table(content: Mapping[str, Any], cls: type[T], where: str) -> T:
    """A table's keys as the fields of `cls`; a key of another name is a mistake."""
    kinds = get_type_hints(cls)
    values: dict[str, Any] = {}
    for written, value in content.items():
        key = written.replace("-", "_")
        if key not in kinds:
            hint = did_you_mean(key, kinds, otherwise=f"there are {', '.join(kinds)}")
            raise UserError(f"There is no setting {written!r} in {where}{hint}")
        values[key] = parse(key, value, kinds[key], where)
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    for key in required:
        if key not in values:
            raise UserError(f"{where} has no {key!r}.")
    return cls(**values)


def groups(content: Mapping[str, Any], names: tuple[str, ...], where: str) -> dict[str, Any]:
    """The tables of a file by name, empty where there is none; '' is what stands before them."""
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for key in tables.keys() - set(names):
        raise UserError(f"{where} has a table [{key}]; it may have {', '.join(names)}.")
    plain = {key: value for key, value in content.items() if key not in tables}
    return {"": plain, **{name: tables.get(name, {}) for name in names}}


def written(settings: Any) -> str:
    """A dataclass as TOML, each key under a comment that says what it is."""
    lines = []
    values = dataclasses.asdict(settings)
    for setting in of_class(type(settings)):
        choices = f" ({setting.kind})" if "|" in setting.kind else ""
        lines += textwrap.wrap(
            setting.text + choices, 98, initial_indent="# ", subsequent_indent="# "
        )
        value = values[setting.name]
        listed = list(value) if isinstance(value, tuple) else value
        # JSON's strings, numbers, lists and booleans are TOML's.
        lines.append(f"{setting.name} = {json.dumps(listed, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
