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
    main: int = 0
    """Columns that are shown at first, the others after a click; 0: all."""
    filtered: bool = False
    """Whether rows can be searched by their text."""


@dataclass(frozen=True)
class Figure:
    """A chart, what it shows in words, and the numbers behind it.

    Without a specification there is no chart, only words and numbers: where all points have the
    same place on the horizontal axis, a chart shows nothing that a table does not.
    """

    id: str
    title: str
    spec: dict[str, Any] | None
    finding: str
    table: ReportTable
    opened: bool = False
    """Whether the numbers are shown at first."""


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
class Sentences:
    """What was found, one sentence after the other; the first is the most important."""

    kind: ClassVar[str] = "sentences"
    items: Sequence[str]


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


Part = ReportTable | Figures | Tiles | Gallery | Sentences | Text | Command | Fold


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
    opened: bool = False


@dataclass(frozen=True)
class View:
    """What is on the screen at one time: sections about all runs, then those of single runs."""

    id: str
    title: str
    sections: Sequence[Section]
    chapters: Sequence[Chapter] = ()

    @property
    def contents(self) -> list[tuple[str, str]]:
        """(id, title) of everything in it."""
        sections = [(each.id, each.title) for each in self.sections]
        return sections + [(each.id, each.title) for each in self.chapters]

    @property
    def figures(self) -> list[Figure]:
        every = [*self.sections, *(one for chapter in self.chapters for one in chapter.sections)]
        parts = [part for section in every for part in section.parts]
        return [figure for part in parts if isinstance(part, Figures) for figure in part.items]


def missing(reason: Missing | str) -> Text:
    return Text(str(reason), missing=True)
