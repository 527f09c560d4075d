"""What tells runs apart: the settings in which they differ, and a label for each.

Settings of `Run` are compared between all runs. A method's own settings are compared where they
mean the same: between runs of one method, and with the method that a subset is put on, such as
pfedbayes under coreset-pfedbayes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corefed.settings.run import Run

if TYPE_CHECKING:  # which imports this file
    from corefed.show.report import RunResult

RUN = frozenset(field.name for field in dataclasses.fields(Run))
OWN_PLACE = ("method", "fraction")
"""Settings that a table and a label show anyway."""
IN_LABEL, IN_LINE = 3, 8
"""Most settings that a label and a line name."""


def base_of(summary: Mapping[str, Any]) -> str:
    """The method that is trained, whatever points it is trained on."""
    method: str = summary["method"]
    if method == "random-subset":
        return str(summary["config"].get("base", "pfedbayes"))
    if method.startswith("submodular-"):
        return "fedavg"
    return method.removeprefix("coreset-")


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Settings that two runs both have, with the same meaning and other values."""
    mine, theirs = one["config"], other["config"]
    same = one["method"] == other["method"]
    related = same or base_of(one) == base_of(other)
    return [
        key
        for key, value in mine.items()
        if key in theirs and theirs[key] != value and key not in OWN_PLACE
        if related or key in RUN
        if same or key != "preset"  # a name of other settings, which are compared themselves
    ]


def differences(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """For each run, the settings in which some other run differs from it."""
    found = []
    for one in results:
        keys = {key for other in results for key in differing(one.summary, other.summary)}
        config = one.summary["config"]
        found.append({key: value for key, value in config.items() if key in keys})
    return found


def words(settings: Mapping[str, Any], most: int = IN_LINE) -> str:
    """`eta_1 0.003, zeta 0.03`; a long list is cut."""
    shown = [f"{key} {plain(value)}" for key, value in settings.items()]
    more = len(shown) - most
    return ", ".join(shown[:most] + ([f"{more} more settings"] if more > 0 else []))


def plain(value: object) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(plain, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value) or "none"


def labels(results: Sequence[RunResult]) -> list[str]:
    """Method and fraction; where runs share both, the settings in which they differ.

    Where these are many, or do not tell two runs apart, the folder.
    """
    kinds = [(r.summary["method"], r.summary["coreset"]["fraction"]) for r in results]
    groups = [[r for r, k in zip(results, kinds, strict=True) if k == kind] for kind in kinds]
    own = [
        next(each for r, each in zip(group, differences(group), strict=True) if r is result)
        for result, group in zip(results, groups, strict=True)
    ]
    parts: list[list[str]] = []
    for (_, fraction), settings in zip(kinds, own, strict=True):
        known = 0 < len(settings) <= IN_LABEL
        parts.append(
            ([f"{100 * fraction:g} %"] if fraction < 1 else [])
            + ([words(settings)] if known else [])
        )
    first = [_label(method, part) for (method, _), part in zip(kinds, parts, strict=True)]
    return [
        label if first.count(label) == 1 else _label(method, [*part, folder])
        for label, (method, _), part, folder in zip(
            first, kinds, parts, _folders(results), strict=True
        )
    ]


def _label(method: str, parts: Sequence[str]) -> str:
    return f"{method} ({', '.join(parts)})" if parts else method


def _folders(results: Sequence[RunResult]) -> list[str]:
    """Their names, or the whole path where two have the same."""
    names = [result.path.name for result in results]
    return [
        name if names.count(name) == 1 else str(result.path)
        for name, result in zip(names, results, strict=True)
    ]
