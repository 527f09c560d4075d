"""Read the settings that dataclasses declare (`base/settings.py`), and check their values."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from corefed.base.errors import UserError
from corefed.base.settings import Ablation, OneOf, PerRun, Range, Rate, Searched, Unit

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True)
class Setting:
    """One setting, as its field declares it."""

    name: str
    group: str  # the field that holds its dataclass; "" where it is in none
    kind: Any  # its type, without what stands beside it
    default: Any  # MISSING where it must be given
    range: Range | None
    unit: str
    ablation: bool
    owner: type  # the dataclass that has the field
    names: OneOf | None = None  # of a text that names something
    per_run: bool = False  # runs that are trained side by side may differ in it
    rate: bool = False  # a schedule scales it
    search: Searched | None = None  # how `corefed tune` varies it, if it does unasked

    @property
    def help(self) -> str:
        """The docstring under the field."""
        return _docstrings(self.owner).get(self.name, "")

    @property
    def choices(self) -> tuple[Any, ...]:
        if self.names is not None:
            return tuple(self.names.names())
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def type_words(self) -> str:
        if self.choices:
            return " | ".join(map(str, self.choices))
        if get_origin(self.kind) is tuple:
            return f"{get_args(self.kind)[0].__name__}, ..."
        return str(self.kind.__name__)

    @property
    def default_words(self) -> str:
        if self.default is MISSING:
            return ""
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)

    @property
    def range_words(self) -> str:
        """The range and the unit: `0 or more, in local steps`."""
        unit = f"in {self.unit}" if self.unit else ""
        return ", ".join(filter(None, (self.range.words if self.range else "", unit)))

    def to_json(self) -> dict[str, Any]:
        default = None if self.default is MISSING else self.default
        return {
            "name": self.name,
            "group": self.group,
            "type": "choice" if self.choices else self.type_words,
            "choices": list(self.choices),
            "default": list(default) if isinstance(default, tuple) else default,
            "range": self.range.words if self.range else "",
            "unit": self.unit,
            "help": self.help,
            "ablation": self.ablation,
        }


def list_settings(cls: type) -> tuple[Setting, ...]:
    """Every setting of a dataclass in the order of its fields, those of groups in their place."""
    return _listed(cls)  # apart: a cached function refuses type[Any] as its argument


@cache
def _listed(cls: type) -> tuple[Setting, ...]:
    found: dict[str, Setting] = {}
    for setting in _declared(cls):
        if setting.name in found:
            first = found[setting.name]
            raise TypeError(f"{_place(first, cls)} and {_place(setting, cls)} have the same name")
        found[setting.name] = setting
    return tuple(found.values())


def _declared(cls: type[Any], group: str = "", given: object = MISSING) -> Iterator[Setting]:
    """`given` is the default of a group's field; its values are the defaults of the group."""
    plain, annotated = get_type_hints(cls), get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        kind, beside = plain[field.name], getattr(annotated[field.name], "__metadata__", ())
        default = _default(field) if given is MISSING else getattr(given, field.name)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if group or default is MISSING:
                raise TypeError(
                    f"{cls.__qualname__}.{field.name}: a group has a default and no group in it"
                )
            yield from _declared(kind, field.name, default)
            continue
        ranges = [each for each in beside if isinstance(each, Range)]
        units = [each.name for each in beside if isinstance(each, Unit)]
        yield Setting(
            field.name,
            group,
            kind,
            default,
            _joined(ranges),
            units[-1] if units else "",
            any(isinstance(each, Ablation) for each in beside),
            cls,
            next((each for each in beside if isinstance(each, OneOf)), None),
            any(isinstance(each, PerRun) for each in beside),
            any(isinstance(each, Rate) for each in beside),
            next((each for each in reversed(beside) if isinstance(each, Searched)), None),
        )


def _joined(ranges: Sequence[Range]) -> Range | None:
    """A value must be in all of them."""
    if len(ranges) < 2:
        return ranges[0] if ranges else None
    words = " and ".join(each.words for each in ranges)
    return Range(lambda v: all(each.holds(v) for each in ranges), words)


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _place(setting: Setting, cls: type[Any]) -> str:
    path = f"{setting.group}.{setting.name}" if setting.group else setting.name
    return f"{cls.__module__}.{cls.__qualname__}.{path}"


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Field -> the string literal that follows it in the source, those of base classes too."""
    texts: dict[str, str] = {}
    for owner in reversed(cls.__mro__[:-1]):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        except (OSError, TypeError):  # typed into a prompt, or not written in Python
            continue
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


def to_flat(settings: DataclassInstance) -> dict[str, Any]:
    """Name -> value of every setting, whatever its group."""
    return {
        each.name: getattr(getattr(settings, each.group) if each.group else settings, each.name)
        for each in list_settings(type(settings))
    }


def from_flat(cls: type[T], values: Mapping[str, Any]) -> T:
    """A `cls` with these values; settings that are left out have their defaults."""
    groups: dict[str, dict[str, Any]] = {}
    known = {each.name: each for each in list_settings(cls)}
    for name, value in values.items():
        groups.setdefault(known[name].group, {})[name] = value
    own = groups.pop("", {})
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for group, changed in groups.items():
        own[group] = dataclasses.replace(_default(fields[group]), **changed)
    return cls(**own)


def check(settings: DataclassInstance, where: str = "") -> None:
    """Refuse the first value out of its range; `where` is the file it is from."""
    values = to_flat(settings)
    place = f" ({where})" if where else ""
    for setting in list_settings(type(settings)):
        value = values[setting.name]
        numbers = value if isinstance(value, tuple) else (value,)
        wrong = next((v for v in numbers if isinstance(v, float) and not math.isfinite(v)), None)
        if wrong is not None:
            raise UserError(f"{setting.name}{place} is {wrong}; it must be a finite number.")
        if setting.range is not None and not setting.range.holds(value):
            raise UserError(
                f"{setting.name}{place} is {_words(value)}; it must be {setting.range.words}."
            )


def _words(value: object) -> str:
    return ",".join(map(str, value)) or "empty" if isinstance(value, tuple) else str(value)
