"""What a page is made of, before any HTML: sections of tiles, charts, tables and pictures.

Text is plain text throughout; the template escapes it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

DASH, TIMES = "\N{EN DASH}", "\N{MULTIPLICATION SIGN}"


class Missing(str):
    """A sentence that says why something is missing."""


class TableCell(NamedTuple):
    """A number as it is shown, and its value for sorting; NaN comes last."""

    text: str
    value: float


Row = Sequence[str | TableCell]


def number(value: float | None, form: str = ".3f", unit: str = "") -> TableCell:
    """A number in a table; a dash where there is none."""
    if value is None or math.isnan(value):
        return TableCell(DASH, math.nan)
    return TableCell(f"{value:{form}}{unit}", value)


def percent(value: float | None, digits: int = 1) -> TableCell:
    """A fraction as percent."""
    return number(None if value is None else 100 * value, f".{digits}f", " %")


@dataclass(frozen=True)
class ReportTable:
    """The first cell of a row names it."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: Sequence[str]
    rows: Sequence[Row]
    sortable: bool = False
    note: str = ""


@dataclass(frozen=True)
class Figure:
    """A chart, what it shows in words, and the numbers behind it."""

    id: str
    title: str
    spec: dict[str, Any]
    finding: str
    table: ReportTable


@dataclass(frozen=True)
class Figures:
    """Charts side by side where there is room."""

    kind: ClassVar[str] = "figures"
    items: Sequence[Figure]
    wide: bool = False


class Tile(NamedTuple):
    label: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class Tiles:
    """The main numbers."""

    kind: ClassVar[str] = "tiles"
    items: Sequence[Tile]


class Share(NamedTuple):
    """One class of a prediction."""

    label: str
    text: str
    value: float  # 0 to 1: the length of its bar
    true: bool


class Card(NamedTuple):
    """One point: its image, where it has one, and lines about it."""

    lines: Sequence[str]
    source: str = ""  # a data: address
    alternative: str = ""
    size: tuple[int, int] = (0, 0)
    shares: Sequence[Share] = ()


class Group(NamedTuple):
    """Cards that belong together."""

    title: str
    cards: Sequence[Card]


@dataclass(frozen=True)
class Gallery:
    kind: ClassVar[str] = "gallery"
    title: str
    groups: Sequence[Group]
    small: bool = False
    note: str = ""


@dataclass(frozen=True)
class Text:
    kind: ClassVar[str] = "text"
    sentence: str
    missing: bool = False


@dataclass(frozen=True)
class Command:
    """Something to type."""

    kind: ClassVar[str] = "command"
    title: str
    words: str


@dataclass(frozen=True)
class Fold:
    """A table that is folded until it is opened."""

    kind: ClassVar[str] = "fold"
    title: str
    table: ReportTable


Part = ReportTable | Figures | Tiles | Gallery | Text | Command | Fold


@dataclass(frozen=True)
class Section:
    """A part of the page under a heading, with one sentence on how to read it."""

    id: str
    title: str
    aid: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Chapter:
    """The sections of one run; folded where there are several runs."""

    id: str
    title: str
    subtitle: str
    sections: Sequence[Section]


def missing(reason: Missing | str) -> Text:
    return Text(str(reason), missing=True)
