"""Deadlines on machines: a client measures its own speed, keeps it, and does what fits.

The clock is a fake one, which training moves on by its passes over a speed, so that every number is
known. `test_federation_faults.py` has a late client in a process of its own.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_inprocess import QUICK, federation
from test_flower import DIGITS, lines_of, server_of, simulate, with_small

from corefed.base.errors import UserError
from corefed.federation import client, local_work, own_speed, server, task_context
from corefed.federation.limits import Limits
from corefed.federation.operate.creating import as_federated
from corefed.federation.own_speed import OwnSpeed
from corefed.federation.rules import Rules
from corefed.federation.waiting import waiting_rules
from corefed.methods import registry
from corefed.models.likelihood import Categorical
from corefed.models.network import PIXELS, mlp
from corefed.settings import config
from corefed.training import client_side
from corefed.training.tasks import Need, Task, needs_of

TIMED: dict[str, Any] = {**DIGITS, "local_epochs": 4, "batch_size": 10, "deadline": 2.0}
"""Each of the three clients has 72 points: 8 minibatches an epoch, 32 steps, 320 passes."""


PATIENT = replace(QUICK, deadline=1e7)


class Machine:
    """A client's machine whose time passes only while it trains."""

    def __init__(self, speed: float) -> None:
        self.speed, self.now = speed, 0.0
        self.slow: dict[int, float] = {}  # round -> factor on the time that it takes
        self.trained: list[tuple[int, int, float]] = []  # round, steps, seconds; less the probes

    def clock(self) -> float:
        return self.now

    def train(self, *arguments: Any) -> client_side.Trained:
        method, _, private, _, streams, work = arguments
        found = client_side.train(*arguments)
        took = local_work._passes(method, private, found) / self.speed
        took *= self.slow.get(streams.round, 1.0)
        self.now += took
        if work.counts is not None:
            self.trained.append((streams.round, work.steps, took))
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """What all clients of a federation in this process train on."""
    found = Machine(100.0)
    training = type("Training", (), {"train": found.train})()
    training.selection_cost = client_side.selection_cost
    monkeypatch.setattr(local_work, "client_side", training)
    timed = functools.partial(local_work.train, clock=found.clock)
    monkeypatch.setattr(client.local_work, "train", timed)
    return found


def need(n: int = 800, **flags: Any) -> Need:
    kind = {"method": "random-subset", "fraction": 1.0, "batch_size": 10, "local_epochs": 10}
    wanted = config.resolve(flags={**kind, "deadline": 6.0, "late": "fit", **flags})
    model = mlp((64, 8, 10), Categorical(10), PIXELS)
    method = registry.build(wanted.run.method, wanted.settings, model)
    return needs_of(wanted.run, wanted.settings, method, [n])[0]


# --- the measurement ------------------------------------------------------------------------------


def speed_of(folder: Path, *speeds: float) -> OwnSpeed:
    """After a probe and rounds at these speeds."""
    folder.mkdir(exist_ok=True)
    found, now = OwnSpeed(folder), [0.0]

    def probe() -> float:
        now[0] += 30 / speeds[0]
        return 30.0

    for round_, speed in enumerate(speeds[1:] or speeds[:1]):
        found.give(round_, 1.0, probe, lambda: now[0])
        if len(speeds) > 1:
            found.note(round_, 50.0, 50.0 / speed)
    return found


def test_one_slow_round_changes_little(tmp_path: Path) -> None:
    assert speed_of(tmp_path / "a", 100.0).speed == pytest.approx(100)
    for place, rounds in enumerate([(1.0,), (100.0, 1.0), (100.0, 100.0, 100.0, 1.0)]):
        found = speed_of(tmp_path / str(place), 100.0, *rounds).speed
        assert found is not None and found >= 50  # the probe and one slow round: no less than half
    assert found == pytest.approx(100)
    slower = speed_of(tmp_path / "b", 100.0, 100.0, 100.0, *[10.0] * 3)
    assert slower.speed == pytest.approx(10)  # a machine that has become slow is known as such


def test_the_speed_outlives_the_process_and_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = speed_of(tmp_path, 100.0, 80.0)
    after = OwnSpeed(tmp_path)
    assert after.measured == before.measured and after.given == before.given
    assert (tmp_path / own_speed.SPEED).stat().st_mode & 0o777 == 0o600
    assert len(speed_of(tmp_path, *[100.0] * 12).measured) == own_speed.LAST


def test_a_round_that_is_asked_again_has_the_same_passes(tmp_path: Path) -> None:
    found = speed_of(tmp_path, 100.0, 80.0, 20.0)
    second = found.given["1"]
    again = OwnSpeed(tmp_path)
    assert again.give(1, 1.0, pytest.fail, pytest.fail) == second  # type: ignore[arg-type]
    again.note(1, 50.0, 1.0)
    assert again.give(2, 1.0, pytest.fail, pytest.fail) == again.speed  # type: ignore[arg-type]
    assert again.give(1, 1.0, pytest.fail, pytest.fail) == second  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"measured": {"0": -1}, "given": {}}', '{"measured": {"0": "x"}, "given": {}}'],
)
def test_a_damaged_speed_is_measured_again(tmp_path: Path, content: str) -> None:
    (tmp_path / own_speed.SPEED).write_text(content)
    assert OwnSpeed(tmp_path).speed is None
    assert speed_of(tmp_path, 50.0).speed == pytest.approx(50)


# --- the plan -------------------------------------------------------------------------------------


def test_a_late_client_says_what_it_does() -> None:
    all_of_it = own_speed.plan(need().run, need(), 8000.0)
    assert all_of_it == (Task(800, 800), "")
    fits = own_speed.plan(need().run, need(), 1200.0)
    assert fits.task == Task(120, 120, 1200.0)
    assert fits.note == (
        "This client trains on 120 of 800 points: the deadline is 6 s and it does 200 passes per "
        "second."
    )
    partial = need(late="partial")
    some = own_speed.plan(partial.run, partial, 1200.0)
    assert some.task == Task(120, 800, 1200.0)
    assert "takes 120 of 800 local steps: the deadline is 6 s and it does 200" in some.note


@pytest.mark.parametrize("late", ["partial", "fit"])
def test_without_time_to_select_or_for_a_minibatch_a_client_takes_part(late: str) -> None:
    kind = need(late=late, method="coreset-pfedbayes", fraction=0.5, monte_carlo=1)
    some = own_speed.plan(kind.run, kind, 60.0)  # ten for a minibatch
    assert some.task[:2] == (6, 800)
    assert "takes 6 of 400 local steps" in some.note and "10 passes per second" in some.note
    assert ("no time to select" in some.note) == (late == "partial")
    none = own_speed.plan(kind.run, kind, 6.0)
    assert none.task == Task(1, 800)
    assert none.note == (
        "This client takes one minibatch, and is late: the deadline is 6 s and it does 1 passes "
        "per second."
    )


# --- a federation in this process -----------------------------------------------------------------


@pytest.mark.parametrize("method", ["pfedbayes", "coreset-pfedbayes"])
def test_epochs_and_a_deadline_that_all_keep_are_the_simulations(
    method: str, tmp_path: Path, machine: Machine
) -> None:
    flags = {**with_small(method), "local_epochs": 2, "batch_size": 10, "rounds": 2}
    _, simulated = simulate(flags)
    for name, timed in (("epochs", {}), ("deadline", {"deadline": 1e6})):
        folders = federation(tmp_path / name, {**flags, **timed})
        folders.federate(PATIENT)
        for key, value in server_of(folders).items():
            torch.testing.assert_close(value, simulated[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"late": "partial"}, "takes 20 of 32 local steps: the deadline is 2 s and it does 100"),
        (
            {"late": "fit", "method": "random-subset", "fraction": 1.0},
            "trains on 50 of 72 points: the deadline is 2 s and it does 100 passes per second",
        ),
        (
            {"late": "fit", "method": "coreset-pfedbayes", "fraction": 1.0, "draws": 8,
             "feature_draws": 1, "refresh_every": 5},
            "points: the deadline is 2 s and it does 100",
        ),
        ({"deadline": 0.05}, "takes one minibatch, and is late"),
    ],
)  # fmt: skip
def test_late_clients_do_what_fits(
    flags: dict[str, Any],
    words: str,
    tmp_path: Path,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = federation(tmp_path, {**TIMED, **flags})
    folders.federate(PATIENT)
    assert words in capsys.readouterr().err
    assert len(lines_of(folders)) == 3 and len(machine.trained) == 9
    deadline = {**TIMED, **flags}["deadline"]
    if deadline == TIMED["deadline"]:
        assert max(seconds for _, _, seconds in machine.trained) <= deadline * (1 + 1e-9)
    else:
        assert {steps for _, steps, _ in machine.trained} == {1}
    kept = json.loads((tmp_path / "client-0" / "first" / own_speed.SPEED).read_text())
    assert set(kept["measured"]) == {"probe", "0", "1", "2"}
    assert list(kept["measured"].values()) == pytest.approx([100.0] * 4)


def test_a_slow_round_is_not_followed_by_a_short_one(tmp_path: Path, machine: Machine) -> None:
    machine.slow = {1: 10.0}
    folders = federation(tmp_path, {**TIMED, "rounds": 4})
    folders.federate(PATIENT)
    steps = {round_: many for round_, many, _ in machine.trained}
    assert steps == {0: 20, 1: 20, 2: 20, 3: 20}


def test_no_message_tells_the_speed(tmp_path: Path, machine: Machine) -> None:
    with_deadline = federation(tmp_path / "a", TIMED, share_metrics=False)
    without = federation(tmp_path / "b", {**TIMED, "deadline": 0}, share_metrics=False)
    names = []
    for folders in (with_deadline, without):
        folders.federate(PATIENT)
        log = folders.run.parent.parent / "client-0" / "audit.jsonl"
        sent = [json.loads(line) for line in log.read_text().splitlines()]
        names.append([sorted(each) for each in sent])
        assert '"speed' not in log.read_text()
    assert names[0] == names[1]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"speeds": "5"}, "speeds is 5, but in a federation of machines each client measures"),
        ({"deadline": 5, "late": "drop"}, "late=drop is for simulations"),
    ],
)
def test_what_has_no_meaning_on_machines_is_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        as_federated(config.resolve(flags=flags), 3)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"deadline": 0.5}, r"deadline is 0.5 s in experiment.toml.* for 0.3 s only"),
        ({"late": "fit"}, "late=fit takes a method that trains on a part"),
        ({"method": "submodular-logdet"}, "deadline is given, but submodular-logdet .* not count"),
    ],
)
def test_deadlines_that_cannot_be_are_refused(
    flags: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folders = federation(tmp_path, {**TIMED, "deadline": 0.1, **flags})
    with pytest.raises(UserError, match=sentence):
        folders.federate()
    assert lines_of(folders) == []


def test_epochs_have_the_limits_of_steps(tmp_path: Path) -> None:
    flags = {**TIMED, "deadline": 0}
    many = federation(tmp_path / "a", flags, limits=Limits(local_steps=31))
    with pytest.raises(UserError, match="no quorum"):
        many.federate()
    assert "local_steps = 32, and this client allows 31" in (many.run / "events.jsonl").read_text()
    more = federation(tmp_path / "b", {**flags, "local_epochs": 10**9})
    with pytest.raises(UserError):
        more.federate()


def test_a_client_refuses_what_its_server_must_not_ask(tmp_path: Path) -> None:
    wanted = config.resolve(flags={"method": "pfedbayes", "deadline": 3, "late": "fit"})
    method = registry.build("pfedbayes", wanted.settings, mlp((4, 2), Categorical(2), PIXELS))
    with pytest.raises(task_context.PublicError, match="late=fit takes a method"):
        task_context._check_time(wanted.run, method)


def test_a_round_waits_for_clients_that_keep_their_deadline() -> None:
    rules = Rules(grace_seconds=30.0)
    assert waiting_rules(rules, 0.0) == rules
    assert waiting_rules(rules, 60.0).grace_seconds == 90.0
    assert server.waiting_rules is waiting_rules
