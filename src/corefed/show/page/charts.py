"""Vega-Lite specifications. Colours are CSS variables of the page, so that charts follow it.

The same series has the same colour in all charts: `domain` is the list of all series of the page.
Where all points share one place on the horizontal axis there is no specification (None).

Legends are buttons of the page (charts.js), made from `usermeta`: they hide a series by the
parameter `hidden`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from corefed.base.errors import UserError, install

COLOURS = [f"var(--series-{i})" for i in range(8)]
RAMP = [f"var(--ramp-{i})" for i in range(7)]
SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "stroke"]
HEIGHT = 260
HIDDEN = "hidden"
"""Parameter of a chart: names of the series that a reader has switched off."""
INK, PAPER, MUTED = "var(--ink)", "var(--paper)", "var(--muted)"

Data = Sequence[Mapping[str, Any]]
Spec = dict[str, Any]


def require_library() -> None:
    """Refuse to go on without the extra: one library writes charts, the other draws them."""
    for module, name in (("altair", "altair"), ("vl_convert", "vl-convert-python")):
        if find_spec(module) is None:
            raise UserError(f"The report needs {name}: {install('report')}.")


def _altair() -> Any:
    """An extra; imported without its types, which are no help here."""
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
) -> Spec | None:
    """One line per series, with a band from low to high if asked for. `x` and `y` are titles."""
    if _one_place(data):
        return None
    alt = _altair()
    shown = [name for name in domain if any(row["series"] == name for row in data)]
    axis = alt.Axis(format=x_form, grid=False, tickCount=6, labelOverlap=True)
    title = _title(x, data, log)
    across = alt.X("x:Q", title=title, scale=_scale(data, log, zero=zero), axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=zero), axis=alt.Axis(format=form, tickCount=5))
    colour = _channel(alt.Color, COLOURS, domain, shown)
    shape = _channel(alt.Shape, SHAPES, domain, shown)
    base = _shown(alt.Chart(alt.Data(values=list(data))), shown).encode(x=across, color=colour)
    between = "step-after" if step else "linear"
    layers: list[Any] = []
    if diagonal:
        layers.append(_diagonal(0, 1))
    if band:
        spread = base.mark_area(opacity=0.18, line=False, interpolate=between)
        layers.append(spread.encode(y=alt.Y("low:Q", title=y), y2="high:Q"))
    layers.append(base.mark_line(strokeWidth=2, interpolate=between).encode(y=up))
    if points:
        dots = base.mark_point(filled=True, size=42, opacity=1)
        layers.append(dots.encode(y=up, shape=shape, tooltip=_tooltip(x, y, ".4~r", form)))
    return _spec(alt.layer(*layers), shown, domain)


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
) -> Spec | None:
    """One cell per column and row; numbers inside where there is room."""
    if len(columns) < 2:
        return None
    alt = _altair()
    step = max(7, min(24, 640 // max(1, len(rows))))
    low, high = domain
    scale = alt.Scale(type="quantize", domain=[low, high], range=RAMP, nice=False)
    base = alt.Chart(alt.Data(values=list(data))).encode(
        x=alt.X(
            "x:N",
            title=x,
            sort=list(columns),
            axis=alt.Axis(
                labelAngle=0,
                labelOverlap=True,
                labelLimit=90 if len(columns) > 6 else 200,
                grid=False,
            ),
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
        # The colours run from the page's background to its ink: dark cells need light text.
        ink = alt.condition(
            f"datum.v >= {low + (high - low) * 4 / 7}", alt.value(PAPER), alt.value(INK)
        )
        size = alt.expr("bandwidth('x') < 30 ? 0 : 10.5")  # no room on a phone
        text = base.mark_text(fontSize=size).encode(text=alt.Text("v:Q", format=form), color=ink)
        layers.append(text)
    return _spec(alt.layer(*layers), height=step * max(1, len(rows)))


def histogram(data: Data, x: str, y: str) -> Spec | None:
    """Bars from `low` to `high` of height `y`."""
    if sum(row["y"] > 0 for row in data) < 2:
        return None
    alt = _altair()
    chart = alt.Chart(alt.Data(values=list(data))).mark_bar(color=COLOURS[0], binSpacing=1)
    return _spec(
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
) -> Spec | None:
    """Points, one colour and shape per series; a line joins those of `front`."""
    if _one_place(data):
        return None
    alt = _altair()
    shown = [name for name in domain if any(row["series"] == name for row in data)]
    axis = alt.Axis(format="~s" if log else ".4~r", grid=False, tickCount=5, labelOverlap=True)
    title = _title(x, data, log)
    across = alt.X("x:Q", title=title, scale=_scale(data, log, padding=18), axis=axis)
    up = alt.Y("y:Q", title=y, scale=alt.Scale(zero=False, padding=14), axis=alt.Axis(format=form))
    layers: list[Any] = []
    if diagonal is not None:
        layers.append(_diagonal(*diagonal))
    if front:
        line = alt.Chart(alt.Data(values=list(front))).mark_line(
            strokeDash=[3, 3], color=MUTED, strokeWidth=1.5, interpolate="step-after"
        )
        layers.append(line.encode(x=across, y=up))
    points = _shown(alt.Chart(alt.Data(values=list(data))), shown if legend else ()).mark_point(
        filled=True, size=110 if legend else 26, opacity=1 if legend else 0.55
    )
    layers.append(
        points.encode(
            x=across,
            y=up,
            color=_channel(alt.Color, COLOURS, domain, shown),
            shape=_channel(alt.Shape, SHAPES, domain, shown),
            tooltip=_tooltip(x, y, ".4~s", form),
        )
    )
    return _spec(alt.layer(*layers), shown if legend else (), domain)


def _one_place(data: Data) -> bool:
    return len({row["x"] for row in data}) < 2


def _is_log(data: Data, log: bool) -> bool:
    return log and all(row["x"] > 0 for row in data)


def _title(x: str, data: Data, log: bool) -> str:
    return f"{x} (log scale)" if _is_log(data, log) else x


def _shown(chart: Any, names: Sequence[str]) -> Any:
    """Without the series that a reader has switched off."""
    return chart.transform_filter(f"indexof({HIDDEN}, datum.series) < 0") if names[1:] else chart


def _scale(data: Data, log: bool, **options: Any) -> Any:
    if _is_log(data, log):
        options.pop("zero", None)  # Vega warns: a log scale has no zero
        return _altair().Scale(type="log", nice=False, **options)
    return _altair().Scale(type="linear", nice=False, **{"zero": False, **options})


def _tooltip(x: str, y: str, x_form: str, form: str) -> list[Any]:
    tooltip = _altair().Tooltip
    return [
        tooltip("series:N", title="series"),
        tooltip("x:Q", title=x, format=x_form),
        tooltip("y:Q", title=y, format=form),
    ]


def _diagonal(low: float, high: float) -> Any:
    alt = _altair()
    ends = alt.Data(values=[{"x": end, "y": end} for end in (low, high)])
    rule = alt.Chart(ends).mark_line(strokeDash=[5, 4], color=MUTED, strokeWidth=1.5)
    return rule.encode(x="x:Q", y="y:Q")


def _channel(
    channel: Any, values: Sequence[str], domain: Sequence[str], shown: Sequence[str]
) -> Any:
    """One value per series."""
    scale = _altair().Scale(domain=list(shown), range=_own(values, domain, shown))
    return channel("series:N", title=None, scale=scale, legend=None, sort=None)


def _own(values: Sequence[str], domain: Sequence[str], shown: Sequence[str]) -> list[str]:
    """What each of these series has in all charts of the page."""
    return [values[domain.index(name) % len(values)] for name in shown]


def _spec(
    chart: Any, names: Sequence[str] = (), domain: Sequence[str] = (), height: int = HEIGHT
) -> Spec:
    """The script sets the width. A single series needs no legend."""
    legend = []
    if len(names) > 1:
        looks = zip(names, _own(COLOURS, domain, names), _own(SHAPES, domain, names), strict=True)
        legend = [{"name": name, "colour": colour, "shape": shape} for name, colour, shape in looks]
    spec: Spec = chart.properties(height=height, usermeta={"legend": legend}).to_dict(
        validate=False
    )
    if legend:
        spec["params"] = [{"name": HIDDEN, "value": []}]
    spec.pop("config", None)  # one for all charts is in the script
    return spec
