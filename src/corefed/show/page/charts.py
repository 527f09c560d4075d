"""Vega-Lite specifications. Colours are CSS variables of the page, so that charts follow it.

The same series has the same colour everywhere: a chart names the whole list of series it is one of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from corefed.base.errors import UserError

COLOURS = [f"var(--series-{i})" for i in range(8)]
RAMP = [f"var(--ramp-{i})" for i in range(7)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]
HEIGHT = 260
INK, PAPER, MUTED = "var(--ink)", "var(--paper)", "var(--muted)"

Data = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]


def require_library() -> None:
    """Both halves of the extra: what writes charts, and the script that draws them."""
    for module, name in (("altair", "altair"), ("vl_convert", "vl-convert-python")):
        if find_spec(module) is None:
            raise UserError(f"The report needs {name}: pip install 'corefed[report]'.")


def _altair() -> Any:
    """Without its types, whose lists of every colour scheme say nothing here."""
    return import_module("altair")


def series(
    data: Data,
    domain: Sequence[str],
    x: str,
    y: str,
    *,
    form: str = ".4~r",
    x_form: str = "~s",
    log: bool = False,
    diagonal: bool = False,
    band: bool = False,
    points: bool = True,
    zero: bool = False,
    step: bool = False,
) -> Spec:
    """Lines of x against y, one a `series`, with a band from low to high where it is asked for.

    `x` and `y` are the titles of the axes.
    """
    alt = _altair()
    shown = [name for name in domain if any(row["series"] == name for row in data)]
    kind = "log" if log and all(row["x"] > 0 for row in data) else "linear"
    axis = alt.Axis(format=x_form, grid=False, tickCount=6, labelOverlap=True)
    zeros = {} if kind == "log" else {"zero": zero}  # a log scale has none, and Vega warns
    scale = alt.Scale(type=kind, nice=False, **zeros)
    across = alt.X("x:Q", title=x, scale=scale, axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=zero), axis=alt.Axis(format=form, tickCount=5))
    colour, shape = _colour(domain, shown), _shape(domain, shown)
    tooltip = [
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("x:Q", title=x, format=".4~r"),
        alt.Tooltip("y:Q", title=y, format=form),
    ]
    base = alt.Chart(alt.Data(values=list(data))).encode(x=across, color=colour)
    between = "step-after" if step else "linear"
    layers: list[Any] = []
    if diagonal:
        ends = alt.Data(values=[{"x": 0, "y": 0}, {"x": 1, "y": 1}])
        rule = alt.Chart(ends).mark_line(strokeDash=[5, 4], color=MUTED, strokeWidth=1.5)
        layers.append(rule.encode(x="x:Q", y="y:Q"))
    if band:
        spread = base.mark_area(opacity=0.18, line=False, interpolate=between)
        layers.append(spread.encode(y=alt.Y("low:Q", title=y), y2="high:Q"))
    line = base.mark_line(strokeWidth=2, interpolate=between)
    layers.append(line.encode(y=up))
    if points:
        dots = base.mark_point(filled=True, size=42, opacity=1)
        layers.append(dots.encode(y=up, shape=shape, tooltip=tooltip))
    return _done(alt.layer(*layers), shown)


def heat(
    data: Data,
    x: str,
    y: str,
    value: str,
    *,
    form: str,
    legend: str,
    columns: Sequence[str],
    rows: Sequence[str],
    domain: tuple[float, float],
) -> Spec:
    """A cell a pair of column and row; figures inside where there is room for them."""
    alt = _altair()
    step = max(7, min(24, 640 // max(1, len(rows))))
    low, high = domain
    scale = alt.Scale(type="quantize", domain=[low, high], range=RAMP, nice=False)
    base = alt.Chart(alt.Data(values=list(data))).encode(
        x=alt.X(
            "x:N",
            title=x,
            sort=list(columns),
            axis=alt.Axis(labelAngle=0, labelOverlap=True, labelLimit=90, grid=False),
        ),
        y=alt.Y(
            "y:N",
            title=y,
            sort=list(rows),
            axis=alt.Axis(labelLimit=120, labelOverlap=step < 12, grid=False),
        ),
    )
    key = alt.Legend(format=legend, gradientThickness=10, title=value, labelOverlap="greedy")
    cells = base.mark_rect(stroke=PAPER, strokeWidth=1).encode(
        color=alt.Color("v:Q", title=value, scale=scale, legend=key),
        tooltip=[
            alt.Tooltip("y:N", title=y),
            alt.Tooltip("x:N", title=x),
            alt.Tooltip("v:Q", title=value, format=form),
        ],
    )
    layers = [cells]
    if len(columns) <= 12 and step >= 14:
        # The ramp runs from the page's ground to its ink, so its dark half needs the other one.
        ink = alt.condition(
            f"datum.v >= {low + (high - low) * 4 / 7}", alt.value(PAPER), alt.value(INK)
        )
        size = alt.expr("bandwidth('x') < 30 ? 0 : 10.5")  # a phone has no room for them
        text = base.mark_text(fontSize=size).encode(text=alt.Text("v:Q", format=form), color=ink)
        layers.append(text)
    return _done(alt.layer(*layers), height=step * max(1, len(rows)))


def histogram(data: Data, x: str, y: str) -> Spec:
    """Bars from `low` to `high` of height `y`."""
    alt = _altair()
    chart = alt.Chart(alt.Data(values=list(data))).mark_bar(color=COLOURS[0], binSpacing=1)
    return _done(
        chart.encode(
            x=alt.X(
                "low:Q",
                title=x,
                bin=alt.BinParams(binned=True),
                scale=alt.Scale(nice=False),
                axis=alt.Axis(format=".4~r", grid=False, tickCount=6),
            ),
            x2="high:Q",
            y=alt.Y("y:Q", title=y, axis=alt.Axis(tickCount=5)),
            tooltip=[
                alt.Tooltip("low:Q", title="from", format=".3~g"),
                alt.Tooltip("high:Q", title="to", format=".3~g"),
                alt.Tooltip("y:Q", title=y),
            ],
        )
    )


def scatter(
    data: Data,
    domain: Sequence[str],
    x: str,
    y: str,
    *,
    form: str = ".4~r",
    log: bool = False,
    front: Data = (),
    diagonal: tuple[float, float] | None = None,
    legend: bool = True,
) -> Spec:
    """Points, one colour and shape a `series`; `front` is joined by a line below them."""
    alt = _altair()
    shown = [name for name in domain if any(row["series"] == name for row in data)]
    kind = "log" if log and all(row["x"] > 0 for row in data) else "linear"
    axis = alt.Axis(format="~s" if log else ".4~r", grid=False, tickCount=5, labelOverlap=True)
    zeros = {} if kind == "log" else {"zero": False}  # a log scale has none, and Vega warns
    pad = alt.Scale(type=kind, nice=False, padding=18, **zeros)
    across = alt.X("x:Q", title=x, scale=pad, axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(format=form))
    layers: list[Any] = []
    if diagonal is not None:
        ends = alt.Data(values=[{"x": end, "y": end} for end in diagonal])
        rule = alt.Chart(ends).mark_line(strokeDash=[5, 4], color=MUTED, strokeWidth=1.5)
        layers.append(rule.encode(x="x:Q", y="y:Q"))
    if front:
        line = alt.Chart(alt.Data(values=list(front))).mark_line(
            strokeDash=[3, 3], color=MUTED, strokeWidth=1.5, interpolate="step-after"
        )
        layers.append(line.encode(x=across, y=up))
    points = alt.Chart(alt.Data(values=list(data))).mark_point(
        filled=True, size=110 if legend else 26, opacity=1 if legend else 0.55
    )
    tooltip = [
        alt.Tooltip("series:N", title="series"),
        alt.Tooltip("x:Q", title=x, format=".4~s"),
        alt.Tooltip("y:Q", title=y, format=form),
    ]
    layers.append(
        points.encode(
            x=across,
            y=up,
            color=_colour(domain, shown, legend),
            shape=_shape(domain, shown, legend),
            tooltip=tooltip,
        )
    )
    return _done(alt.layer(*layers), shown)


def _colour(domain: Sequence[str], shown: Sequence[str], legend: bool = True) -> Any:
    return _told_apart(_altair().Color, COLOURS, domain, shown, legend)


def _shape(domain: Sequence[str], shown: Sequence[str], legend: bool = True) -> Any:
    return _told_apart(_altair().Shape, SHAPES, domain, shown, legend)


def _told_apart(
    channel: Any, values: Sequence[str], domain: Sequence[str], shown: Sequence[str], legend: bool
) -> Any:
    """Each of the series that are shown by its own value; alone, it needs no legend."""
    alt = _altair()
    own = [values[domain.index(name) % len(values)] for name in shown]
    scale = alt.Scale(domain=list(shown), range=own)
    key = alt.Legend() if legend and len(shown) > 1 else None
    return channel("series:N", title=None, scale=scale, legend=key, sort=None)


def _done(chart: Any, names: Sequence[str] = (), height: int = HEIGHT) -> Spec:
    """The width is the page's matter, and with it how many names of a legend are in a row."""
    about = {"letters": max(map(len, names), default=0)}
    spec: Spec = chart.properties(height=height, usermeta=about).to_dict(validate=False)
    spec.pop("config", None)  # one for all charts is in the script
    return spec
