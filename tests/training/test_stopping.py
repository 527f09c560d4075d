"""Early stopping: the rule, the models that are kept, seeds side by side, and killed runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from corefed import Federation, UserError, resolve, train
from corefed.federation.operate.creating import as_federated
from corefed.show import report
from corefed.training import candidates, checkpoint, distributed, early, fitted, record

SMALL: dict[str, Any] = {
    "method": "independent", "clients": 3, "hidden": "8", "local_steps": 20, "keep": 0.15,
    "validation": 0.5, "partition": "iid", "learning_rate": 0.9, "device": "cpu", "rounds": 14,
    "evaluate_every": 1, "patience": 2, "calibrate": "off", "checkpoint_every": 1,
}  # fmt: skip
"""A few points and large steps: after a few rounds models get worse."""


def course(nll: list[list[float]], patience: int) -> early.Course:
    """The rule on validation NLLs, one list per evaluation; every second round is evaluated."""
    lines = [{"round": r} for r in range(1, 2 * len(nll) + 1)]
    for place, each in enumerate(nll):
        lines[2 * place + 1]["validation"] = {"personal_nll": each, "global_nll": [0.0, 0.0]}
    return early.follow(lines, patience, 2)


def test_the_rule_by_hand() -> None:
    found = course([[3.0, 1.0], [2.0, 2.0], [2.5, 2.0]], 2)
    assert found.best == [4, 2] and found.nll == [2.0, 1.0]
    assert [found.has_stopped(g) for g in (0, 1)] == [False, True] and not found.over
    assert course([[3.0, 1.0], [2.0, 2.0], [2.5, 2.0], [2.0, 2.0]], 2).over  # a tie is no better


def test_what_comes_after_a_seed_has_stopped_does_not_count() -> None:
    found = course([[1.0, 9.0], [2.0, 8.0], [0.5, 7.0]], 1)
    assert found.best == [2, 6] and found.nll == [1.0, 7.0] and not found.over


def test_a_run_without_numbers_keeps_its_first_evaluation() -> None:
    assert course([[float("nan"), 1.0], [float("nan"), 2.0]], 1).best == [2, 2]


def fit(folder: Path, **changes: Any) -> dict[str, Any]:
    return train(resolve(flags=SMALL | changes), folder).summary


def kept(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / fitted.MODELS)


def told(folder: Path) -> list[dict[str, Any]]:
    """The lines without times."""
    lines, _ = record.read_lines(folder / record.ROUNDS)
    times = ("seconds", "evaluate_seconds", "peak_memory_mb", "sha256")
    return [{k: v for k, v in line.items() if k not in times} for line in lines]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("stopping") / "run"
    return folder, fit(folder, seeds="0,1")


def test_it_ends_early_with_the_models_of_the_best_rounds(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The kept state is that of a run of so many rounds, planned alike, bit for bit."""
    folder, summary = stopped
    best, done = summary["stopping"]["best_round"], summary["rounds"]
    assert all(summary["stopping"]["stopped"]) and done < SMALL["rounds"]
    assert done == max(best) + SMALL["patience"] and len(set(best)) == 2, "seeds differ here"
    for g, rounds in enumerate(best):
        other = tmp_path / str(g)
        alone = fit(other, seeds="0,1", rounds=rounds, planned_rounds=14, patience=0)
        mine, theirs = kept(folder), kept(other)
        for name in theirs:
            n = len(theirs[name]) // 2
            assert torch.equal(mine[name][g * n : (g + 1) * n], theirs[name][g * n : (g + 1) * n])
        for name, value in alone["metrics"].items():
            assert summary["metrics"][name]["per_seed"][g] == value["per_seed"][g], name
        nll = alone["validation"]["personal_nll"]["per_seed"][g]
        assert summary["stopping"]["validation_nll"][g] == nll


def test_a_seed_does_not_depend_on_those_beside_it(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, summary = stopped
    for g in (0, 1):
        alone = fit(tmp_path / str(g), seeds=g)
        assert alone["stopping"]["best_round"] == summary["stopping"]["best_round"][g : g + 1]
        mine = kept(folder)["personal.theta"].view(2, 3, -1)[g]
        torch.testing.assert_close(kept(tmp_path / str(g))["personal.theta"], mine)


@pytest.mark.parametrize("after", [1, 3, 5])
def test_a_resumed_run_ends_bit_for_bit_the_same(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path, after: int
) -> None:
    folder, _ = stopped
    here = tmp_path / "run"
    experiment = resolve(flags=SMALL | {"seeds": "0,1"})
    rounds: list[int] = []
    found = train(
        experiment,
        here,
        on_round=lambda line: rounds.append(1),
        stop=lambda: len(rounds) >= after - 1,
    )
    assert not found.finished
    assert train(experiment, here, resume=True).finished
    assert told(here) == told(folder)
    assert all(torch.equal(value, kept(folder)[name]) for name, value in kept(here).items())
    assert train(experiment, here, resume=True).finished, "nothing is left to train"
    assert told(here) == told(folder)


@pytest.mark.parametrize("at", [2, 5])
def test_killed_after_the_copies_and_before_the_checkpoint(
    stopped: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The copies on the disk are newer than the checkpoint; those that belong to it are taken."""
    folder, _ = stopped
    here, save = tmp_path / "run", checkpoint.Checkpoints.save

    def dying(self: Any, round_: int, *rest: Any) -> None:
        if round_ == at and self.folder.name == checkpoint.FOLDER:
            raise RuntimeError("killed")
        save(self, round_, *rest)

    experiment = resolve(flags=SMALL | {"seeds": "0,1"})
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.Checkpoints, "save", dying)
        with pytest.raises(RuntimeError, match="killed"):
            train(experiment, here)
    assert train(experiment, here, resume=True).finished
    assert told(here) == told(folder)
    assert all(torch.equal(value, kept(folder)[name]) for name, value in kept(here).items())


def test_a_run_that_never_stops_keeps_its_best_round_and_its_temperature(tmp_path: Path) -> None:
    summary = fit(tmp_path / "run", rounds=4, patience=9, calibrate="auto")
    assert summary["rounds"] == 4 and summary["stopping"]["stopped"] == [False]
    assert "calibration" in summary and "temperature.personal" in kept(tmp_path / "run")
    last = told(tmp_path / "run")[-1]
    assert "calibration" in last["kept"] and "calibration" not in last
    assert last["kept"]["rounds"] == summary["stopping"]["best_round"]


def test_it_is_shown(stopped: tuple[Path, dict[str, Any]]) -> None:
    folder, summary = stopped
    best = summary["stopping"]["best_round"]
    words = f"models of rounds {best[0]}, {best[1]} (by seed), the best of {summary['rounds']}"
    assert words in str(report.metrics_table(summary).caption)
    (line,) = report.legend(report.load([folder]))
    assert words in line and " of 14" not in line
    assert json.loads((folder / record.SUMMARY).read_text())["stopping"] == summary["stopping"]


def test_a_posterior_stops_too(tmp_path: Path) -> None:
    flags = {k: v for k, v in SMALL.items() if k != "learning_rate"}
    flags |= {"method": "coreset-pfedbayes", "fraction": 0.5, "rounds": 4, "cohort": 2}
    summary = train(resolve(flags=flags), tmp_path / "run").summary
    assert summary["stopping"]["best_round"][0] in range(1, 5)
    assert "personal_auroc" not in summary["metrics"]  # metrics are those of any run


def test_in_python() -> None:
    chance = np.random.default_rng(0)
    clients = {
        name: (x := chance.normal(size=(40, 5)), (x[:, 0] + chance.normal(size=40) > 0).astype(int))
        for name in ("north", "south")
    }
    flags = {
        k: v for k, v in SMALL.items() if k not in ("clients", "keep", "partition", "calibrate")
    }
    federation = Federation(**flags).fit(clients)
    best = federation.summary_["stopping"]["best_round"][0]
    assert len(federation.history_) == min(14, best + 2)
    line = federation.history_[-1]["kept"]
    assert federation.evaluate()["clients"] == dict(zip(clients, line["clients"][0], strict=True))
    truth = np.concatenate([y for _, y in clients.values()])
    assert federation.personal["north"].predict(clients["north"][0]).shape == truth[:40].shape


def test_what_cannot_stop_early_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="takes validation points"):
        resolve(flags=SMALL | {"validation": 0})
    experiment = resolve(flags=SMALL)
    with pytest.raises(UserError, match="A federation cannot stop early"):
        as_federated(experiment, 3)
    with pytest.raises(UserError, match="A search ends candidates by its own rule"):
        candidates.plan(experiment)
    here: Any = SimpleNamespace(first=True)
    with pytest.raises(UserError, match="Workers cannot stop early"):
        distributed._check(here, experiment, record.Folder(tmp_path / "run"), resume=False)
    with pytest.raises(UserError, match="second copy of all clients' state"):
        train(resolve(flags=SMALL | {"client_state": "host"}), tmp_path / "host")
