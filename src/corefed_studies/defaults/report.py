"""The tables of the study of defaults: what was chosen, its worth, what was to be reached."""

from __future__ import annotations

from statistics import fmean

from corefed_studies.defaults.choosing import ARMS, CANDIDATES, WIDE
from corefed_studies.defaults.judging import ALONE, CORESET, FULL, REDRAWN, ROWS, TUNED, Cell
from corefed_studies.defaults.results import Study
from corefed_studies.pages import Table
from corefed_studies.reproduce.selectors.verdicts import Mean, mean_of

WITHIN = {"cifar10-cnn": 1.5}
"""Points that the coreset may be below full data; 0.5 elsewhere."""
CALIBRATED = 0.03


def tables(study: Study) -> list[Table]:
    found = [chosen(study), annealed(study)] if study.choosing else []
    found += [judged(study, problem) for problem in study.judging]
    found += [reached(study)] if study.judging else []
    found += [tuned(study)] if study.tuning else []
    return found


def chosen(study: Study) -> Table:
    problems = list(study.choosing)
    rows = []
    for arm, (method, model) in ARMS.items():
        if not any(method in each for each in study.choosing.values()):
            continue
        choice = study.choice(arm)
        settings = ", ".join(f"{key} {_number(value)}" for key, value in choice.candidate.items())
        each = [f"{choice.by_problem[p]:.3f}" if p in choice.by_problem else "-" for p in problems]
        rows.append((f"{arm} ({model})", settings, f"{choice.regret:.3f}", *each))
    number = len(CANDIDATES["pfedbayes"])
    note = (
        f"{number} candidates of each method, chosen by the "
        "validation NLL of the model in brackets. Regret: nats per point above the best candidate "
        "of the method on that problem. The candidate with the smallest mean regret is taken."
    )
    return Table("What was chosen", ("", "settings", "mean regret", *problems), rows, note)


def annealed(study: Study) -> Table:
    """What the rise of zeta is worth: the best of the wide candidates with it and without."""
    scores = {
        problem: [nll["personal"] for nll in rows["pfedbayes"][: len(WIDE["pfedbayes"])]]
        for problem, rows in study.choosing.items()
    }
    least = {problem: min(each) for problem, each in scores.items()}
    rows = []
    for part, words in ((1.0, "zeta rises"), (0.0, "zeta from the first round")):
        mine = [n for n, each in enumerate(WIDE["pfedbayes"]) if each["anneal"] == part]
        regret = min(fmean(scores[p][n] - least[p] for p in scores) for n in mine)
        best = (f"{min(scores[p][n] for n in mine):.4f}" for p in scores)
        rows.append((words, f"{regret:.3f}", *best))
    note = (
        "Of the 24 wide candidates of each kind: the smallest mean regret of one candidate for all "
        "problems, and the lowest validation NLL on each problem."
    )
    return Table("What the rise of zeta is worth", ("", "mean regret", *scores), rows, note)


def judged(study: Study, problem: str) -> Table:
    cells = study.judging[problem]
    score = "RMSE" if "rmse" in cells[FULL]["metrics"] else "accuracy %"
    rows = []
    for row in ROWS:
        if row not in cells:
            continue
        cell = cells[row]
        if "failure" in cell:
            rows.append((row, "diverged", *[""] * 5))
            continue
        calibration = cell.get("calibration", {})
        rows.append(
            (
                f"{row} ({ROWS[row].model})",
                _score(cell),
                _against(cells, row, "score"),
                f"{fmean(cell['metrics']['nll']):.3f}",
                _against(cells, row, "nll"),
                f"{fmean(cell['metrics']['ece']):.3f}" if "ece" in cell["metrics"] else "-",
                f"{fmean(calibration['by_chance']):.3f}" if calibration else "-",
            )
        )
    columns = (
        "", score, "pfedbayes better by", "NLL", "pfedbayes better by", "ECE", "ECE by chance",
    )  # fmt: skip
    note = (
        "Means over 5 seeds, last round. Better by: paired by seed, ± half of the 95 % interval; "
        "points of accuracy or percent of RMSE, and nats. ECE by chance: what a perfectly "
        "calibrated model with these confidences would show on so few points."
    )
    return Table(problem, columns, rows, note)


def gap(cells: dict[str, Cell], one: str, other: str, what: str) -> Mean | None:
    """By how much `one` is better than `other`, paired by seed."""
    if any("failure" in cells.get(row, {"failure": ""}) for row in (one, other)):
        return None
    mine, theirs = cells[one]["metrics"], cells[other]["metrics"]
    if what == "nll":
        return mean_of([b - a for a, b in zip(mine["nll"], theirs["nll"], strict=True)])
    if "rmse" in mine:
        pairs = zip(mine["rmse"], theirs["rmse"], strict=True)
        return mean_of([100 * (b - a) / b for a, b in pairs])
    pairs = zip(mine["accuracy"], theirs["accuracy"], strict=True)
    return mean_of([100 * (a - b) for a, b in pairs])


def reached(study: Study) -> Table:
    """What was to be reached on held-out problems, with defaults and no tuning by hand."""
    lines = [
        _compared(study, ALONE, "at least independent on every problem", least=1.0),
        _compared(study, TUNED, "at least FedAvg, fine-tuned, on half", least=0.5),
        _significant(study),
        _near(study),
        _above_random(study),
        _calibrated(study),
    ]
    note = (
        "At least: the 95 % interval of the difference is not below 0, for accuracy (RMSE) and "
        "for NLL. A line that is not reached stays."
    )
    return Table("What was to be reached", ("to reach", "measured", "reached"), lines, note)


def _compared(study: Study, other: str, words: str, least: float) -> tuple[str, str, str]:
    held, below = 0, []
    for problem, cells in study.judging.items():
        both = [gap(cells, FULL, other, what) for what in ("score", "nll")]
        if all(each is not None and not each.below for each in both):
            held += 1
        else:
            below.append(problem)
    total = len(study.judging)
    measured = f"{held} of {total}" + (f"; not on {', '.join(below)}" if below else "")
    return f"pfedbayes: {words}", measured, _yes(held >= least * total)


def _significant(study: Study) -> tuple[str, str, str]:
    better = [
        problem
        for problem, cells in study.judging.items()
        if all((each := gap(cells, FULL, ALONE, w)) and each.above for w in ("score", "nll"))
    ]
    total = len(study.judging)
    measured = f"{len(better)} of {total}: {', '.join(better)}"
    words = "pfedbayes: significantly better than independent on two thirds, both measures"
    return words, measured, _yes(len(better) >= 2 * total / 3)


def _near(study: Study) -> tuple[str, str, str]:
    """The coreset of a tenth against all data."""
    held, each = 0, []
    for problem, cells in study.judging.items():
        mean = gap(cells, CORESET, FULL, "score")
        if mean is None:
            continue
        held += mean.value >= -WITHIN.get(problem, 0.5)
        each.append(f"{problem} {mean.value:+.2f}")
    words = "coreset 10 %: within 0.5 points of full data (CIFAR-10 with a CNN: 1.5)"
    return words, f"{held} of {len(each)}: {', '.join(each)}", _yes(held == len(each))


def _above_random(study: Study) -> tuple[str, str, str]:
    above, below, total = [], [], 0
    for problem, cells in study.judging.items():
        mean = gap(cells, CORESET, REDRAWN, "score")
        if mean is not None:
            total += 1
            above += [problem] if mean.above else []
            below += [problem] if mean.below else []
    measured = f"above in {len(above)} of {total}, below in {len(below)}"
    measured += f" ({', '.join(below)})" if below else ""
    words = "coreset 10 %: never below a redrawn random tenth, above in half"
    return words, measured, _yes(not below and len(above) >= total / 2)


def _calibrated(study: Study) -> tuple[str, str, str]:
    """By the test points of all seeds together: those of one seed are few."""
    held, each = 0, []
    for problem, cells in study.judging.items():
        calibration = cells.get(FULL, {}).get("calibration")
        if calibration:
            held += calibration["pooled"] <= CALIBRATED
            chance = f"{calibration['pooled_by_chance']:.3f}"
            each.append(f"{problem} {calibration['pooled']:.3f} (by chance {chance})")
    words = f"pfedbayes: ECE at most {CALIBRATED} everywhere, test points of all seeds together"
    return words, f"{held} of {len(each)}: {', '.join(each)}", _yes(held == len(each))


def tuned(study: Study) -> Table:
    """What `corefed tune` makes of the held-out problems."""
    rows = []
    for problem, found in study.tuning.items():
        cells = {"tuned": found["tuned"], "defaults": found["defaults"]}
        nll, score = (gap(cells, "tuned", "defaults", what) for what in ("nll", "score"))
        changed = sum(bool(settings) for settings in found["chosen"])
        rows.append(
            (
                problem,
                f"{changed} of {len(found['chosen'])}",
                f"{found['validation'][0]:.3f} to {found['validation'][1]:.3f}",
                _mean(nll),
                _mean(score),
            )
        )
    note = (
        "For each of 5 seeds: a search of 16 candidates, then training with what was found on all "
        "training points. Searches that left the defaults; the validation NLL of the defaults and "
        "of what was chosen; and by how much the test points of the tuned run are better, paired "
        "by seed, ± half of the 95 % interval."
    )
    columns = ("", "searches that moved", "validation NLL", "NLL better by", "score better by")
    return Table("What `corefed tune` adds", columns, rows, note)


def _against(cells: dict[str, Cell], row: str, what: str) -> str:
    return "" if row == FULL else _mean(gap(cells, FULL, row, what))


def _mean(mean: Mean | None) -> str:
    return "-" if mean is None else f"{mean.value:+.3g} ± {mean.half:.2g}"


def _score(cell: Cell) -> str:
    metrics = cell["metrics"]
    if "rmse" in metrics:
        return f"{fmean(metrics['rmse']):,.0f}"
    return f"{100 * fmean(metrics['accuracy']):.2f}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"
