"""The study of defaults: how a candidate is chosen, what is counted, and that the code has it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from commands import corefed

from corefed.base.errors import UserError
from corefed.methods import registry
from corefed.settings.fields import list_settings
from corefed.settings.run import Run
from corefed_studies import pages
from corefed_studies.defaults import choosing, judging, report, results
from corefed_studies.defaults.choosing import Score
from corefed_studies.defaults.problems import problem_of

ROOT = Path(__file__).parents[2]
FILE = ROOT / "results" / "defaults.json"


def scores(*rows: tuple[float, ...]) -> dict[str, list[Score]]:
    """By problem, the NLL of candidates 0, 1, ..."""
    return {
        f"problem {p}": [Score({"rate": n}, {"personal": nll}) for n, nll in enumerate(row)]
        for p, row in enumerate(rows)
    }


def test_the_smallest_mean_regret_is_chosen() -> None:
    found = choosing.choose(scores((0.1, 0.2, 0.45), (5.4, 5.2, 5.0)), "personal")
    assert found.candidate == {"rate": 1}
    assert found.regret == pytest.approx(0.15)
    assert found.nll == {"problem 0": 0.1, "problem 1": 5.0}


def test_a_candidate_that_diverged_is_not_chosen() -> None:
    found = choosing.choose(scores((0.1, 0.5), (float("inf"), 0.5)), "personal")
    assert found.candidate == {"rate": 1}


def test_every_method_has_as_many_candidates() -> None:
    assert {len(each) for each in choosing.CANDIDATES.values()} == {72}
    assert {method for method, _ in choosing.ARMS.values()} == set(choosing.CANDIDATES)


def test_the_code_has_what_was_chosen() -> None:
    """The defaults of every tuned method; fedavg's are those of its fine-tuned models."""
    study = results.read(FILE)
    for arm in ("pfedbayes", "independent", "fedavg, fine-tuned", "pfedme", "per-fedavg"):
        method = choosing.ARMS[arm].method
        every = (*list_settings(registry.config_class(method)), *list_settings(Run))
        defaults = {each.name: each.default for each in every}
        chosen = study.choice(arm).candidate
        assert {name: defaults[name] for name in chosen} == pytest.approx(chosen), arm


def test_the_page_is_what_the_file_makes_it(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "defaults-study.md").read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(page, encoding="utf-8")
    result = corefed("bench", "defaults", "--from", FILE, "--page", copy, "--out", tmp_path / "out")
    assert result.code == 0, result.err
    assert copy.read_text(encoding="utf-8") == page


def test_candidates_are_scored_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant and falling rates in two groups; one that diverges has an infinite NLL."""
    monkeypatch.setattr(choosing, "SEEDS", (100,))
    small = problem_of("digits")
    small = small._replace(flags={**small.flags, "clients": 2, "rounds": 2, "hidden": (4,)})
    candidates = [
        {"schedule": "constant", "learning_rate": 0.1},
        {"schedule": "linear", "learning_rate": 0.1},
        {"schedule": "constant", "learning_rate": 1e9},
    ]
    found = choosing.train(small, "fedavg", candidates, Path("nowhere"), "cpu")
    assert [each.candidate for each in found] == candidates
    first, second, third = (each.nll["global"] for each in found)
    assert math.isfinite(first) and math.isfinite(second) and first != second
    assert math.isinf(third) or third > first


def cell(nll: list[float], accuracy: list[float]) -> judging.Cell:
    return {"metrics": {"nll": nll, "accuracy": accuracy}, "cost": {}}


def test_differences_are_paired_and_failures_are_none() -> None:
    cells = {
        "a": cell([0.1, 0.2, 0.3], [0.9, 0.8, 0.7]),
        "b": cell([0.2, 0.3, 0.4], [0.8, 0.7, 0.6]),
        "c": {"failure": "diverged"},
    }
    nll, score = (report.gap(cells, "a", "b", what) for what in ("nll", "score"))
    assert nll is not None and nll.value == pytest.approx(0.1) and nll.above
    assert score is not None and score.value == pytest.approx(10.0)
    assert report.gap(cells, "a", "c", "nll") is None
    assert report.gap(cells, "a", "absent", "nll") is None


def test_lines_that_are_not_reached_stay() -> None:
    table = report.reached(results.read(FILE))
    assert {row[2] for row in table.rows} == {"yes", "no"}
    assert "chest-xray" in table.rows[0][1]
    assert pages.markdown([table]).count("\n|") == len(table.rows) + 2


@pytest.mark.parametrize("content", ["", "[]", '{"schema": 1, "name": "selectors"}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match="no result file"):
        results.read(tmp_path / "x.json")
    assert corefed("bench", "defaults", "--from", tmp_path / "x.json").code == 2


def test_a_file_that_lacks_a_part_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(
        json.dumps({"schema": 1, "name": "defaults", "scale": "quick"})
    )
    with pytest.raises(UserError, match="not whole: it lacks 'choosing'"):
        results.read(tmp_path / "x.json")
