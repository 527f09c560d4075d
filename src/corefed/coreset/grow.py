"""`size="auto"`: the first coreset of a growing series whose error on fresh draws is small enough.

One survey of the data serves all sizes up to half its draws; where none of them suffices, the next
survey has four times as many draws. So the last survey costs three quarters of all.

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
SURVEYS = (400, 1600, 6400)
"""Draws of each survey."""


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
    surveys = [recipe.samples or 0] if given or recipe.samples else list(SURVEYS)
    best: Coreset | None = None
    least = FIRST
    for samples in surveys:
        number = samples
        if isinstance(posterior, Draws):
            available = posterior.number - max(2, posterior.number // 5)
            number = min(samples or available, available)
        most = min(number // 2, n // 2)
        sizes = _series(least if best is not None else min(FIRST, max(2, most)), most)
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


def _series(least: int, most: int) -> list[int]:
    """FIRST, FIRST STEP, .. from least to most; most itself at the end."""
    sizes, k = [], float(FIRST)
    while round(k) <= most:
        if round(k) >= least:
            sizes.append(round(k))
        k *= STEP
    if most >= least and (not sizes or sizes[-1] < 0.8 * most):
        sizes.append(most)
    return sizes
