"""How long a question waits, for whom, and who is not waited for."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from federation_inprocess import LOST, QUICK, Folders, federation
from flwr.app import Message

from corefed.federation import events
from corefed.federation.rules import Rules
from corefed.federation.waiting import Strikes, Waiting
from corefed.training import record

FLAGS: dict[str, Any] = {
    "method": "fedavg", "data": "digits", "partition": "iid", "clients": 3, "rounds": 4,
    "local_steps": 2, "hidden": "8", "evaluate_every": 4,
}  # fmt: skip


# How long


@pytest.mark.parametrize(
    ("answered", "pending", "end"),
    [
        ([], {"a", "b", "c"}, 600.0),
        ([10.0, 11.0], {"c", "d"}, 600.0),  # no quorum yet
        ([10.0, 20.0, 50.0], {"d"}, 200.0),  # 50 s and three times as long again
        ([50.0, 10.0, 20.0], {"d"}, 200.0),
        ([10.0, 20.0, 50.0, 90.0], {"e"}, 200.0),  # later ones do not prolong it
        ([1.0, 1.0, 2.0], {"d"}, 32.0),  # never less than 30 s
        ([300.0, 300.0, 300.0], {"d"}, 600.0),
        ([10.0, 20.0, 50.0], set(), 0.0),
    ],
)
def test_a_round_ends_some_time_after_its_quorum(
    answered: list[float], pending: set[str], end: float
) -> None:
    assert Waiting(600.0, 3, 3.0, 30.0).end(answered, pending) == end


def test_a_client_that_takes_twice_as_long_is_waited_for() -> None:
    """At every speed, with the defaults."""
    rules = Rules()
    for seconds in (0.1, 1.0, 60.0, 250.0):
        waiting = Waiting(rules.deadline, 3, rules.grace, rules.grace_seconds)
        assert waiting.end([seconds] * 3, {"slow"}) >= 2 * seconds


def test_nobody_waits_for_those_who_are_not_waited_for() -> None:
    waiting = Waiting(600.0, 2, 3.0, 30.0, frozenset({"d"}))
    assert waiting.end([1.0], {"b", "d"}) == 600.0  # but for a quorum everybody counts
    assert waiting.end([1.0, 2.0], {"c", "d"}) == 32.0
    assert waiting.end([1.0, 2.0], {"d"}) == 0.0


def test_without_grace_a_question_waits_until_its_deadline() -> None:
    assert Waiting(600.0, 2, 0.0, 30.0).end([1.0, 2.0], {"d"}) == 600.0
    assert Waiting(600.0).end([1.0, 2.0], {"d"}) == 600.0


# For whom


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_silent_client_is_not_waited_for_until_it_answers() -> None:
    strikes = Strikes(replace(Rules(), strikes=3), Clock())
    for _ in range(2):
        strikes.missed("a")
        assert not strikes.unawaited()
    strikes.missed("a")
    assert strikes.unawaited() == {"a"}
    assert strikes.waiting(2).unawaited == {"a"}
    strikes.heard("a")
    assert not strikes.unawaited()
    strikes.missed("a")
    assert not strikes.unawaited()  # counting begins anew


def test_questions_to_a_silent_client_have_growing_pauses() -> None:
    """Otherwise a client that was frozen would find a question for every round it missed."""
    clock = Clock()
    strikes = Strikes(Rules(deadline=600.0, grace_seconds=30.0, strikes=1), clock)
    asked = []
    while clock.now < 2000:
        if strikes.due(["a", "b"]) == ["a", "b"]:
            asked.append(clock.now)
            strikes.missed("a")
        clock.now += 1
    pauses = [later - before for before, later in pairwise(asked)]
    assert pauses == [30, 60, 120, 240, 480, 600]


def test_without_strikes_everybody_is_waited_for() -> None:
    strikes = Strikes(Rules(strikes=0), Clock())
    for _ in range(5):
        strikes.missed("a")
    assert not strikes.unawaited() and strikes.due(["a"]) == ["a"]


# Through Flower's messages


def lines_of(folders: Folders) -> list[dict[str, Any]]:
    return record.read_lines(folders.run / record.ROUNDS)[0]


def test_a_silent_client_costs_a_few_graces_and_no_deadline(tmp_path: Path) -> None:
    def silent(name: str, reply: Message) -> Message | str:
        return LOST if name == "client-2" and reply.metadata.group_id != "0" else reply

    folders = federation(tmp_path, {**FLAGS, "rounds": 6, "evaluate_every": 6}, tamper=silent)
    rules = replace(QUICK, deadline=60.0, grace=0.1, grace_seconds=0.2, strikes=2)
    began = time.monotonic()
    folders.federate(rules)
    assert time.monotonic() - began < 30
    lost = [line["federation"]["lost"]["client-2"] for line in lines_of(folders)]
    assert all("no answer within" in each for each in lost[:2])
    assert lines_of(folders)[-1]["coverage"]["clients"] == 2
    asked = [kind for name, kind in folders.grid.asked if name == "client-2"]
    assert len(asked) < 1 + 6 + 1  # not in every round


def test_a_client_that_answers_again_is_waited_for_again(tmp_path: Path) -> None:
    def silent(name: str, reply: Message) -> Message | str:
        return LOST if name == "client-2" and reply.metadata.group_id in "12" else reply

    folders = federation(tmp_path, {**FLAGS, "rounds": 8, "evaluate_every": 8}, tamper=silent)
    folders.federate(replace(QUICK, deadline=60.0, grace=2.0, grace_seconds=0.0, strikes=1))
    took_part = ["client-2" in line["federation"]["accepted"] for line in lines_of(folders)]
    assert took_part[:2] == [False, False]
    assert True in took_part[2:]


def test_a_round_without_a_quorum_asks_everybody(tmp_path: Path) -> None:
    """Also those that are not waited for: without them it would not have enough."""
    gone = {"1": "client-2", "2": "client-2", "3": "client-0"}

    def silent(name: str, reply: Message) -> Message | str:
        return LOST if gone.get(str(reply.metadata.group_id)) == name else reply

    folders = federation(tmp_path, FLAGS, tamper=silent)
    folders.federate(
        replace(QUICK, deadline=1.0, grace_seconds=0.2, strikes=1, quorum=0.6, attempts=2)
    )
    third = lines_of(folders)[2]["federation"]
    assert third["accepted"] == ["client-1", "client-2"]


def test_an_evaluation_is_tried_twice(tmp_path: Path) -> None:
    failed: list[str] = []

    def silent(name: str, reply: Message) -> Message | str:
        if reply.metadata.message_type == "evaluate" and name != "client-0" and len(failed) < 2:
            failed.append(name)
            return LOST
        return reply

    folders = federation(tmp_path, FLAGS, tamper=silent)
    summary = folders.federate(QUICK)
    assert sorted(failed) == ["client-1", "client-2"]
    assert summary["coverage"]["clients"] == summary["coverage"]["of"] == 3


def test_an_evaluation_without_a_quorum_reports_nothing(tmp_path: Path) -> None:
    def silent(name: str, reply: Message) -> Message | str:
        return LOST if reply.metadata.message_type == "evaluate" and name != "client-0" else reply

    folders = federation(tmp_path, FLAGS, tamper=silent)
    summary = folders.federate(QUICK)
    assert summary["metrics"] == {} and "coverage" not in summary
    found = events.read(folders.run / record.EVENTS)
    (event,) = (each for each in found if each["event"] == "no-quorum")
    assert event["reason"] == "1 acceptable answers in the evaluation, 2 needed"
