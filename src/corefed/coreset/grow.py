"""`size="auto"`: the first coreset of a growing series whose error on fresh draws is small enough.

One survey of the data serves all sizes up to half its draws; where none of them suffices, the next
survey has four times as many draws. So the last survey costs three quarters of all.

Where it begins, by the number P of parameters: near a mode, log-likelihoods are nearly quadratic,
with P + P (P + 1) / 2 directions. Fewer draws than that do not determine the weights, and fewer
than a few P points cannot cancel each other's slopes. With P = 32 and 1e-3 as the target, 400 draws
end at an error of 7e-3 with 169 points and 1600 at 5e-4. A network has far fewer directions that
matter than parameters: above SMALL parameters, P says nothing, and it begins at the least.

What a target means: over draws of a nearly Gaussian posterior of P parameters, all data's
log-likelihood has variance P/2, and an error of a part e of it moves each mean by about sqrt(e/2)
standard deviations, root mean square, whatever P is: 0.02 at e = 0.001.
"""

from __future__ import annotations

import dataclasses

from corefed.base.errors import UserError
from corefed.coreset.coreset import Coreset
from corefed.coreset.draws import Draws, Posterior
from corefed.coreset.making import Recipe, make

TARGET = 1e-3
FIRST, STEP = 50, 1.5
"""The smallest size, and the ratio of a size to the one before."""
EACH, SMALL = 4, 100
"""The smallest size per parameter, where there are at most SMALL."""
DRAWS, MORE, MOST = 400, 4, 6400
"""The fewest draws of the first survey, how many times as many the next has, and the bound."""
DETERMINED = 1.5
"""Draws of the first survey per direction of a quadratic."""


class OutOfReachError(UserError):
    """No size reached the target; `coreset` is the best one."""

    def __init__(self, message: str, coreset: Coreset) -> None:
        super().__init__(message)
        self.coreset = coreset


def grown(recipe: Recipe, posterior: Posterior, target: float) -> Coreset:
    """The first coreset of the series with at most `target` error on fresh draws."""
    if not 0 < target < 1:
        raise UserError(f"target is {target!r}; it must be between 0 and 1, such as {TARGET}.")
    n = recipe.source.n
    given = isinstance(posterior, Draws)
    width = (posterior if isinstance(posterior, Draws) else posterior(1, 0, "shape")).width
    surveys = [recipe.samples or 0] if given or recipe.samples else _surveys(width)
    best: Coreset | None = None
    first = least = max(FIRST, EACH * width) if width <= SMALL else FIRST
    for samples in surveys:
        number = samples
        if isinstance(posterior, Draws):
            available = posterior.number - max(2, posterior.number // 5)
            number = min(samples or available, available)
        most = min(number // 2, n // 2)
        sizes = _series(first, least if best is not None else min(first, max(2, most)), most)
        if not sizes:
            continue
        found = make(dataclasses.replace(recipe, samples=samples), posterior, sizes, target)
        if best is None or found.diagnostics.held_out_error < best.diagnostics.held_out_error:
            best = found
        if found.diagnostics.held_out_error <= target:
            # a coreset made anew there has draws by its own size again
            assert found.origin is not None
            return dataclasses.replace(found, origin=found.origin._replace(recipe=recipe))
        least = sizes[-1] + 1
    if best is None:
        raise UserError(
            f"size='auto' grows up to half of {n} points and half of the draws: there are too few; "
            "give size as a number."
        )
    d = best.diagnostics
    more = " Give more draws." if given or recipe.samples else ""
    raise OutOfReachError(
        f"No coreset of up to {d.size} points has an error on fresh draws of {target:g} or less; "
        f"the best, of {d.size}, has {d.held_out_error:.3g}: raise target, or give size as a "
        f"number.{more}",
        best,
    )


def _surveys(width: int) -> list[int]:
    """Draws of each survey, for this many parameters."""
    directions = width + width * (width + 1) // 2 if width <= SMALL else 0
    draws, found = max(DRAWS, min(round(DETERMINED * directions), MOST)), []
    while draws < MOST:
        found.append(draws)
        draws *= MORE
    return [*found, MOST]


def _series(first: int, least: int, most: int) -> list[int]:
    """first, first STEP, .. from least to most; most itself at the end."""
    sizes, k = [], float(first)
    while round(k) <= most:
        if round(k) >= least:
            sizes.append(round(k))
        k *= STEP
    if most >= least and (not sizes or sizes[-1] < 0.8 * most):
        sizes.append(most)
    return sizes
