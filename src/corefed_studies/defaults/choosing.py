"""Choose defaults: every method the same number of candidates, on validation points alone.

Of each tuning problem and method, all candidates are trained side by side (`training/together.py`)
on the same splits. A candidate's regret on a problem is its validation NLL, in nats per point, over
that of the best candidate of its method there. The default is the candidate with the smallest mean
regret over the problems. Test points are never looked at.

bnfed is not among the methods: its neurons are matched on the host, client by client, and 72
candidates would take hours.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base import files
from corefed.settings.config import resolve
from corefed.settings.space import changed
from corefed.training.groups import split
from corefed.training.record import MODELS
from corefed.training.setup import prepare
from corefed_studies.defaults.problems import DefaultsProblem, flags

SEEDS = (100, 101, 102)
"""Other seeds than those that the held-out problems are judged with."""
VALIDATION = 0.2
COPIES_MB = 20_000
"""Of training data: each candidate has a copy."""

Candidate = dict[str, Any]


class Arm(NamedTuple):
    """A method and the model of it that is judged."""

    method: str
    model: str  # personal, global or localized (after the local steps: fine-tuned)


ARMS = {
    "pfedbayes": Arm("pfedbayes", "personal"),
    "independent": Arm("independent", "personal"),
    "fedavg": Arm("fedavg", "global"),
    "fedavg, fine-tuned": Arm("fedavg", "localized"),
    "pfedme": Arm("pfedme", "personal"),
    "per-fedavg": Arm("per-fedavg", "personal"),
}
"""What settings are chosen for. coreset-pfedbayes and random-subset take those of pfedbayes, and
submodular-* those of fedavg."""


def _product(**values: Sequence[Any]) -> list[Candidate]:
    return [dict(zip(values, row, strict=True)) for row in itertools.product(*values.values())]


def _bayesian(**values: Sequence[float]) -> list[Candidate]:
    """eta_2 is given as a part of eta_1."""
    found = _product(**values)
    return [{**each, "eta_2": each["eta_1"] * each["eta_2"]} for each in found]


_SCHEDULES = ("constant", "cosine")
_SGD = _product(
    schedule=_SCHEDULES,
    learning_rate=(0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6),
    initial_std=(0.05, 0.1, 0.2),
)

WIDE: dict[str, list[Candidate]] = {
    "pfedbayes": _bayesian(
        eta_1=(0.004, 0.008, 0.016),
        eta_2=(0.25, 1.0),
        zeta=(1.0, 3.0),
        initial_rho=(-3.0, -4.0),
        anneal=(0.0, 1.0),
    ),
    "independent": _SGD,
    "fedavg": _SGD,
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
"""The first 48 candidates of each method."""

FINE: dict[str, list[Candidate]] = {
    "pfedbayes": _bayesian(
        eta_1=(0.008, 0.012),
        eta_2=(0.15, 0.25),
        zeta=(0.5, 1.0, 2.0),
        initial_rho=(-3.5, -4.0),
        anneal=(1.0,),
    ),
    "independent": _product(
        schedule=_SCHEDULES,
        learning_rate=(0.025, 0.035, 0.05, 0.07),
        initial_std=(0.035, 0.05, 0.07),
    ),
    "fedavg": [
        *_product(
            schedule=("constant",),
            learning_rate=(0.07, 0.1, 0.14),
            initial_std=(0.035, 0.05, 0.07, 0.1),
        ),
        *_product(
            schedule=("cosine",),
            learning_rate=(0.3, 0.4, 0.55),
            initial_std=(0.035, 0.05, 0.07, 0.1),
        ),
    ],
    "pfedme": _product(
        personal_rate=(0.015, 0.02, 0.03),
        penalty=(20.0, 30.0),
        learning_rate=(0.06, 0.08, 0.12, 0.16),
    ),
    "per-fedavg": _product(
        alpha=(0.005, 0.01, 0.014, 0.02), beta=(0.05, 0.07, 0.1, 0.14, 0.2, 0.28)
    ),
}
"""24 more around the best of the first."""

CANDIDATES = {method: [*WIDE[method], *FINE[method]] for method in WIDE}


class Score(NamedTuple):
    """One candidate on one problem."""

    candidate: Candidate
    nll: dict[str, float]  # by model; of validation points, mean over seeds; infinite: diverged


def place_of(folder: Path, problem: str, method: str) -> Path:
    return folder / "choosing" / f"{problem}--{method}.json"


def train(
    problem: DefaultsProblem,
    method: str,
    candidates: Sequence[Candidate],
    files_in: Path,
    device: str,
) -> list[Score]:
    """Train candidates on a problem, and score them on its validation points."""
    base = {
        **flags(problem, files_in), "method": method, "seeds": SEEDS, "validation": VALIDATION,
        "device": device, "memory_mb": COPIES_MB,
    }  # fmt: skip
    setup = prepare(resolve(flags=base))
    points = setup.data.validation
    assert points is not None
    experiments = {n: changed(setup.experiment, each) for n, each in enumerate(candidates)}
    found: dict[int, Score] = {}
    for group in split(setup, experiments):
        while group.members and group.round < setup.experiment.run.rounds:
            for lost in group.train():
                found[lost] = Score(candidates[lost], dict.fromkeys(MODELS, math.inf))
        each = group.together.evaluate(group.round - 1, points) if group.members else []
        for n, metrics in zip(group.numbers, each, strict=True):
            found[n] = _score(candidates[n], metrics)
    return [found[n] for n in range(len(candidates))]


def _score(candidate: Candidate, metrics: Sequence[dict[str, float]]) -> Score:
    models = [name.removesuffix("_nll") for name in metrics[0] if name.endswith("_nll")]
    means = {m: sum(each[f"{m}_nll"] for each in metrics) / len(metrics) for m in models}
    return Score(candidate, {m: v if math.isfinite(v) else math.inf for m, v in means.items()})


def keep(path: Path, scores: Sequence[Score]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [each._asdict() for each in scores]
    files.replace(path, (json.dumps(rows, indent=1) + "\n").encode())


def read(path: Path) -> list[Score]:
    return [Score(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


class Choice(NamedTuple):
    """The candidate of an arm, and how it was found."""

    candidate: Candidate
    regret: float  # mean over problems, nats per point
    by_problem: dict[str, float]  # its regret
    nll: dict[str, float]  # by problem: that of the candidate that was best there


def choose(scores: Mapping[str, Sequence[Score]], model: str) -> Choice:
    """The candidate with the smallest mean regret; `scores` by problem, in the same order."""
    least = {problem: min(each.nll[model] for each in row) for problem, row in scores.items()}
    first = next(iter(scores.values()))
    regrets = [
        {problem: row[n].nll[model] - least[problem] for problem, row in scores.items()}
        for n in range(len(first))
    ]
    means = [sum(each.values()) / len(each) for each in regrets]
    winner = min(range(len(first)), key=means.__getitem__)
    return Choice(first[winner].candidate, means[winner], regrets[winner], least)
