"""Figure 2 of the paper: Bayesian linear regression of house prices on radial bases over positions.

    y_j = log10 price,    y_j ~ N(b_j^T theta, noise^2),    b_ji = exp(-|p_j - c_i|^2 / (2 l_i^2))

p_j is longitude and latitude in degrees, neither scaled nor projected, as in the coreset
literature. There are 301 bases: 50 at each of the scales l = 0.2, 0.4, 0.8, 1.2, 1.6 and 2 degrees,
and one at 100, which is nearly constant. Their centres c_i are positions drawn from the file. With
the file's log prices of mean m and variance v, noise^2 = v and theta ~ N(m 1, (v + m^2) I): the
prior's variance is the second moment.

A trial draws 1000 rows and its own centres. Potentials are those of the true posterior, either
exact (`regression.tangent`) or by 600 draws, twice the largest k. `held_out` is the exact objective
of the result, so for exact potentials it is the objective itself. Posteriors and both KLs are
closed forms. Sparse VI draws from the posteriors of its own coresets, so it is measured once,
beside the Monte Carlo potentials.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.base.progress import track
from corefed.bayes import regression
from corefed.bayes.regression import Normal, kl, linear_posterior
from corefed.coreset import solvers
from corefed.coreset.problem import Problem, problem
from corefed_studies.data import positions
from corefed_studies.data.positions import Positions
from corefed_studies.reproduce import curves
from corefed_studies.reproduce.curves import LONG, Contender, Measurement
from corefed_studies.reproduce.figure2_map import Panel, draw

SCALES = (0.2, 0.4, 0.8, 1.2, 1.6, 2.0)
CONSTANT = 100.0

EXACT, DRAWN = "exact", "Monte Carlo"

METRICS = {
    "objective": "relative objective",
    "held_out": "the same, exact potentials",
    "reverse_kl": "reverse KL",
    "forward_kl": "forward KL",
    "seconds": "seconds",
}


class SpatialSetting(NamedTuple):
    trials: int
    points: int
    bases: int  # at each of SCALES
    draws: int
    sizes: tuple[int, ...]
    shown: tuple[int, ...]  # sizes on the map
    long: tuple[int, ...]  # sizes of the long A-IHT II
    solvers: tuple[str, ...]


SETTINGS = {
    "paper": SpatialSetting(
        trials=10,
        points=1000,
        bases=50,
        draws=600,
        sizes=(20, 60, 100, 140, 180, 220, 260, 300),
        shown=(220, 260, 300),
        long=(220, 260, 300),
        solvers=tuple(solvers.SOLVERS),
    ),
    "quick": SpatialSetting(
        trials=1,
        points=200,
        bases=10,
        draws=120,
        sizes=(20, 40, 60),
        shown=(20, 40, 60),
        long=(60,),
        solvers=(solvers.DEFAULT, "omp", "aiht-2", "uniform"),
    ),
}


def reproduce(
    name: str,
    scale: str,
    folder: Path,
    console: Console,
    data: Path | None = None,
    postcodes: Path | None = None,
) -> None:
    """Write figure2.md, .json, .png and figure2-map.png; `data` is a file of `positions.load`."""
    setting = SETTINGS[scale]
    places = positions.load(data, postcodes)
    if len(places.where) < setting.points:
        raise UserError(
            f"{places.name} has {len(places.where)} rows with a price and a position; scale "
            f"{scale} draws {setting.points} of them."
        )
    about = {"data": places.name, "rows": len(places.where), "dropped": places.dropped}
    console.print(f"{places.name}: {about['rows']} rows, {places.dropped} dropped")
    settings = {**about, **setting._asdict()}
    kept = curves.Kept(folder / "figure2.jsonl", settings, ("trial", "kind", "solver", "k"))
    measure_all(places, setting, kept, console)
    lines = list(kept.lines.values())
    found = curves.summary(lines, ("kind", "solver", "k"), list(METRICS))
    figures = {"settings": settings, "summary": found}
    (folder / "figure2.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "figure2.md").write_text("\n".join(_text(settings, setting, lines)) + "\n")
    shown = {k: METRICS[k] for k in ("objective", "reverse_kl", "forward_kl")}
    groups = {kind: [line for line in lines if line["kind"] == kind] for kind in (EXACT, DRAWN)}
    curves.picture(groups, shown, folder / "figure2.png", floor=1e-4)
    _map(trial(places, setting, 0), setting, folder / "figure2-map.png")


# --- one trial ------------------------------------------------------------------------------------


class Trial(NamedTuple):
    where: Tensor  # [n, 2]
    centres: Tensor  # [d, 2]
    scales: Tensor  # [d]
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    prior: Normal
    noise: float
    truth: Normal
    potentials: dict[str, Tensor]  # [n, S] by kind
    number: int

    def posterior(self, w: Tensor) -> Normal:
        return linear_posterior(self.x, self.y, w, self.prior, self.noise)


def bases(where: Tensor, centres: Tensor, scales: Tensor) -> Tensor:
    """[n, d]."""
    square = (where.unsqueeze(1) - centres).square().sum(-1)
    return (-square / (2 * scales.square())).exp()


def trial(places: Positions, setting: SpatialSetting, number: int) -> Trial:
    draw = rng.generator(number, 0, rng.SERVER, "figure2 rows and centres")
    rows = torch.randperm(len(places.where), generator=draw)[: setting.points]
    scales = torch.tensor((*SCALES,) * setting.bases + (CONSTANT,), dtype=torch.float64)
    centres = places.where[torch.randint(len(places.where), (len(scales),), generator=draw)]
    x, y = bases(places.where[rows], centres, scales), places.log_price[rows]
    prior, noise = model(places.log_price, len(scales))
    truth = linear_posterior(x, y, torch.ones_like(y), prior, noise)
    thetas = truth.sample(setting.draws, rng.generator(number, 0, rng.SERVER, "figure2 draws"))
    potentials = {
        EXACT: regression.tangent(x, y, truth, noise),
        DRAWN: regression.potentials(regression.gaussian(noise), thetas, x, y),
    }
    return Trial(places.where[rows], centres, scales, x, y, prior, noise, truth, potentials, number)


def model(log_price: Tensor, d: int) -> tuple[Normal, float]:
    """Prior and noise, from all prices of the file."""
    mean, variance = log_price.mean(), log_price.var(correction=0)
    eye = torch.eye(d, dtype=log_price.dtype)
    return Normal(mean.expand(d), (variance + mean.square()) * eye), float(variance.sqrt())


def measure(
    this: Trial, setting: SpatialSetting, kind: str, contender: Contender, k: int
) -> tuple[Tensor, Measurement]:
    """w [n] of one solver, and how near its posterior is to that of all data."""
    g, exact = this.potentials[kind].unsqueeze(0), this.potentials[EXACT].unsqueeze(0)

    def resample(w: Tensor, step: int) -> Problem:
        draw = rng.generator(this.number, step, k, "figure2 resample")
        thetas = this.posterior(w[0]).sample(setting.draws, draw)
        family = regression.gaussian(this.noise)
        return problem(regression.potentials(family, thetas, this.x, this.y).unsqueeze(0), k)

    draw = rng.generator(this.number, 0, k, "figure2 solver")
    w, line = curves.solve(contender, problem(g, k), draw, resample)
    coreset = this.posterior(w[0])
    line |= {
        "held_out": curves.relative_objective(problem(exact, k), w),
        "reverse_kl": float(kl(coreset, this.truth)),
        "forward_kl": float(kl(this.truth, coreset)),
        "weight": float(w.sum()),
    }
    return w[0], line


def jobs(setting: SpatialSetting) -> Iterator[tuple[dict[str, Any], Contender]]:
    """Every measurement there is to make: its key, and who makes it."""
    plain = [(c, setting.sizes) for c in curves.contenders(setting.solvers)]
    for number in range(setting.trials):
        for kind in (EXACT, DRAWN):
            for contender, sizes in [*plain, (LONG, setting.long)]:
                if kind == EXACT and solvers.SOLVERS[contender.solver].resample:
                    continue
                for k in sizes:
                    key = {"trial": number, "kind": kind, "solver": contender.label, "k": k}
                    yield key, contender


def measure_all(
    places: Positions, setting: SpatialSetting, kept: curves.Kept, console: Console
) -> None:
    wanted = [job for job in jobs(setting) if job[0] not in kept]
    this: Trial | None = None
    for key, contender in track(wanted, "solvers", console):
        if this is None or this.number != key["trial"]:
            this = trial(places, setting, key["trial"])
        _, line = measure(this, setting, key["kind"], contender, key["k"])
        kept.add(key | line)


# --- what is written ------------------------------------------------------------------------------


def _text(settings: Measurement, setting: SpatialSetting, lines: list[Measurement]) -> list[str]:
    labels = [*setting.solvers, LONG.label]
    largest = max(setting.sizes)
    text = [
        f"{settings['data']}: {settings['rows']} rows ({settings['dropped']} dropped), "
        f"{setting.trials} trials of {setting.points} points, "
        f"{len(SCALES) * setting.bases + 1} bases; mean ± standard deviation over trials. "
        "Relative objective: ||y - Phi w||² / ||y||². Reverse KL: of the coreset's posterior from "
        "that of all data; forward KL: the other way round.",
        "",
        *_target(lines, largest),
    ]
    for kind in (EXACT, DRAWN):
        rows = [label for label in labels if curves.values(lines, "k", solver=label, kind=kind)]
        text += [f"## {kind} potentials", "", f"k = {largest}", ""]
        wanted: dict[str, object] = {"kind": kind, "k": largest}
        columns = {title: (metric, wanted) for metric, title in METRICS.items()}
        text += curves.table(lines, rows, columns)
        for metric in ("reverse_kl", "forward_kl", "objective"):
            text += [METRICS[metric], ""]
            by_size: dict[str, tuple[str, dict[str, object]]] = {
                f"k = {k}": (metric, {"kind": kind, "k": k}) for k in setting.sizes
            }
            text += curves.table(lines, rows, by_size)
    return text


def _target(lines: list[Measurement], k: int) -> list[str]:
    """The default solver against the long run of the paper's, in words."""
    text = []
    for kind in (EXACT, DRAWN):
        mine = {"solver": solvers.DEFAULT, "kind": kind, "k": k}
        longer = {**mine, "solver": LONG.label}
        reverse = curves.values(lines, "reverse_kl", **mine)
        other = curves.values(lines, "reverse_kl", **longer)
        ahead = sum(a <= b for a, b in zip(reverse, other, strict=True))
        text.append(
            f"- {kind}, k = {k}: reverse KL of {solvers.DEFAULT} {curves.cell(reverse)}, of "
            f"A-IHT II with {LONG.iterations} iterations {curves.cell(other)}, not above it in "
            f"{ahead} of {len(reverse)} trials; greatest forward KL "
            f"{max(curves.values(lines, 'forward_kl', **mine)):.3g}."
        )
    return [*text, ""]


def _map(this: Trial, setting: SpatialSetting, path: Path) -> None:
    """Coresets of growing size over their posterior mean, and all data over theirs."""
    panels = []
    contender = Contender(solvers.DEFAULT, solvers.DEFAULT)
    for k in setting.shown:
        w, line = measure(this, setting, EXACT, contender, k)
        title = f"k = {k}\nKL {line['reverse_kl']:.2g} reverse, {line['forward_kl']:.2g} forward"
        panels.append(Panel(title, this.posterior(w).mean, w))
    everything = f"true posterior\nall {len(this.y)} points"
    panels.append(Panel(everything, this.truth.mean, torch.ones_like(this.y)))
    draw(this.where, panels, lambda cells: bases(cells, this.centres, this.scales), path)
