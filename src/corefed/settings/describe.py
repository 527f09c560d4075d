"""Every setting of a method with its type, default and docstring, read from the dataclasses.

The text under a field is its only documentation; the command line shows that same text.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from corefed.methods import registry
from corefed.settings.config import Run


class Setting(NamedTuple):
    name: str
    kind: str
    default: str
    text: str


def of_method(name: str) -> list[Setting]:
    """The settings that only this method (or those built like it) has."""
    return of_class(registry.config_class(name))


def of_run() -> list[Setting]:
    """The settings every run has."""
    return of_class(Run)


def of_class(cls: type[Any]) -> list[Setting]:
    hints, texts = get_type_hints(cls), _texts(cls)
    return [
        Setting(field.name, _kind(hints[field.name]), _value(field.default), texts[field.name])
        for field in dataclasses.fields(cls)
    ]


def _texts(cls: type[Any]) -> dict[str, str]:
    """Field -> the string literal that follows it in the source, those of base classes too."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        name = ""
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                name = node.target.id
                texts.setdefault(name, "")
            elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts[name] = inspect.cleandoc(str(node.value.value)).replace("\n", " ")
                name = ""
    return texts


def _kind(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"{get_args(hint)[0].__name__}, ..."
    return str(hint.__name__)


def _value(default: object) -> str:
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return str(default).lower() if isinstance(default, bool) else str(default)
