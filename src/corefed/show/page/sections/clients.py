"""Who does well, beside who holds what."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from corefed.show.page import charts
from corefed.show.page.content import (
    DASH,
    Figure,
    Figures,
    Missing,
    Part,
    ReportTable,
    Section,
    Text,
    missing,
)
from corefed.show.page.gather import RunFolder, heading, score_name, score_text
from corefed.show.page.sections.learning import score_cell

MOST = 100
"""Clients in a heat map; of more, the worst and the best halves of as many are shown."""


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}clients", "Clients"
    aid = (
        f"Each row is a client of seed {run.seeds[0]}: its {score_name(run.score)} over the "
        "rounds, beside the training points it holds."
    )
    parts: list[Part] = []
    evaluated = [line for line in run.lines if "clients" in line]
    if not evaluated:
        return Section(name, title, "", [missing("No round of this run was evaluated.")])
    rows = shown_clients(evaluated[-1]["clients"][0], run.score)
    items = [scores(run, evaluated, rows, f"{name}-scores")]
    if isinstance(run.clients, Missing):
        parts.append(missing(run.clients))
    else:
        items.append(holdings(run, run.clients[0], rows, f"{name}-holdings"))
    parts.insert(0, Figures(items))
    if len(run.seeds) > 1:
        parts.append(Figures([by_seed(run, evaluated[-1], rows, f"{name}-seeds")], wide=True))
    if len(rows) < len(run.names):
        parts.append(
            Text(f"Shown are the {len(rows)} of {len(run.names)} clients that do worst and best.")
        )
    return Section(name, title, aid, parts)


def shown_clients(last: list[float | None], score: str) -> list[int]:
    """All of them, or the worst and the best."""
    if len(last) <= MOST:
        return list(range(len(last)))
    sign = 1 if score == "accuracy" else -1
    order = sorted((sign * v if v is not None else 0.0, i) for i, v in enumerate(last))
    ends = order[: MOST // 2] + order[-MOST // 2 :]
    return sorted(i for _, i in ends)


def scores(run: RunFolder, evaluated: list[dict[str, Any]], rows: list[int], name: str) -> Figure:
    """Client by round, of the first seed."""
    columns = [str(line["round"]) for line in evaluated]
    data = [
        {"x": column, "y": run.names[i], "v": value}
        for column, line in zip(columns, evaluated, strict=True)
        for i in rows
        if (value := line["clients"][0][i]) is not None
    ]
    last = {run.names[i]: v for i in rows if (v := evaluated[-1]["clients"][0][i]) is not None}
    return Figure(
        name,
        f"{heading(score_name(run.score))} by client and round",
        _heat(run, data, "round", columns, rows),
        _ends(last, run.score, f"After round {columns[-1]}"),
        ReportTable(
            f"{heading(score_name(run.score))} of each client's own test points",
            ("client", *(f"round {column}" for column in columns)),
            [
                (
                    run.names[i],
                    *(_cell(line["clients"][0][i], run.score) for line in evaluated),
                )
                for i in rows
            ],
        ),
    )


def by_seed(run: RunFolder, line: dict[str, Any], rows: list[int], name: str) -> Figure:
    """Client by seed, of the last evaluated round; a seed deals other points to each client."""
    columns = [f"seed {seed}" for seed in run.seeds]
    data = [
        {"x": column, "y": run.names[i], "v": value}
        for column, each in zip(columns, line["clients"], strict=True)
        for i in rows
        if (value := each[i]) is not None
    ]
    means = [
        statistics.fmean(v for v in each if v is not None) for each in line["clients"] if any(each)
    ]
    said = "; ".join(
        f"{column} mean {score_text(mean, run.score)}"
        for column, mean in zip(columns, means, strict=False)
    )
    return Figure(
        name,
        f"{heading(score_name(run.score))} by client and seed, round {line['round']}",
        _heat(run, data, "seed", columns, rows),
        f"Each seed deals the points anew: {said}.",
        ReportTable(
            f"{heading(score_name(run.score))} after round {line['round']}",
            ("client", *columns),
            [
                (run.names[i], *(_cell(each[i], run.score) for each in line["clients"]))
                for i in rows
            ],
        ),
    )


def holdings(run: RunFolder, clients: list[dict[str, Any]], rows: list[int], name: str) -> Figure:
    """Client by class: training points. A regression has one column."""
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
    said = f"{span(sizes)} training points a client"
    if run.labels:
        said += f", {span(held)} of {len(labels)} classes each"
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
    return Figure(name, title, spec, said + ".", table)


def span(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _cell(value: float | None, score: str) -> Any:
    return DASH if value is None else score_cell(value, score)


def _heat(
    run: RunFolder, data: list[dict[str, Any]], x: str, columns: list[str], rows: list[int]
) -> charts.Spec:
    factor = 100 if run.score == "accuracy" else 1
    scaled = [{**row, "v": factor * row["v"]} for row in data]
    values = [row["v"] for row in scaled]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return charts.heat(
        scaled,
        x,
        "client",
        "accuracy, %" if run.score == "accuracy" else "RMSE",
        form=".3~g" if run.score == "accuracy" else ".2~g",
        legend=".0f" if run.score == "accuracy" else ".2~g",
        columns=columns,
        rows=[run.names[i] for i in rows],
        domain=(low, high if high > low else low + 1),
    )


def _ends(last: dict[str, float], score: str, when: str) -> str:
    if not last:
        return "No client has test points."
    order = sorted(last, key=lambda name: last[name], reverse=score == "rmse")
    worst, best = order[0], order[-1]
    return (
        f"{when}: lowest {worst} ({score_text(last[worst], score)}), highest {best} "
        f"({score_text(last[best], score)})."
        if score == "accuracy"
        else f"{when}: worst {worst} ({score_text(last[worst], score)}), best {best} "
        f"({score_text(last[best], score)})."
    )
