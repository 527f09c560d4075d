"""`corefed bench solvers`: every solver on three problems whose posteriors are known.

    logistic   x_j ~ N(0, I), 20 coefficients; posteriors by Laplace's approximation
    rbf        regression on 301 radial bases over positions, as in `figure2.py`; exact
    gaussian   x_j ~ N(theta, I), the mean of 200 dimensions unknown; exact

Potentials are S draws from the full posterior, in float32 as the library takes them. The objective
that a solver was given does not decide. So the tables also show the objective on fresh draws, and
the divergence of the coreset's posterior from the full one. A-IHT II is also timed against one
product with Phi^T, the least that an iteration can cost.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from corefed.base.device import device_for
from corefed.base.progress import bars
from corefed.bayes import regression
from corefed.bayes.regression import Normal
from corefed.coreset import aiht, problem, solvers
from corefed.coreset.problem import Problem
from corefed_studies import pages
from corefed_studies.reproduce import curves, figure2


class SolverSetting(NamedTuple):
    """How much is measured at a scale."""

    points: int
    draws: int
    fresh: int
    sizes: tuple[int, ...]


SETTINGS = {
    "paper": SolverSetting(20_000, 500, 1000, (100, 300, 1000)),
    "quick": SolverSetting(600, 80, 100, (20, 40)),
}

METRICS = {
    "objective": "objective",
    "held_out": "on fresh draws",
    "reverse_kl": "reverse KL",
    "forward_kl": "forward KL",
    "seconds": "seconds",
}


class Case(NamedTuple):
    """A data set with a model: its posterior under any weights, and potentials at any draws."""

    posterior: Callable[[Tensor], Normal]  # w [n] -> pi_w
    potentials: Callable[[Tensor], Tensor]  # thetas [S, d] -> g [n, S]
    points: int

    def full(self) -> Normal:
        return self.posterior(torch.ones(self.points, dtype=torch.float64))


def main(
    scale: str, out: Path | None, console: Console, device_name: str, *, page: Path | None = None
) -> None:
    """Measure, keep each number as it comes, and write solvers.md, .json and .png into `out`.

    On a `page` with marks, what lies between them becomes solvers.md.
    """
    marked = pages.Marked(page, "bench solvers") if page is not None else None
    device = device_for(device_name)
    folder = out or Path("runs") / f"bench-solvers-{device.type}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    setting = SETTINGS[scale]
    settings = {**setting._asdict(), "device": device.type}
    kept = curves.Kept(folder / "solvers.jsonl", settings, ("problem", "solver", "k"))
    floor = []
    for name, make in CASES.items():
        case = make(setting.points)
        measure_all(name, case, setting, kept, console, device)
        floor.append(_iteration(name, case, setting, device))
    lines = list(kept.lines.values())
    text = _text(setting, lines, floor)
    figures = {"settings": settings, "lines": lines, "iteration": floor}
    (folder / "solvers.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "solvers.md").write_text(text)
    groups = {name: [line for line in lines if line["problem"] == name] for name in CASES}
    shown = {k: METRICS[k] for k in ("held_out", "seconds")}
    curves.picture(groups, shown, folder / "solvers.png", floor=1e-7)
    if marked is not None:
        marked.write(text)
    console.print(f"written to {page or folder / 'solvers.md'}")


def measure_all(
    name: str,
    case: Case,
    setting: SolverSetting,
    kept: curves.Kept,
    console: Console,
    device: torch.device,
) -> None:
    """Every solver at every size, but for those that are kept already."""
    jobs: list[curves.Measurement] = [
        {"problem": name, "solver": solver, "k": k}
        for k in setting.sizes
        for solver in solvers.SOLVERS
    ]
    jobs = [job for job in jobs if job not in kept]
    if not jobs:
        return
    full = case.full()
    g = _draw_potentials(case, full, setting.draws, 0).to(device)
    fresh = _draw_potentials(case, full, setting.fresh, 1).to(device)
    with bars(console=console) as shown:
        for done, job in enumerate(jobs):
            text = f"{done}/{len(jobs)}, k = {job['k']}, {job['solver']}"
            shown.show(name, done, len(jobs), text)
            kept.add({**job, **measure(case, full, g, fresh, job["solver"], job["k"])})
    console.print(f"{name}: done")


def measure(
    case: Case, full: Normal, g: Tensor, fresh: Tensor, solver: str, k: int
) -> dict[str, Any]:
    """One solver at one size."""

    def resample(w: Tensor, step: int) -> Problem:
        """Potentials under draws of the coreset's own posterior, for sparse-vi."""
        now = case.posterior(w[0].double().cpu())
        return problem.problem(
            _draw_potentials(case, now, g.shape[1], 2 + step).to(g).unsqueeze(0), k
        )

    posed = problem.problem(g.unsqueeze(0), k)
    generator = torch.Generator().manual_seed(0)
    w, line = curves.solve(curves.Contender(solver, solver), posed, generator, resample)
    judged = problem.problem(fresh.unsqueeze(0), k)
    mine = case.posterior(w[0].double().cpu())
    line["held_out"] = curves.relative_objective(judged, w)
    line["reverse_kl"] = float(regression.kl(mine, full))
    line["forward_kl"] = float(regression.kl(full, mine))
    return line


def _draw_potentials(case: Case, posterior: Normal, draws: int, stream: int) -> Tensor:
    """g [n, S] in float32, from draws of a stream of their own."""
    thetas = posterior.sample(draws, torch.Generator().manual_seed(stream))
    return case.potentials(thetas).float()


def _iteration(
    name: str, case: Case, setting: SolverSetting, device: torch.device
) -> dict[str, Any]:
    """Seconds of an iteration of A-IHT II and of one product with Phi^T, in turn, in one run."""
    g = _draw_potentials(case, case.full(), setting.draws, 0).to(device)
    posed = problem.problem(g.unsqueeze(0), setting.sizes[0])
    iterations, repeats = 20, 5
    best = {"product": math.inf, "iteration": math.inf}
    for _ in range(repeats):
        start = _synchronised_time(device)
        for _ in range(iterations):
            posed.points.correlate(posed.y)
        middle = _synchronised_time(device)
        aiht.solve(posed, iterations=iterations, debias=True)
        end = _synchronised_time(device)
        best["product"] = min(best["product"], (middle - start) / iterations)
        best["iteration"] = min(best["iteration"], (end - middle) / iterations)
    return {"problem": name, "k": setting.sizes[0], **best}


def _synchronised_time(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _text(
    setting: SolverSetting, lines: list[curves.Measurement], floor: list[dict[str, Any]]
) -> str:
    text = [f"n = {setting.points}, S = {setting.draws}, {setting.fresh} fresh draws.", ""]
    for name in CASES:
        for k in setting.sizes:
            mine = [line for line in lines if line["problem"] == name and line["k"] == k]
            text += [f"**{name}, k = {k}**", ""]
            if k >= setting.draws - 1:
                text += [f"*S - 1 = {setting.draws - 1} < k: an exact zero exists and says nothing"]
                text[-1] += " of the fit; the other columns do.*"
                text += [""]
            columns: dict[str, tuple[str, dict[str, object]]] = {
                heading: (metric, {}) for metric, heading in METRICS.items()
            }
            text += curves.table(mine, list(solvers.SOLVERS), {**columns, "points": ("points", {})})
    text += ["**A-IHT II: an iteration against one product with all of Phi**", ""]
    text += ["| problem | k | product, ms | iteration, ms | ratio |", "|---" * 5 + "|"]
    for row in floor:
        product, iteration = 1e3 * row["product"], 1e3 * row["iteration"]
        text.append(
            f"| {row['problem']} | {row['k']} | {product:.2f} | {iteration:.2f} | "
            f"{iteration / product:.2f} |"
        )
    return "\n".join(text) + "\n"


# --- the three problems ---------------------------------------------------------------------------


def logistic(n: int, d: int = 20) -> Case:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)
    theta = torch.randn(d, generator=g, dtype=torch.float64)
    y = (torch.rand(n, generator=g, dtype=torch.float64) < torch.sigmoid(x @ theta)).double()
    prior = Normal(torch.zeros(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64))
    return Case(
        lambda w: regression.laplace(regression.logistic, x, y, w, prior),
        lambda thetas: regression.potentials(regression.logistic, thetas, x, y),
        n,
    )


def rbf(n: int) -> Case:
    """Positions in forty towns, a smooth surface over them, noise of a third of its spread."""
    g = torch.Generator().manual_seed(0)
    towns = 10 * torch.rand(40, 2, generator=g, dtype=torch.float64)
    home = torch.randint(40, (n,), generator=g)
    where = towns[home] + 0.5 * torch.randn(n, 2, generator=g, dtype=torch.float64)
    each = 50 if n >= 5000 else 10
    scales = torch.tensor([*(s for s in figure2.SCALES for _ in range(each)), figure2.CONSTANT])
    centres = where[torch.randperm(n, generator=g)[: len(scales)]]
    x = figure2.bases(where, centres, scales.double())
    surface = x @ torch.randn(len(scales), generator=g, dtype=torch.float64)
    noise = float(surface.std()) / 3
    y = surface + noise * torch.randn(n, generator=g, dtype=torch.float64)
    d = x.shape[1]
    prior = Normal(torch.zeros(d, dtype=torch.float64), torch.eye(d, dtype=torch.float64))
    family = regression.gaussian(noise)
    return Case(
        lambda w: regression.linear_posterior(x, y, w, prior, noise),
        lambda thetas: regression.potentials(family, thetas, x, y),
        n,
    )


def gaussian(n: int, d: int = 200) -> Case:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=g, dtype=torch.float64)

    def posterior(w: Tensor) -> Normal:  # prior N(0, I)
        precision = 1 + w.sum()
        return Normal(w @ x / precision, torch.eye(d, dtype=x.dtype) / precision)

    def potentials(thetas: Tensor) -> Tensor:  # -|x - theta|^2 / 2, less what no theta changes
        f = x @ thetas.T - 0.5 * thetas.square().sum(-1)
        return (f - f.mean(-1, keepdim=True)) / math.sqrt(len(thetas))

    return Case(posterior, potentials, n)


CASES: dict[str, Callable[[int], Case]] = {"logistic": logistic, "rbf": rbf, "gaussian": gaussian}
