"""A final fit on all points: its settings, and what can still be done with it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import corefed

from corefed import Federation, UserError, resolve
from corefed.training import final, record

FEW = (
    "--target=y", "--client=site", "--method=pfedbayes", "--set=local_steps=3", "--set=hidden=4",
    "--set=evaluate_draws=2", "--device=cpu", "--rounds=6", "--seed=0,1", "--set=validation=0.3",
    "--set=patience=1", "--set=evaluate_every=1", "--set=eta_1=0.3", "--quiet",
)  # fmt: skip


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped early, on a table of two sites beside it."""
    here, g = tmp_path_factory.mktemp("final"), np.random.default_rng(0)
    x, site = g.normal(size=(60, 2)), np.repeat(["east", "west"], 30)
    rows = [f"{a:.4f},{b:.4f},{s},{int(a + b > 0)}" for (a, b), s in zip(x, site, strict=True)]
    (here / "t.csv").write_text("\n".join(["a,b,site,y", *rows]) + "\n")
    done = corefed("run", "--data", f"table:{here / 't.csv'}", *FEW, "--out", here / "chosen")
    assert done.code == 0, done.err
    return here / "chosen"


def test_it_has_all_points_and_the_median_of_the_best_rounds(chosen: Path, tmp_path: Path) -> None:
    best = record.read(chosen)[0]["stopping"]["best_round"]
    done = corefed("run", "--final", chosen, "--out", tmp_path / "final")
    assert done.code == 0, done.err
    run = resolve(record.settings_file(tmp_path / "final")).run
    assert (run.test_fraction, run.validation, run.patience) == (0, 0, 0)
    assert run.rounds == round(np.median(best)) and run.planned_rounds == 6
    assert f"final fit: {run.rounds} rounds" in done.err and "median of" in done.err
    rows = json.loads((tmp_path / "final" / "data.json").read_text())["clients"][0]
    assert [(row["train"], row["test"]) for row in rows] == [(30, 0), (30, 0)]
    assert resolve(record.settings_file(chosen)).run.validation == 0.3, "the other is as it was"


def test_it_predicts_and_says_what_it_cannot_promise(chosen: Path, tmp_path: Path) -> None:
    made = tmp_path / "final"
    assert corefed("run", "--final", chosen, "--seed=0", "--quiet", "--out", made).code == 0
    table = chosen.parent / "t.csv"
    done = corefed("predict", made, "--client=east", "--input", table, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["review"]["flagged"] == 60, "the rows of the other site too"
    assert any("no held-out points to promise" in note for note in told["notes"])
    done = corefed("compare", chosen, made)
    assert done.code == 0 and "nan" not in done.out and "cannot be compared" in done.out
    done = corefed("export", made, "--client=east", "--out", tmp_path / "export")
    assert done.code == 0, done.err
    card = (tmp_path / "export" / "model_card.md").read_text()
    assert "no held-out points, so that nothing is known of its accuracy" in card
    done = corefed("measures", made)
    assert done.code == 2 and "no held-out points" in done.err
    done = corefed("report", made, "--out", tmp_path / "page.html")
    assert done.code == 0, done.err


def test_a_run_that_does_not_stop_early_keeps_its_rounds(chosen: Path, tmp_path: Path) -> None:
    run = resolve(record.settings_file(chosen), assignments=["patience=0"])
    record.Folder(tmp_path / "plain").create(run)
    assert final.settings(tmp_path / "plain") == (
        {"test_fraction": 0.0, "validation": 0.0, "patience": 0},
        "",
    )


def test_what_is_refused(chosen: Path, tmp_path: Path) -> None:
    record.Folder(tmp_path / "half").create(resolve(record.settings_file(chosen)))
    with pytest.raises(UserError, match="stops early and is not finished"):
        final.settings(tmp_path / "half")
    done = corefed("run", "--final", chosen, "--resume", chosen)
    assert done.code == 2 and "--final takes all settings from its folder" in done.err
    assert corefed("run", "--final", tmp_path / "none").code == 2


def test_data_with_test_points_of_their_own_keep_them(tmp_path: Path) -> None:
    done = corefed("run", "--method=fedavg", "--rounds=1", "--set=local_steps=1", "--clients=2",
                   "--set=test_fraction=0", "--device=cpu", "--out", tmp_path / "run")  # fmt: skip
    assert done.code == 0, done.err
    assert "the partition shards-medium has test points of its own; these are tested on" in done.err


def test_in_python() -> None:
    g = np.random.default_rng(0)
    x = g.normal(size=(30, 2))
    clients = {"east": (x, (x[:, 0] > 0).astype(int))}
    found = Federation(method="fedavg", test_fraction=0, rounds=2, local_steps=2).fit(clients)
    assert found.evaluate()["clients"] == {"east": None}
    assert found.global_.predict(x).shape == (30,)
