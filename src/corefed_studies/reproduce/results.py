"""The result file of a table: every cell with its settings, its numbers and its learning curve.

    {"schema": 1, "name": "table1", "scale": "paper", "cells": [
    {"row", "column", "method", ..., "metrics", "classes", "cost", "environment", "curve"}, ...
    ]}

One line per cell, so that two versions can be compared; small enough to be committed. Tables and
pictures are made from this file alone: `corefed reproduce NAME --from FILE` makes them again, on
any machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from corefed.base.errors import UserError
from corefed.training.record import Line
from corefed.training.summaries import over_seeds
from corefed_studies.reproduce.cells import CellOutcome, Found
from corefed_studies.result_file import rounded

SCHEMA = 1
SHOWN = ("personal_accuracy", "global_accuracy", "personal_rmse", "global_rmse")
"""What a curve has."""
DIGITS = 5
"""Significant digits kept: an accuracy to a hundredth of a point."""

Result = dict[str, Any]
"""One cell as the file has it; `failure` in place of numbers where it has none."""

Results = dict[tuple[str, str], Result]


def keep(found: Found, *, classes: bool = False) -> Results:
    """What is kept of each cell; accuracies by class only where a table shows them."""
    cells = {key: _cell(outcome) for key, outcome in found.items()}
    for cell in cells.values():
        if not classes:
            cell.pop("classes", None)
    return cells


def write(path: Path, name: str, scale: str, results: Results) -> None:
    head = json.dumps({"schema": SCHEMA, "name": name, "scale": scale, "cells": []})
    cells = [
        json.dumps({"row": row, "column": column, **rounded(result, DIGITS)}, ensure_ascii=False)
        for (row, column), result in results.items()
    ]
    text = head.removesuffix("]}") + "\n" + ",\n".join(cells) + "\n]}\n"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def read(path: Path, name: str) -> Results:
    """The cells of a result file of this table."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        about = content["schema"], content["name"]
        cells = {(cell.pop("row"), cell.pop("column")): cell for cell in content["cells"]}
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a result file of corefed reproduce.") from error
    if about != (SCHEMA, name):
        raise UserError(f"{path} holds {about[1]} (schema {about[0]}), not {name} ({SCHEMA}).")
    return cells


def _cell(outcome: CellOutcome) -> Result:
    if outcome.failure:
        return {"failure": outcome.failure}
    return {
        **{key: value for key, value in outcome.summary.items() if key != "schema"},
        "curve": curve(outcome.lines),
    }


def curve(lines: Sequence[Line]) -> dict[str, list[Any]]:
    """Personal and global accuracy by seed at every evaluated round, and what it took till then.

    Bytes and examples are of one seed, all clients; seconds of all seeds together.
    """
    sent = accumulate(_mean(line["bytes_up"]) + _mean(line["bytes_down"]) for line in lines)
    seen = accumulate(_mean(line["examples"]) for line in lines)
    spent = accumulate(line["seconds"] for line in lines)
    points: dict[str, list[Any]] = {}
    for line, bytes_, examples, seconds in zip(lines, sent, seen, spent, strict=True):
        if "metrics" not in line:
            continue
        found = {
            "round": line["round"],
            "bytes": bytes_,
            "examples": examples,
            "seconds": seconds,
            **{k: v for k, v in line["metrics"].items() if k in SHOWN},
        }
        for key, value in found.items():
            points.setdefault(key, []).append(value)
    return points


def metric(results: Results, key: tuple[str, str], name: str) -> list[float]:
    """A metric by seed; empty where the cell or the metric is missing."""
    each: list[float] = results.get(key, {}).get("metrics", {}).get(name, {}).get("per_seed", [])
    return each


def percent(each: Sequence[float]) -> str:
    """mean ± std over seeds, in percent; a dash where there is none."""
    if not each:
        return "-"
    spread = over_seeds([100 * value for value in each])
    mean = f"{spread['mean']:.2f}"
    return f"{mean} ± {spread['std']:.2f}" if len(each) > 1 else mean


def against(each: Sequence[float], other: Sequence[float]) -> str:
    """The mean of the differences by seed, in points, and p of the paired t-test."""
    if not each or len(each) != len(other):
        return "-"
    gaps = [100 * (a - b) for a, b in zip(each, other, strict=True)]
    mean = round(math.fsum(gaps) / len(gaps), 2) + 0.0  # no -0.00
    # One seed, or equal gaps but for rounding: a t-test has nothing to estimate from.
    if len(gaps) < 2 or math.isclose(max(gaps), min(gaps), rel_tol=1e-9):
        return f"{mean:+.2f}"
    from scipy.stats import ttest_rel

    p = float(ttest_rel(each, other).pvalue)
    return f"{mean:+.2f} (p {'< 0.001' if p < 0.001 else format(p, '.3f')})"


def machines(results: Results) -> str:
    """Where the cells were trained, and how long that took, as a sentence."""
    seconds: dict[str, float] = {}
    for result in results.values():
        if "environment" in result:
            env = result["environment"]
            name = f"{env.get('device', 'unknown')}, torch {env.get('torch', '?')}"
            cost = result["cost"]
            seconds[name] = seconds.get(name, 0.0) + cost["seconds"] + cost["evaluate_seconds"]
    parts = [f"{name} ({spent / 60:.0f} minutes)" for name, spent in sorted(seconds.items())]
    if not parts:
        return ""
    return f"Trained on {' and '.join(parts)}: the sum over cells, of which several ran at once."


def failures(results: Results) -> str:
    found = [f"{row}, {column}: {r['failure']}" for (row, column), r in results.items()
             if "failure" in r]  # fmt: skip
    return " ".join(found)


def _mean(each: Sequence[float]) -> float:
    return math.fsum(each) / len(each)
