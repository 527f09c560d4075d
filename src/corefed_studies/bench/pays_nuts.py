"""NUTS on all data against a coreset and NUTS on it, by NumPyro, as its users would.

Each row is one model and one set of rows; `pays_chains.py` says how two posteriors are compared.
The rival is NUTS on a uniform subset of the same number of rows with weights n/k. What was not run
is not in the table.

With torch, numpy, JAX and NumPyro alone, for a machine that only lends its cores or its GPU:

    python -m corefed_studies.bench.pays_nuts --rows 1000000 --device cpu --out DIR

A chain of all data is kept in DIR/chains as soon as it is there: a run that is stopped goes on.
The tables are made elsewhere: `corefed bench pays --from DIR/pays.json --page docs/pays.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import torch

from corefed.base import machine
from corefed.base.errors import UserError
from corefed.base.shown import say
from corefed.coreset.adapters import numpyro as adapter
from corefed_studies.bench import pays_chains, pays_models
from corefed_studies.bench.pays_models import Case

if TYPE_CHECKING:
    from corefed_studies.bench.parted import Shown


class Setting(NamedTuple):
    rows: tuple[int, ...]  # of each synthetic set
    warmup: int
    samples: int
    synthetic: tuple[str, ...] = pays_models.SYNTHETIC
    real: tuple[str, ...] = pays_models.REAL
    chains: Path | None = None  # where chains of all data are kept


SETTINGS = {
    "paper": Setting((200_000, 1_000_000), 500, 2000),
    "quick": Setting((2_000,), 100, 100, ("logistic",), ()),
}


def measure(
    scale: str, console: Shown, known: Sequence[dict[str, Any]], setting: Setting | None = None
) -> Iterator[dict[str, Any]]:
    """A row per model and set, the quick ones first, but for those that are known already."""
    s = setting or SETTINGS[scale]
    jobs: list[tuple[str, int]] = [(name, 0) for name in s.real]
    jobs += [(name, n) for n in s.rows for name in s.synthetic]
    for name, n in jobs:
        earlier = [r for r in known if r["set"] == name and n in (0, r["n"])]
        if earlier:
            yield earlier[0]
            continue
        case = pays_models.synthetic(name, n) if n else pays_models.real(name)
        row = compare(case, s.warmup, s.samples, s.chains)
        console.print(
            f"{name}, n = {case.n:,}: {row['speed-up']:.3g}x, means off by {row['off']:.2g} sd"
        )
        yield row


def compare(case: Case, warmup: int, samples: int, chains: Path | None = None) -> dict[str, Any]:
    """All data, coreset and a uniform subset of its size."""
    path = None
    if chains is not None:
        path = chains / f"{case.name}-{case.n}-{warmup}-{samples}.json"
    begun, cpu = time.perf_counter(), time.process_time()
    coreset = adapter.build(case.model, case.x, case.y)
    build, build_cpu = time.perf_counter() - begun, time.process_time() - cpu
    model = adapter.weighted(case.model, coreset)
    small = pays_chains.run(model, adapter.points(coreset), warmup, samples)
    check = coreset.check(adapter.draws(case.model, coreset, small.samples))
    rival = pays_chains.run(*_uniform(case, len(coreset)), warmup, samples)
    points = (case.x, case.y)
    full = pays_chains.remembered(
        path, partial(pays_chains.run, case.model, points, warmup, samples)
    )
    apart = pays_chains.difference(small, full)
    paired = pays_chains.paired(case.model, points, coreset, full)
    return {
        "set": case.name,
        "n": case.n,
        "k": len(coreset),
        "parameters": full.draws.shape[1],
        "draws": samples,
        "on": jax.default_backend(),
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
        "off": apart.off,
        "sampler": apart.off_error,
        "ratio least": apart.least,
        "ratio most": apart.most,
        "ratio sampler": apart.ratio_error,
        "paired off": paired.off,
        "paired least": paired.least,
        "paired most": paired.most,
        "uniform off": pays_chains.difference(rival, full).off,
        "error": coreset.diagnostics.held_out_error,
        "shift": check.shift,
        "settled": check.settled,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """NUTS, build included; and the posteriors."""
    lines = [
        "**NUTS on all data, and on a coreset with its build**",
        "",
        "| | rows | parameters | coreset | all data, s | build + NUTS, s | faster | the same in "
        "CPU time | uniform subset off, sd |",
        "|---" * 9 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['set']} | {r['n']:,} | {r['parameters']} | {r['k']} | {r['full s']:.3g} | "
            f"{r['build s']:.3g} + {r['coreset s']:.3g} | {r['speed-up']:.2g}x | "
            f"{r['speed-up cpu']:.2g}x | {r['uniform off']:.3g} |"
        )
    lines += [
        "",
        "**The posterior of the coreset against that of all data**",
        "",
        "| | rows | means off, sd | error of the two chains | ratio of deviations | error of the "
        "two chains | the same draws weighted: means off, sd | ratio of deviations |",
        "|---" * 8 + "|",
    ]
    for r in rows:
        lines.append(
            f"| {r['set']} | {r['n']:,} | {r['off']:.2g} | {r['sampler']:.2g} | "
            f"{r['ratio least']:.3g} to {r['ratio most']:.3g} | {r['ratio sampler']:.2g} | "
            f"{r['paired off']:.2g} | {r['paired least']:.3g} to {r['paired most']:.3g} |"
        )
    return "\n".join(lines) + "\n"


def _uniform(case: Case, k: int) -> tuple[Any, tuple[Any, Any]]:
    """The model with weights n/k, and k rows at random."""
    index = np.sort(np.random.default_rng(1).choice(case.n, k, replace=False))
    rows = jax.tree.map(lambda part: part[index], (case.x, case.y))
    return adapter.weighted(case.model, torch.full((k,), case.n / k)), rows


class _Terminal:
    def print(self, text: str) -> None:
        say(text)


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in known:
            raise UserError(f"There is no set {name!r}; there are {', '.join(known)}.")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m corefed_studies.bench.pays_nuts")
    parser.add_argument("--scale", choices=tuple(SETTINGS), default="paper")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", default="", help="of synthetic sets, separated by commas")
    parser.add_argument("--sets", default="", help="names, separated by commas; all if not given")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--samples", type=int)
    given = parser.parse_args(arguments)
    # before JAX looks for devices, and in the name that it has for them
    jax.config.update("jax_platforms", given.device)  # type: ignore[no-untyped-call]
    from corefed_studies.bench import pays

    setting = SETTINGS[given.scale]
    try:
        every = (*pays_models.SYNTHETIC, *pays_models.REAL)
        names = _names(given.sets, every) or (*setting.synthetic, *setting.real)
        try:
            rows = tuple(int(n) for n in given.rows.split(",") if n) or setting.rows
        except ValueError:
            raise UserError(f"--rows is {given.rows!r}; give numbers such as 200000.") from None
        setting = Setting(
            rows,
            given.warmup or setting.warmup,
            given.samples or setting.samples,
            tuple(name for name in pays_models.SYNTHETIC if name in names),
            tuple(name for name in pays_models.REAL if name in names),
            given.out / "chains",
        )
        torch.set_num_threads(machine.usable_cores())
        pays.PAYS.measured(
            given.scale, given.out, _Terminal(), ["nuts"], partial(measure, setting=setting)
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for name, value in machine.polite(os.environ).items():
        os.environ.setdefault(name, value)
    sys.exit(main())
