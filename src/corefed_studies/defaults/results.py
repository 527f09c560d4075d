"""The result file of the study of defaults: small enough to be committed.

    {"schema": 1, "name": "defaults", "scale": "paper",
     "choosing": {problem: {method: [{model: NLL}, ... one per candidate]}},
     "judging": {problem: {row: {"metrics": {name: by seed}, "cost", "calibration"}}},
     "tuning": {problem: {...}}}

Candidates are not in it: they are those of `choosing.CANDIDATES`, in that order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base import files
from corefed.base.errors import UserError
from corefed_studies import result_file
from corefed_studies.defaults import choosing, judging, tuning
from corefed_studies.defaults.choosing import Choice, Score
from corefed_studies.defaults.judging import Cell
from corefed_studies.defaults.problems import PROBLEMS

SCHEMA, NAME = 1, "defaults"
DIGITS = 5


class Study(NamedTuple):
    scale: str
    choosing: dict[str, dict[str, list[dict[str, float]]]]
    judging: dict[str, dict[str, Cell]]
    tuning: dict[str, dict[str, Any]]

    def choice(self, arm: str) -> Choice:
        """The settings of an arm, from the problems that have all of its candidates."""
        method, model = choosing.ARMS[arm]
        candidates = choosing.CANDIDATES[method]
        scores = {
            problem: [Score(*pair) for pair in zip(candidates, rows[method], strict=True)]
            for problem, rows in self.choosing.items()
            if len(rows.get(method, ())) == len(candidates)
        }
        return choosing.choose(scores, model)


def gather(folder: Path, scale: str) -> Study:
    """What is finished in a folder."""
    chosen: dict[str, dict[str, list[dict[str, float]]]] = {}
    judged: dict[str, dict[str, Cell]] = {}
    tuned: dict[str, dict[str, Any]] = {}
    for problem in PROBLEMS:
        for method in choosing.CANDIDATES:
            path = choosing.place_of(folder, problem.name, method)
            if path.exists():
                rows = [each.nll for each in choosing.read(path)]
                chosen.setdefault(problem.name, {})[method] = rows
        for row in judging.ROWS:
            path = judging.place_of(folder, problem.name, row)
            if path.exists():
                judged.setdefault(problem.name, {})[row] = judging.read(path)
        path = tuning.place_of(folder, problem.name)
        if path.exists():
            tuned[problem.name] = judging.read(path)
    return Study(scale, chosen, judged, tuned)


def write(path: Path, study: Study) -> None:
    whole = {"schema": SCHEMA, "name": NAME, **_rounded(study._asdict())}
    files.replace(path, (json.dumps(whole, indent=0) + "\n").encode())


def read(path: Path) -> Study:
    found = result_file.read(path, NAME, SCHEMA)
    try:
        return Study(*(found[field] for field in Study._fields))
    except KeyError as error:
        raise UserError(f"{path} is not whole: it lacks {error}.") from error


def _rounded(value: Any) -> Any:
    """Numbers with a few digits; infinite ones, which JSON has not, as 1e9."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{min(value, 1e9):.{DIGITS}g}")
    return value
