"""The error of personal posteriors against the number of points, beside the rate of Theorem 2.

Clients have regression functions of smoothness beta on data of dimension Lambda inside R^s_0
(`corefed/data/hoelder.py`). Networks have L = 2 hidden layers with
T = C_1 n^(Lambda / (2 beta + Lambda)) parameters, as in the proof; C_1 makes it 600 at n = 1000.
PFedBayes trains on n points, CoreSet-PFedBayes and random subsets on n_k of them: n_k = n / 5 at
every n, and several n_k at the largest. Every run is a cell, as in the tables. What is measured of
its posteriors (`posterior_errors.py`) is beside it in errors.json. A Gaussian process of the right
smoothness shows what the data allow (`yardstick.py`).

Steps, batch, draws and learning rate were chosen on seeds 100 to 103, which are not among those
shown.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple, Unpack

from rich.console import Console

from corefed.base import files
from corefed.base.progress import track
from corefed.data import hoelder
from corefed.training import summaries
from corefed_studies.reproduce import cells
from corefed_studies.reproduce.cells import MATCHING, Flags, StudyCell
from corefed_studies.reproduce.rates import picture, posterior_errors, slopes, yardstick
from corefed_studies.reproduce.rates.slopes import CORESET, FRACTION, FULL, ONCE, PROCESS, REDRAWN
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.tables import Options, show
from corefed_studies.theory.quantities import proof_parameters, width_for

ERRORS = "errors.json"
LAYERS = 2
NOISE = 0.3
PARAMETERS = 600.0
"""T at n = 1000, whatever beta and Lambda: it sets C_1."""


class RateScale(NamedTuple):
    """How much of the study is run."""

    problems: tuple[tuple[float, int], ...]  # (beta, Lambda)
    sizes: tuple[int, ...]  # n
    fractions: tuple[float, ...]  # n_k / n at the largest n, beside FRACTION
    seeds: tuple[int, ...]
    rounds: int
    batch: int
    draws: int  # of the weights, per step


SCALES = {
    "quick": RateScale(
        ((1.0, 1), (1.0, 2)), (125, 250, 500, 1000), (0.1, 0.5), (0, 1, 2), 40, 100, 1
    ),
    "paper": RateScale(
        ((0.5, 1), (1.0, 1), (1.0, 2), (2.0, 2), (1.0, 4), (2.0, 4)),
        (250, 500, 1000, 2000, 4000), (0.05, 0.1, 0.5), tuple(range(10)), 240, 500, 4,
    ),
}  # fmt: skip
CLIENTS, LOCAL_STEPS, RENEWED = 4, 50, 200
"""Clients per seed, steps per round, and steps after which a subset is reselected."""


def reproduce(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write rates.json, .md, .html and .png, and a part of a page."""

    def study() -> Results:
        return _study(SCALES[scale], folder, console, options.get("jobs", 0))

    found = show(name, scale, folder, study, slopes.make_tables, options)
    picture.draw(found, folder / f"{name}.png")


def _study(scale: RateScale, folder: Path, console: Console, jobs: int) -> Results:
    """Train and measure what is missing; row and column -> metrics by seed."""
    planned = plan(scale)
    trained = cells.outcomes(planned, folder, console, jobs)
    found: Results = {}
    for cell in track(planned, "measuring", console):
        outcome = trained[cell.row, cell.column]
        if outcome.failure:
            found[cell.row, cell.column] = {"failure": outcome.failure}
            continue
        each = _errors(cells.place_of(cell, folder))
        about = {key: outcome.summary[key] for key in ("cost", "environment")}
        metrics = {key: summaries.over_seeds(values) for key, values in each.items()}
        found[cell.row, cell.column] = {**_about(cell), **about, "metrics": metrics}
    for beta, dimension in scale.problems:
        kept = folder / f"yardstick-{beta:g}-{dimension}.json"
        settings = [_setting(beta, dimension, n) for n in scale.sizes]
        for n, errors in yardstick.errors(settings, scale.seeds, kept, console).items():
            column = column_of(beta, dimension, n, n)
            about = {"beta": beta, "dimension": dimension, "n": n, "k": n}
            found[PROCESS, column] = {**about, "metrics": {"mean": summaries.over_seeds(errors)}}
    return found


def _errors(place: Path) -> dict[str, list[float]]:
    """What errors.json of a finished run says, which is measured first where it is missing."""
    path = place / ERRORS
    if not path.exists():
        files.replace(path, (json.dumps(posterior_errors.measure(place)) + "\n").encode())
    each: dict[str, list[float]] = json.loads(path.read_text(encoding="utf-8"))
    return each


# --- the runs -------------------------------------------------------------------------------------


def plan(scale: RateScale) -> list[StudyCell]:
    """Every run, those of the largest n first."""
    found = []
    for beta, dimension in scale.problems:
        for n in sorted(scale.sizes, reverse=True):
            found.append(_cell(scale, FULL, beta, dimension, n, 1.0))
            more = scale.fractions if n == max(scale.sizes) else ()
            for fraction in (FRACTION, *more):
                found += [
                    _cell(scale, row, beta, dimension, n, fraction)
                    for row in (CORESET, ONCE, REDRAWN)
                ]
    return found


def _cell(
    scale: RateScale, row: str, beta: float, dimension: int, n: int, fraction: float
) -> StudyCell:
    own: dict[str, Flags] = {
        FULL: {"method": "pfedbayes"},
        CORESET: {
            **MATCHING,
            "refresh_every": RENEWED,
            "check_every": RENEWED // 2,
        },
        ONCE: {"method": "random-subset"},
        REDRAWN: {"method": "random-subset", "redraw_every": RENEWED},
    }
    setting = _setting(beta, dimension, n)
    width = width_of(setting)
    flags: Flags = {
        **own[row],
        "data": hoelder.name_of(setting),
        "clients": CLIENTS,
        "seeds": scale.seeds,
        "rounds": scale.rounds,
        "local_steps": LOCAL_STEPS,
        "batch_size": scale.batch,
        "monte_carlo": scale.draws,
        "eta_1": 0.003,
        "eta_2": 0.003,
        "noise": NOISE,
        "hidden": (width,) * LAYERS,
        "evaluate_every": scale.rounds,
        "checkpoint_every": max(1, scale.rounds // 6),
    }
    if row != FULL:
        flags["fraction"] = fraction
    k = round(fraction * n)
    return StudyCell(row, column_of(beta, dimension, n, k), flags)


def _setting(beta: float, dimension: int, n: int) -> hoelder.HoelderSetting:
    return hoelder.HoelderSetting(beta=beta, dimension=dimension, points=n, noise=NOISE)


def width_of(setting: hoelder.HoelderSetting) -> int:
    """M of the network whose T is nearest to C_1 n^(Lambda / (2 beta + Lambda))."""
    beta, dimension = setting.beta, float(setting.dimension)
    constant = PARAMETERS / proof_parameters(1000.0, beta, dimension)
    wanted = proof_parameters(float(setting.points), beta, dimension, float(constant))
    return width_for(float(wanted), setting.ambient, LAYERS)


def column_of(beta: float, dimension: int, n: int, k: int) -> str:
    return f"beta {beta:g} dimension {dimension} n {n} k {k}"


def _about(cell: StudyCell) -> dict[str, Any]:
    setting = hoelder.parse(str(cell.flags["data"]))
    k = round(float(str(cell.flags.get("fraction", 1.0))) * setting.points)
    return {"beta": setting.beta, "dimension": setting.dimension, "n": setting.points, "k": k}
