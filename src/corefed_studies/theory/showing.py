"""What `corefed theory` shows: two tables of numbers, one of statements, a chart, files."""

from __future__ import annotations

import io
import json as jsonlib
import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.panels import panels, save
from corefed.show import report
from corefed_studies.theory import figures
from corefed_studies.theory.figures import Curves, Quantity
from corefed_studies.theory.quantities import proof_parameters
from corefed_studies.theory.setting import TheorySetting
from corefed_studies.theory.statements import Statement, digits, judge
from corefed_studies.theory.theorems import Constants

FEWEST = 10
"""Points of a client from which on there is a curve over coreset sizes to draw."""

WIDTH, HEIGHT = 72, 14
"""Of the chart in the terminal, in characters; less where the terminal is narrower."""

MARKS, PLAIN_MARKS = "█▓░", "#+."
STYLES = ("red", "yellow", "cyan")
VERDICTS = {
    True: ("holds", "green"),
    None: ("under a condition", "yellow"),
    False: ("does not hold", "red"),
}


def execute(
    values: dict[str, Any],
    *,
    parameters: str,
    assignments: Sequence[str],
    out: Path,
    json: bool,
) -> None:
    """The command: everything shown, and kept in `out`."""
    setting = read(values, parameters, assignments)
    content = jsonlib.dumps(figures.as_json(setting), indent=1)
    curves = figures.curves(setting)
    files.write_folder(
        out,
        [("theory.json", f"{content}\n".encode()), ("theory.png", picture(setting, curves))],
    )
    if json:
        print(content)
        return
    console = report.console()
    console.print(about(setting))
    console.print(sizes_table(setting))
    console.print(together_table(setting))
    console.print(statements_table(judge(setting)))
    console.print(chart(setting, curves, console))
    console.print(Text(f"written to {out}: theory.png, theory.json; docs/theory.md says why"))


def read(values: dict[str, Any], parameters: str, assignments: Sequence[str]) -> TheorySetting:
    """The flags as a setting; `parameters` is network, proof or a number."""
    constants = Constants(**dict(_constant(each) for each in assignments))
    if values["n"] < FEWEST:
        raise UserError(f"n is {values['n']}; error against k needs at least {FEWEST} points.")
    number: float | None = None
    if parameters == "proof":
        TheorySetting(
            **values, constants=constants
        )  # beta and Lambda are checked before they are used
        chosen = proof_parameters(values["n"], values["beta"], values["Lambda"], constants.C_1)
        number = max(1.0, float(chosen))
    elif parameters != "network":
        try:
            number = float(parameters)
        except ValueError:
            raise UserError(
                f"parameters is {parameters!r}; it must be network, proof or a number."
            ) from None
    return TheorySetting(**values, parameters=number, constants=constants)


def _constant(assignment: str) -> tuple[str, float]:
    name, _, value = assignment.partition("=")
    if name not in Constants._fields:
        known = ", ".join(Constants._fields)
        raise UserError(f"{name!r} is no constant of the proofs; there are {known}.")
    try:
        return name, float(value)
    except ValueError:
        raise UserError(f"{name} is {value!r}; it must be a number.") from None


# --- tables ---------------------------------------------------------------------------------------


def about(setting: TheorySetting) -> Text:
    known = [f"{name} = {value:g}" for name, value in setting.constants._asdict().items()]
    ones = all(value == 1 for value in setting.constants)
    return Text.assemble(
        (
            f"s_0 = {setting.s_0}, L = {setting.L}, M = {setting.M}, beta = {setting.beta:g}, "
            f"Lambda = {setting.Lambda:g}, zeta = {setting.zeta:g}, delta = {setting.delta:g}, "
            f"F = {setting.F:g}, sigma = {setting.sigma:g}, Omega = {setting.Omega:g}, "
            f"N = {setting.N}\n",
            "bold",
        ),
        "The constants of the proofs are unknown; "
        + ("all are taken as 1" if ones else f"taken as {', '.join(known)}")
        + ". Read shapes and signs, not levels.",
    )


def sizes_table(setting: TheorySetting) -> Table:
    """What depends on the number of points."""
    rows = figures.at_sizes(setting)
    table = _table("", f"n = {setting.n:,}", f"n_k = {setting.n_k:,}", title="At both sizes")
    for row in rows:
        table.add_row(_heading(row), *map(_figure(row), row.values), row.place)
    if any(row.bound and value > 1 for row in rows for value in row.values):
        table.caption = "* above 1: a bound that says nothing, since d^2 <= 1"
    return table


def together_table(setting: TheorySetting) -> Table:
    """What belongs to the network, or to n and n_k together."""
    table = _table("", "value", title="Together")
    for row in figures.together(setting):
        table.add_row(_heading(row), *map(_figure(row), row.values), row.place)
    return table


def statements_table(found: Sequence[Statement]) -> Table:
    """What holds, and why."""
    table = Table(box=box.SIMPLE_HEAD, title="What holds for these numbers", show_lines=False)
    table.add_column("statement", ratio=3)
    table.add_column("", width=13)
    table.add_column("because", ratio=4)
    for each in found:
        verdict, style = VERDICTS[each.holds]
        claim = Text.assemble((each.name, "bold"), f"\n{each.claim}")
        table.add_row(claim, Text(verdict, style=style), Text(each.because))
    return table


def _table(*headings: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, padding=(0, 1, 0, 0))
    table.add_column(headings[0])
    for heading in headings[1:]:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("in the paper")
    return table


def _heading(row: Quantity) -> Text:
    return Text.assemble((row.symbol, "bold"), f": {row.what}")


def _figure(row: Quantity) -> Any:
    def text(value: float) -> str:
        mark = "*" if row.bound and value > 1 else ""
        return (digits(value) if row.log else f"{value:.4g}") + mark

    return text


# --- the chart ------------------------------------------------------------------------------------


def chart(setting: TheorySetting, curves: Curves, console: Console) -> Text:
    """Error against k, log-log, in characters; later curves lie above earlier ones."""
    marks = PLAIN_MARKS if console.options.ascii_only else MARKS
    drawn = {
        "bound of Eq. 18": curves.bound,
        "upper rate": curves.upper,
        "lower rate": curves.lower,
    }
    width = max(20, min(WIDTH, console.width - 12))
    logs = [_log(each) for each in drawn.values()]
    low, high = (float(f([f(each) for each in logs])) for f in (np.nanmin, np.nanmax))
    steps = (high - low) / (HEIGHT - 1)
    cells = [[(" ", "")] * width for _ in range(HEIGHT)]
    if low < 0 < high:  # where d^2 = 1 and a bound begins to say something
        cells[round(high / steps)] = [("-", "dim")] * width
    for each, mark, style in zip(logs, marks, STYLES, strict=True):
        at = np.interp(np.linspace(0, 1, width), np.linspace(0, 1, len(each)), each)
        before = None
        for column, value in enumerate(at):
            if math.isnan(value):
                continue
            row = round((high - value) / steps)
            start = row if before is None else before + (row > before) - (row < before)
            for between in range(min(start, row), max(start, row) + 1):
                cells[between][column] = (mark, style)
            before = row
    labels = {0: f"{math.exp(high):.2g}", HEIGHT - 1: f"{math.exp(low):.2g}"}
    if low < 0 < high:
        labels.setdefault(round(high / steps), "1")
    text = Text.assemble(("Error against k, both on a log scale\n", "italic"))
    for number, line in enumerate(cells):
        text.append(f"{labels.get(number, ''):>9} ", style="dim")
        for (mark, style), alike in groupby(line):
            text.append(mark * len(list(alike)), style=style)
        text.append("\n")
    place = round((width - 1) * math.log(setting.n_k / 2) / math.log(setting.n / 2))
    pointer = "^" if setting.n_k >= 2 else " "
    text.append(" " * (10 + max(0, place)) + f"{pointer} n_k = {setting.n_k:,}\n", style="dim")
    ends = f"k = 2{f'n = {setting.n:,}':>{width - 5}}"
    text.append(" " * 10 + ends, style="dim")
    for name, mark, style in zip(drawn, marks, STYLES, strict=True):
        text.append(f"\n{'':10}")
        text.append(mark, style=style)
        text.append(f" {name}")
    return text


def _log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural logarithms; a bound that is not positive is not drawn."""
    kept: NDArray[np.float64] = np.log(np.where(values > 0, values, np.nan))
    return kept


def picture(setting: TheorySetting, curves: Curves) -> bytes:
    """Bounds and rates against k, and Im(w, k) in both forms."""
    figure, (errors, im) = panels(2, height=3.9)
    figure.suptitle(
        f"n = {setting.n:,}, T = {setting.parameter_count:,.0f}, beta = {setting.beta:g}, "
        f"Lambda = {setting.Lambda:g}\nunknown constants as given: shapes, not levels"
    )
    for values, label, style in (
        (curves.bound, "bound of Eq. 18", "C3-"),
        (curves.epsilon, r"its part $C \varepsilon_k^2$", "C1--"),
        (curves.upper, "upper rate, Theorem 2", "C2-"),
        (curves.lower, "lower rate, Theorem 2", "C0-"),
    ):
        errors.plot(curves.k, np.where(values > 0, values, np.nan), style, label=label)
    errors.axhline(1, color="0.4", linewidth=1, linestyle=":")
    errors.annotate(
        "above: says nothing", (0.98, 1), xycoords=("axes fraction", "data"),
        va="bottom", ha="right", color="0.4",
    )  # fmt: skip
    errors.set(xscale="log", yscale="log", xlabel="k", ylabel="error", title="Error against k")
    im.plot(curves.k, curves.im, "C4-", label="as printed")
    im.plot(curves.k, curves.im_per_point, "C5-", label="1/n kept")
    im.axhline(0, color="0.4", linewidth=1, linestyle=":")
    im.set(xscale="log", xlabel="k", title=r"$\Im(w, k)$ of Theorem 1, full minus coreset")
    for axis in (errors, im):
        axis.axvline(setting.n_k, color="0.7", linewidth=1, label=f"$n_k$ = {setting.n_k:,}")
        axis.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2, frameon=False,
            columnspacing=1, handlelength=1.2, handletextpad=0.5,
        )  # fmt: skip
        axis.grid(alpha=0.3)
    buffer = io.BytesIO()
    save(figure, buffer, format="png")
    return buffer.getvalue()
