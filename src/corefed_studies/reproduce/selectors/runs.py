"""From the run folders of `bench selectors` to a result file that is small enough to be committed.

For every cell: metrics by seed, numbers of its coresets, costs, where it was trained, and for a few
rows the learning curve. Seconds are those of training, all seeds together; examples are of one
seed, all clients. Flags are kept where they tell a row from full data, in the first column of a
problem; full data and variations keep all of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from corefed.base.errors import UserError
from corefed.settings import config
from corefed.training import record
from corefed.training.record import Line
from corefed_studies.reproduce.cells import (
    ELSEWHERE,
    CellOutcome,
    Flags,
    StudyCell,
    place_of,
)
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.selectors.study import FULL, ROWS, SHARED, TIMED, problem_of, spot_of

METRICS = {
    "personal_accuracy": 5, "global_accuracy": 5, "personal_rmse": 5, "global_rmse": 5,
    "personal_nll": 4, "personal_ece": 4,
}  # fmt: skip
"""What is kept by seed, with how many significant digits."""
FIGURES = ("held_out_error", "refreshes")


def read(cells: Sequence[StudyCell], folder: Path) -> Results:
    """The results of cells that are finished in a folder, wherever they were trained.

    Needs neither data nor the device of the runs. One with other settings is refused.
    """
    found: Results = {}
    for cell in cells:
        place = place_of(cell, folder)
        if (place / record.SUMMARY).exists():
            summary, lines = record.read(place)
            _refuse_others(cell, place, summary["config"])
            found |= results_of(cell, CellOutcome(summary, lines))
    return found


def _refuse_others(cell: StudyCell, place: Path, there: dict[str, Any]) -> None:
    """What is left to the machine or the data may differ; defaults of settings may not."""
    here = config.to_dict(config.resolve(flags=cell.flags))
    free = {key for key, value in here.items() if key in ELSEWHERE or value in ("auto", "")}
    changed = config.differences({**there, **{key: here[key] for key in free}}, here)
    if changed:
        raise UserError(
            f"{place} holds a run with other settings: {', '.join(changed)}; remove it, and train "
            "it again."
        )


def results_of(cell: StudyCell, outcome: CellOutcome) -> Results:
    """A cell as the result file has it: small, since there are hundreds."""
    if outcome.failure:
        return {(cell.row, cell.column): {"failure": outcome.failure}}
    summary, spot = outcome.summary, spot_of(cell.column)
    spot = spot._replace(machine=_machine(summary) if spot.machine else "")
    result: Result = {
        "flags": _telling(cell),
        "metrics": {
            name: [float(f"{value:.{digits}g}") for value in summary["metrics"][name]["per_seed"]]
            for name, digits in METRICS.items()
            if name in summary["metrics"]
        },
        "coreset": {key: value for key, value in summary["coreset"].items() if key in FIGURES},
        "cost": _cost(summary),
        "device": summary["environment"]["device"],
    }
    if not result["flags"]:
        del result["flags"]
    if cell.row in TIMED:
        result["curve"] = curve(outcome.lines)
    return {(cell.row, str(spot)): result}


def _telling(cell: StudyCell) -> Flags:
    spot = spot_of(cell.column)
    problem = problem_of(spot.problem)
    if cell.row in ROWS and cell.row != FULL and spot.percent != min(problem.percents):
        return {}
    told = ELSEWHERE if cell.row == FULL else ELSEWHERE.union(problem.flags, SHARED)
    return {key: value for key, value in cell.flags.items() if key not in told}


def _machine(summary: dict[str, Any]) -> str:
    name: str = summary["environment"]["device"]
    if summary["config"]["device"] != "cpu":
        return name
    return f"CPU ({name}, {summary['environment']['threads']} threads)"


def _cost(summary: dict[str, Any]) -> dict[str, float]:
    """Seconds of all seeds together; examples of one seed, all clients."""
    cost, seeds = summary["cost"], len(summary["seeds"])
    found = {"seconds": cost["seconds"], "examples": round(cost["examples_processed"] / seeds)}
    if "selection_examples" in cost:
        found["selection_examples"] = round(cost["selection_examples"] / seeds)
    return found


def curve(lines: Sequence[Line]) -> dict[str, list[float]]:
    """The personal metric, mean over seeds, at every evaluated round, and what it took till then.

    Seconds of all seeds together; examples, and those of selections, of one seed, all clients.
    """
    totals = {
        "seconds": accumulate(line["seconds"] for line in lines),
        "examples": accumulate(_mean(line["examples"]) for line in lines),
    }
    if any("selection_examples" in line for line in lines):
        each = (_mean(line.get("selection_examples", [0.0])) for line in lines)
        totals["selection_examples"] = accumulate(each)
    points: dict[str, list[float]] = {}
    for line, *so_far in zip(lines, *totals.values(), strict=True):
        metrics = line.get("metrics", {})
        personal = next((metrics[name] for name in METRICS if name in metrics), None)
        if personal is not None:
            at = {"round": line["round"], "personal": _mean(personal)}
            for key, value in {**at, **dict(zip(totals, so_far, strict=True))}.items():
                counted = key.endswith("examples")
                points.setdefault(key, []).append(round(value) if counted else value)
    return points


def _mean(each: Sequence[float]) -> float:
    return sum(each) / len(each)
