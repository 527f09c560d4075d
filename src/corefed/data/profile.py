"""Find out what the columns of a table are, in one pass that keeps counts, not rows.

Text is a category and numbers are numbers, unless the user says otherwise. Dates, identifiers, and
numbers with a few words among them are refused, with a remedy.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from corefed.base.errors import UserError
from corefed.data import values as cell_values
from corefed.data.cells import is_number, shorten
from corefed.data.columns import LARGEST, Column
from corefed.data.sources import Source
from corefed.data.values import Cells

MOST_CATEGORIES = 50
"""Per column: each is a feature, and rare ones teach nothing."""

MOST_VALUES = 10_000
"""Different values per column that are counted; with more it is no category."""

MOST_CLIENTS = 1_000_000
"""The same for the column of clients: their names alone take about 100 MB."""

_DATE = re.compile(
    r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T].*)?|\d{1,2}[-/.]\d{1,2}[-/.](\d{4}|\d{2})([ T].*)?"
)
_WRITTEN = {
    re.compile(r"[-+]?\d+([.,]\d+)?\s*%"): "percentages, such as {!r}; write them without the sign",
    re.compile(r"[-+]?\d{1,3}(,\d{3}){2,}(\.\d+)?|[-+]?\d{1,3},\d{3}\.\d+"): (
        "commas between thousands, such as {!r}; write numbers without them"
    ),
    re.compile(r"[-+]?[1-9]\d{0,2},\d{3}"): (
        "numbers with a comma, such as {!r}; leave it out where it stands between thousands, and "
        "write a decimal point where it is a decimal comma"
    ),
    re.compile(r"[-+]?\d+,\d+"): (
        "numbers with decimal commas, such as {!r}; write decimal points"
    ),
}
"""Numbers that are not written as such, and what to do."""

Role = Literal["number", "category", "target", "client", "ignored"]


class Profile(NamedTuple):
    """One column of the whole file."""

    name: str
    role: Role
    rows: int
    missing: int
    texts: int  # cells that are neither missing nor a number
    first_text: tuple[int, str]  # row and cell
    values: Counter[str]  # counts of different values; empty above the most that are counted
    low: float  # of the numbers; NaN without any
    high: float
    whole: bool  # all numbers are whole
    too_large: tuple[int, str] | tuple[()] = ()  # row and cell of the first such number
    gaps: tuple[str, ...] = ()  # of a target or client: words that were taken for missing

    @property
    def present(self) -> int:
        return self.rows - self.missing

    @property
    def different(self) -> bool:
        """All values differ; above MOST_VALUES, whether they are consecutive whole numbers."""
        counted = len(self.values) == self.present
        numbered = self.whole and not self.texts and self.high - self.low + 1 == self.present
        return self.present > 2 and (counted or (not self.values and numbered))

    @property
    def among_numbers(self) -> str:
        """The end of a sentence about a cell of text."""
        others = self.texts - 1
        return f"whose other cells are numbers{f' but for {others}' if others else ''}"

    @property
    def taken_for_missing(self) -> str:
        """The end of a sentence about cells that are missing: which words are."""
        if not self.gaps:
            return ""
        words = shorten([repr(word) for word in self.gaps], 5)
        return f" ({words} means missing; write another word where it is a name)"

    @property
    def constant(self) -> bool:
        return len(self.values) == 1 and not self.missing


class _Tally:
    """The counts of a column so far."""

    def __init__(self, role: Role) -> None:
        self.role, self.most = role, MOST_CLIENTS if role == "client" else MOST_VALUES
        self.gaps: set[str] = set()
        self.rows = self.missing = self.texts = 0
        self.first_text = (0, "")
        self.too_large: tuple[int, str] | tuple[()] = ()
        self.values: Counter[str] = Counter()
        self.overflown = False
        self.low, self.high = np.inf, -np.inf
        self.whole = True

    def add(self, places: range, cells: Cells) -> None:
        values, texts = cell_values.numbers(cells)
        if texts and not self.texts:
            self.first_text = places[texts[0]], cell_values.cell(cells, texts[0]).strip()
        self.rows += len(values)
        self.texts += len(texts)
        there = values[~np.isnan(values)]
        missing = len(values) - len(there) - len(texts)
        self.missing += missing
        if missing and self.role in ("target", "client"):
            self.gaps |= cell_values.gaps(cells)
        if len(there):
            self.low, self.high = min(self.low, there.min()), max(self.high, there.max())
            self.whole = self.whole and bool((there == np.floor(there)).all())
            if not self.too_large and max(-self.low, self.high) > LARGEST:
                at = int((np.abs(values) > LARGEST).argmax())
                self.too_large = places[at], cell_values.cell(cells, at).strip()
        if not self.overflown:
            found = cell_values.count(cells, values, self.most)
            self.values.update(found or ())
            if found is None or len(self.values) > self.most:
                self.overflown = True
                self.values = Counter()

    def profile(self, name: str) -> Profile:
        seen = self.low <= self.high
        return Profile(
            name,
            self.role,
            self.rows,
            self.missing,
            self.texts,
            self.first_text,
            self.values,
            float(self.low) if seen else float("nan"),
            float(self.high) if seen else float("nan"),
            self.whole,
            self.too_large,
            tuple(sorted(self.gaps)),
        )


def scan(source: Source, roles: dict[str, Role]) -> dict[str, Profile]:
    """Profiles of all columns that are not ignored."""
    used = [name for name, role in roles.items() if role != "ignored"]
    for name in used:
        if name in source.unfit:
            raise UserError(_unfit(source, name, roles[name]))
    tallies = {name: _Tally(roles[name]) for name in used}
    for block in source.blocks(used):
        for name, tally in tallies.items():
            tally.add(block.places, block.cells[name])
    found = {name: tally.profile(name) for name, tally in tallies.items()}
    if not next(iter(found.values())).rows:
        raise UserError(f"{source.path} has a header but no rows; it needs at least one point.")
    return found


def _unfit(source: Source, name: str, role: Role) -> str:
    where, what = f"Column {name!r} of {source.path}", source.unfit[name]
    if role in ("target", "client"):
        return f"{where} has {what}; a {role} is text or numbers."
    if what == "dates":
        return f"{where} has dates; {_AGES.format(name)}"
    hint = f"make columns of numbers or text of it, or leave it out by {_IGNORE.format(name)}"
    return f"{where} has {what}; {hint}."


_IGNORE = "--set ignore={}"
_AGES = (
    "turn them into numbers (an age, days since something, a month), or leave the column out by "
    "--set ignore={}."
)


def make_column(source: Source, own: Profile, categorical: bool, partial: bool = False) -> Column:
    """A column as features; refused where it is neither a number nor a category.

    `partial`: the table is one site's part of a federation's. Other sites may have values where
    this one has none. Its categories will be told to the server, so an identifier is refused even
    where the experiment names it as categorical.
    """
    name, where = own.name, f"Column {own.name!r} of {source.path}"
    if not own.present and partial:
        return Column(name, (), True)
    if not own.present:
        raise UserError(f"{where} is empty; leave it out by {_IGNORE.format(name)}.")
    if not categorical and not own.texts:
        if own.too_large:
            raise UserError(describe_large(source, own))
        return Column(name, (), own.missing > 0)
    if not categorical:
        _check_text(source, own, where)
    elif partial and own.different:
        _refuse_identifier(own, where)
    if not own.values or len(own.values) > MOST_CATEGORIES:
        count = str(len(own.values)) if own.values else f"more than {MOST_VALUES}"
        raise UserError(
            f"{where} has {count} different categories, more than {MOST_CATEGORIES}; join rare "
            f"ones, or leave the column out by {_IGNORE.format(name)}."
        )
    return Column(name, tuple(sorted(own.values)), own.missing > 0)


def describe_large(source: Source, own: Profile) -> str:
    """The sentence about a number that no network can compute with."""
    assert own.too_large
    row, cell = own.too_large
    infinite = max(-own.low, own.high) == np.inf
    what = "an infinite number" if infinite else f"{cell[:40]}, more than {LARGEST:.1e},"
    return (
        f"{source.at(row)} has {what} in column {own.name!r}; correct it, or leave the cell empty."
    )


def _check_text(source: Source, own: Profile, where: str) -> None:
    """Refuse dates, identifiers, and a few words among numbers."""
    line, cell = own.first_text
    values = list(own.values) or [cell]
    refuse_written(where, own)
    if sum(bool(_DATE.fullmatch(each)) for each in values) * 2 > len(values):
        raise UserError(f"{where} has dates, such as {cell[:40]!r}; {_AGES.format(own.name)}")
    if own.texts * 2 < own.present:
        raise UserError(
            f"{source.at(line)} has {cell[:40]!r} in column {own.name!r}, {own.among_numbers}; "
            "correct it, leave it empty, or take all for categories by --set "
            f"categorical={own.name}."
        )
    if own.different:
        _refuse_identifier(own, where)


def refuse_written(where: str, own: Profile) -> None:
    """Refuse numbers that are written in another way: 1,472 or 50%."""
    texts = [each for each in own.values if not is_number(each)] or [own.first_text[1]]
    for pattern, sentence in _WRITTEN.items():
        alike = [each for each in texts if pattern.fullmatch(each)]
        if 2 * len(alike) > len(texts):
            first = own.first_text[1]
            shown = first if pattern.fullmatch(first) else alike[0]
            raise UserError(f"{where} has {sentence.format(shown[:40])}.")


def _refuse_identifier(own: Profile, where: str) -> NoReturn:
    raise UserError(
        f"{where} has another value in every row, such as {next(iter(own.values), '')[:40]!r}, as "
        f"an identifier has; leave it out by {_IGNORE.format(own.name)}."
    )
