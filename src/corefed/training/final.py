"""A final fit: settings that held-out points have chosen, of a run or a search, on all points.

Nothing is held out, so nothing is validated, and the run cannot stop early. Where the run that the
settings come from did, the final fit has as many rounds as that run was best at: the median over
its seeds. Schedules keep their plan, so that these are the same rounds.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from corefed.base.errors import UserError
from corefed.settings.config import resolve
from corefed.training import record


def settings(folder: Path) -> tuple[dict[str, Any], str]:
    """What differs from experiment.toml in the folder, and a sentence about the rounds."""
    run = resolve(record.settings_file(folder)).run
    changed: dict[str, Any] = {"test_fraction": 0.0, "validation": 0.0, "patience": 0}
    if not run.patience:
        return changed, ""
    if not (folder / record.SUMMARY).exists():
        raise UserError(
            f"The run in {folder} stops early and is not finished, so nothing says how many rounds "
            f"a final fit has; go on with it by corefed run --resume {folder}."
        )
    summary, _ = record.read(folder)
    best = summary["stopping"]["best_round"]
    rounds = round(statistics.median(best))
    by_seed = f", the median of {', '.join(map(str, best))}" if len(best) > 1 else ""
    changed |= {"rounds": rounds, "planned_rounds": run.planned_rounds}
    return changed, (
        f"{rounds} rounds, where the run in {folder} was best on validation points{by_seed}"
    )
