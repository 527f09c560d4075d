"""The results of `bench selectors` as a page: first what it set out to show, then all tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from corefed_studies import pages
from corefed_studies.pages import Table
from corefed_studies.reproduce import results
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.selectors import aims
from corefed_studies.reproduce.selectors.aims import format_mean
from corefed_studies.reproduce.selectors.study import (
    CURVED,
    DEFAULT,
    FULL,
    REDRAWN,
    ROWS,
    VARIANT,
    Spot,
    StudyProblem,
    place_of,
    problem_of,
    spot_of,
)
from corefed_studies.reproduce.selectors.verdicts import Mean, costs, gap, mean_of, savings, scores

UP, DOWN = "▲", "▼"
NOTHING = "No results yet.\n"
FOLD = '<details markdown="1"><summary>{}: global model, NLL, ECE, coresets, costs</summary>\n'
MARKS = (
    f"Mean ± half of its 95 % interval. {UP}, {DOWN}: better, worse than {REDRAWN!r}, the paired "
    "95 % interval without 0."
)


def text(found: Results, images: str) -> str:
    """All of it as Markdown; `images` is what the addresses of pictures begin with."""
    if not found:
        return NOTHING
    parts = [pages.markdown(_first(found))]
    for problem in problems(found):
        parts += [f"### {problem.label}\n", f"![{_alt(problem)}]({images}{picture(problem)})\n"]
        parts.append(pages.markdown(shown_tables(found, problem)))
        folded = pages.markdown(folded_tables(found, problem))
        parts += [FOLD.format(problem.label), f"{folded}\n</details>\n"]
    tail = " ".join(filter(None, (_machines(found), results.failures(found))))
    return "\n".join([*parts, f"{tail}\n"])


def tables(found: Results) -> list[Table]:
    """All of it, to be a page of its own."""
    each = (
        table
        for problem in problems(found)
        for table in (*shown_tables(found, problem), *folded_tables(found, problem))
    )
    return [*_first(found), *each] if found else []


def _first(found: Results) -> list[Table]:
    """Tables over all problems together."""
    return [aims.table(found), *aims.rivals(found), *ablation(found)]


def picture(problem: StudyProblem) -> str:
    return f"{problem.name}.png"


def _alt(problem: StudyProblem) -> str:
    return (
        f"{problem.label}: personal models against the fraction of data that is trained on, by "
        "selector, and against examples processed"
    )


def _machines(found: Results) -> str:
    seconds: dict[str, float] = {}
    for result in found.values():
        if "device" in result:
            spent = seconds.get(result["device"], 0.0)
            seconds[result["device"]] = spent + result["cost"]["seconds"]
    parts = [f"{device} ({spent / 60:.0f} minutes)" for device, spent in sorted(seconds.items())]
    return f"Trained on {' and '.join(parts)}, evaluations not counted." if parts else ""


# --- which cells ----------------------------------------------------------------------------------


def spots(found: Results, problem: StudyProblem) -> list[Spot]:
    """Of a problem's cells, those that were timed alone and variations left out."""
    each = [spot_of(column) for row, column in found if not row.startswith(VARIANT)]
    mine = {spot for spot in each if spot.problem == problem.name and not spot.machine}
    return sorted(mine, key=lambda spot: (spot.steps, spot.percent))


def problems(found: Results) -> list[StudyProblem]:
    """Those with a cell that is not of the ablation, or timed, alone."""
    names = {spot_of(column).problem for _, column in found}
    mine = sorted(map(problem_of, names), key=place_of)
    return [problem for problem in mine if spots(found, problem)]


def local_steps(found: Results, problem: StudyProblem) -> list[int]:
    return sorted({spot.steps for spot in spots(found, problem)})


def at(found: Results, row: str, problem: StudyProblem, percent: int, steps: int) -> Result:
    """A cell, full data's at every percentage; empty where there is none."""
    spot = Spot(problem.name, 100 if row == FULL else percent, steps)
    return found.get((row, str(spot)), {})


def percents(found: Results, problem: StudyProblem, steps: int) -> list[int]:
    mine = [spot for spot in spots(found, problem) if spot.steps == steps]
    return [spot.percent for spot in mine if spot.percent < 100]


# --- tables ---------------------------------------------------------------------------------------


def unit(found: Results, problem: StudyProblem) -> str:
    regression = any(
        scores(result)[1]
        for (_, column), result in found.items()
        if spot_of(column).problem == problem.name
    )
    return "RMSE (less is better)" if regression else "accuracy %"


def shown_tables(found: Results, problem: StudyProblem) -> list[Table]:
    """The personal model's, one table for each number of local steps."""
    laid = [_scores(found, problem, steps, "personal") for steps in local_steps(found, problem)]
    return [*laid[:-1], laid[-1]._replace(note=MARKS)]


def folded_tables(found: Results, problem: StudyProblem) -> list[Table]:
    laid = []
    for steps in local_steps(found, problem):
        laid.append(_scores(found, problem, steps, "global"))
        for what, figures in FIGURES.items():
            laid.append(_grid(found, problem, steps, what, _pair(*figures)))
        laid.append(_costs(found, problem, steps))
    return laid


FIGURES = {
    "NLL / ECE of the personal model": ("metrics", "personal_nll", "personal_ece"),
    "error of the coreset on fresh draws / refreshes per client": (
        "coreset", "held_out_error", "refreshes",
    ),
    "seconds of training, all seeds / millions of examples through gradients, per seed": (
        "cost", "seconds", "examples",
    ),
}  # fmt: skip

Shown = Callable[[Result], str]


def _grid(found: Results, problem: StudyProblem, steps: int, what: str, shown: Shown) -> Table:
    """One row per selector, one column per fraction; rows without a number are left out."""
    columns = percents(found, problem, steps)
    rows = []
    for row in ROWS:
        cells = [shown(at(found, row, problem, percent, steps)) for percent in columns]
        if set(cells) != {"-"}:
            alike = row == FULL and len(cells) > 1  # full data have no fraction: said once
            rows.append([row, cells[0], *[""] * (len(cells) - 1)] if alike else [row, *cells])
    return Table(_title(problem, steps, what), _heads(columns), rows)


def _title(problem: StudyProblem, steps: int, what: str) -> str:
    return f"{problem.label}, {steps} local steps per round: {what}"


def _heads(columns: Sequence[int]) -> list[str]:
    return ["", *(f"{percent} %" for percent in columns)]


def _scores(found: Results, problem: StudyProblem, steps: int, model: str) -> Table:
    columns, rows = percents(found, problem, steps), []
    for row in ROWS:
        if row == FULL:
            continue
        cells = []
        for percent in columns:
            mine, other = (at(found, name, problem, percent, steps) for name in (row, REDRAWN))
            marked = row != REDRAWN and model == "personal"
            cells.append(_score(mine, model) + (_mark(gap(mine, other)) if marked else ""))
        if set(cells) != {"-"}:
            rows.append([row, *cells])
    full = _score(at(found, FULL, problem, 100, steps), model)
    what = f"{model} {unit(found, problem)}; full data {full}"
    return Table(_title(problem, steps, what), _heads(columns), rows)


def _score(result: Result, model: str) -> str:
    each, smaller = scores(result, model)
    if not each:
        return "failed" if "failure" in result else "-"
    mean = mean_of(each)
    large = smaller and mean.value >= 1000
    digits = (",.0f" if large else ".4f") if smaller else ".2f"
    value = format(mean.value, digits)
    return value if len(each) < 2 else f"{value} ± {format(mean.half, digits)}"


def _mark(difference: Mean | None) -> str:
    if difference is None:
        return ""
    return f" {UP}" if difference.above else f" {DOWN}" if difference.below else ""


def _pair(part: str, first: str, second: str) -> Shown:
    """Two numbers of a cell, means over seeds."""

    def shown(result: Result) -> str:
        values = [result.get(part, {}).get(key) for key in (first, second)]
        if values == [None, None]:
            return "-"
        scaled = values[:1] + [v / 1e6 if v and second == "examples" else v for v in values[1:]]
        return " / ".join("-" if value is None else _figure(value) for value in scaled)

    return shown


def _figure(value: float | list[float]) -> str:
    mean = mean_of(value).value if isinstance(value, list) else value
    return f"{mean:.3g}" if abs(mean) < 1000 else f"{mean:,.0f}"


def _costs(found: Results, problem: StudyProblem, steps: int) -> Table:
    columns, rows = percents(found, problem, steps), []
    for row in CURVED[1:]:
        for what, called in costs(found).items():
            ratios = {
                each.spot.percent: each.ratio
                for each in savings(found, row, what)
                if (each.spot.problem, each.spot.steps) == (problem.name, steps)
            }
            if ratios and (what != "passes" or row == DEFAULT):
                cells = [_ratio(ratios.get(percent)) for percent in columns]
                rows.append([f"{row}: {called}", *cells])
    title = _title(
        problem, steps, "full data's cost to 99 % of its accuracy, as a multiple of the row's"
    )
    return Table(title, _heads(columns), rows)


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio:.2f}" if ratio else "not reached"


def ablation(found: Results) -> list[Table]:
    """Variations of the default, each with its difference from it; no table without them."""
    labels = list(dict.fromkeys(row for row, _ in found if row.startswith(VARIANT)))
    columns = list(dict.fromkeys(column for row, column in found if row in labels))
    rows = []
    for row in labels:
        cells = []
        for column in columns:
            mine = found.get((row, column), {})
            difference = gap(mine, found.get((DEFAULT, column), {}))
            cells.append(_score(mine, "personal"))
            if difference is not None:
                cells[-1] += f" ({format_mean(difference)}{_mark(difference)})"
        rows.append([row.removeprefix(VARIANT), *cells])
    if not rows:
        return []
    rows = [
        [
            "the default",
            *(_score(found.get((DEFAULT, column), {}), "personal") for column in columns),
        ],
        *rows,
    ]
    note = (
        "Personal model; in brackets the paired difference from the default, up is better: points "
        f"of accuracy, or percent of RMSE. {UP}, {DOWN}: its 95 % interval is without 0."
    )
    return [Table("Variations of the default", ["", *columns], rows, note)]
