"""The imports between the rooms as a picture: which room imports which, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from corefed.base.panels import TYPE, WIDTH

INK, QUIET, EMPTY, SELF, WRONG = "#16302f", "#5d7573", "#f0f5f4", "#c9d5d3", "#c2410c"
TEAL = LinearSegmentedColormap.from_list("teal", ["#d5efec", "#5fb8b0", "#00695c"])
STYLE: dict[Any, str] = {
    "svg.hashsalt": "rooms",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}
"""The same numbers give the same file; text stays text."""

DOWN = ("All squares below the diagonal are empty:", "no room imports a room above it.")
UP = ("Imports in orange point upwards.",)


def draw(
    rooms: Sequence[tuple[str, int, int]], edges: Sequence[tuple[str, str, int]], file: Path
) -> None:
    """A square per pair of rooms. `rooms` are (name, files, lines), top to bottom."""
    place = {name: i for i, (name, _, _) in enumerate(rooms)}
    known = [(place[a], place[b], n) for a, b, n in edges if a in place and b in place]
    most = max((n for _, _, n in known), default=1)
    size = len(rooms)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 6.0))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(-4.5, size + 0.9), ylim=(size + 0.5, -2.6))
        axes.axis("off")
        _text(axes, -1.55, -0.3, "files", QUIET, size=TYPE, ha="right")
        _text(axes, -0.2, -0.3, "lines", QUIET, size=TYPE, ha="right")
        for y, (name, files, lines) in enumerate(rooms):
            label = name.removeprefix("corefed_")
            _text(axes, -2.2, y + 0.5, label, size=TYPE, weight="bold", ha="right")
            _text(axes, -1.55, y + 0.5, f"{files}", QUIET, size=TYPE, ha="right")
            _text(axes, -0.2, y + 0.5, f"{lines:,}", QUIET, size=TYPE, ha="right")
            _text(axes, y + 0.4, -0.15, label, size=TYPE, rotation=45, ha="left", va="bottom")
            _square(axes, y, y, SELF)
            for x in range(y + 1, size):
                _square(axes, x, y, EMPTY)
        for y, x, number in known:
            depth = (number / most) ** 0.5
            _square(axes, x, y, TEAL(depth) if x > y else WRONG)
            light = depth > 0.6 or x < y
            _text(axes, x + 0.5, y + 0.5, str(number), "white" if light else INK, size=TYPE)
        for line, text in enumerate(UP if any(x < y for y, x, _ in known) else DOWN):
            _text(axes, 0.1, size - 1.6 + 0.65 * line, text, size=TYPE, ha="left")
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file, format="svg", facecolor="white", metadata={"Date": None})


def _square(axes: Any, x: int, y: int, colour: Any) -> None:
    axes.add_patch(
        Rectangle((x + 0.03, y + 0.03), 0.94, 0.94, facecolor=colour, linewidth=0, clip_on=False)
    )


def _text(axes: Any, x: float, y: float, text: str, colour: str = INK, **how: Any) -> None:
    axes.text(x, y, text, color=colour, **{"va": "center", "ha": "center", **how})
