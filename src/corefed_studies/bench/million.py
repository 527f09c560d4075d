"""`corefed bench million`: a coreset of 1000 points from up to a million, its memory and time.

Logistic regression with 20 coefficients, S = 500 draws, k = 1000, by `corefed.coreset.build` as
a user would call it. Each size runs in a subprocess, so that its peak memory is its own. What
Python, torch and the data take is measured there before `build` is called. Every size with a pool
(two phases); the largest also with the potentials of all points in a file and in memory, on a GPU
in its memory.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from corefed.bayes import regression
from corefed.coreset.engine import build
from corefed_studies.bench import isolated

SIZES = {"paper": (125_000, 250_000, 500_000, 1_000_000), "quick": (2_000, 4_000)}
SHAPE = {"paper": (500, 1000, 1024), "quick": (60, 50, 64)}  # S, k, memory_mb
FEATURES = 20
MODULE = "corefed_studies.bench.million"  # not __name__, which is __main__ if it is run alone


def million(device: torch.device, scale: str) -> list[dict[str, Any]]:
    """One row per size and store, each from a subprocess."""
    stores = ("pool", "memory") if device.type == "cuda" else ("pool", "disk", "memory")
    rows = []
    for store in stores:
        sizes = SIZES[scale] if store == stores[0] else SIZES[scale][-1:]
        for n in sizes:
            rows.append(isolated.measure(MODULE, str(n), store, device.type, scale))
    return rows


def one(n: int, store: str, device: str, scale: str) -> dict[str, Any]:
    draws, k, memory_mb = SHAPE[scale]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, FEATURES, generator=g)
    truth = torch.randn(FEATURES, generator=g)
    y = (torch.rand(n, generator=g) < torch.sigmoid(x @ truth)).float()
    some = slice(0, min(n, 20_000))  # enough for where the posterior is; its width is that of all
    prior = regression.Normal(torch.zeros(FEATURES).double(), torch.eye(FEATURES).double())
    near = regression.laplace(
        regression.logistic,
        x[some].double(),
        y[some].double(),
        torch.full_like(y[some], n / len(y[some])).double(),
        prior,
    )
    factor = torch.linalg.cholesky(near.covariance).float().to(device)
    before = isolated.peak_mb()
    begun, cpu = time.perf_counter(), time.process_time()
    coreset = build(
        log_p,
        (near.mean.float().to(device), factor),
        (x, y),
        k,
        samples=draws,
        store="auto" if store == "pool" else store,
        pool="auto" if store == "pool" else 0,
        memory_mb=max(memory_mb, 2 * n * draws * 4 >> 20) if store == "memory" else memory_mb,
    )
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    d = coreset.diagnostics
    row = {
        "n": n,
        "potentials in": store if device != "cuda" or store == "pool" else "GPU memory",
        "pool": d.pool,
        "potentials s": d.potentials_seconds,
        "solver s": d.solver_seconds,
        "all s": seconds,
        "cpu s": cpu,
        "us a point": 1e6 * seconds / n,
        "potentials MB": n * draws * 4 / 2**20,
        "peak MB": isolated.peak_mb(),
        "of which before": before,
        "kept": d.kept,
        "fitted error": d.fitted_error,
        "on fresh draws": d.held_out_error,
        "uniform": d.uniform_error,
    }
    if device == "cuda":
        row["peak GPU MB"] = torch.cuda.max_memory_allocated() / 2**20
    return row


def log_p(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    eta = x @ theta
    return y * eta - torch.nn.functional.softplus(eta)


def main(arguments: list[str]) -> None:
    """`python -m corefed_studies.bench.million [cpu|cuda] [paper|quick]` prints a row per line; it
    needs torch and numpy alone. `N STORE DEVICE SCALE` is one row, in this process."""
    if arguments and arguments[0].isdigit():
        print(json.dumps(one(int(arguments[0]), *arguments[1:])))
        return
    device, scale = (*arguments, *("cpu", "paper")[len(arguments) :])
    for row in million(torch.device(device), scale):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
