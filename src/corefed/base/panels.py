"""Matplotlib figures without a window."""

from __future__ import annotations

from typing import Any


def panels(number: int) -> tuple[Any, Any]:
    """A figure, and its axes side by side."""
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(5 * number + 1, 3.8), layout="constrained")
    return figure, figure.subplots(1, number, squeeze=False)[0]
