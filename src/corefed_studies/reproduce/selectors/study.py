"""What `bench selectors` trains: problems, fractions, numbers of local steps, selectors.

Of every problem, at every fraction and number of local steps: full data, the default of
coreset-pfedbayes, random subsets, and for some the other selectors. Seeds are the same everywhere,
so that differences can be paired by seed. Whatever is reselected is reselected at the same local
steps: those of the default's budget (`corefed/selectors/renewal.py`). All seeds of a cell are
trained together.

A cell that was stopped begins again; finished ones are kept. Checkpoints and models of 700 cells
with 50 clients would be a hundred gigabytes, and a cell takes minutes at most.

Scale paper has the constants of the paper, scale defaults the first four rows with corefed's
defaults.

`plan` and `alone` say what is to be trained, `cells.outcomes` trains it, and `runs.read` makes
results of run folders, wherever they were trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from corefed.base.errors import UserError
from corefed.data import cifar, fetch, networks
from corefed_studies.reproduce.cells import Flags, StudyCell, published
from corefed_studies.reproduce.selectors.variations import ABLATED, ABLATION, Ablated

FULL, DEFAULT = "full data", "default"
REDRAWN, ONCE = "random, redrawn", "random, once"
MAIN = (FULL, DEFAULT, REDRAWN, ONCE)
"""Rows that every problem has."""
CURVED = (FULL, DEFAULT, REDRAWN)
"""Rows whose learning curves are kept."""
FRUGAL = "default, a fifth looked at"
"""The default with a fifth of the points, in turn, to choose from: at a fifth of the cost."""
MATCHING = "matching"
"""The paper's recipe, with all of the settings that it was tuned with, its own cadence included."""
SELECTORS = (
    "craig", "gradmatch", "herding", "k-centre", "loss", "gradient-norm", "leverage",
)  # fmt: skip

CORESET: Flags = {"method": "coreset-pfedbayes"}
ROWS: dict[str, Flags] = {
    FULL: {"method": "pfedbayes"},
    DEFAULT: CORESET,
    REDRAWN: {**CORESET, "selector": "random"},
    ONCE: {"method": "random-subset"},
    MATCHING: {**CORESET, "preset": "matching"},
    **{name: {**CORESET, "selector": name} for name in SELECTORS},
    FRUGAL: {**CORESET, "pool": 0.2, "budget": 0.1},
}
OTHERS = (MATCHING, *SELECTORS)
TIMED = (*CURVED, FRUGAL)
"""Rows of the runs that are timed alone."""

VARIANT = "variant "
"""How the rows of variations of the default begin."""

PERCENTS = (1, 5, 10, 30, 50)
ROUNDS = {20: 100, 150: 14}
"""Local steps per round -> rounds: about as many steps in total."""


class StudyProblem(NamedTuple):
    """Data, network and prior, and how much of the study it has."""

    name: str  # a word, of files and columns
    label: str
    flags: Flags
    rounds: dict[int, int] = ROUNDS
    percents: tuple[int, ...] = PERCENTS
    others: tuple[str, ...] = ()  # rows beside the main ones,
    other_percents: tuple[int, ...] = (1, 10)  # at these fractions,
    other_steps: tuple[int, ...] = (20,)  # and numbers of local steps
    within: float | None = None  # points of full data that 10 % should be within


class SelectorScale(NamedTuple):
    problems: tuple[StudyProblem, ...]
    seeds: tuple[int, ...]
    evaluations: int  # of a run, about
    alone: tuple[tuple[str, int, int], ...] = ()
    """(problem, percent, local steps) that are also timed with nothing else on the machine."""
    ablation: tuple[tuple[str, Flags], ...] = ()
    """Variations of the default: label and flags."""
    ablated: tuple[Ablated, ...] = ()
    constants: bool = False
    """Learning rates, initial width and zeta as in the paper, not corefed's defaults."""

    def as_they_come(self) -> SelectorScale:
        """The main rows of every problem with corefed's defaults."""
        kept = [
            problem._replace(
                flags={
                    key: v for key, v in problem.flags.items() if key not in ("zeta", "initial_rho")
                },
                others=(),
            )
            for problem in self.problems
        ]
        return SelectorScale(tuple(kept), self.seeds, self.evaluations)


def _shards(data: str, size: str, label: str) -> StudyProblem:
    flags: Flags = {"data": data, "partition": f"shards-{size}", "zeta": 1.0}
    short = data.removesuffix("-mnist")
    others = OTHERS if size == "medium" else ()
    return StudyProblem(
        f"{short}-{size}", f"{label}, shards-{size}", flags, others=others, within=0.5
    )


CIFAR = StudyProblem(
    "cifar10",
    "CIFAR-10, shards-large, 4 clients",
    # sigma = 0.018 at the start, as in Table 1: more noise drowns what 576 inputs say.
    {"data": "cifar10", "partition": "shards-large", "clients": 4, "zeta": 1.0,
     "initial_rho": -4.0},
    rounds={20: 40},
    within=2.0,
)  # fmt: skip
CHEST = StudyProblem(
    "chest-xray",
    "chest X-ray embeddings",
    {"data": "image-folder:chest-xray", "partition": "shared-normal", "clients": 2,
     "scale": "standard", "zeta": 10.0},
    others=OTHERS,
)  # fmt: skip
HOUSING = StudyProblem(
    "housing",
    "California housing, regression",
    {"data": "table:housing/california_housing.csv", "target": "median_house_value",
     "partition": "iid", "zeta": 1.0},
    others=OTHERS,
)  # fmt: skip

ALONE = (
    ("mnist-medium", 5, 20), ("fashion-medium", 5, 20), ("cifar10", 10, 20), ("housing", 5, 20),
)  # fmt: skip

QUICK_ROUNDS = {20: 20, 100: 4}
SCALES = {
    "paper": SelectorScale(
        (
            _shards("mnist", "medium", "MNIST"),
            _shards("mnist", "large", "MNIST"),
            _shards("fashion-mnist", "medium", "Fashion-MNIST"),
            _shards("fashion-mnist", "large", "Fashion-MNIST"),
            CIFAR,
            CHEST,
            HOUSING,
        ),
        (0, 1, 2, 3, 4), 12, ALONE, ABLATION, ABLATED, constants=True,
    ),
    "quick": SelectorScale(
        (
            StudyProblem("digits", "digits", {"data": "digits"}, QUICK_ROUNDS, (5, 30)),
            StudyProblem(
                "hoelder", "a Hölder function, regression",
                {"data": "synthetic-hoelder:points=400,test=400", "clients": 4, "noise": 0.3},
                QUICK_ROUNDS, (5, 30),
            ),
        ),
        (0, 1, 2), 10,
    ),
}  # fmt: skip
SCALES["defaults"] = SCALES["paper"].as_they_come()


# --- the plan -------------------------------------------------------------------------------------


class Spot(NamedTuple):
    """What a column is about; full data are 100 %."""

    problem: str
    percent: int
    steps: int
    machine: str = ""  # of a run that was timed alone

    def __str__(self) -> str:
        tail = f" alone on {self.machine}" if self.machine else ""
        return f"{self.problem} {self.percent} % {self.steps} steps{tail}"


def spot_of(column: str) -> Spot:
    """The spot whose text a column is."""
    found = re.fullmatch(r"(\S+) (\d+) % (\d+) steps(?: alone on (.+))?", column)
    if found is None:
        raise UserError(f"{column!r} is no column of the selectors' results.")
    problem, percent, steps, machine = found.groups()
    return Spot(problem, int(percent), int(steps), machine or "")


HERE = "this machine"
"""In place of a machine's name, while a run that is timed is still to be made."""


def plan(scale: str, problems: Sequence[str] = ()) -> list[StudyCell]:
    """Every run but those that are timed alone, of all problems or of those named."""
    return [cell for cell in _plan(SCALES[scale]) if _wanted(cell, problems)]


def alone(scale: str, problems: Sequence[str] = ()) -> list[StudyCell]:
    """Runs to be timed one after the other."""
    setting = SCALES[scale]
    named = {problem.name: problem for problem in setting.problems}
    found = []
    for name, percent, steps in setting.alone:
        for row in TIMED:
            spot = Spot(name, 100 if row == FULL else percent, steps, HERE)
            cell = StudyCell(row, str(spot), _flags(setting, named[name], spot, ROWS[row]))
            if cell not in found and _wanted(cell, problems):
                found.append(cell)
    return found


def _plan(setting: SelectorScale) -> Iterator[StudyCell]:
    for problem in setting.problems:
        for row, percent, steps in _spots(problem):
            spot = Spot(problem.name, percent, steps)
            yield StudyCell(row, str(spot), _flags(setting, problem, spot, ROWS[row]))
    named = {problem.name: problem for problem in setting.problems}
    for place in setting.ablated:
        spot = Spot(place.problem, place.percent, place.steps)
        for label, own in setting.ablation:
            if not place.labels or label in place.labels:
                varied = {**ROWS[DEFAULT], "refresh_every": place.refresh_every, **own}
                flags = _flags(setting, named[place.problem], spot, varied)
                yield StudyCell(f"{VARIANT}{label}", str(spot), flags)


def _spots(problem: StudyProblem) -> Iterator[tuple[str, int, int]]:
    """(row, percent, local steps) of all that a problem has, what matters most first."""
    for steps in problem.rounds:
        yield FULL, 100, steps
        for percent in problem.percents:
            for row in MAIN[1:]:
                yield row, percent, steps
    for steps in problem.other_steps:
        for percent in problem.other_percents:
            for row in problem.others:
                yield row, percent, steps


def _wanted(cell: StudyCell, problems: Sequence[str]) -> bool:
    return not problems or spot_of(cell.column).problem in problems


SHARED = ("fraction", "seeds", "local_steps", "rounds", "evaluate_every", "checkpoint_every")
"""Flags of a cell that follow from its column and scale."""


def _flags(setting: SelectorScale, problem: StudyProblem, spot: Spot, own: Flags) -> Flags:
    rounds = problem.rounds[spot.steps]
    flags: Flags = {
        **problem.flags,
        **own,
        **({} if spot.percent == 100 else {"fraction": spot.percent / 100}),
        "seeds": setting.seeds,
        "local_steps": spot.steps,
        "rounds": rounds,
        "evaluate_every": max(1, rounds // setting.evaluations),
        "checkpoint_every": 0,
    }
    return published(flags) if setting.constants else flags


def problem_of(name: str) -> StudyProblem:
    """The problem of that name; a bare one for a name that is in no plan any more."""
    every = (problem for scale in SCALES.values() for problem in scale.problems)
    return next(
        (problem for problem in every if problem.name == name), StudyProblem(name, name, {})
    )


def place_of(problem: StudyProblem) -> tuple[int, str]:
    """Where a problem stands among the others, for sorting."""
    every = [each.name for scale in SCALES.values() for each in scale.problems]
    known = problem.name in every
    return every.index(problem.name) if known else len(every), problem.name


def absent(problem: StudyProblem) -> str:
    """Why a problem cannot be trained on here, as a sentence; empty if it can.

    Sets that a user must have brought; MNIST and Fashion-MNIST are fetched where they are missing.
    """
    kind, _, path = str(problem.flags["data"]).partition(":")
    try:
        if kind in ("table", "image-folder"):
            fetch.find_path(path, None)
        if kind == "image-folder":
            networks.choose("auto")
        if kind == cifar.NAME:
            cifar.load(None, download=False)
    except UserError as error:
        return f"{problem.label} is left out: {error}"
    return ""
