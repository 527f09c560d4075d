"""NUTS on all data against a coreset and NUTS on it, by NumPyro, as its users would.

Each row is one model and one set of rows. Times are wall time and CPU time of this process, with
compilation, since a user pays for it too. *off* is the greatest difference of a posterior mean, in
standard deviations of the posterior of all data, and *error of the sampler* what two runs of NUTS
differ by at their effective sample sizes (root of the sum of both squared Monte Carlo errors, at
the parameter that is off most). The rival is NUTS on a uniform subset of the same number of rows
with weights n/k. What was not run is not in the table.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from numpy.typing import NDArray
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from rich.console import Console

from corefed.coreset.adapters import numpyro as adapter
from corefed_studies.bench import pays_models
from corefed_studies.bench.pays_models import Case

Array = NDArray[Any]


class Setting(NamedTuple):
    rows: tuple[int, ...]  # of each synthetic set
    warmup: int
    samples: int
    synthetic: tuple[str, ...] = pays_models.SYNTHETIC
    real: tuple[str, ...] = pays_models.REAL


SETTINGS = {
    "paper": Setting((200_000, 1_000_000), 300, 700),
    "quick": Setting((2_000,), 100, 100, ("logistic",), ()),
}


class Run(NamedTuple):
    mean: Array  # [P]
    deviation: Array
    error: Array  # Monte Carlo standard error of the mean
    steps: int
    seconds: float
    cpu: float
    samples: Mapping[str, Any]


def measure(
    scale: str, console: Console, known: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A row per model and set, the quick ones first, but for those that are known already."""
    setting = SETTINGS[scale]
    jobs: list[tuple[str, int]] = [(name, 0) for name in setting.real]
    jobs += [(name, n) for n in setting.rows for name in setting.synthetic]
    for name, n in jobs:
        earlier = [r for r in known if r["set"] == name and n in (0, r["n"])]
        if earlier:
            yield earlier[0]
            continue
        case = pays_models.synthetic(name, n) if n else pays_models.real(name)
        yield compare(case, setting.warmup, setting.samples)
        console.print(f"{name}, n = {case.n}: done")


def compare(case: Case, warmup: int, samples: int) -> dict[str, Any]:
    """All data, coreset and a uniform subset of its size."""
    begun, cpu = time.perf_counter(), time.process_time()
    coreset = adapter.build(case.model, case.x, case.y)
    build, build_cpu = time.perf_counter() - begun, time.process_time() - cpu
    model = adapter.weighted(case.model, coreset)
    small = run(model, adapter.points(coreset), warmup, samples)
    check = coreset.check(adapter.draws(case.model, coreset, small.samples))
    rival = run(*_uniform(case, len(coreset)), warmup, samples)
    full = run(case.model, (case.x, case.y), warmup, samples)
    off, off_error = _off(small, full)
    rival_off, _ = _off(rival, full)
    ratio = small.deviation / full.deviation
    return {
        "set": case.name,
        "n": case.n,
        "k": len(coreset),
        "parameters": len(full.mean),
        "full s": full.seconds,
        "build s": build,
        "coreset s": small.seconds,
        "speed-up": full.seconds / (build + small.seconds),
        "full cpu": full.cpu,
        "build cpu": build_cpu,
        "coreset cpu": small.cpu,
        "speed-up cpu": full.cpu / (build_cpu + small.cpu),
        "full steps": full.steps,
        "coreset steps": small.steps,
        "off": off,
        "sampler": off_error,
        "ratio least": float(ratio.min()),
        "ratio most": float(ratio.max()),
        "uniform off": rival_off,
        "error": coreset.diagnostics.held_out_error,
        "shift": check.shift,
        "settled": check.settled,
    }


def run(model: Any, points: tuple[Any, Any], warmup: int, samples: int) -> Run:
    """One chain of NUTS."""
    begun, cpu = time.perf_counter(), time.process_time()
    mcmc = MCMC(NUTS(model), num_warmup=warmup, num_samples=samples, progress_bar=False)
    mcmc.run(jax.random.PRNGKey(0), *points, extra_fields=("num_steps",))
    found = {name: np.asarray(value, np.float64) for name, value in mcmc.get_samples().items()}
    seconds, used = time.perf_counter() - begun, time.process_time() - cpu
    flat = np.concatenate([v.reshape(len(v), -1) for v in found.values()], 1)
    size = np.array([effective_sample_size(column[None]) for column in flat.T])
    deviation = flat.std(0, ddof=1)
    steps = int(np.asarray(mcmc.get_extra_fields()["num_steps"]).sum())
    return Run(flat.mean(0), deviation, deviation / np.sqrt(size), steps, seconds, used, found)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """NUTS, build included."""
    lines = [
        "**NUTS on all data, and on a coreset with its build**",
        "",
        "| | rows | coreset | all data, s | build + NUTS, s | faster | the same in CPU time | "
        "means off, sd | error of the sampler, sd | ratio of deviations | uniform subset off, sd |",
        "|---" * 11 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['set']} | {r['n']:,} | {r['k']} | {r['full s']:.3g} | {r['build s']:.3g} + "
            f"{r['coreset s']:.3g} | {r['speed-up']:.2g}x | {r['speed-up cpu']:.2g}x | "
            f"{r['off']:.2g} | {r['sampler']:.2g} | {r['ratio least']:.3g} to "
            f"{r['ratio most']:.3g} | {r['uniform off']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def _off(found: Run, full: Run) -> tuple[float, float]:
    """The greatest difference of a mean, in deviations of `full`, and the samplers' error there."""
    off = np.abs(found.mean - full.mean) / full.deviation
    error = np.hypot(found.error, full.error) / full.deviation
    worst = int(off.argmax())
    return float(off[worst]), float(error[worst])


def _uniform(case: Case, k: int) -> tuple[Any, tuple[Any, Any]]:
    """The model with weights n/k, and k rows at random."""
    index = np.sort(np.random.default_rng(1).choice(case.n, k, replace=False))
    rows = jax.tree.map(lambda part: part[index], (case.x, case.y))
    return adapter.weighted(case.model, torch.full((k,), case.n / k)), rows
