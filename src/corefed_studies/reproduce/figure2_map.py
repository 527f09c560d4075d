"""The map of Figure 2: coresets over the surface that they imply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base import panels as sheets

GRID = 160
"""Cells along each side of the map."""

NEAR = 1 / 25
"""Of the map's height: a cell further from every point is left white, nothing is known there."""


class Panel(NamedTuple):
    title: str
    theta: Tensor  # [d] coefficients of the surface
    w: Tensor  # [n] weights of the points


def draw(
    where: Tensor, panels: Sequence[Panel], surface_of: Callable[[Tensor], Tensor], path: Path
) -> None:
    """Points of positive weight over the surface of each panel, the last of which sets the colours.

    `where` [n, 2] is longitude and latitude; `surface_of` gives the bases [m, d] at m positions.
    """
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    low, high = where.amin(0), where.amax(0)
    margin = (high - low) * 0.04
    side = torch.linspace(0, 1, GRID, dtype=torch.float64).unsqueeze(-1)
    longitude, latitude = ((low - margin) + side * (high - low + 2 * margin)).T
    cells = torch.cartesian_prod(latitude, longitude).flip(-1)
    surface = surface_of(cells)
    far = torch.cdist(cells, where).amin(-1) > NEAR * (high - low)[1]

    heights = [
        (surface @ each.theta).masked_fill(far, torch.nan).reshape(GRID, GRID) for each in panels
    ]
    known = heights[-1][~heights[-1].isnan()]
    bounds = known.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64))
    light = ListedColormap(colormaps["YlGnBu_r"](torch.linspace(0.4, 1, 64).tolist()))
    levels = MaxNLocator(14).tick_values(float(bounds[0]), float(bounds[1]))
    aspect = 1 / float(torch.deg2rad(latitude.mean()).cos())  # a degree of latitude is longer
    figure, axes = sheets.panels(len(panels), height=3.6)
    for axis, (title, _, w), z in zip(axes, panels, heights, strict=True):
        filled = axis.contourf(longitude, latitude, z, levels=levels, cmap=light, extend="both")
        axis.contour(longitude, latitude, z, levels=levels, colors="white", linewidths=0.4)
        here = w > 0
        # The area is the weight: a point that stands for four is twice as wide.
        area = 3.5 * w[here]
        axis.scatter(*where[here].T, s=area, color="black", alpha=0.7, linewidths=0, zorder=3)
        axis.set(title=title, xlabel="longitude")
        axis.set_aspect(aspect)
        axis.set_ylabel("latitude")
    figure.colorbar(filled, ax=axes, label="posterior mean of log10 price", shrink=0.85)
    sheets.save(figure, path)
