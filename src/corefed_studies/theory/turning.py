"""Where epsilon_n^2 turns: Lemma 3 takes it to rise with n, and it does so only up to n*.

With l = log n, log epsilon_n^2 = log T - l + log(G + l/2) + 2 delta log l has the slope

    1 / (2G + l) + 2 delta / l - 1,

which is positive up to one point, l* = log n*, and negative beyond it. Where T = C_1 n^a is set
for every n (a of the proof of Theorem 2, M and L fixed), G of T = C_1 takes the place of G and
(1 - a) l that of l, so that n* is raised to the power 1 / (1 - a).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from corefed.base.errors import UserError
from corefed_studies.theory.quantities import above, at_least, finite

SMALLEST, LARGEST = -600.0, 7.0
"""Ends of a search over log l: from n next to 1 to n = e^1096, beyond the range of a float."""


def turning_point(G: float, delta: float, a: float = 0.0) -> float:
    """n* of Lemma 3; epsilon_n^2 rises up to it and falls from there.

    l* = (b + sqrt(b^2 + 16 delta G)) / 2,    b = 1 + 2 delta - 2G.

    For G >= 0 it lies between e^(2 delta) and e^(2 delta + 1).
    """
    above(1, delta=delta)
    finite("G", G)
    if not 0 <= a < 1:
        raise UserError(f"a is {a:g}; the exponent of T = C_1 n^a must be from 0 to below 1.")
    b = 1 + 2 * delta - 2 * G
    root = math.hypot(b, 4 * math.sqrt(delta * G)) if G >= 0 else math.sqrt(b**2 + 16 * delta * G)
    # The two forms are one number; each is used where it does not subtract alike numbers.
    log = (b + root) / 2 if b >= 0 else 8 * delta * G / (root - b)
    with np.errstate(over="ignore"):
        return float(finite("n*", np.exp(log / (1 - a))))


def partner(n: float, G: float, delta: float) -> float:
    """k' < n* with epsilon_{k'}^2 = epsilon_n^2, for n > n*: Lemma 3 holds for n_k < k' alone."""
    at_least(1, n=n)
    top = math.log(turning_point(G, delta))
    if not math.log(n) > top:
        raise UserError(f"n is {n:g}; it has a partner only beyond n* = {math.exp(top):.4g}.")
    start = max(0.0, -2 * G)  # below it epsilon is not real
    wanted = _log_shape(math.log(n), G, delta)

    def excess(u: float) -> float:
        return _log_shape(start + math.exp(u), G, delta, math.exp(u)) - wanted

    u = brentq(excess, SMALLEST, math.log(top - start), xtol=1e-14, rtol=1e-14)
    return math.exp(start + math.exp(u))


def falls_below(level: float, T: float, G: float, delta: float) -> float:
    """The n from which on epsilon_n^2 is at most the level; d^2 <= 1 makes 1 of interest."""
    above(0, level=level)
    at_least(1, T=T)
    top = math.log(turning_point(G, delta))
    wanted = math.log(level) - math.log(T)
    if _log_shape(top, G, delta) <= wanted:
        return 1.0
    u = brentq(
        lambda u: _log_shape(math.exp(u), G, delta) - wanted,
        math.log(top),
        LARGEST,
        xtol=1e-14,
        rtol=1e-14,
    )
    with np.errstate(over="ignore"):
        return float(finite("n", np.exp(math.exp(u))))


def _log_shape(log_n: float, G: float, delta: float, above_start: float | None = None) -> float:
    """log(epsilon_n^2 / T); `above_start` is 2G + log n where G < 0, in full precision."""
    both = 2 * G + log_n if above_start is None or G >= 0 else above_start
    return -log_n + math.log(both / 2) + 2 * delta * math.log(log_n)
