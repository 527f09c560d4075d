"""Matplotlib figures without a window, for a page: 7.5 inches wide, with type of 9 points.

A picture that is wider than the page is shrunk by whoever shows it, and its letters with it. The
ground is white, so that a page in the dark shows a card that can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

WIDTH = 7.5
"""Inches: the text of a page of A4 or letter, and 720 pixels of a browser."""

TYPE = 9
"""Points."""

DPI = 150


def panels(number: int, *, height: float = 2.9, legend: int = 0) -> tuple[Any, Any]:
    """A figure and its axes: up to three side by side, more in rows."""
    across = number if number <= 3 else 2 if number == 4 else 3
    figure, axes = grid(-(-number // across), across, height=height, legend=legend)
    for spare in axes.ravel()[number:]:
        spare.set_axis_off()
    return figure, axes.ravel()[:number]


def grid(down: int, across: int, *, height: float = 2.2, legend: int = 0) -> tuple[Any, Any]:
    """A figure and its axes [down, across]; a row has `height` inches, and `legend` lines room."""
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(WIDTH, height * down + 0.2 * legend), layout="constrained")
    return figure, figure.subplots(down, across, squeeze=False)


def legend_below(figure: Any, lines: Mapping[str, Any], across: int = 4) -> None:
    """One legend for all panels. At the side it would take the width that the lines need."""
    figure.legend(
        lines.values(), lines, loc="outside lower center", ncols=min(across, len(lines)),
        frameon=False,
    )  # fmt: skip


def labelled(axes: Any) -> dict[str, Any]:
    """The lines of all panels that have a label, once each."""
    found = {str(line.get_label()): line for axis in axes for line in axis.lines}
    return {label: line for label, line in found.items() if not label.startswith("_")}


def save(figure: Any, file: Path | IO[bytes], **how: Any) -> None:
    """Write it, with all of its letters in one size."""
    from matplotlib.text import Text

    for axis in figure.axes:
        axis.tick_params(which="both", labelsize=TYPE)
    for text in figure.findobj(Text):
        text.set_fontsize(TYPE)
    figure.savefig(file, **{"dpi": DPI, "facecolor": "white", **how})
