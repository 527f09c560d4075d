"""What the sections of a page say: tiles, sites, coresets, sure errors; and pages from Python."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from report_pages import Made, Page

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")

import corefed
from corefed.show.page import charts, gather, making, paired
from corefed.show.page.content import Fold, ReportTable, Sentences, TableCell, Tile, Tiles
from corefed.show.page.gather import RunFolder
from corefed.show.page.sections import chosen, comparison, examples, in_short, sites
from corefed.use import selective


@pytest.fixture(scope="module")
def runs(made: Made) -> list[RunFolder]:
    return gather.read(made.runs)


def tiles_of(runs: list[RunFolder]) -> dict[str, Tile]:
    tiles, sentences = in_short.section(runs, paired.comparisons(runs, runs[0])).parts
    assert isinstance(tiles, Tiles) and isinstance(sentences, Sentences) and sentences.items
    return {tile.label: tile for tile in tiles.items}


def with_summary(run: RunFolder, **changes: Any) -> RunFolder:
    return run._replace(summary={**copy.deepcopy(run.summary), **changes})


def with_nll(run: RunFolder, per_seed: list[float]) -> RunFolder:
    """The run as if it had these seeds and NLLs, and kept no predictions, which have others."""
    summary = copy.deepcopy(run.summary)
    del summary["measures"]
    seeds = list(range(len(per_seed)))
    summary["seeds"] = summary["config"]["seeds"] = seeds
    for name, each in summary["metrics"].items():
        values = per_seed if name.endswith("_nll") else [each["mean"]] * len(seeds)
        summary["metrics"][name] = {"mean": float(np.mean(values)), "std": 0.0, "per_seed": values}
    return run._replace(path=run.path / "made up", summary=summary)


# --- in short -------------------------------------------------------------------------------------


def test_tiles_of_the_best_run(runs: list[RunFolder]) -> None:
    coreset, full, _ = runs
    better = with_nll(coreset, [0.30, 0.31, 0.32])
    worse = with_nll(full, [0.51, 0.50, 0.52])
    tiles = tiles_of([worse, better])
    assert tiles["Best run"].value == better.label
    assert "clearly ahead of pfedbayes" in tiles["Best run"].more
    near = with_nll(full, [0.29, 0.33, 0.32])
    assert "cannot be told from" in tiles_of([better, near])["Best run"].more
    one = tiles_of([with_nll(coreset, [0.3]), with_nll(full, [0.5])])["Best run"]
    assert "one seed: run three to tell" in one.more


@pytest.mark.parametrize(("others", "claimed"), [(0, True), (1, False)])
def test_sentences_claim_what_the_table_tells_apart(
    runs: list[RunFolder], others: int, claimed: bool
) -> None:
    """p = 0.0202: enough alone, not among three comparisons, which is what both go by."""
    coreset, full, fedavg = runs
    better, worse = with_nll(coreset, [0.30, 0.31, 0.32]), with_nll(full, [0.315, 0.33, 0.345])
    both = [better, worse, with_nll(fedavg, [0.31, 0.33, 0.33])][: 2 + others]
    asked = paired.comparisons(both, worse)
    (fold,) = comparison.table(both, worse, asked)[1:]
    assert isinstance(fold, Fold)
    (p,) = [row[4] for row in fold.table.rows if row[:2] == (better.label, "NLL")]
    assert isinstance(p, TableCell) and (p.value <= 0.05) is claimed
    _, sentences = in_short.section(both, asked).parts
    assert isinstance(sentences, Sentences)
    about = next(each for each in sentences.items if "20 % of the points" in each)
    assert ("NLL is 0.020 lower" in about) is claimed
    assert ("NLL cannot be told apart" in about) is not claimed


def test_runs_of_other_test_points_have_no_best_one(runs: list[RunFolder]) -> None:
    coreset, full, _ = runs
    other = with_summary(full, config={**full.summary["config"], "data": "mnist"})
    both = [coreset, other]
    tiles, sentences = in_short.section(both, paired.comparisons(both, coreset)).parts
    assert isinstance(tiles, Tiles) and not tiles.items
    assert isinstance(sentences, Sentences) and "cannot be compared" in sentences.items[0]


def test_weakest_site_boldness_review_and_cost(runs: list[RunFolder]) -> None:
    run = runs[1]
    tiles = tiles_of([run])
    found = sites.scores(run)
    worst = min(found, key=lambda name: found[name])
    assert tiles["Weakest site"].value == worst
    assert f"{100 * found[worst]:.1f} %" in tiles["Weakest site"].more
    gap = run.summary["overconfidence"]["personal"]["mean"]
    boldness, way = tiles["Calibration"], "bold" if gap > 0 else "cautious"
    assert boldness.value == f"{100 * gap:+.1f} points"
    assert f"too {way} on average in one seed, where a small gap may be chance" in boldness.more
    assert f"ECE {run.metrics['personal_ece']['mean']:.3f}" in boldness.more
    held = run.held_out
    wrong = (held["personal.mean"].argmax(-1) != held["y"]).double()  # type: ignore[index]
    kept = selective.threshold(held["personal.total"], wrong, 0.05, 0.9)  # type: ignore[index]
    review = tiles["To review at 5 % error"]
    if kept.kept:
        assert f"{kept.points - kept.kept:,} of {kept.points:,}" in review.more
    else:
        assert review.value == "all"
    assert "passes" in tiles["Spent on training"].more and "MB" in tiles["Spent on training"].more


def test_numbers_of_a_page_agree(made: Made, runs: list[RunFolder]) -> None:
    """One ECE and one gap of the main model, wherever they are shown."""
    words = " ".join(Page(made.page.read_text(encoding="utf-8")).words).lower()
    run = runs[0]
    ece = f"{run.metrics['personal_ece']['mean']:.3f}"
    assert f"personal ece {ece}" in words and f"(ece {ece})" in words
    bold = run.summary["overconfidence"]["personal"]["mean"]
    way, gap = "bold" if bold > 0 else "cautious", f"{100 * abs(bold):.1f} points"
    said = f"too {way} on average in one seed, where a small gap may be chance"
    assert words.count(said) == 3, "a sentence, a tile and a chart"
    assert f"{said}, by {gap}" in words and f"{100 * bold:+.1f} points" in words


# --- sites ----------------------------------------------------------------------------------------


def test_sites_weakest_first_with_means_over_seeds(runs: list[RunFolder]) -> None:
    run = runs[1]
    last = {**run.lines[-1], "clients": [[0.9, 0.5, None, 1.0], [0.7, 0.7, None, 1.0]]}
    two = with_summary(run, seeds=[0, 1])._replace(lines=[*run.lines[:-1], last])
    assert sites.scores(two) == pytest.approx({"client 0": 0.8, "client 1": 0.6, "client 3": 1.0})
    (table,) = sites.table(two)
    assert isinstance(table, ReportTable) and table.sortable and table.filtered
    assert [row[0] for row in table.rows] == ["client 1", "client 0", "client 3"]
    assert sites.weakest_first({"a": 1.0, "b": 2.0}, "rmse") == ["b", "a"]


def test_confidence_and_review_of_each_site(runs: list[RunFolder]) -> None:
    run = runs[1]
    gaps, _ = sites._predictions(run)
    held = run.held_out
    mine = held["row"] == 2  # type: ignore[index]
    mean, y = held["personal.mean"][mine].double(), held["y"][mine]  # type: ignore[index]
    expected = mean.amax(-1).mean() - (mean.argmax(-1) == y).double().mean()
    assert gaps["client 2"] == pytest.approx(expected.item())


def test_sites_are_compared_where_runs_have_the_same(runs: list[RunFolder]) -> None:
    _, full, fedavg = runs
    (section,) = sites.section([full, fedavg])
    assert section.id == "all-sites"
    renamed = [{**each, "name": f"x{i}"} for i, each in enumerate(fedavg.clients[0])]
    assert sites.section([full, fedavg._replace(clients=[renamed])]) == []


# --- the comparison's table -----------------------------------------------------------------------


def test_seven_columns_come_first(runs: list[RunFolder]) -> None:
    table = comparison.table(runs, runs[0], paired.comparisons(runs, runs[0]))[0]
    assert isinstance(table, ReportTable) and table.main == 7 < len(table.columns)
    assert table.columns[:2] == ["run", "personal, %"]
    assert all(len(row) == len(table.columns) for row in table.rows)
    for head, cell in zip(table.columns, table.rows[1], strict=True):
        if head in ("NLL", "ECE", "passes", "seconds", "p (Holm)"):
            assert isinstance(cell, TableCell), head


# --- charts ---------------------------------------------------------------------------------------


def test_no_chart_with_one_place_on_its_axis() -> None:
    one = [{"series": s, "x": 3, "y": y} for s, y in (("a", 1.0), ("b", 2.0))]
    two = [*one, {"series": "a", "x": 4, "y": 1.0}]
    assert charts.series(one, ["a", "b"], "x", "y") is None
    assert charts.scatter(one, ["a", "b"], "x", "y") is None
    assert charts.series(two, ["a", "b"], "x", "y") is not None
    assert charts.histogram([{"low": 0.0, "high": 1.0, "y": 3}], "x", "y") is None


def test_log_axes_say_so_and_legends_have_every_series() -> None:
    data = [{"series": s, "x": x, "y": 1.0} for s in "ab" for x in (1, 10)]
    spec = charts.scatter(data, ["b", "a"], "cost", "y", log=True)
    assert spec is not None and "cost (log scale)" in str(spec)
    assert [each["name"] for each in spec["usermeta"]["legend"]] == ["b", "a"]
    assert spec["params"] == [{"name": charts.HIDDEN, "value": []}]
    zero = charts.scatter([*data, {"series": "a", "x": 0, "y": 1.0}], ["a", "b"], "cost", "y",
                          log=True)  # fmt: skip
    assert zero is not None and "log" not in str(zero)


# --- coresets and sure errors ---------------------------------------------------------------------


def test_only_rounds_with_a_measurement_are_drawn(runs: list[RunFolder]) -> None:
    lines = [
        {"round": t, "coreset": {"held_out_error": value}}
        for t, value in enumerate(([None], [0.5], [0.5], [0.4], [0.4], [0.4]), 1)
    ]
    run = runs[0]._replace(lines=lines)
    assert chosen.measured(run, "held_out_error") == [(2, [0.5]), (4, [0.4])]
    assert chosen.measured(run, "over_uniform") == []


def test_errors_and_ratios_have_charts_of_their_own(runs: list[RunFolder]) -> None:
    lines = [
        {"round": t, "coreset": {"held_out_error": [0.1 * t], "over_uniform": [0.2 / t]}}
        for t in (1, 2, 3)
    ]
    figures = chosen._quality(runs[0]._replace(lines=lines), "coreset")
    assert [figure.id for figure in figures] == ["coreset-quality", "coreset-ratio"]
    for figure in figures:
        assert figure.spec is not None and figure.spec["usermeta"]["legend"] == []
        assert len(figure.table.rows) == 3


def test_titles_say_how_many_of_the_chosen_points_are_shown() -> None:
    assert chosen.shown_of("north", 13, 15) == "north, 13 of 15 chosen points"
    assert chosen.shown_of("north", 4, 4) == "north, all 4 chosen points"


def test_only_sure_errors_are_called_sure() -> None:
    mean = torch.tensor([[0.95, 0.05], [0.49, 0.51], [0.08, 0.92], [0.99, 0.01]])
    found = {"mean": mean, "y": torch.tensor([1, 0, 0, 0])}  # the last one is right
    places, heading = examples._sure_and_wrong(found, 12)
    assert places == [0, 2] and "Wrong at 90 % confidence or more (2; 3 wrong in all)" in heading
    places, heading = examples._sure_and_wrong(found, 1)
    assert places == [0] and "(1 of 2; 3 wrong in all)" in heading
    unsure = {"mean": mean[1:2], "y": torch.tensor([0])}
    places, heading = examples._sure_and_wrong(unsure, 12)
    assert places == [] and "highest confidence among 1 wrong ones is 51 %" in heading
    right = {"mean": mean[3:], "y": torch.tensor([0])}
    assert examples._sure_and_wrong(right, 12) == ([], "No test point of this seed is wrong.")


# --- views ----------------------------------------------------------------------------------------


def test_views_hold_every_section_once(made: Made) -> None:
    page = Page(made.many.read_text(encoding="utf-8"))
    assert [i for i in page.ids if i.startswith("view-")] == [f"view-{v}" for v in making.VIEWS]
    shared = ("in-short", "comparison", "all-curves", "all-cost", "all-coresets")
    assert [i for i in page.ids if i in shared] == list(shared)
    for end in ("overview", "curves", "trust", "cost", "clients", "classes", "examples", "coreset"):
        assert f"run-3-{end}" in page.ids


# --- from Python ----------------------------------------------------------------------------------


def test_page_of_a_federation_object(made: Made, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    clients = {
        name: (rng.normal(size=(30, 4)), rng.integers(0, 2, 30)) for name in ("north", "south")
    }
    fitted = corefed.Federation(method="pfedbayes", rounds=2, local_steps=2, hidden=[8])
    with pytest.raises(corefed.UserError, match="not fitted"):
        corefed.report(fitted, tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()
    fitted.fit(clients)
    (tmp_path / "old.html").touch()
    with pytest.raises(corefed.UserError, match="exists already"):
        corefed.report(fitted, tmp_path / "old.html")
    out = tmp_path / "new" / "page.html"
    found = corefed.report([fitted, made.runs[1]], out, title="Wards", baseline=fitted)
    assert found == out
    text = out.read_text(encoding="utf-8")
    words = " ".join(Page(text).words)
    assert "Wards" in words and "north" in words and "corefed-report-" not in text
    assert "Federation object 1, in memory" in words and str(made.runs[1]) in words
