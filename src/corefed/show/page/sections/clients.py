"""The score of each client, beside the data it holds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    Missing,
    Part,
    ReportTable,
    Row,
    Section,
    Text,
    missing,
)
from corefed.show.page.gather import (
    RunFolder,
    capitalize,
    score_axis,
    score_cell,
    score_name,
    score_text,
)
from corefed.show.page.sections import sites
from corefed.training.record import Line

MOST = 100
"""Clients in a heat map. Of more clients, the worst and the best half of this number are shown."""


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}clients", "Sites"
    aid = (
        f"One row per site: its {score_name(run.score)} over all seeds in the table; over the "
        f"rounds of seed {run.seeds[0]}, beside its training points, in the charts."
    )
    parts: list[Part] = []
    evaluated = [line for line in run.lines if "clients" in line]
    if not evaluated:
        return Section(name, title, "", [missing("No round of this run was evaluated.")])
    rows = shown_clients(evaluated[-1]["clients"][0], run.score)
    items = [_by_round(run, evaluated, rows, f"{name}-scores")]
    if isinstance(run.clients, Missing):
        parts.append(missing(run.clients))
    else:
        items.append(_holdings(run, run.clients[0], rows, f"{name}-holdings"))
    parts = [*sites.table(run), Figures(items), *parts]
    if len(run.seeds) > 1:
        parts.append(Figures([_by_seed(run, evaluated[-1], rows, f"{name}-seeds")], wide=True))
    if len(rows) < len(run.names):
        parts.append(Text(f"Shown are the {len(rows)} worst and best of {len(run.names)} clients."))
    return Section(name, title, aid, parts)


def shown_clients(last: list[float | None], score: str) -> list[int]:
    """All of them, or the worst and the best."""
    if len(last) <= MOST:
        return list(range(len(last)))
    sign = 1 if score == "accuracy" else -1
    order = sorted((sign * v if v is not None else 0.0, i) for i, v in enumerate(last))
    ends = order[: MOST // 2] + order[-MOST // 2 :]
    return sorted(i for _, i in ends)


def _score_map(
    run: RunFolder,
    values: Mapping[str, list[float | None]],  # column -> score of each client
    x: str,
    rows: list[int],
    name: str,
    *,
    title: str,
    caption: str,
    finding: str,
) -> Figure:
    """Scores as a heat map of clients by columns, and as a table."""
    factor, unit = score_axis(run.score)
    data: list[dict[str, Any]] = [
        {"x": column, "y": run.names[i], "v": factor * value}
        for column, each in values.items()
        for i in rows
        if (value := each[i]) is not None
    ]
    shown = [row["v"] for row in data]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    accuracy = run.score == "accuracy"
    spec = charts.heat(
        data,
        x,
        "client",
        unit,
        form=".3~g" if accuracy else ".2~g",
        legend=".0f" if accuracy else ".2~g",
        columns=list(values),
        rows=[run.names[i] for i in rows],
        domain=(low, high if high > low else low + 1),
    )
    heads = ("client", *(f"{x} {column}" for column in values))
    cells: list[Row] = [
        (run.names[i], *(score_cell(each[i], run.score) for each in values.values())) for i in rows
    ]
    return Figure(name, title, spec, finding, ReportTable(caption, heads, cells))


def _by_round(run: RunFolder, evaluated: list[Line], rows: list[int], name: str) -> Figure:
    """Client by round, of the first seed."""
    values = {str(line["round"]): line["clients"][0] for line in evaluated}
    last = {run.names[i]: v for i in rows if (v := evaluated[-1]["clients"][0][i]) is not None}
    score = capitalize(score_name(run.score))
    finding = "No client has test points."
    if last:
        order = sorted(last, key=lambda client: last[client], reverse=run.score == "rmse")
        worst, best = (f"{c} ({score_text(last[c], run.score)})" for c in (order[0], order[-1]))
        finding = f"After round {evaluated[-1]['round']}: worst {worst}, best {best}."
    return _score_map(
        run, values, "round", rows, name, title=f"{score} by client and round",
        caption=f"{score} on each client's own test points", finding=finding,
    )  # fmt: skip


def _by_seed(run: RunFolder, line: Line, rows: list[int], name: str) -> Figure:
    """Client by seed, of the last evaluated round."""
    values = dict(zip(map(str, run.seeds), line["clients"], strict=True))
    means = "; ".join(
        f"seed {column} mean {score_text(statistics.fmean(tested), run.score)}"
        for column, each in values.items()
        if (tested := [v for v in each if v is not None])
    )
    score = capitalize(score_name(run.score))
    return _score_map(
        run, values, "seed", rows, name,
        title=f"{score} by client and seed, round {line['round']}",
        caption=f"{score} after round {line['round']}",
        finding=f"Each seed splits the points differently: {means}.",
    )  # fmt: skip


def _holdings(run: RunFolder, clients: list[dict[str, Any]], rows: list[int], name: str) -> Figure:
    """Training points, client by class. A regression has one column."""
    labels = run.labels or ("points",)
    counts = {i: clients[i].get("classes") or [clients[i]["train"]] for i in rows}
    data = [
        {"x": label, "y": run.names[i], "v": count}
        for i in rows
        for label, count in zip(labels, counts[i], strict=True)
        if count
    ]
    most = max(max(each) for each in counts.values())
    spec = charts.heat(
        data, "class" if run.labels else "", "client", "training points", form="~s", legend=".0f",
        columns=labels, rows=[run.names[i] for i in rows], domain=(0, most),
    )  # fmt: skip
    sizes = [clients[i]["train"] for i in rows]
    held = [sum(1 for count in each if count) for each in counts.values()]
    finding = f"{span(sizes)} training points per client"
    if run.labels:
        finding += f", {span(held)} of {len(labels)} classes each"
    heads = ("client", *labels, "training points", "test points") if run.labels else (
        "client", "training points", "test points"
    )  # fmt: skip
    table = ReportTable(
        "Training points of each client and class" if run.labels else "Points of each client",
        heads,
        [
            (
                run.names[i],
                *(map(str, counts[i]) if run.labels else ()),
                str(clients[i]["train"]),
                str(clients[i]["test"]),
            )
            for i in rows
        ],
    )
    title = "Who holds which classes" if run.labels else "Who holds how many points"
    return Figure(name, title, spec, f"{finding}.", table)


def span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"
