"""`corefed bench attacks`: the liars, the tables, and the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed

from corefed.federation.protocol import Reply, Task
from corefed_studies import pages
from corefed_studies.bench import attacks, attacks_liars, attacks_runs, study
from corefed_studies.bench.attacks_liars import ATTACKS, Seen
from corefed_studies.bench.attacks_runs import RULES, Cell

ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "results" / "attacks.json", ROOT / "docs" / "attacks-study.md"


def seen(**figures: Any) -> Seen:
    """Three honest clients that moved by 1, 2 and 3, and a liar that would move by 4."""
    sent = {"v": torch.tensor([[0.0, 1.0], [-4.0, -4.0]])}
    task = Task("train", "r", 1, 3, "", None, "float32", False, 0.0, 0.0, sent)

    def reply(client: int, by: float) -> Reply:
        return Reply("train", "r", 1, client, figures, {"v": sent["v"] + by})

    honest = {f"c{i}": reply(i, i + 1.0) for i in range(3)}
    return Seen(task, reply(3, 4.0), honest, reply(3, 9.0))


def moved(name: str, **figures: Any) -> torch.Tensor:
    """How far the liar is from the broadcast."""
    given, lie = seen(**figures), ATTACKS[name].train
    assert lie is not None
    return lie(given).tree["v"] - given.task.tree["v"]


def test_what_liars_send() -> None:
    every = torch.ones(2, 2)
    torch.testing.assert_close(moved("sign flip"), -4 * every)
    torch.testing.assert_close(moved("sign flip x19"), -76 * every)
    torch.testing.assert_close(moved("inner product"), -20 * every)
    torch.testing.assert_close(moved("a little"), 0.5 * every)  # 2 - 1.5 * 1
    torch.testing.assert_close(moved("free rider"), every)
    torch.testing.assert_close(moved("stale"), 9 * every)
    torch.testing.assert_close(moved("noise x19").norm(), torch.tensor(19 * 8.0))
    assert moved("not a number").isnan().all()
    torch.testing.assert_close(moved("small sigmas"), torch.tensor([[4.0, 4.0], [-3.0, -3.0]]))
    lie = ATTACKS["claimed examples"].train
    assert lie is not None and lie(seen(examples=5)).figures["examples"] == 10**7


def test_there_are_enough_attacks() -> None:
    assert len(ATTACKS) - 1 >= 12
    assert set(attacks_liars.TWO) | set(attacks_liars.FEDAVG) <= set(ATTACKS)


def test_the_truth_is_of_the_honest_clients() -> None:
    """A lie about test points changes what is reported and nothing else."""
    few = {"rounds": 1, "clients": 3}
    honest = attacks_runs.run(Cell("fedavg", "plain", "none", **few))
    bold = attacks_runs.run(Cell("fedavg", "plain", "perfect score", **few))
    default = attacks_runs.run(Cell("fedavg", "default", "perfect score", **few))
    assert honest["stopped"] == "" and honest["rounds"] == 1
    assert bold["reported"]["global"] > 0.999
    assert bold["accuracy"]["global"] < 0.8 > default["median"]["global"]


def fake(cell: Cell) -> dict[str, Any]:
    """As if the default lost 3 points to one attack, and plain stopped."""
    if (cell.rule, cell.attack) == ("plain", "sign flip x19"):
        return {"accuracy": {}, "reported": {}, "median": {}, "rounds": 1, "stopped": "no quorum"}
    lost = 0.03 * (cell.attack == "wild mean")
    found = {"personal": 0.9 - lost, "global": 0.8}
    return {"accuracy": found, "reported": found, "median": found, "rounds": 2, "stopped": ""}


def test_the_tables_are_written_into_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "run", fake)
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text("a\n<!-- bench attacks: begin -->\nold\n<!-- bench attacks: end -->\nb\n")
    done = corefed("bench", "attacks", "--scale=quick", f"--out={out}", f"--page={page}")
    assert done.code == 0, done.err
    text = page.read_text()
    assert "old" not in text and "| sign flip x19 | stops in round 2 | 90.0 |" in text
    assert "missed by: wild mean (3.0)" in text and "default (trimmed-mean)" in text
    assert (out / "attacks.md").read_text() in text
    found = json.loads((out / "attacks.json").read_text())
    assert {cell["rule"] for cell in found["cells"]} == set(RULES)

    monkeypatch.setattr(attacks, "run", lambda cell: pytest.fail("it was measured before"))
    page.write_text("<!-- bench attacks: begin -->\n<!-- bench attacks: end -->\n")
    again = corefed("bench", "attacks", "--scale=quick", f"--out={out}", f"--page={page}")
    assert again.code == 0, again.err
    source = corefed(
        "bench", "attacks", f"--from={out / 'attacks.json'}", f"--out={tmp_path / 'two'}"
    )
    assert source.code == 0, source.err
    assert (tmp_path / "two" / "attacks.md").read_text() == (out / "attacks.md").read_text()


def test_mistakes_are_refused_before_anything_is_run(tmp_path: Path) -> None:
    done = corefed("bench", "attacks", "--device=cuda", f"--out={tmp_path / 'out'}")
    assert done.code == 2 and "runs on a CPU" in done.err
    assert not (tmp_path / "out").exists()


def test_the_page_has_the_numbers_of_the_result_file() -> None:
    found = study.read(RESULTS, attacks.NAME, attacks.FIELDS)
    part = pages.Marked(PAGE, "bench attacks").part
    assert part.strip("\n") == pages.markdown(attacks.tables(found)).strip("\n")
    assert found["scale"] == "paper" and RESULTS.stat().st_size < 100_000
