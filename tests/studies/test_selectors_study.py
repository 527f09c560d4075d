"""`corefed bench selectors`: its plan, what its figures say, its result file, its page."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed
from scipy.stats import ttest_rel

from corefed.base.errors import UserError
from corefed.base.types import Work
from corefed.methods import coreset_pfedbayes
from corefed.models.cnn import cnn
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import Model, mlp
from corefed.selectors import renewal
from corefed.settings import config
from corefed_studies import pages
from corefed_studies.bench import selectors as bench_selectors
from corefed_studies.reproduce import results
from corefed_studies.reproduce.cells import StudyCell, place_of
from corefed_studies.reproduce.results import Result, Results
from corefed_studies.reproduce.selectors import aims, report, runs, study, verdicts
from corefed_studies.reproduce.selectors.study import (  # fmt: skip
    DEFAULT,
    FULL,
    MAIN,
    ONCE,
    REDRAWN,
    Ablated,
    SelectorScale,
    Spot,
    StudyProblem,
)

ROOT = Path(__file__).parents[2]


# --- the plan -------------------------------------------------------------------------------------


def test_cells_of_a_problem_differ_in_method_and_selector_alone() -> None:
    own = {"method", "preset", "selector", "fraction", "refresh_every", "redraw_every"}
    groups: dict[tuple[str, int], list[dict[str, object]]] = {}
    for cell in study.plan("paper"):
        if cell.row.startswith(study.VARIANT):
            continue
        spot = study.spot_of(cell.column)
        rest = {key: value for key, value in cell.flags.items() if key not in own}
        groups.setdefault((spot.problem, spot.steps), []).append(rest)
        assert cell.flags.get("fraction", 1.0) == spot.percent / 100
    assert len(groups) == 2 * 7 - 1  # CIFAR-10 has one number of local steps
    for rest in groups.values():
        assert all(each == rest[0] for each in rest)
        assert rest[0]["seeds"] == (0, 1, 2, 3, 4)


def test_every_row_is_chosen_anew_at_the_same_cadence() -> None:
    """But for the paper's recipe, which has its own, and what is chosen once."""
    model = mlp((20, 16, 5), Categorical(5))
    often = set()
    for row, flags in study.ROWS.items():
        if row not in (FULL, ONCE, study.MATCHING):
            settings = config.resolve(flags=flags).settings
            assert isinstance(settings, coreset_pfedbayes.Config)
            rule = settings.renewal
            passes = renewal.selection_cost("calibrated", model, settings.selection)
            n = torch.tensor([10_000])
            often.add(int(renewal.interval(rule, passes, n, Work(20, 100), 1)))
            assert rule.moved == rule.stale == 0
    assert len(often) == 1 and often != {renewal.LEAST}
    assert "selector" not in study.ROWS[DEFAULT]


@pytest.mark.parametrize(
    ("name", "model", "points"),
    [
        ("fashion-medium", mlp((784, 100, 10), Categorical(10)), 1000),
        ("housing", mlp((14, 100, 1), Gaussian(1, learn_noise=True)), 1651),
        ("cifar10", cnn((3, 32, 32), (32, 64, 64), (100,), Categorical(10)), 2375),
    ],
)
def test_variations_are_renewed_as_often_as_the_default(
    name: str, model: Model, points: int
) -> None:
    """The numbers in ABLATED are what the default's budget comes to."""
    default = coreset_pfedbayes.Config()
    passes = renewal.selection_cost("calibrated", model, default.selection)
    n = torch.tensor([points])
    every = renewal.interval(default.renewal, passes, n, Work(20, 100), 1)
    found = {place.refresh_every for place in study.ABLATED if place.problem == name}
    assert found == {int(every)}


def test_every_problem_has_the_rows_that_verdicts_need() -> None:
    for scale in ("quick", "paper"):
        planned = {(cell.row, cell.column) for cell in study.plan(scale)}
        assert len(planned) == len(study.plan(scale))  # no name twice
        places = {place_of(cell, Path()) for cell in study.plan(scale)}
        places |= {place_of(cell, Path()) for cell in study.alone(scale)}
        assert len(places) == len(planned) + len(study.alone(scale))
        for problem in study.SCALES[scale].problems:
            for steps in problem.rounds:
                assert (FULL, str(Spot(problem.name, 100, steps))) in planned
                for percent in problem.percents:
                    for row in MAIN[1:]:
                        assert (row, str(Spot(problem.name, percent, steps))) in planned
    known = [problem.name for problem in study.SCALES["paper"].problems]
    assert {place[0] for place in (*study.ABLATED, *study.ALONE)} <= set(known)
    labels = {label for label, _ in study.ABLATION}
    assert all(set(place.labels) <= labels for place in study.ABLATED)
    only = study.plan("paper", ["housing"])
    assert {study.spot_of(cell.column).problem for cell in only} == {"housing"}


@pytest.mark.parametrize("scale", ["quick", "paper"])
def test_every_run_is_one_that_can_be_started(scale: str) -> None:
    """One of each row and problem: their settings exist, and about ten to twenty evaluations."""
    seen = set()
    for cell in [*study.plan(scale), *study.alone(scale)]:
        problem = study.spot_of(cell.column).problem
        if (cell.row, problem) in seen:
            continue
        seen.add((cell.row, problem))
        run = config.resolve(flags=cell.flags).run
        assert run.data_dir == "" and not run.data.partition(":")[2].startswith("/")
        assert scale == "quick" or 6 <= run.rounds / run.evaluate_every <= 20


@pytest.mark.parametrize(
    "spot", [Spot("digits", 5, 20), Spot("a-b", 100, 150, "CPU (x86_64, 2 threads)")]
)
def test_a_column_says_what_it_is_about(spot: Spot) -> None:
    assert study.spot_of(str(spot)) == spot


def test_what_is_not_at_hand_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_DATA", str(tmp_path))
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    for problem in (study.CIFAR, study.CHEST, study.HOUSING):
        assert study.absent(problem).startswith(f"{problem.label} is left out: ")
    (tmp_path / "housing").mkdir()
    (tmp_path / "housing" / "california_housing.csv").write_text("a,b\n")
    assert study.absent(study.HOUSING) == ""
    assert study.absent(StudyProblem("digits", "digits", {"data": "digits"})) == ""
    only = SelectorScale((study.CIFAR, study.CHEST), (0,), 1)
    monkeypatch.setitem(study.SCALES, "quick", only)
    done = corefed("bench", "selectors", "--scale=quick", f"--out={tmp_path / 'out'}")
    assert done.code == 2 and "None of the data sets" in done.err
    assert done.err.count("is left out") == 2
    assert not (tmp_path / "out").exists()


# --- verdicts -------------------------------------------------------------------------------------


def test_an_interval_is_students() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / sqrt 3; t of 2 degrees has closed forms."""
    found = verdicts.mean_of([1.0, 2.0, 3.0])
    assert found.value == 2
    # P(|T| > t) = 1 - t / sqrt(2 + t^2), so that the quantile is 0.95 sqrt(2 / (1 - 0.95^2)).
    assert found.half == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3))
    assert found.p == pytest.approx(1 - math.sqrt(12) / math.sqrt(14))
    assert not found.above and not found.below
    mine, other = [3.0, 5.0, 4.5, 7.0, 6.0], [2.0, 4.5, 4.0, 6.5, 5.0]
    paired = verdicts.mean_of([a - b for a, b in zip(mine, other, strict=True)])
    test = ttest_rel(mine, other)
    assert paired.p == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert (paired.value - paired.half, paired.value + paired.half) == pytest.approx((low, high))
    assert paired.above


@pytest.mark.parametrize(
    ("each", "p", "above", "below"),
    [([0.5, 0.5], 0.0, True, False), ([0.0, 0.0], 1.0, False, False), ([-1, -1], 0, False, True)],
)
def test_equal_differences_leave_no_doubt(
    each: list[float], p: float, above: bool, below: bool
) -> None:
    found = verdicts.mean_of(each)
    assert (found.half, found.p, found.above, found.below) == (0.0, p, above, below)


def test_a_single_seed_says_nothing() -> None:
    found = verdicts.mean_of([5.0])
    assert math.isnan(found.half) and not found.above and not found.below
    assert aims.format_mean(found) == "+5.00"
    counts = verdicts.count([verdicts.Compared(Spot("digits", 5, 20), found)])
    assert counts == verdicts.Counts(1, 0, 0, 0, 0) and counts.at_or_above == 1


def cell_of(
    accuracy: list[float] | None = None, rmse: list[float] | None = None, **more: Any
) -> Result:
    metrics = {}
    for name, values in (("accuracy", accuracy), ("rmse", rmse)):
        if values is not None:
            metrics |= {f"personal_{name}": values, f"global_{name}": values}
    return {"metrics": metrics, "coreset": {}, "cost": {"seconds": 1.0, "examples": 10}, **more}


def test_up_is_better_whatever_is_measured() -> None:
    points = verdicts.gap(cell_of([0.9, 0.92]), cell_of([0.88, 0.9]))
    assert points is not None and points.value == pytest.approx(2.0)
    # 10 % and 20 % less than the other's.
    less = verdicts.gap(cell_of(rmse=[90.0, 40.0]), cell_of(rmse=[100.0, 50.0]))
    assert less is not None and less.value == pytest.approx(15.0)
    assert verdicts.gap(cell_of([0.9]), cell_of([0.9, 0.8])) is None
    assert verdicts.gap(cell_of([0.9]), {}) is None
    assert verdicts.gap({"failure": "Training diverged."}, cell_of([0.9])) is None


def made_up() -> Results:
    """Above redrawn at 5 %, level at 10 %, below at 50 %; full data reach 0.90 at last."""
    noise = [-0.001, 0.0, 0.001]

    def near(value: float, by: float = 1.0) -> list[float]:
        return [round(value + by * each, 4) for each in noise]

    found: Results = {}
    redrawn = {5: 0.80, 10: 0.85, 50: 0.90}
    default = {5: 0.82, 10: 0.85, 50: 0.88}
    full_curve = {"personal": [0.5, 0.8, 0.9], "seconds": [1.0, 2.0, 3.0], "examples": [10, 20, 30]}
    found[FULL, "mnist-medium 100 % 20 steps"] = cell_of(near(0.90), curve=full_curve)
    for percent in redrawn:
        column = f"mnist-medium {percent} % 20 steps"
        # Level: the same mean, and differences of both signs.
        by = -1.0 if percent == 10 else 1.5
        curve = {"personal": [0.6, default[percent]], "seconds": [0.5, 1.0], "examples": [5, 10]}
        found[DEFAULT, column] = cell_of(near(default[percent], by), curve=curve)
        found[REDRAWN, column] = cell_of(near(redrawn[percent]))
        found[ONCE, column] = cell_of(near(0.7))
    return found


def test_cells_are_counted() -> None:
    found = made_up()
    compared = verdicts.compare(found, DEFAULT, REDRAWN)
    assert [each.spot.percent for each in compared] == [5, 10, 50]
    assert [each.gap.value for each in compared] == pytest.approx([2.0, 0.0, -2.0])
    counts = verdicts.count(compared)
    assert counts == verdicts.Counts(3, 1, 1, 1, 1) and counts.at_or_above == 2
    (half,) = verdicts.compare(found, DEFAULT, FULL, 50)
    assert half.gap.value == pytest.approx(-2.0) and half.gap.below
    assert verdicts.count(verdicts.compare(found, DEFAULT, ONCE)).above == 3


def test_what_was_to_be_shown_is_said_in_figures() -> None:
    lines = {aim: (measured, reached) for aim, measured, reached in _aims(made_up())}
    measured, reached = lines["at or above random redrawn at the same cadence in every cell"]
    assert measured.startswith("2 of 3 cells; below in 1, with Holm's correction in 1: ")
    assert measured.endswith("mnist-medium 50 %, 20 steps -2.00 ± 0.12") and reached == "no"
    measured, reached = lines["significantly above it in at least half of the cells"]
    assert (measured, reached) == ("1 of 3; with Holm's correction 1", "no")
    assert lines["never below random chosen once"][1] == "yes"
    measured, reached = next(v for aim, v in lines.items() if aim.startswith("10 %: within 0.5"))
    assert measured == "0 of 1: mnist-medium 10 %, 20 steps -5.00 ± 0.50" and reached == "no"
    cifar = next(v for aim, v in lines.items() if "CIFAR-10" in aim)
    assert cifar == ("not measured", "-")
    # 0.891 is met by full data at 2 + 0.091 / 0.1 seconds, and by none of the coresets.
    measured, reached = next(v for aim, v in lines.items() if "in seconds" in aim)
    assert measured.startswith("at some fraction in 0 of 1") and reached == "no"
    assert measured.count("target not reached in 1") == 3
    assert len(lines) == 3 + 2 + 1 + 2


def _aims(found: Results) -> list[list[str]]:
    return [list(row) for row in aims.table(found).rows]


# --- costs ----------------------------------------------------------------------------------------


def test_the_cost_to_a_target_is_read_between_evaluations() -> None:
    curve = {
        "personal": [0.5, 0.8, 0.7, 0.9],
        "seconds": [1.0, 2.0, 3.0, 4.0],
        "examples": [100, 200, 300, 400],
        "selection_examples": [60, 60, 60, 120],
    }
    result = cell_of([0.9], curve=curve)
    assert verdicts.cost_to(result, 0.8, "seconds") == pytest.approx(2.0)  # the first time
    assert verdicts.cost_to(result, 0.65, "examples") == pytest.approx(150)
    assert verdicts.cost_to(result, 0.65, "passes") == pytest.approx(150 + 20)
    assert verdicts.cost_to(result, 0.85, "passes") == pytest.approx(375 + 35)
    assert verdicts.cost_to(result, 0.4, "seconds") == 1.0  # no earlier than the first evaluation
    assert verdicts.cost_to(result, 0.95, "seconds") == math.inf
    assert verdicts.cost_to(cell_of([0.9]), 0.5, "seconds") == math.inf
    error = cell_of(rmse=[2.0], curve={"personal": [4.0, 2.0], "seconds": [1.0, 2.0]})
    assert verdicts.cost_to(error, 3.0, "seconds") == pytest.approx(1.5)


def test_targets_are_99_percent_of_full_data() -> None:
    assert verdicts.target(cell_of([0.8, 1.0])) == pytest.approx(0.891)
    assert verdicts.target(cell_of(rmse=[100.0, 100.0])) == pytest.approx(101.0)
    assert verdicts.target({"failure": "x"}) is None


def test_savings_are_ratios_and_runs_timed_alone_are_apart() -> None:
    found = made_up()
    spot = Spot("mnist-medium", 30, 20)
    curve = {"personal": [0.8, 0.9], "seconds": [0.5, 1.0], "examples": [5, 10]}
    found[DEFAULT, str(spot)] = cell_of([0.9] * 3, curve=curve)
    ratios = {each.spot.percent: each.ratio for each in verdicts.savings(found, DEFAULT, "seconds")}
    assert ratios == {5: 0.0, 10: 0.0, 50: 0.0, 30: pytest.approx(2.91 / 0.955)}
    for machine in ("NVIDIA H200", "CPU (x86_64, 2 threads)"):
        for row, percent in ((FULL, 100), (DEFAULT, 30)):
            timed = spot._replace(percent=percent, machine=machine)
            found[row, str(timed)] = cell_of([0.9] * 3, curve=curve)
    alone = verdicts.savings(found, DEFAULT, "seconds", alone=True)
    assert [each.ratio for each in alone] == [1.0, 1.0]
    aims = [aim for aim, _, _ in _aims(found) if "in seconds" in aim]
    assert len(aims) == 2 and aims[1].endswith("on CPU (x86_64, 2 threads)")
    assert len(verdicts.compare(found, DEFAULT, FULL)) == 4


# --- results --------------------------------------------------------------------------------------


def test_a_curve_has_evaluated_rounds_and_what_they_took() -> None:
    lines = [
        {"round": 1, "seconds": 1.0, "examples": [10, 20], "selection_examples": [6, 6]},
        {"round": 2, "seconds": 2.0, "examples": [10, 20], "metrics": {"personal_rmse": [3, 5]}},
    ]
    assert runs.curve(lines) == {
        "round": [2],
        "personal": [4.0],
        "seconds": [3.0],
        "examples": [30],
        "selection_examples": [6],
    }


def test_a_result_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = made_up()
    results.write(tmp_path / "selectors.json", "selectors", "paper", found)
    read = results.read(tmp_path / "selectors.json", "selectors")
    assert read == found
    assert report.text(read, "") == report.text(found, "")


# --- as a command ---------------------------------------------------------------------------------

TINY = StudyProblem(
    "digits", "digits", {"data": "digits", "clients": 2, "hidden": (8,)}, {2: 2}, (30,)
)
SPOT = ("digits", 30, 2)
VARIED = (("no shrinkage", {"shrink": 0.0}),)
STUDY = SelectorScale((TINY,), (0, 1), 2, (SPOT,), VARIED, (Ablated(*SPOT, 20),))
MARKS = "<!-- bench selectors: begin -->", "<!-- bench selectors: end -->"


def test_a_small_study_from_runs_to_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(study.SCALES, "quick", STUDY)
    out, page = tmp_path / "out", tmp_path / "page.md"
    page.write_text("above\n{}\nof before\n{}\nbelow\n".format(*MARKS))
    call = ("bench", "selectors", "--scale=quick", "--jobs=1", "--device=cpu", f"--out={out}")
    done = corefed(*call, f"--page={page}")
    assert done.code == 0, done.err
    found = results.read(out / "selectors.json", "selectors")
    planned = study.plan("quick")
    assert len(found) == len(planned) + 4 == 5 + 4
    default = found[DEFAULT, "digits 30 % 2 steps"]
    assert default["flags"] == {"method": "coreset-pfedbayes"}
    assert {len(each) for each in default["metrics"].values()} == {2}
    assert len(default["curve"]["personal"]) == 2 and default["coreset"]["refreshes"] == 1
    timed = [column for _, column in found if "alone on CPU" in column]
    assert len(timed) == 4
    text = page.read_text()
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "of before" not in text
    for phrase in ("| no shrinkage |", "images/selectors-digits.png", "| random, once |"):
        assert phrase in text
    for place in (out, tmp_path / "images"):
        assert (place / "selectors-digits.png").stat().st_size > 10_000
    assert "no shrinkage" in (out / "selectors.html").read_text()

    # What is finished is not trained again; what is not, is.
    cells = {cell.row: cell for cell in planned}
    lost, kept = (place_of(cells[row], out) / "summary.json" for row in (ONCE, FULL))
    lost.unlink()
    before = kept.stat().st_mtime_ns
    again = corefed(*call)
    assert again.code == 0 and again.err.count(": done") == 1
    assert kept.stat().st_mtime_ns == before
    second = results.read(out / "selectors.json", "selectors")
    assert {k: r["metrics"] for k, r in second.items()} == {
        k: r["metrics"] for k, r in found.items()
    }

    # Folders are read without training, where they are finished and of these settings.
    lost.unlink()
    read = runs.read(planned, out)
    assert set(read) == {(cell.row, cell.column) for cell in planned if cell.row != ONCE}
    other = cells[DEFAULT]._replace(flags={**cells[DEFAULT].flags, "zeta": 2.0})
    with pytest.raises(UserError, match=r"other settings: zeta \(1.0 there, 2.0 here\)"):
        runs.read([other], out)

    # A result file alone makes the same page.
    more = corefed("bench", "selectors", "--from", out / "selectors.json", "--out", tmp_path / "b")
    assert more.code == 0, more.err
    assert (tmp_path / "b" / "selectors.md").read_text() == (out / "selectors.md").read_text()


def test_a_run_that_failed_is_named() -> None:
    found = made_up()
    found[DEFAULT, "mnist-medium 5 % 20 steps"] = {"failure": "Training diverged."}
    text = report.text(found, "")
    assert "mnist-medium 5 % 20 steps: Training diverged." in text
    assert "| default | failed |" in text
    cell = StudyCell(DEFAULT, "mnist-medium 5 % 20 steps", {})
    failed = runs.CellOutcome({}, [], "Training diverged.")
    assert runs.results_of(cell, failed) == {
        (DEFAULT, cell.column): {"failure": "Training diverged."}
    }


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "Cannot read"),
        ("{", "is not a result file"),
        ({"schema": 1, "name": "table1", "cells": []}, "not selectors"),
        ({"schema": 1, "name": "selectors", "cells": [{"row": "a", "column": "b"}]}, "no column"),
        (
            {"schema": 1, "name": "selectors", "cells": [{"row": "a", "column": "b 5 % 1 steps"}]},
            "lacks figures",
        ),
    ],
)
def test_a_broken_result_file_is_one_sentence(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "broken.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    done = corefed("bench", "selectors", "--from", path, "--out", tmp_path / "out")
    assert done.code == 2 and says in done.err and "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    assert "scale is 'huge'" in corefed("bench", "selectors", "--scale=huge").err
    assert "at least 1" in corefed("bench", "selectors", "--jobs=0").err
    assert "no device 'tpu'" in corefed("bench", "selectors", "--device=tpu").err
    assert "--jobs is for bench selectors" in corefed("bench", "runtime", "--jobs=2").err
    assert "--from is for bench engine" in corefed("bench", "review", "--from=x").err
    (tmp_path / "page.md").write_text("no marks")
    done = corefed("bench", "selectors", f"--page={tmp_path / 'page.md'}", f"--out={tmp_path}/out")
    assert done.code == 2 and "once each" in done.err and not (tmp_path / "out").exists()


def test_the_page_shows_the_result_file() -> None:
    name = bench_selectors.NAME
    found = results.read(ROOT / "results" / f"{name}.json", name)
    part = pages.Marked(ROOT / "docs" / "selectors-study.md", f"bench {name}").part
    assert part == "\n" + report.text(found, f"{bench_selectors.IMAGES}{name}-")
    drawn = {path.name for path in (ROOT / "docs" / "images").glob(f"{name}-*.png")}
    assert drawn == {f"{name}-{report.picture(problem)}" for problem in report.problems(found)}
