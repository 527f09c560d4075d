"""Choose defaults: every method the same number of candidates, on validation points alone.

Of each tuning problem and method, all candidates are trained side by side (`training/together.py`)
on the same splits. A candidate's regret on a problem is its validation NLL, in nats per point, over
that of the best candidate of its method there. The default is the candidate with the smallest mean
regret over the problems. Test points are never looked at.

The NLL is that of a method's main model: the personal one, or the shared one of fedavg and bnfed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base import files
from corefed.settings.config import resolve
from corefed.settings.fields import from_flat, list_settings, to_flat
from corefed.settings.run import Run
from corefed.training import record
from corefed.training.setup import prepare
from corefed.training.together import Together
from corefed_studies.defaults.problems import DefaultsProblem, flags

SEEDS = (100, 101, 102)
"""Other seeds than those that the held-out problems are judged with."""
VALIDATION = 0.2
COPIES_MB = 20_000
"""Of training data: each candidate has a copy."""

Candidate = dict[str, Any]


def _product(**values: Sequence[Any]) -> list[Candidate]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _bayesian() -> list[Candidate]:
    """eta_2 is given as a part of eta_1."""
    found = _product(
        eta_1=(0.004, 0.008, 0.016),
        eta_2=(0.25, 1.0),
        zeta=(1.0, 3.0),
        initial_rho=(-3.0, -4.0),
        anneal=(0.0, 1.0),
    )
    return [{**each, "eta_2": each["eta_1"] * each["eta_2"]} for each in found]


_SGD = _product(
    schedule=("constant", "cosine"),
    learning_rate=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    initial_std=(0.05, 0.1, 0.2),
)

CANDIDATES: dict[str, list[Candidate]] = {
    "pfedbayes": _bayesian(),
    "fedavg": _SGD,
    "independent": _SGD,
    "pfedme": _product(
        personal_rate=(0.005, 0.01, 0.02, 0.04),
        penalty=(5.0, 15.0, 30.0),
        learning_rate=(0.01, 0.02, 0.04, 0.08),
    ),
    "per-fedavg": _product(
        alpha=(0.01, 0.02, 0.05, 0.1, 0.2, 0.4),
        beta=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    ),
}
"""Method -> its candidates, as many for each. coreset-pfedbayes and random-subset take the settings
of pfedbayes, and submodular-* those of fedavg, untuned."""


class Score(NamedTuple):
    """One candidate on one problem."""

    candidate: Candidate
    nll: float  # of validation points, mean over seeds; infinite where a seed diverged
    accuracy: float  # NaN for a regression


def place_of(folder: Path, problem: str, method: str, part: int) -> Path:
    return folder / "choosing" / f"{problem}--{method}--{part}.json"


def train(
    problem: DefaultsProblem,
    method: str,
    candidates: Sequence[Candidate],
    files_in: Path,
    device: str,
) -> list[Score]:
    """Train candidates on a problem, and score them on its validation points."""
    shared = {each.name for each in list_settings(Run)}
    base = {
        **flags(problem, files_in), "method": method, "seeds": SEEDS, "validation": VALIDATION,
        "device": device, "memory_mb": COPIES_MB,
    }  # fmt: skip
    found: dict[int, Score] = {}
    setup = prepare(resolve(flags=base))
    for run_keys, numbers in _grouped(candidates, shared):
        run = dataclasses.replace(setup.experiment.run, **run_keys)
        mine = setup._replace(experiment=dataclasses.replace(setup.experiment, run=run))
        own = to_flat(setup.experiment.settings)
        kind = type(setup.experiment.settings)
        settings = [
            from_flat(kind, {**own, **{k: v for k, v in candidates[n].items() if k not in shared}})
            for n in numbers
        ]
        together = Together(mine, settings)
        for t in range(run.rounds):
            together.train(t)
        assert setup.data.validation is not None
        for n, metrics in zip(
            numbers, together.evaluate(run.rounds - 1, setup.data.validation), strict=True
        ):
            found[n] = _score(candidates[n], metrics)
    return [found[n] for n in range(len(candidates))]


def _score(candidate: Candidate, metrics: Sequence[dict[str, float]]) -> Score:
    model = record.main_model(metrics[0])
    nll = sum(each[f"{model}_nll"] for each in metrics) / len(metrics)
    right = [each.get(f"{model}_accuracy", math.nan) for each in metrics]
    return Score(candidate, nll if math.isfinite(nll) else math.inf, sum(right) / len(right))


def _grouped(
    candidates: Sequence[Candidate], shared: set[str]
) -> Iterator[tuple[Candidate, list[int]]]:
    """Candidates that can train side by side: those with the same settings of the run."""
    groups: dict[str, tuple[Candidate, list[int]]] = {}
    for number, each in enumerate(candidates):
        keys = {k: v for k, v in each.items() if k in shared}
        groups.setdefault(json.dumps(keys), (keys, []))[1].append(number)
    yield from groups.values()


def keep(path: Path, scores: Sequence[Score]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**each.candidate, "nll": each.nll, "accuracy": each.accuracy} for each in scores]
    files.replace(path, (json.dumps(rows, indent=1) + "\n").encode())


def read(path: Path) -> list[Score]:
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        nll, accuracy = row.pop("nll"), row.pop("accuracy")
        found.append(Score(row, nll, accuracy))
    return found


class Choice(NamedTuple):
    """The default of a method, and how it was found."""

    candidate: Candidate
    regret: float  # mean over problems, nats per point
    by_problem: dict[str, float]  # regret
    best: dict[str, Candidate]  # by problem: the candidate that was best there


def choose(scores: dict[str, Sequence[Score]]) -> Choice:
    """The candidate with the smallest mean regret; `scores` by problem, in the same order."""
    number = len(next(iter(scores.values())))
    least = {problem: min(each.nll for each in row) for problem, row in scores.items()}
    regrets = [
        {problem: row[n].nll - least[problem] for problem, row in scores.items()}
        for n in range(number)
    ]
    means = [sum(each.values()) / len(each) for each in regrets]
    winner = min(range(number), key=means.__getitem__)
    best = {problem: min(row, key=lambda each: each.nll) for problem, row in scores.items()}
    return Choice(
        next(iter(scores.values()))[winner].candidate,
        means[winner],
        regrets[winner],
        {problem: each.candidate for problem, each in best.items()},
    )
