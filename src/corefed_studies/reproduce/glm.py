"""Coresets of logistic and Poisson regressions: every solver on six small sets of the literature.

theta ~ N(0, I), the six sets of `data/coreset_sets.py` in their own units. The full posterior and
those of the coresets are Laplace approximations, so both KLs are closed forms. Potentials are 500
draws of the full one; `held_out` is the objective on 2000 others. How good Laplace is, is measured
too: by a long run of Hamiltonian Monte Carlo on all data of each set, and one on the coreset. Both
comparisons are distances of means, in standard deviations of the long run.
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
from corefed.base.progress import track
from corefed.bayes.regression import Family, Normal, kl, laplace, logistic, poisson, potentials
from corefed.coreset import solvers
from corefed.coreset.problem import Problem, problem
from corefed_studies.data import coreset_sets
from corefed_studies.reproduce import curves, hamiltonian
from corefed_studies.reproduce.curves import LONG, Contender, Measurement

FAMILIES = {"logistic": logistic, "poisson": poisson}

METRICS = {
    "objective": "relative objective",
    "held_out": "the same on fresh draws",
    "reverse_kl": "reverse KL",
    "forward_kl": "forward KL",
    "mean_error": "error of the mean in MCMC standard deviations",
    "seconds": "seconds",
}


class GlmSetting(NamedTuple):
    sets: tuple[str, ...]
    seeds: int
    draws: int
    fresh: int
    sizes: tuple[int, ...]
    shown: int  # the size in the tables
    solvers: tuple[str, ...]
    chains: int
    chain_draws: int


SETTINGS = {
    "paper": GlmSetting(
        sets=tuple(coreset_sets.SETS),
        seeds=5,
        draws=500,
        fresh=2000,
        sizes=(10, 20, 50, 100, 200),
        shown=100,
        solvers=tuple(solvers.SOLVERS),
        chains=40,
        chain_draws=500,
    ),
    "quick": GlmSetting(
        sets=("synth_lr", "synth_poiss"),
        seeds=1,
        draws=200,
        fresh=500,
        sizes=(5, 20, 100),
        shown=100,
        solvers=(solvers.DEFAULT, "omp", "aiht-2", "uniform"),
        chains=10,
        chain_draws=100,
    ),
}


def reproduce(name: str, scale: str, folder: Path, console: Console) -> None:
    """Write glm.md, glm.json and glm.png."""
    setting = SETTINGS[scale]
    settings = setting._asdict()
    checks = curves.Kept(folder / "glm-mcmc.jsonl", settings, ("set",))
    for each in track(setting.sets, "Monte Carlo", console):
        if {"set": each} not in checks:
            checks.add({"set": each} | check(load(each), setting))
    kept = curves.Kept(folder / "glm.jsonl", settings, ("set", "seed", "solver", "k"))
    measure_all(setting, kept, checks, console)
    lines, mcmc = list(kept.lines.values()), list(checks.lines.values())
    found = curves.summary(lines, ("set", "solver", "k"), list(METRICS))
    figures = {"settings": settings, "laplace": mcmc, "summary": found}
    (folder / "glm.json").write_text(json.dumps(figures, indent=1) + "\n")
    (folder / "glm.md").write_text("\n".join(_text(setting, lines, mcmc)) + "\n")
    shown = {"reverse_kl": METRICS["reverse_kl"]}
    groups = {each: [line for line in lines if line["set"] == each] for each in setting.sets}
    curves.picture(groups, shown, folder / "glm.png", floor=1e-6)


# --- one set --------------------------------------------------------------------------------------


class Regression(NamedTuple):
    name: str
    family: Family
    x: Tensor  # [n, d]
    y: Tensor  # [n]
    prior: Normal
    truth: Normal  # Laplace's

    def posterior(self, w: Tensor) -> Normal:
        return laplace(self.family, self.x, self.y, w, self.prior)

    def chains(
        self, w: Tensor, start: Normal, setting: GlmSetting, stream: int
    ) -> hamiltonian.Chains:
        return hamiltonian.sample(
            *(self.family, self.x, self.y, w, self.prior, start),
            chains=setting.chains,
            draws=setting.chain_draws,
            generator=rng.generator(0, 0, stream, f"glm chains {self.name}"),
        )

    def problem(self, thetas: Tensor, k: int) -> Problem:
        return problem(potentials(self.family, thetas, self.x, self.y).unsqueeze(0), k)


def load(name: str) -> Regression:
    data = coreset_sets.load(name)
    d = data.x.shape[1]
    prior = Normal(torch.zeros(d, dtype=data.x.dtype), torch.eye(d, dtype=data.x.dtype))
    family = FAMILIES[data.family]
    truth = laplace(family, data.x, data.y, torch.ones_like(data.y), prior)
    return Regression(name, family, data.x, data.y, prior, truth)


def check(this: Regression, setting: GlmSetting) -> Measurement:
    """Laplace against a long run: means in the run's standard deviations, and ratios of those."""
    run = this.chains(torch.ones_like(this.y), this.truth, setting, rng.SERVER)
    error = (this.truth.mean - run.mean) / run.std
    ratio = this.truth.covariance.diagonal().sqrt() / run.std
    return {
        "family": this.family.name,
        "d": len(run.mean),
        "draws": setting.chains * setting.chain_draws,
        "acceptance": run.acceptance,
        "r_hat": float(run.r_hat().max()),
        "standard_error": float((run.standard_error() / run.std).max()),
        "mean_error": _rms(error),
        "worst_mean_error": float(error.abs().max()),
        "least_ratio": float(ratio.min()),
        "greatest_ratio": float(ratio.max()),
        "mean": run.mean.tolist(),
        "std": run.std.tolist(),
    }


def measure(
    this: Regression,
    setting: GlmSetting,
    seed: int,
    contender: Contender,
    k: int,
    mcmc: Measurement,
) -> Measurement:
    """One solver at one size, and how near its posterior is to that of all data."""

    def draws(purpose: str) -> torch.Generator:
        return rng.generator(seed, 0, k, f"glm {this.name} {purpose}")

    def resample(w: Tensor, step: int) -> Problem:
        generator = rng.generator(seed, step, k, f"glm {this.name} resample")
        return this.problem(this.posterior(w[0]).sample(setting.draws, generator), k)

    fitted = this.problem(this.truth.sample(setting.draws, draws("draws")), k)
    fresh = this.problem(this.truth.sample(setting.fresh, draws("fresh draws")), k)
    w, line = curves.solve(contender, fitted, draws("solver"), resample)
    coreset = this.posterior(w[0])
    mean, std = (torch.tensor(mcmc[key], dtype=w.dtype) for key in ("mean", "std"))
    line |= {
        "held_out": curves.relative_objective(fresh, w),
        "reverse_kl": float(kl(coreset, this.truth)),
        "forward_kl": float(kl(this.truth, coreset)),
        "mean_error": _rms((coreset.mean - mean) / std),
    }
    if contender.label == solvers.DEFAULT and k == setting.shown:
        run = this.chains(w[0], coreset, setting, seed)
        line["chains_mean_error"] = _rms((run.mean - mean) / std)
        line["chains_r_hat"] = float(run.r_hat().max())
    return line


def _rms(v: Tensor) -> float:
    return float(v.square().mean().sqrt())


def jobs(setting: GlmSetting) -> Iterator[tuple[dict[str, Any], Contender]]:
    for each in setting.sets:
        for seed in range(setting.seeds):
            for contender in [*curves.contenders(setting.solvers), LONG]:
                for k in setting.sizes if contender != LONG else (setting.shown,):
                    yield {"set": each, "seed": seed, "solver": contender.label, "k": k}, contender


def measure_all(
    setting: GlmSetting, kept: curves.Kept, checks: curves.Kept, console: Console
) -> None:
    wanted = [job for job in jobs(setting) if job[0] not in kept]
    this: Regression | None = None
    for key, contender in track(wanted, "solvers", console):
        if this is None or this.name != key["set"]:
            this = load(key["set"])
        mcmc = checks.lines[(key["set"],)]
        kept.add(key | measure(this, setting, key["seed"], contender, key["k"], mcmc))


# --- what is written ------------------------------------------------------------------------------


def _text(setting: GlmSetting, lines: list[Measurement], mcmc: list[Measurement]) -> list[str]:
    text = [
        "Full-data Laplace posterior against Hamiltonian Monte Carlo. Differences of means are in "
        "Monte Carlo standard deviations, root mean square over coefficients; ratios are Laplace's "
        "standard deviations over Monte Carlo's. The error of the run's own means is the floor "
        f"below which a difference is none. Last two columns: the coreset of {setting.shown} "
        f"points by {solvers.DEFAULT}, its mean by Laplace and by Monte Carlo on the coreset, both "
        "against Monte Carlo on all data.",
        "",
        "| | model | draws | accepted | greatest R-hat | error of the run | Laplace's mean "
        "| worst coefficient | ratio of std | coreset, Laplace | coreset, Monte Carlo |",
        "|---" * 11 + "|",
    ]
    for line in mcmc:
        mine = {"set": line["set"], "solver": solvers.DEFAULT, "k": setting.shown}
        text.append(
            f"| {line['set']} | {line['family']}, d = {line['d']} | {line['draws']} "
            f"| {line['acceptance']:.3f} | {line['r_hat']:.4f} | {line['standard_error']:.4f} "
            f"| {line['mean_error']:.3f} | {line['worst_mean_error']:.3f} "
            f"| {line['least_ratio']:.3f} to {line['greatest_ratio']:.3f} "
            f"| {curves.cell(curves.values(lines, 'mean_error', **mine))} "
            f"| {curves.cell(curves.values(lines, 'chains_mean_error', **mine))} |"
        )
    text += [
        "",
        f"Every solver at k = {setting.shown}; mean ± standard deviation over {setting.seeds} "
        "seeds. Reverse KL: of the coreset's posterior from that of all data; forward KL: the "
        "other way round.",
        "",
    ]
    for metric, title in METRICS.items():
        columns: dict[str, tuple[str, dict[str, object]]] = {
            each: (metric, {"set": each, "k": setting.shown}) for each in setting.sets
        }
        text += [f"**{title}**", "", *curves.table(lines, [*setting.solvers, LONG.label], columns)]
    return text
