"""The golden cases: what is run, with every setting that matters written out.

A case goes through surfaces that stay while modules move: `python -m corefed` and
`corefed.coreset.build`. No case relies on a default, as defaults may change. The one exception are
settings that a method refuses where they have no meaning; those are left out.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import golden_digest
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Fields = dict[str, Any]


class Case(NamedTuple):
    name: str
    group: str  # the file in digests/
    make: Callable[[Path], Fields]  # run it in an empty folder, and digest what it left


# --- the command line -----------------------------------------------------------------------------


def corefed(*words: object) -> None:
    """`python -m corefed WORDS` in this process. No module of the package is named here."""
    before, sys.argv = sys.argv, ["corefed", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    code: object = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_module("corefed", run_name="__main__")
            except SystemExit as stop:
                code = stop.code
    finally:
        sys.argv = before
    if code != 0:
        raise RuntimeError(f"corefed {' '.join(map(str, words))}: {code}\n{err.getvalue()}")


Settings = Mapping[str, object]


def assignments(settings: Settings) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def run(folder: Path, settings: Settings) -> None:
    corefed("run", *assignments(settings), "--out", folder, "--quiet")


# --- settings -------------------------------------------------------------------------------------

# dirichlet: clients differ in size, so padding takes part. keep: less data, and quicker.
DIGITS: Settings = {
    "data": "digits", "partition": "dirichlet:1.0", "clients": 4, "keep": 0.5, "rounds": 2,
    "local_steps": 6, "batch_size": 20, "seeds": "0,1", "cohort": 0, "model": "mlp", "hidden": 12,
    "scale": "unit", "device": "cpu", "runtime": "vmap", "memory_mb": 4096, "evaluate_every": 1,
    "evaluate_draws": 3, "checkpoint_every": 1, "schedule": "constant", "warmup": 0,
    "validation": 0.0,
}  # fmt: skip
BAYES: Settings = {
    "zeta": 1.0, "beta": 1.0, "eta_1": 0.01, "eta_2": 0.01, "monte_carlo": 1, "optimizer": "adam",
    "fusion": "average", "initial_std": 0.1, "initial_rho": -3.0, "anneal": 0.0,
    "by_layer": "false",
}  # fmt: skip
# refresh_every 4 of 6 local steps: coresets are chosen anew inside a round.
CORESET: Settings = {
    "method": "coreset-pfedbayes", **BAYES, "preset": "fast", "fraction": 0.2,
    "around": "posterior", "widths": 1.0, "match": "potentials", "draws": 64, "feature_draws": 2,
    "shrink": 0.1, "pool": 1.0, "refresh_every": 4, "budget": 0.5, "moved": 0.0, "stale": 0.0,
    "check_every": 5, "check_draws": 16, "kl_weight": 0.0, "kl_rows": 16, "kl_curvature": "exact",
    "outer": 3, "selection_mb": 2048,
}  # fmt: skip
CALIBRATED: Settings = {
    **CORESET, "selector": "calibrated", "score": "gradient", "floor": 0.3, "in_turn": "true",
    "balance": "true", "bound": 4.0,
}  # fmt: skip
FEW = 10
"""Iterations of A-IHT. Within a hundred it turns a rounding into another coreset: on two kinds of
processors most of the points differed. The paper's preset, which begins anew from the last weights,
does so within twenty."""
MATCHING: Settings = {
    **CORESET, "preset": "matching", "selector": "matching", "widths": "1.0,4.0",
    "feature_draws": 16, "solver": "aiht-2", "max_iterations": FEW, "shrink": 0.01, "draws": 80,
}  # fmt: skip
PAPER: Settings = {
    **CORESET, "preset": "paper", "zeta": 10.0, "selector": "matching", "feature_draws": 16,
    "solver": "aiht", "shrink": 0.0, "kl_weight": 1.0,
    "rounds": 1, "outer": 2, "max_iterations": 3,
}  # fmt: skip
PFEDBAYES: Settings = {"method": "pfedbayes", **BAYES}
SGD: Settings = {"learning_rate": 0.05, "initial_std": 0.1}
SUBSET: Settings = {"method": "random-subset", "fraction": 0.2, "redraw_every": 4}
PER_FEDAVG: Settings = {
    "method": "per-fedavg", "alpha": 0.05, "beta": 0.05, "delta": 1.0, "adapt_steps": 1,
    "initial_std": 0.1,
}  # fmt: skip
BNFED: Settings = {
    "method": "bnfed", "learning_rate": 0.01, "sigma": 1.0, "sigma_0": 1.0, "gamma": 1.0,
    "sweeps": 10, "growth": 5, "initial": "own", "initial_std": 0.1,
}  # fmt: skip
SUBMODULAR: Settings = {**SGD, "fraction": 0.3, "metric": "cosine", "selection_mb": 2048}
# The budget decides in multiples of 20 local steps, and so does a question whether q has moved.
LONG: Settings = {"local_steps": 24}

METHODS: dict[str, Settings] = {
    "coreset-pfedbayes-fast": {
        **CALIBRATED, **LONG, "refresh_every": 0, "draws": 0, "budget": 4.0,
    },
    "coreset-pfedbayes-matching": {
        **MATCHING, "draws": 0, "stale": 0.5, "check_every": 3, "refresh_every": 5,
    },
    "coreset-pfedbayes-paper": {**PAPER, "draws": 0, "kl_rows": 2, "hidden": 6},
    "coreset-pfedbayes-paper-diagonal": {**PAPER, "kl_curvature": "diagonal", "kl_rows": 8},
    "pfedbayes-average": PFEDBAYES,
    "pfedbayes-precision": {**PFEDBAYES, "fusion": "precision", "beta": 0.7},
    "pfedbayes-sgd": {**PFEDBAYES, "optimizer": "sgd", "monte_carlo": 2, "zeta": 3.0},
    "random-subset-pfedbayes": {**SUBSET, **BAYES, "base": "pfedbayes"},
    "random-subset-fedavg": {**SUBSET, **SGD, "base": "fedavg"},
    "fedavg": {"method": "fedavg", **SGD},
    "pfedme": {
        "method": "pfedme", "penalty": 30.0, "inner_steps": 5, "personal_rate": 0.02,
        "learning_rate": 0.01, "beta": 2.0, "initial_std": 0.1,
    },
    "per-fedavg-fo": {**PER_FEDAVG, "variant": "fo"},
    "per-fedavg-hf": {**PER_FEDAVG, "variant": "hf", "adapt_steps": 2},
    "bnfed": BNFED,
    "bnfed-two-layers": {**BNFED, "hidden": "10,8", "initial": "shared"},
    "independent": {"method": "independent", **SGD},
    "submodular-logdet": {**SUBMODULAR, "method": "submodular-logdet", "regulariser": 1.0},
    "submodular-dispsum": {**SUBMODULAR, "method": "submodular-dispsum"},
    "submodular-dispmin": {**SUBMODULAR, "method": "submodular-dispmin", "metric": "euclidean"},
}  # fmt: skip
SELECTORS: dict[str, Settings] = {
    "calibrated": CALIBRATED,
    "matching": {**MATCHING, "preset": "fast", "widths": 1.0, "shrink": 0.1, "feature_draws": 2},
    **{
        name: {**CORESET, "selector": name}
        for name in (
            "craig", "gradmatch", "herding", "k-centre", "loss", "gradient-norm", "leverage",
            "random",
        )
    },
}  # fmt: skip
CALIBRATIONS: dict[str, Settings] = {
    "pool": {"pool": 0.5},
    "around-path": {"around": "path"},
    "around-global": {"around": "global"},
    "match-gradients": {"match": "gradients"},
    "score-potential": {"score": "potential"},
    "score-loss": {"score": "loss"},
    "score-none": {"score": "none"},
    "balance-off": {"balance": "false"},
    "in-turn-off": {"in_turn": "false"},
    "moved": {**LONG, "moved": 0.1, "refresh_every": 100},
    "stale": {"stale": 0.05, "refresh_every": 100, "check_every": 3},
    "every-layer-drawn": {"feature_draws": 0, "draws": 16, "widths": "1.0,2.0"},
    "whole": {"fraction": 1.0},
    "gradients-on-path": {"match": "gradients", "around": "path", "shrink": 0.01, "floor": 0.1},
    "stale-and-worse-than-uniform": {
        "match": "gradients", "around": "path", "shrink": 0.01, "floor": 0.1, "stale": 0.5,
        "check_every": 3,
    },
}  # fmt: skip
SOLVERS = (
    "exchange", "omp", "omp-block", "aiht-2", "aiht", "iht", "giga", "frank-wolfe", "uniform",
    "uniform-refit",
)  # fmt: skip
BUILD_SOLVERS = (*SOLVERS, "sparse-vi")


def many(solver: str) -> int:
    return FEW if solver.startswith("aiht") else 100


def plain(settings: Settings) -> Callable[[Path], Fields]:
    """A run on the digits and its digest."""

    def make(folder: Path) -> Fields:
        run(folder / "run", {**DIGITS, **settings})
        return golden_digest.of_run(folder / "run")

    return make


# --- other data, networks and ways to run ---------------------------------------------------------

TABLE: Settings = {
    **DIGITS, "partition": "natural", "keep": 1.0, "scale": "features", "hidden": 8,
    "target": "outcome", "client_column": "site", "ignore": "patient", "categorical": "ward",
    "missing": "impute", "smallest_client": 10, "noise": 0.5, "learn_noise": "true",
}  # fmt: skip


def write_table(path: Path, regression: bool, rows: int = 120, seed: int = 3) -> Path:
    """Rows of three sites: a text category, one of codes, a number with gaps, an identifier."""
    rng = np.random.default_rng(seed)
    lines = [["patient", "site", "dose", "grade", "ward", "weight", "outcome"]]
    for i in range(rows):
        dose, grade, ward = rng.normal(50, 9), "abc"[rng.integers(3)], int(rng.integers(4))
        weight = "" if i % 11 == 0 else f"{rng.normal(70, 5):.3f}"
        value = 1000 + 30 * dose + 200 * (grade == "a") + 50 * ward + rng.normal(0, 5)
        said = f"{value:.4f}" if regression else ("high" if value > 2600 else "low")
        site = ("x", "y", "z")[i % 3 if i % 7 else 0]
        lines.append([f"p{i}", site, f"{dose:.6f}", grade, str(ward), weight, said])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(lines)
    return path


def table(regression: bool, settings: Settings, *predict: object) -> Callable[[Path], Fields]:
    """Train on a table, then predict rows of another one for a client."""

    def make(folder: Path) -> Fields:
        data = write_table(folder / "own.csv", regression)
        task = "regression" if regression else "classification"
        run(folder / "run", {**TABLE, **settings, "data": f"table:{data}", "task": task})
        fields = golden_digest.of_run(folder / "run")
        new = write_table(folder / "new.csv", regression, rows=20, seed=4)
        return fields | predicted(folder, "y", new, *predict)

    return make


def predicted(folder: Path, client: str, points: Path, *words: object) -> Fields:
    """What `corefed predict` writes for the run in folder/run."""
    out = folder / "predicted.csv"
    corefed(
        "predict", folder / "run", "--client", client, "--input", points, "--model", "personal",
        "--seed", 1, "--by", "total", "--target-error", 0.3, "--confidence", 0.8, *words,
        "--out", out,
    )  # fmt: skip
    fields = golden_digest.of_csv(f"predict/{client}", out)
    out.unlink()
    return fields


def points(path: Path, first: int, number: int) -> Path:
    """Some of the digits 0, 1 and 2 in a file."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    chosen = np.flatnonzero(y < 3)[first : first + number]
    np.savez(path, X=(x[chosen] / 16).astype(np.float32), y=y[chosen])
    return path


def newcomer(settings: Settings, *more: object) -> Callable[[Path], Fields]:
    """A run, a client that joins after it, and predictions of an old client and the new one."""

    def make(folder: Path) -> Fields:
        run(folder / "run", {**DIGITS, **settings})
        corefed(
            "personalize", folder / "run", "--data", points(folder / "south.npz", 0, 50),
            "--name", "south", "--steps", 10, "--test-fraction", 0.2, "--seed", 1,
            "--device", "cpu", "--share", 1, *more, "--out", folder / "south",
        )  # fmt: skip
        fields = golden_digest.of_run(folder / "south", "newcomer/")
        shutil.copytree(folder / "south", folder / "run" / "personalized" / "south")
        new = points(folder / "new.npz", 60, 30)
        return fields | predicted(folder, "client 1", new) | predicted(folder, "south", new)

    return make


def resumed(settings: Settings) -> Callable[[Path], Fields]:
    """One round, and then from its checkpoint to two."""

    def make(folder: Path) -> Fields:
        run(folder / "run", {**DIGITS, **settings, "rounds": 1})
        corefed("run", "--resume", folder / "run", "--set", "rounds=2", "--quiet")
        return golden_digest.of_run(folder / "run")

    return make


CNN: Settings = {"model": "cnn", "channels": "3,4", "hidden": 8, "scale": "standard"}
# Targets that are drawn by the data set itself, and not standardised.
SYNTHETIC: Settings = {"partition": "natural", "keep": 1.0, "noise": 0.5, "learn_noise": "true"}

SAME_AS = {"resume": "selectors/calibrated", "resume-fedavg": "methods/fedavg"}
"""Cases that must equal a case of another group, bit for bit."""

OTHERS = [
    Case("regression-smooth", "others",
         plain({**CALIBRATED, **SYNTHETIC, "data": "synthetic-regression"})),
    Case("regression-linear", "others",
         plain({**PFEDBAYES, **SYNTHETIC, "data": "synthetic-linear", "learn_noise": "false"})),
    Case("table-classes", "others", table(False, CALIBRATED)),
    Case("table-regression", "others",
         table(True, PFEDBAYES, "--tolerance", 100, "--level", 0.9)),
    Case("cnn", "others", plain({**CALIBRATED, **CNN})),
    Case("cnn-fedavg", "others", plain({**METHODS["fedavg"], **CNN})),
    Case("loop", "others", plain({**CALIBRATED, "runtime": "loop"})),
    Case("loop-fedavg", "others", plain({**METHODS["fedavg"], "runtime": "loop"})),
    Case("cohort", "others", plain({**CALIBRATED, "cohort": 2})),
    Case("cohort-pfedbayes", "others", plain({**PFEDBAYES, "cohort": 3})),
    Case("resume", "others", resumed(CALIBRATED)),
    Case("resume-fedavg", "others", resumed(METHODS["fedavg"])),
    Case("newcomer", "others", newcomer(CALIBRATED, "--fraction", 0.5)),
    Case("newcomer-pfedbayes", "others", newcomer(PFEDBAYES)),
    Case("newcomer-per-fedavg", "others", newcomer(METHODS["per-fedavg-fo"])),
]  # fmt: skip


# --- corefed.coreset.build ------------------------------------------------------------------------

BUILD: dict[str, Any] = {
    "size": 12, "samples": 60, "shrink": 0.0, "seed": 5, "device": "cpu", "chunk": 64,
    "memory_mb": 64, "store": "memory",
}  # fmt: skip
BUILDS: dict[str, dict[str, Any]] = {
    **{solver: {"solver": solver} for solver in BUILD_SOLVERS},
    # Blocks are of k/20 points: with 12 points they would be of one.
    "omp-block": {"solver": "omp-block", "size": 40, "samples": 120},
    "omp-40-points": {"solver": "omp", "size": 40, "samples": 120},
    "exchange-shrunk": {"solver": "exchange", "shrink": "auto", "samples": 20},
    "exchange-own-bounds": {"solver": "exchange", "samples": 0, "iterations": 0},
    "omp-on-disk": {"solver": "omp", "store": "disk"},
    "aiht-2-recomputed": {"solver": "aiht-2", "store": "recompute", "shrink": 0.1},
}


def logistic(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    eta = x @ theta
    return y * eta - F.softplus(eta)


def build(options: dict[str, Any]) -> Callable[[Path], Fields]:
    """A coreset of 200 points of a logistic regression."""

    def make(folder: Path) -> Fields:
        from corefed.coreset import build as public

        g = torch.Generator().manual_seed(1)
        x = torch.randn(200, 4, generator=g)
        y = (torch.rand(200, generator=g) < torch.sigmoid(x.sum(-1))).float()

        def resample(indices: Tensor, weights: Tensor, number: int, g: torch.Generator) -> Tensor:
            """Laplace draws of the coreset's posterior, with a standard normal prior."""
            rows, w = x[indices].double(), weights.double()
            theta = torch.zeros(4, dtype=torch.float64)
            for _ in range(8):
                p = torch.sigmoid(rows @ theta)
                precision = (rows.mT * (w * p * (1 - p))) @ rows + torch.eye(4).double()
                slope = rows.mT @ (w * (y[indices].double() - p)) - theta
                theta = theta + torch.linalg.solve(precision, slope)
            noise = torch.randn(number, 4, generator=g, dtype=torch.float64)
            half = torch.linalg.cholesky(torch.linalg.inv(precision))
            return (theta + noise @ half.mT).float()

        asked = {"iterations": many(options["solver"]), **BUILD, **options, "scratch": folder}
        if options["solver"] == "sparse-vi":
            asked["resample"] = resample
        posterior = (torch.ones(4), torch.full((4,), 0.15))
        return golden_digest.of_coreset(public(logistic, posterior, (x, y), **asked))

    return make


CASES = [
    *(
        Case(name, "methods", plain(settings)) for name, settings in METHODS.items()
    ),
    *(
        Case(name, "selectors", plain(settings)) for name, settings in SELECTORS.items()
    ),
    *(
        Case(name, "calibrated", plain({**CALIBRATED, **settings}))
        for name, settings in CALIBRATIONS.items()
    ),
    *(
        Case(name, "solvers", plain({**MATCHING, "solver": name, "max_iterations": many(name)}))
        for name in SOLVERS
    ),
    *OTHERS,
    *(Case(name, "build", build(options)) for name, options in BUILDS.items()),
]  # fmt: skip
"""All but the federation, which needs processes and ports."""


# --- a real federation ----------------------------------------------------------------------------

PATIENCE = 120.0
"""Seconds for a program to start or to end."""
NAMES = ("alice", "bob")
RUN = "golden"
FEDERATED: Settings = {
    **{
        key: value
        for key, value in {**DIGITS, **CALIBRATED}.items()
        if key not in ("data", "partition", "clients", "keep")
    },
    "seeds": 0, "hidden": 4, "local_steps": 6,
}  # fmt: skip
RULES: Settings = {
    "quorum": 1.0, "deadline": 60, "attempts": 3, "join_wait": 120, "outlier": 20.0,
    "aggregation": "plain", "upload": "float32", "difference": "false", "dp_clip": 0.0,
}  # fmt: skip


def federation(folder: Path) -> Fields:
    """A server and two clients as processes; the server's model and those of both clients."""
    rng = np.random.default_rng(0)
    data = {}
    for number, name in enumerate(NAMES):
        x = rng.normal(size=(60 + 20 * number, 3)).astype("float32")
        data[name] = folder / f"{name}.npz"
        np.savez(data[name], X=x, y=(x.sum(1) > 0).astype("int64"))
    place = folder / "fed"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    rules = [word for key, value in RULES.items() for word in ("--rule", f"{key}={value}")]
    corefed(
        "federation", "init", place, "--clients", *NAMES, "--address", address,
        *assignments(FEDERATED), *rules,
    )  # fmt: skip
    models = {name: place / "clients" / name / "models" / RUN for name in NAMES}
    with contextlib.ExitStack() as programs:
        programs.enter_context(program(folder, "server", "federation", "server", place))
        for name in NAMES:
            mine = ("federation", "client", place / "clients" / name, "--data", data[name])
            programs.enter_context(program(folder, name, *mine, "--device", "cpu"))
        words = ("federation", "run", place, "--name", RUN)
        training = programs.enter_context(program(folder, "run", *words))
        if training.wait(PATIENCE) != 0:
            said = "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))
            raise RuntimeError(f"the federation failed:\n{said}")
        until = time.monotonic() + PATIENCE  # clients keep their models when the run has ended
        while not all((path / "summary.json").exists() for path in models.values()):
            if time.monotonic() > until:
                raise RuntimeError(f"no summary.json in {', '.join(map(str, models.values()))}")
            time.sleep(0.1)
    fields = golden_digest.of_run(place / "server" / "runs" / RUN, "server/")
    for name, path in models.items():
        fields |= golden_digest.of_run(path, f"{name}/")
    return fields


@contextlib.contextmanager
def program(folder: Path, name: str, *words: object) -> Iterator[subprocess.Popen[bytes]]:
    """A command as a process of its own; it and what it started are gone afterwards."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "corefed", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that was started above
        process.wait()


FEDERATION = Case("two-clients", "federation", federation)
