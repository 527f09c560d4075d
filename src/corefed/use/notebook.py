"""How a `Federation` shows itself in a notebook: a small table that needs no style sheet.

Colours are the notebook's own, lines a grey that is seen on light and dark ground alike.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

from corefed.training.kinds import main_model

LINE = "border-bottom:1px solid rgba(128,128,128,.35)"
CELL = f"padding:.25em .9em .25em 0;text-align:left;{LINE};background:none;color:inherit"
TABLE = "border-collapse:collapse;color:inherit;background:none;font-variant-numeric:tabular-nums"
TITLE = "text-align:left;color:inherit"
NOTE = "opacity:.75;font-size:90%"

SCORES = {"accuracy": "Accuracy", "rmse": "RMSE", "nll": "NLL", "ece": "Calibration error (ECE)"}


def before(given: Mapping[str, Any]) -> str:
    """Not fitted: the settings that differ from the defaults."""
    rows = [(name, repr(value)) for name, value in given.items()]
    return card("Federation, not fitted", rows, "All other settings have their defaults.")


def after(method: str, clients: Iterable[Any], found: Mapping[str, Any], joined: int = 0) -> str:
    """Fitted: what was trained, and how good it is on the clients' test points.

    `found` is what `Federation.evaluate` returns.
    """
    names = list(clients)
    rows = [("Method", method), ("Clients", _clients(names, joined))]
    metrics = found["metrics"]
    kind = main_model(metrics)
    shown = {n: metrics[f"{kind}_{n}"] for n in SCORES if f"{kind}_{n}" in metrics}
    if not shown:
        return card("Federation, fitted", rows, "Not tested: no points were held out.")
    rows += [(SCORES[name], _number(name, value)) for name, value in shown.items()]
    score = "accuracy" if "accuracy" in shown else "rmse"
    tested = {name: value for name, value in found["clients"].items() if value is not None}
    if score in shown and len(tested) > 1:
        worst = min if score == "accuracy" else max
        weakest = worst(tested, key=lambda name: tested[name])
        rows.append(("Weakest site", f"{weakest}: {_number(score, tested[weakest])}"))
    note = f"{kind.capitalize()} models, on test points of all clients, after the last round."
    return card("Federation, fitted", rows, note)


def card(title: str, rows: Iterable[tuple[str, str]], note: str) -> str:
    """A table with a title and a line below; whatever it is given is shown as text."""
    body = "".join(
        f'<tr><th scope="row" style="{CELL};font-weight:normal">{html.escape(name)}</th>'
        f'<td style="{CELL}">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    heading = (
        f'<caption style="text-align:left;color:inherit"><b>{html.escape(title)}</b></caption>'
    )
    below = f'<div style="{NOTE}">{html.escape(note)}</div>'
    return f'<div><table style="{TABLE}">{heading}<tbody>{body}</tbody></table>{below}</div>'


def _clients(names: list[Any], joined: int) -> str:
    later = f", and {joined} that joined later" if joined else ""
    some = ", ".join(map(str, names[:3])) + (", ..." if len(names) > 3 else "")
    return f"{len(names):,} ({some}){later}"


def _number(name: str, value: float) -> str:
    if name == "accuracy":
        return f"{100 * value:.2f} %"
    return f"{value:,.4g}" if name == "rmse" else f"{value:.3f}"
