"""Passes and CPU seconds of training to 99 % of full data's accuracy, selection counted.

The rival is full data at its own best batch size. Of each problem, full data are trained at every
batch size first; what all others have to reach is 99 % of the best accuracy that any of these runs
has at any time, seed by seed. A row then is trained until all seeds have reached it, or for all
rounds. Coresets are at the batch size of the default, and again at the rival's best. `seen` and the
random subset are reselected every 20 local steps, the default as often as its budget allows. In the
CNN `seen` also has a row whose batch follows the gain of importance sampling (`selectors/gain.py`).

Seconds are CPU time of this process in training, evaluation left out; all seeds train together, and
a seed's are its part. What selection took is inside, and shown as a part of the rest.

Beside it, some cells of `bench selectors` again (`pays_cells.py`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from corefed.base.types import Method, Tree
from corefed.settings.config import resolve
from corefed.training.loop import run_rounds
from corefed.training.rounds import Simulation
from corefed.training.setup import prepare
from corefed_studies.bench import pays_cells
from corefed_studies.bench.parted import Shown
from corefed_studies.reproduce.cells import Flags

Row = dict[str, Any]
F = TypeVar("F", bound=Callable[..., Any])

LEVEL = 0.99
"""Part of full data's best accuracy that is to be reached."""
OFTEN = 20
"""Local steps between two selections of `seen` and of the random subset."""
FULL = "full data"
BY_GAIN = "seen, batch by gain"
"""The same as `seen` for an MLP, in which a point costs less than a weight: of CNNs only."""
CORESETS: dict[str, Flags] = {
    "seen": {"selector": "seen", "refresh_every": OFTEN},
    BY_GAIN: {"selector": "seen", "refresh_every": OFTEN, "batch_by_gain": True},
    "calibrated": {},
    "random, redrawn": {"selector": "random", "refresh_every": OFTEN, "check_every": 10**6},
}
"""Flags of a row on coresets. The error of a random subset is not measured: nobody needs it."""


class Setting(NamedTuple):
    problems: dict[str, Flags]
    batches: tuple[int, ...]
    cells: tuple[tuple[str, int, int], ...]  # problem, percent, local steps
    seeds: tuple[int, ...]


SMALL: Flags = {
    "local_steps": 20, "evaluate_every": 2, "evaluate_draws": 2, "checkpoint_every": 0,
    "compile": "off",
}  # fmt: skip
MNIST: Flags = {**SMALL, "data": "mnist", "partition": "shards-medium"}
SETTINGS = {
    "paper": Setting(
        {
            "MNIST, 784-100-10": {**MNIST, "clients": 2, "rounds": 24},
            "MNIST, CNN 4-8-32": {
                **MNIST, "clients": 2, "rounds": 20, "model": "cnn", "channels": (4, 8),
                "hidden": (32,),
            },
        },
        (16, 32, 64, 100),
        (
            ("housing", 1, 20), ("housing", 10, 20), ("mnist-medium", 10, 20),
            ("fashion-medium", 10, 20),
        ),
        (0, 1, 2),
    ),
    "quick": Setting(
        {"digits": {**SMALL, "data": "digits", "clients": 2, "rounds": 4, "hidden": (8,)}},
        (16, 64), (), (0, 1),
    ),
}  # fmt: skip


def measure(scale: str, console: Shown, known: Sequence[Row]) -> Iterator[Row]:
    """Row after row, but for those that are known already."""
    setting = SETTINGS[scale]
    for problem, flags in setting.problems.items():
        found: list[Row] = []
        left_out = () if "model" in flags else (BY_GAIN,)
        for row, batch in rows_of(setting.batches, found, left_out):
            name = {"problem": problem, "row": row, "batch": batch}
            earlier = [r for r in known if {**r, **name} == r]
            own = {"method": "pfedbayes"} if row == FULL else {"fraction": 0.1, **CORESETS[row]}
            given = {**flags, **own, "batch_size": batch, "seeds": setting.seeds}
            goals = goals_of(found) if row != FULL else None
            found.append(earlier[0] if earlier else {**name, **trained(given, goals)})
            yield found[-1]
            console.print(f"{problem}, {row}, batch {batch}: done")
    yield from pays_cells.measure(setting.cells, setting.seeds, console, known)


def rows_of(
    batches: Sequence[int], found: Sequence[Row], left_out: Sequence[str] = ()
) -> Iterator[tuple[str, int]]:
    """(row, batch size): full data at each, then coresets; `found` grows meanwhile."""
    yield from ((FULL, batch) for batch in batches)
    for batch in dict.fromkeys((batches[-1], best(found, "passes")["batch"])):
        yield from ((row, batch) for row in CORESETS if row not in left_out)


# --- one run --------------------------------------------------------------------------------------


def trained(flags: Flags, goals: Sequence[float] | None) -> Row:
    """A run until all seeds have reached their goals; without goals, all rounds of it."""
    setup = prepare(resolve(None, dict(flags)))
    setup = setup._replace(method=_personal(setup.method))
    simulation, spent = Simulation(setup), Spent()
    setup.clients.method_of = spent.of_methods(setup.clients.method_of)  # type: ignore[method-assign]
    simulation.train = spent.all_of(simulation.train)  # type: ignore[method-assign]
    lines: list[Row] = []
    clock: list[tuple[float, float]] = []

    def on_round(line: Row, servers: object, last: bool) -> None:
        clock.append((spent.training, spent.selecting))

    def stop() -> bool:
        if goals is None:
            return False
        return all(at is not None for at in reached(accuracies(lines), goals))

    run = setup.experiment.run
    run_rounds(
        setup.method, simulation, setup.servers, run, lines, on_round=on_round, stop=stop
    )  # fmt: skip
    return {
        "accuracy": accuracies(lines),
        "passes": [[line["passes"][g] for line in lines] for g in range(len(run.seeds))],
        "selection": sum(sum(line.get("selection_examples", [0.0])) for line in lines) / 3,
        "seconds": [total / len(run.seeds) for total, _ in clock],
        "selecting": [part / len(run.seeds) for _, part in clock],
        "goals": list(goals) if goals is not None else None,
    }


def _personal(method: Method) -> Method:
    """The same method, of which the personal models alone are evaluated."""

    def models(*arguments: Any) -> dict[str, Tree]:
        return {"personal": method.models(*arguments)["personal"]}

    return method._replace(models=models)


class Spent:
    """CPU seconds of training, and of selecting as a part of them."""

    def __init__(self) -> None:
        self.training = self.selecting = 0.0

    def all_of(self, train: F) -> Any:
        def call(*arguments: Any) -> Any:
            began = time.process_time()
            found = train(*arguments)
            self.training += time.process_time() - began
            return found

        return call

    def of_methods(self, method_of: Callable[..., Method]) -> Callable[..., Method]:
        """The same methods, whose selections are timed."""

        def select(plain: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                began = time.thread_time()
                found = plain(*arguments)
                self.selecting += time.thread_time() - began
                return found

            return call

        def of(rows: Sequence[int], round_: int) -> Method:
            method = method_of(rows, round_)
            if method.subset is None:
                return method
            subset = method.subset._replace(select=select(method.subset.select))
            if subset.learn is not None:
                subset = subset._replace(learn=select(subset.learn))
            return method._replace(subset=subset)

        return of


# --- what is made of rows -------------------------------------------------------------------------


def accuracies(lines: Sequence[Row]) -> list[list[float | None]]:
    """By seed and round; None where a round was not evaluated."""
    every = [line["metrics"]["personal_accuracy"] if "metrics" in line else None for line in lines]
    seeds = len(lines[0]["passes"])
    return [[None if each is None else each[g] for each in every] for g in range(seeds)]


def goals_of(found: Sequence[Row]) -> list[float]:
    """By seed: the best accuracy of full data at any batch size and time, times `LEVEL`."""
    full = [row["accuracy"] for row in found if row["row"] == FULL]
    return [
        LEVEL * max(a for each in full for a in each[g] if a is not None)
        for g in range(len(full[0]))
    ]


def reached(accuracy: Sequence[Sequence[float | None]], goals: Sequence[float]) -> list[int | None]:
    """By seed: the first round (from 0) whose accuracy is at the goal; None: not reached."""
    return [
        next((t for t, a in enumerate(mine) if a is not None and a >= goal), None)
        for mine, goal in zip(accuracy, goals, strict=True)
    ]


def cost(row: Mapping[str, Any], goals: Sequence[float], kind: str) -> float:
    """Mean over seeds of the passes, seconds or steps up to the goal; infinite if one missed it."""
    at = reached(row["accuracy"], goals)
    if any(t is None for t in at):
        return math.inf
    rounds = [t + 1 for t in at if t is not None]
    if kind == "passes":
        pairs = zip(row["passes"], rounds, strict=True)
        return statistics.fmean(sum(mine[:many]) for mine, many in pairs)
    if kind == "seconds":
        return statistics.fmean(row["seconds"][many - 1] for many in rounds)
    return statistics.fmean(rounds)


def best(found: Sequence[Row], kind: str) -> Row:
    """Full data at the batch size at which it is cheapest."""
    goals = goals_of(found)
    full = [row for row in found if row["row"] == FULL]
    return min(full, key=lambda row: cost(row, goals, kind))


def table(rows: Sequence[Row]) -> str:
    """Costs by problem, then the cells."""
    lines: list[str] = []
    for problem in dict.fromkeys(row["problem"] for row in rows if "problem" in row):
        lines += _costs(problem, [row for row in rows if row.get("problem") == problem])
    some = [row for row in rows if "cell" in row]
    return "\n".join(lines + (pays_cells.lines_of(some) if some else []))


def _costs(problem: str, rows: Sequence[Row]) -> list[str]:
    goals = goals_of(rows)
    rival = {kind: cost(best(rows, kind), goals, kind) for kind in ("passes", "seconds")}
    lines = [
        f"**{problem}: to {statistics.fmean(goals):.4f}, {LEVEL:.0%} of full data's best accuracy, "
        f"mean of {len(goals)} seeds**",
        "",
        "| | batch | rounds | passes | over the rival's | CPU seconds | over the rival's | "
        "selection, of the passes | of the seconds |",
        "|---" * 9 + "|",
    ]
    for row in rows:
        many, *spent = (cost(row, goals, kind) for kind in ("rounds", "passes", "seconds"))
        shares = ["", ""]
        if row["row"] != FULL:
            total = sum(sum(mine) for mine in row["passes"])
            shares = [f"{row['selection'] / (total - row['selection']):.1%}"]
            seconds, part = row["seconds"][-1], row["selecting"][-1]
            shares.append(f"{part / (seconds - part):.1%}")
        if math.isinf(many):
            highest = [max(a for a in mine if a is not None) for mine in row["accuracy"]]
            shown = [f"not in {len(row['seconds'])}: {statistics.fmean(highest):.4f}", *[""] * 4]
        else:
            ratios = [f"{s / rival[k]:.2f}" for s, k in zip(spent, rival, strict=True)]
            shown = [f"{many:.1f}", f"{spent[0]:,.0f}", ratios[0], f"{spent[1]:.2f}", ratios[1]]
        lines.append("| " + " | ".join([row["row"], str(row["batch"]), *shown, *shares]) + " |")
    return [*lines, ""]
