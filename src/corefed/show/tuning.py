"""A search of settings for people: a table, a picture, and sentences, from tune.json alone."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from corefed.base.errors import UserError
from corefed.base.panels import legend_below, panels, save
from corefed.training.halving import Difference
from corefed.training.record import EXPERIMENT
from corefed.training.search_progress import named

PICTURE = "what-mattered.png"

Report = Mapping[str, Any]


def table(report: Report) -> Table:
    """One row per candidate, best first."""
    first = report["candidates"][0]
    metric = "rmse" if "rmse" in first else "accuracy"
    title = (
        f"{report['method']} on {report['data']}: {len(report['candidates'])} candidates on "
        f"{report['validation_points']:,} validation points"
    )
    found = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    found.add_column("")
    for name in first["settings"]:
        found.add_column(name, justify="right")
    found.add_column("rounds")
    for heading in ("NLL", "RMSE" if metric == "rmse" else "accuracy %"):
        found.add_column(heading, justify="right", no_wrap=True)
    for each in report["candidates"]:
        found.add_row(
            _mark(report, each),
            *(f"{v:g}" if isinstance(v, float) else str(v) for v in each["settings"].values()),
            _rounds(each),
            *(_number(each, name) for name in ("nll", metric)),
        )
    return found


def sentences(report: Report, folder: Path) -> list[str]:
    """What was chosen, by how much it is better, what it cost, and the command to type next."""
    cost = report["cost"]
    spent = f"The search took {cost['seconds']:.0f} s, and the passes of {cost['runs']:.1f} runs."
    command = f"corefed run --config {shlex.quote(str(folder / EXPERIMENT))}"
    return [
        conclusion(report),
        f"{spent} Test points were not used.",
        f"Train with these settings, on all training points again: {command}",
    ]


def conclusion(report: Report) -> str:
    """The choice, and why."""
    chosen, given = report["chosen"], report["given"]
    by_number = {each["number"]: each for each in report["candidates"]}
    compared, found = by_number[chosen["compared"]], chosen["difference"]
    said = f"{named(compared['settings'])} (validation NLL {compared['nll']:.4f})"
    if chosen["compared"] == 0:
        return f"Kept {given}: no candidate has a lower validation NLL ({compared['nll']:.4f})."
    if found is None:
        return f"Chose {said}; {given} diverged."
    gain = (
        f"lower by {_digits(-found['mean'])} ± {_digits(found['error'])} (one standard error, over "
        f"{report['validation_points']:,} points)"
    )
    if chosen["number"] != 0:
        return f"Chose {said}: {gain} than with {given}."
    kept = (
        f"Kept {given} (validation NLL {by_number[0]['nll']:.4f}). The best candidate, {said}, is"
    )
    if Difference(**found).is_certain:
        return f"{kept} {gain}, but one mistake more would outweigh that: it is bolder."
    return f"{kept} {gain}. It takes more than two standard errors to rule out chance."


def picture(report: Report, file: Path) -> None:
    """Validation NLL against each searched setting.

    That of a candidate that dropped out is from the round where it did.
    """
    figure, axes = panels(len(report["space"]), legend=1)
    chosen = report["chosen"]["number"]
    for axis, dimension in zip(axes, report["space"], strict=True):
        place, _ = _places(report, dimension["name"])
        for each in report["candidates"]:
            x = place[each["settings"][dimension["name"]]]
            if "nll" not in each:
                axis.axvline(x, color="tab:red", alpha=0.4, linestyle=":", label="diverged")
                continue
            kind = "given" if each["number"] == 0 else each["outcome"]
            axis.plot(x, each["nll"], **_MARKS[kind])
            if each["number"] == chosen:
                axis.plot(x, each["nll"], **_MARKS["chosen"])
        _scale(axis, report, dimension)
        axis.set(xlabel=dimension["name"])
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="validation NLL")
    handles, labels = axes[-1].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    legend_below(figure, unique, across=5)
    try:
        save(figure, file)
    except OSError as error:
        raise UserError(f"Cannot write the picture {file}: {error}.") from error


_MARKS: dict[str, dict[str, Any]] = {
    "finished": {"marker": "o", "color": "tab:blue", "linestyle": "", "label": "to the end"},
    "dropped": {"marker": ".", "color": "tab:gray", "linestyle": "", "label": "dropped out"},
    "given": {
        "marker": "*", "markersize": 11, "color": "tab:orange", "linestyle": "", "label": "given",
    },
    "chosen": {
        "marker": "o", "markersize": 13, "fillstyle": "none", "color": "black", "linestyle": "",
        "label": "chosen",
    },
}  # fmt: skip


def _places(report: Report, name: str) -> tuple[dict[Any, float], bool]:
    """Where each value stands, and whether that is a number's own place."""
    values = {each["settings"][name] for each in report["candidates"]}
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return {value: float(value) for value in values}, True
    return {value: float(place) for place, value in enumerate(sorted(values, key=str))}, False


def _scale(axis: Any, report: Report, dimension: Mapping[str, Any]) -> None:
    place, own = _places(report, dimension["name"])
    if not own:
        axis.set_xticks(list(place.values()), [str(value) for value in place])
    elif min(place.values()) > 0 and (dimension["log"] or dimension["values"]):
        _logarithmic(axis, "x")
    if all(each.get("nll", 1) > 0 for each in report["candidates"]):
        _logarithmic(axis, "y")


def _logarithmic(axis: Any, way: str) -> None:
    """With ticks at 1, 2 and 5 of each power of ten, as plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter  # matplotlib takes half a second

    getattr(axis, f"set_{way}scale")("log")
    side = getattr(axis, f"{way}axis")
    side.set_major_locator(LogLocator(subs=(1, 2, 5)))
    side.set_major_formatter("{x:g}")
    side.set_minor_formatter(NullFormatter())


def _mark(report: Report, each: Mapping[str, Any]) -> str:
    words = []
    if each["number"] == report.get("chosen", {}).get("number"):
        words.append("chosen")
    if each["number"] == 0:
        words.append(report["given"].removeprefix("the "))
    return ", ".join(words)


def _rounds(each: Mapping[str, Any]) -> str:
    if each["outcome"] == "diverged":
        return f"diverged in {each['round']}"
    return f"{each['round']}, dropped" if each["outcome"] == "dropped" else str(each["round"])


def _number(each: Mapping[str, Any], name: str) -> str:
    if name not in each:
        return "-"
    return f"{100 * each[name]:.2f}" if name == "accuracy" else f"{each[name]:.4f}"


def _digits(value: float) -> str:
    """Two significant digits of small numbers, four places of others."""
    return f"{value:.4f}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"
