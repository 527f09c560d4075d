"""A search as a whole: halving, groups, divergence, what it may look at, and resuming."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from corefed import UserError
from corefed.data.clients import FederatedData
from corefed.settings import space
from corefed.settings.config import resolve
from corefed.settings.fields import to_flat
from corefed.settings.run import Experiment
from corefed.training import groups, rounds, search, setup
from corefed.training.candidates import Plan, Standing, plan
from corefed.training.search import Found
from corefed.training.search_folder import SearchFolder

TINY: dict[str, Any] = {
    "method": "pfedbayes", "data": "digits", "clients": 3, "keep": 0.4, "local_steps": 3,
    "batch_size": 16, "hidden": "6", "rounds": 4, "evaluate_draws": 2, "validation": 0.25,
    "device": "cpu",
}  # fmt: skip


def experiment(**flags: Any) -> Experiment:
    return resolve(flags={**TINY, **flags})


def planned(number: int = 6, asked: Any = None, **flags: Any) -> Plan:
    return plan(experiment(**flags), asked, number)


def same(one: Found, other: Found) -> None:
    """Bit-identical but for time."""
    first, second = (json.loads(json.dumps(each.report)) for each in (one, other))
    for report in (first, second):
        del report["cost"]["seconds"]
    assert first == second
    assert one.experiment == other.experiment


def rows(found: Found) -> dict[int, dict[str, Any]]:
    return {each["number"]: each for each in found.report["candidates"]}


# The whole way


@pytest.fixture(scope="module")
def whole() -> Found:
    return search.search(planned())


def test_candidates_drop_out_by_halves(whole: Found) -> None:
    report = whole.report
    assert report["rungs"] == [1, 2, 4]
    each = rows(whole)
    assert sorted(row["round"] for row in each.values()) == [1, 1, 2, 4, 4, 4]
    assert each[0]["outcome"] == "finished"  # the given always go on
    assert [row["outcome"] for row in report["candidates"]] == ["finished"] * 3 + ["dropped"] * 3
    ends = [row["nll"] for row in report["candidates"][:3]]
    assert ends == sorted(ends)
    for row in each.values():
        assert [point["round"] for point in row["history"]] == [
            end for end in report["rungs"] if end <= row["round"]
        ]
    others = {n: row["history"][0]["nll"] for n, row in each.items() if n}
    out = [n for n, row in each.items() if row["round"] == 1]
    assert sorted(others, key=others.__getitem__)[-2:] == sorted(out, key=others.__getitem__)
    assert whole.finished and whole.experiment.run.validation == 0
    chosen = report["chosen"]
    expected = space.changed(experiment(), chosen["settings"]).settings
    assert whole.experiment.settings == expected


def test_the_cost_is_counted(whole: Found) -> None:
    each = rows(whole)
    plain = each[0]["passes"]
    alone = rounds.train(experiment()).summary["cost"]["passes"]
    assert plain == pytest.approx(alone)
    assert [row["passes"] / plain for row in each.values()] == pytest.approx(
        [row["round"] / 4 for row in each.values()]
    )
    cost = whole.report["cost"]
    assert cost["passes"] == sum(row["passes"] for row in each.values())
    assert cost["runs"] == pytest.approx((4 + 4 + 4 + 2 + 1 + 1) / 4)
    assert cost["seconds"] > 0


def test_the_given_settings_have_the_numbers_of_their_run(whole: Found) -> None:
    lines: list[dict[str, Any]] = []
    rounds.train(experiment(evaluate_every=1), on_round=lines.append)
    history = rows(whole)[0]["history"]
    for point in history:
        expected = lines[point["round"] - 1]["validation"]
        assert point["nll"] == pytest.approx(expected["personal_nll"][0], rel=1e-3)
        assert point["accuracy"] == pytest.approx(expected["personal_accuracy"][0], abs=0.02)


def test_the_choice_is_by_points(whole: Found) -> None:
    each, chosen = rows(whole), whole.report["chosen"]
    found = chosen["difference"]
    if chosen["compared"]:
        lower = each[chosen["compared"]]["nll"] - each[0]["nll"]
        assert found["mean"] == pytest.approx(lower)
        gain = -lower > 2 * found["error"] and found["mistaken"] < 0
        assert chosen["number"] == (chosen["compared"] if gain else 0)
    else:
        assert whole.report["candidates"][0]["number"] == 0


def test_it_is_told_how_far_it_is() -> None:
    seen: list[Standing] = []
    search.search(planned(4), on_round=seen.append)
    ends = [now for now in seen if now.compared]
    assert [(now.rung, now.left) for now in ends] == [(1, 3), (2, 2), (3, 2)]
    assert not seen[0].leader and all(now.leader for now in ends)
    assert all(now.done <= now.total for now in seen)
    assert [now.done for now in seen] == sorted(now.done for now in seen)
    assert seen[-1].done == seen[-1].total == 4 + 3 + 2 * 2
    assert {now.total for now in seen} == {11}


def test_fedavg_is_chosen_by_its_global_model() -> None:
    found = search.search(planned(2, method="fedavg"))
    lines: list[dict[str, Any]] = []
    rounds.train(experiment(method="fedavg"), on_round=lines.append)
    expected = lines[-1]["validation"]["global_nll"][0]
    assert rows(found)[0]["nll"] == pytest.approx(expected, rel=1e-3)


def test_regression() -> None:
    found = search.search(planned(3, data="synthetic-regression", keep=1.0, rounds=2))
    for row in found.report["candidates"]:
        assert "rmse" in row and "accuracy" not in row


# Test points


def test_test_points_are_not_looked_at(
    whole: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With ruined test points the search is the same, bit for bit, to its files."""
    load = setup.load

    def ruined(*arguments: Any, **more: Any) -> FederatedData:
        data = load(*arguments, **more)
        x = torch.full_like(data.test.x, math.nan)
        return data._replace(test=data.test._replace(x=x, y=torch.zeros_like(data.test.y)))

    monkeypatch.setattr(setup, "load", ruined)
    same(search.search(planned(), tmp_path / "out"), whole)


# Groups


def test_settings_that_cannot_be_stacked_are_groups() -> None:
    wanted = planned(8, ["zeta=0.1..1", "local_steps=2,4", "optimizer=adam,sgd"])
    ready = setup.prepare(wanted.experiment)
    made = groups.split(ready, dict(enumerate(wanted.candidates)))
    assert sorted(number for group in made for number in group.numbers) == list(range(8))
    assert made[0].numbers[0] == 0

    def apart(each: Experiment) -> tuple[Any, ...]:
        values = to_flat(each.settings)
        return each.run.local_steps, values["optimizer"]

    assert len(made) == len({apart(each) for each in wanted.candidates}) > 2
    assert all(len({apart(each) for each in group.members.values()}) == 1 for group in made)
    found = search.search(wanted)
    for row in found.report["candidates"]:  # passes are in proportion to steps
        steps = row["settings"]["local_steps"]
        assert row["passes"] == pytest.approx(
            rows(found)[0]["passes"] / 3 / 4 * steps * row["round"]
        )


def test_memory_bounds_a_group(
    whole: Found, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two at a time, the others parked: the numbers of all together but for rounding."""
    monkeypatch.setattr(groups, "capacity", lambda setup: 2)
    made: list[groups.Group] = []
    init, train = groups.Group.__init__, groups.Group.train

    def counted(group: groups.Group, ready: Any, members: Any) -> None:
        made.append(group)
        init(group, ready, members)

    def alone(group: groups.Group) -> list[int]:
        others = [each for each in made if each is not group and each._together is not None]
        assert all(each._parked for each in others if each.members)
        return train(group)

    monkeypatch.setattr(groups.Group, "__init__", counted)
    monkeypatch.setattr(groups.Group, "train", alone)
    found = search.search(planned(), tmp_path / "out")
    assert len(made) == 3
    for number, row in rows(found).items():
        assert row["round"] == rows(whole)[number]["round"]
        assert row["nll"] == pytest.approx(rows(whole)[number]["nll"], rel=1e-3)


def test_capacity_follows_memory() -> None:
    ready = setup.prepare(experiment())
    run = ready.experiment.run
    large = ready._replace(data=ready.data._replace(validation=None))
    assert groups.capacity(large) >= groups.capacity(ready) > 16
    small = dataclasses.replace(ready.experiment, run=dataclasses.replace(run, memory_mb=1))
    assert 1 <= groups.capacity(ready._replace(experiment=small)) < 16


def test_the_paper_preset_is_not_stacked() -> None:
    wanted = planned(3, ["zeta=1..20"], method="coreset-pfedbayes", preset="paper", fraction=0.3)
    ready = setup.prepare(wanted.experiment)
    assert [len(g.members) for g in groups.split(ready, dict(enumerate(wanted.candidates)))] == [
        1
    ] * 3


# Divergence


def test_a_candidate_that_diverges_drops_out() -> None:
    wanted = planned(4, {"eta_1": [0.001, 1e30, 0.02]}, optimizer="sgd", eta_1=0.01, zeta=0.0)
    found = search.search(wanted)
    lost = [row for row in found.report["candidates"] if row["outcome"] == "diverged"]
    assert [row["settings"]["eta_1"] for row in lost] == [1e30]
    assert lost == found.report["candidates"][-1:]
    assert "nll" not in lost[0] and lost[0]["passes"] > 0
    assert found.report["chosen"]["number"] != lost[0]["number"]
    json.dumps(found.report, allow_nan=False)


def test_given_settings_that_diverge_are_replaced() -> None:
    wanted = planned(3, {"eta_1": [0.001, 0.01]}, optimizer="sgd", eta_1=1e30, zeta=0.0)
    found = search.search(wanted)
    assert rows(found)[0]["outcome"] == "diverged"
    assert found.report["chosen"]["number"] in (1, 2)
    assert found.report["chosen"]["difference"] is None
    assert found.report["cost"]["runs"] > 1


def test_all_diverge(tmp_path: Path) -> None:
    wanted = planned(3, {"eta_1": [1e29, 1e31]}, optimizer="sgd", eta_1=1e30, zeta=0.0)
    with pytest.raises(UserError, match="All 3 candidates diverged"):
        search.search(wanted, tmp_path / "out")
    report = SearchFolder(tmp_path / "out").read()
    assert {row["outcome"] for row in report["candidates"]} == {"diverged"}


# Validation points


def test_no_validation_points() -> None:
    with pytest.raises(UserError, match="validation is 0: a search needs validation points"):
        planned(validation=0.0)
    with pytest.raises(UserError, match="leaves no client a validation point"):
        search.search(planned(validation=0.001))
    data = setup.load(setup.concrete(experiment(validation=0.0)).run)
    with pytest.raises(UserError, match="no validation points"):
        search.search(planned(), data=data)


def test_one_class(tmp_path: Path) -> None:
    data = setup.load(setup.concrete(experiment()).run)
    assert data.validation is not None
    alike = data.validation._replace(y=torch.full_like(data.validation.y, 3))
    with pytest.raises(UserError, match="All validation points are of class '3'"):
        search.search(planned(), tmp_path / "out", data=data._replace(validation=alike))
    assert not (tmp_path / "out").exists()


def test_too_few_candidates() -> None:
    with pytest.raises(UserError, match="candidates is 1; it must be at least 2"):
        planned(1)


# Stopping and resuming


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("apart", [False, True])
def test_a_resumed_search_ends_as_if_it_had_not_been_stopped(
    after: int, apart: bool, tmp_path: Path, whole: Found
) -> None:
    """Stopped in the first rung, or later; in one group, or in two."""
    asked = ["zeta=0.1..1", "local_steps=2,4"] if apart else None
    expected = search.search(planned(6, asked)) if apart else whole
    folder, calls = tmp_path / "out", iter(range(100))
    stopped = search.search(planned(6, asked), folder, stop=lambda: next(calls) + 1 >= after)
    assert not stopped.finished and not stopped.report["finished"]
    assert not (folder / "experiment.toml").exists()
    same(search.search(planned(6, asked), folder, resume=True), expected)
    assert sorted(path.name for path in folder.iterdir()) == [
        "experiment.toml", "search.toml", "tune.json",
    ]  # fmt: skip
    assert resolve(folder / "experiment.toml") == expected.experiment
    same(search.search(planned(6, asked), folder, resume=True), expected)  # it is finished


def test_a_crash_goes_on_from_the_last_rung(
    tmp_path: Path, whole: Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, calls = groups.Group.train, iter(range(100))

    def crash(group: groups.Group) -> list[int]:
        if next(calls) == 3:
            raise RuntimeError
        return train(group)

    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "train", crash)
        with pytest.raises(RuntimeError):
            search.search(planned(), tmp_path / "out")
    states = [path.name for path in (tmp_path / "out" / "checkpoint").iterdir()]
    assert states == ["0-2-3.safetensors"]
    same(search.search(planned(), tmp_path / "out", resume=True), whole)


def test_a_search_is_resumed_with_its_own_settings_and_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    search.search(planned(3), folder, stop=lambda: True)
    with pytest.raises(UserError, match=r"other settings: hidden \(\[6\] there, \[7\] here\)"):
        search.search(planned(3, hidden="7"), folder, resume=True)
    with pytest.raises(UserError, match="other settings: candidates"):
        search.search(planned(4), folder, resume=True)
    load = setup.load

    def other(*arguments: Any, **more: Any) -> FederatedData:
        data = load(*arguments, **more)
        return data._replace(train=data.train._replace(x=data.train.x + 1))

    with monkeypatch.context() as patch:
        patch.setattr(setup, "load", other)
        with pytest.raises(UserError, match="The data have changed since the search in"):
            search.search(planned(3), folder, resume=True)
    state = next((folder / "checkpoint").iterdir())
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(UserError, match="truncated or damaged"):
        search.search(planned(3), folder, resume=True)
    state.unlink()
    with pytest.raises(UserError, match=r"Cannot read .* start a new search"):
        search.search(planned(3), folder, resume=True)
    (folder / "tune.json").write_text("{")
    with pytest.raises(UserError, match=r"tune.json is damaged"):
        search.search(planned(3), folder, resume=True)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    search.search(planned(2, rounds=1), tmp_path / "out")
    before = (tmp_path / "out" / "tune.json").read_bytes()
    with pytest.raises(UserError, match=r"is not empty, it has search.toml; choose another --out"):
        search.search(planned(2), tmp_path / "out")
    assert (tmp_path / "out" / "tune.json").read_bytes() == before
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(UserError, match=r"is not empty, it has summary.json"):
        search.search(planned(2), tmp_path / "run")
    with pytest.raises(UserError, match="holds no search to resume"):
        search.search(planned(2), tmp_path / "run", resume=True)
