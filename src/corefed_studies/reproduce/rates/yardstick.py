"""What the data of a rate study allow: a Gaussian process of the right smoothness on all points.

A Matern process of smoothness beta learns beta-smooth functions on a surface of dimension Lambda at
the rate n^(-2 beta / (2 beta + Lambda)), whatever R^s_0 contains it. Its scales are fitted by the
marginal likelihood on the smallest n and kept; the noise is the true one. So its error against n
shows how hard these functions are at these n, where rates need not hold yet. One client per seed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from corefed.base import files
from corefed.base.progress import track
from corefed.data import hoelder


def errors(
    settings: Sequence[hoelder.HoelderSetting], seeds: Sequence[int], kept: Path, console: Console
) -> dict[int, list[float]]:
    """n -> the error of the mean prediction by seed; what `kept` has is not computed again."""
    known: dict[str, dict[str, float]] = (
        json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    )
    missing = [seed for seed in seeds if str(seed) not in known]
    for seed in track(missing, "Gaussian processes", console):
        known[str(seed)] = {str(n): error for n, error in of_seed(settings, seed).items()}
        files.replace(kept, (json.dumps(known) + "\n").encode())
    return {s.points: [known[str(seed)][str(s.points)] for seed in seeds] for s in settings}


def of_seed(settings: Sequence[hoelder.HoelderSetting], seed: int) -> dict[int, float]:
    """Of the first client, at every n."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    found = {}
    first, *_ = ordered = sorted(settings, key=lambda setting: setting.points)
    kernel = ConstantKernel(1.0, (0.01, 100.0)) * Matern(2.0, (0.1, 100.0), nu=first.beta)
    for place, setting in enumerate(ordered):
        drawn = hoelder.draw(setting, 1, seed)
        x, y, signal = (part.double().numpy() for part in (drawn.x, drawn.y, drawn.signal))
        test = drawn.held_out.numpy()
        process = GaussianProcessRegressor(
            kernel,
            alpha=setting.noise**2,
            optimizer="fmin_l_bfgs_b" if place == 0 else None,
        )
        with warnings.catch_warnings():  # a line search that finds nothing better at the optimum
            warnings.simplefilter("ignore", ConvergenceWarning)
            process.fit(x[~test], y[~test, 0])
        kernel = process.kernel_
        off = process.predict(x[test]) - signal[test, 0]
        found[setting.points] = float(np.square(off).mean())
    return found
