"""A coreset in three panels: its log-likelihood against the full data's, weights, errors."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from corefed.base.errors import UserError
from corefed.base.panels import panels, save

if TYPE_CHECKING:
    from corefed.coreset.coreset import Coreset

WIDE = 50
"""Weights that differ by more than this factor are drawn on a log scale."""

SMALLEST = 1e-6
"""Errors below this are rounding, and are drawn at the bottom of the log scale."""


def render(coreset: Coreset, suffix: str = "png") -> bytes:
    """The picture as the content of a file of this suffix."""
    figure, (likelihoods, weights, errors) = panels(3)
    d = coreset.diagnostics
    figure.suptitle(
        f"{d.kept:,} of {d.n:,} points by {d.solver}: error on fresh draws {d.held_out_error:.2g}"
    )
    _likelihoods(likelihoods, coreset)
    _weights(weights, coreset)
    _errors(errors, coreset)
    buffer = io.BytesIO()
    try:
        save(figure, buffer, format=suffix)
    except ValueError as error:  # a suffix matplotlib does not know
        raise UserError(f"Cannot draw a picture as .{suffix}: {error}.") from error
    return buffer.getvalue()


def _likelihoods(axis: Any, coreset: Coreset) -> None:
    full, approximate = coreset.full.tolist(), coreset.approximate.tolist()
    ends = [min(full), max(full)]
    axis.plot(ends, ends, color="0.6", linewidth=1, label="equal")
    axis.scatter(full, approximate, s=12, alpha=0.7, label=f"{len(full)} fresh draws")
    axis.set(
        xlabel="log-likelihood, all data",
        ylabel="of the coreset (both centred)",
        title="Draws it was not fitted on",
    )
    axis.ticklabel_format(style="plain", useOffset=False)
    axis.locator_params(nbins=4)
    axis.legend()
    axis.grid(alpha=0.3)


def _weights(axis: Any, coreset: Coreset) -> None:
    values = coreset.weights.sort(descending=True).values.tolist()
    axis.step(range(1, len(values) + 1), values, where="mid")
    d = coreset.diagnostics
    axis.axhline(d.n / d.kept, color="0.6", linewidth=1, linestyle="--", label="n/k")
    axis.set(xlabel="point, by weight", ylabel="weight", title=f"Weights, sum {d.weight_sum:,.0f}")
    if max(values) > WIDE * min(values):
        axis.set_yscale("log")
    else:
        axis.set_ylim(bottom=0)
    axis.legend()
    axis.grid(alpha=0.3)


def _errors(axis: Any, coreset: Coreset) -> None:
    d = coreset.diagnostics
    bars = {
        "fitted\ndraws": d.fitted_error,
        "fresh\ndraws": d.held_out_error,
        "uniform,\nexpected": d.uniform_error,
    }
    heights = [max(value, SMALLEST) for value in bars.values()]
    shapes = axis.bar(list(bars), heights, color=["0.75", "C0", "0.5"], width=0.6)
    axis.bar_label(shapes, [f"{value:.2g}" for value in bars.values()], padding=2)
    axis.set_yscale("log")
    axis.set_ylim(min(heights) / 3, max(heights) * 4)
    axis.set_axisbelow(True)
    axis.set(ylabel="relative squared error")
    axis.set_title(
        "Error" + (": too few draws\nfor the fitted one to mean anything" if d.degenerate else "")
    )
    axis.grid(axis="y", alpha=0.3)
