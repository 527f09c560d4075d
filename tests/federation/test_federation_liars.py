"""A server and its clients in one process, with a liar between them: what it cannot do."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from federation_calls import AS_SIMULATED, Call
from federation_points import deal

from corefed.federation import events, server, task_context
from corefed.federation.protocol import Reply, Task
from corefed.federation.rules import Rules
from corefed.federation.trust import checks, robust
from corefed.federation.waiting import Waiting
from corefed.methods import bnfed, fedavg, pfedbayes
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.settings import config
from corefed.show import report
from corefed.training import record

FLAGS: dict[str, Any] = {
    "method": "fedavg", "data": "digits", "partition": "iid", "clients": 5, "keep": 0.3,
    "rounds": 2, "local_steps": 5, "hidden": "8", "evaluate_every": 2,
}  # fmt: skip
LIAR = "client-0"
VAST = 10_000_000
DEFAULT = Rules(join_wait=0.0, attempts=1)

Lie = Callable[[Task, Reply], Reply]


class Liar(Call):
    """One client's answers are changed on their way."""

    def __init__(self, places: Mapping[str, task_context.ClientSettings], lie: Lie) -> None:
        super().__init__(places)
        self.lie = lie

    def ask(self, tasks: Mapping[str, Task], waiting: Waiting) -> dict[str, Reply | str]:
        answers = super().ask(tasks, waiting)
        reply = answers.get(LIAR)
        if isinstance(reply, Reply):
            answers[LIAR] = self.lie(tasks[LIAR], reply)
        return answers


class Ended(NamedTuple):
    run: Path
    summary: dict[str, Any]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return record.read_lines(self.run / record.ROUNDS)[0]

    def reasons(self, kind: str) -> list[str]:
        found = events.read(self.run / record.EVENTS)
        return [str(each["reason"]) for each in found if each["event"] == kind]

    def agreement(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run / "agreement.json").read_text())
        return found


def federate(
    folder: Path, lie: Lie = lambda task, reply: reply, rules: Rules = DEFAULT, **flags: Any
) -> Ended:
    flags = {**FLAGS, **flags}
    deal(config.resolve(flags=flags).run, folder / "data")
    places = {
        f"client-{i}": task_context.ClientSettings(
            f"client-{i}", folder / f"state-{i}", str(folder / "data" / f"client-{i}.npz")
        )
        for i in range(flags["clients"])
    }
    run = folder / "run"
    record.Folder(run).create(config.resolve(flags={**flags, "data": "local"}))
    return Ended(run, server.federate(run, list(places), rules, Liar(places, lie)))


def joining(**changed: Any) -> Lie:
    """A lie at the join alone."""

    def lie(task: Task, reply: Reply) -> Reply:
        if task.kind != "join":
            return reply
        return reply._replace(figures={**reply.figures, **changed})

    return lie


# Joining


def test_a_wild_mean_does_not_move_the_scale(tmp_path: Path) -> None:
    count = VAST * 64
    wild = joining(train=VAST, count=count, mean=1e6, m2=1e12 * count)
    found = federate(tmp_path / "a", wild, scale="standard").agreement()
    honest = federate(tmp_path / "b", scale="standard").agreement()
    assert found["mean"][0] == pytest.approx(honest["mean"][0], rel=0.1)
    assert found["std"][0] == pytest.approx(honest["std"][0], rel=0.1)
    pooled = replace(DEFAULT, join="pooled")
    assert federate(tmp_path / "c", wild, pooled, scale="standard").agreement()["mean"][0] > 9e5


def test_a_wrong_shape_stops_nobody(tmp_path: Path) -> None:
    ended = federate(tmp_path, joining(shape=[8, 8]))
    assert ended.summary["rounds"] == 2 and ended.agreement()["shape"] == [64]
    (reason,) = ended.reasons("refused")
    assert "points of shape [64] but client-0 has [8, 8]" in reason


def test_invented_classes_do_not_swell_the_model(tmp_path: Path) -> None:
    names = [*map(str, range(10)), *(f"made up {i}" for i in range(5000))]
    ended = federate(tmp_path, joining(classes=names))
    assert ended.agreement()["classes"] == list(map(str, range(10)))
    (reason,) = ended.reasons("left-out")
    assert "too few clients name" in reason and "(client-0)" in reason
    assert 'classes = ["0", "1", "2", ...]' in reason  # all of it is in the log


def test_points_of_a_class_that_is_left_out_are_left_out(tmp_path: Path) -> None:
    """The client that has it trains on its others; a resumed run knows it, too."""
    ended = federate(tmp_path, partition="labels:4", clients=3, keep=1.0)
    joined = json.loads((ended.run / "joined.json").read_text())
    assert joined["classes_left_out"]
    assert ended.summary["config"]["classes"] == ended.agreement()["classes"]
    assert [len(line["federation"]["accepted"]) for line in ended.lines] == [3, 3]
    told = sum(joined["train"].values())
    assert sum(ended.lines[0]["federation"]["examples"]) < told
    record.Folder(ended.run).create(
        config.resolve(ended.run / record.EXPERIMENT, assignments=["rounds=3"])
    )
    (ended.run / record.SUMMARY).unlink()
    places = {
        f"client-{i}": task_context.ClientSettings(
            f"client-{i}", tmp_path / f"state-{i}", str(tmp_path / "data" / f"client-{i}.npz")
        )
        for i in range(3)
    }
    assert server.federate(ended.run, list(places), DEFAULT, Call(places))["rounds"] == 3


def test_made_up_classes_beside_those_that_the_operator_names(tmp_path: Path) -> None:
    named = ",".join(map(str, range(10)))
    ended = federate(tmp_path, joining(classes=["0", "other"]), classes=named)
    assert ended.agreement()["classes"] == list(map(str, range(10)))
    assert "does not" in ended.reasons("refused")[0]


# Counts


def test_no_client_trains_on_more_than_it_told(tmp_path: Path) -> None:
    def lie(task: Task, reply: Reply) -> Reply:
        if task.kind != "train":
            return reply
        return reply._replace(figures={**reply.figures, "examples": VAST})

    ended = federate(tmp_path, lie)
    assert all(LIAR not in line["federation"]["accepted"] for line in ended.lines)
    assert "at the join it told" in ended.lines[0]["federation"]["lost"][LIAR]


def test_what_it_told_counts_within_bounds(tmp_path: Path) -> None:
    def lie(task: Task, reply: Reply) -> Reply:
        changed = {
            "join": {"train": VAST, "count": VAST * 64, "m2": 0.0},
            "train": {"examples": VAST},
        }
        return reply._replace(figures={**reply.figures, **changed.get(task.kind, {})})

    ended = federate(tmp_path, lie, replace(DEFAULT, aggregation="plain"))
    first, *others = ended.lines[0]["federation"]["examples"]
    assert first == 5 * sorted([*others, VAST])[2]


def perfect(task: Task, reply: Reply) -> Reply:
    """Every one of 10^7 test points is right, it says."""
    if task.kind == "join":
        return reply._replace(figures={**reply.figures, "test": VAST})
    if task.kind != "evaluate":
        return reply
    models = {
        model: {
            **sums, "points": VAST, "correct": VAST, "nll": 0.0, "brier": 0.0,
            "gap": [0.0] * len(sums["gap"]),
        }
        for model, sums in reply.figures["models"].items()
    }  # fmt: skip
    return reply._replace(figures={**reply.figures, "models": models})


def test_one_evaluation_does_not_decide_what_is_reported(tmp_path: Path) -> None:
    honest = federate(tmp_path / "honest").summary
    bold = federate(tmp_path / "bold", perfect).summary
    truth = honest["metrics"]["global_accuracy"]["mean"]
    assert truth < 0.7
    median = bold["coverage"]["median"]["global_accuracy"][0]
    assert abs(median - honest["coverage"]["median"]["global_accuracy"][0]) < 0.1
    assert bold["metrics"]["global_accuracy"]["mean"] < truth + 5 / 9 * (1 - truth) + 0.05
    trusting = federate(tmp_path / "trusting", perfect, AS_SIMULATED).summary
    assert trusting["metrics"]["global_accuracy"]["mean"] > 0.999


def test_more_test_points_than_told_are_refused(tmp_path: Path) -> None:
    def later(task: Task, reply: Reply) -> Reply:
        return reply if task.kind == "join" else perfect(task, reply)

    ended = federate(tmp_path, later)
    assert ended.summary["coverage"]["clients"] == 4 and ended.summary["coverage"]["of"] == 5
    assert "number of test points" in ended.reasons("refused")[-1]
    caption = report.metrics_table(ended.summary).caption
    assert "metrics of 4 of 5 clients, median accuracy over clients" in str(caption)


def test_slopes_of_one_client_do_not_choose_the_temperature(tmp_path: Path) -> None:
    def bold(task: Task, reply: Reply) -> Reply:
        slopes = reply.figures.get("slopes", {}) if task.kind == "evaluate" else {}
        most = {
            kind: [99.0 * reply.figures["validation"][kind]["points"]] * len(each)
            for kind, each in slopes.items()
        }
        return reply._replace(figures={**reply.figures, "slopes": most}) if most else reply

    flags = {"method": "pfedbayes", "validation": 0.2, "keep": 1.0}
    found = [
        federate(tmp_path / name, lie, **flags).lines[-1]["calibration"]["pooled"]
        for name, lie in (("a", lambda task, reply: reply), ("b", bold))
    ]
    for kind, (T,) in found[0].items():
        assert found[1][kind][0] == pytest.approx(T, rel=0.3)


# Aggregation

MODEL = mlp((4, 3, 2), Categorical(2))


def test_what_auto_means() -> None:
    methods = [pfedbayes.build(pfedbayes.Config(), MODEL), fedavg.build(fedavg.Config(), MODEL)]
    for method in methods:
        found = [robust.resolve(Rules(), method, n)[0].aggregation for n in (1, 2, 3, 10)]
        assert found == ["plain", "plain", "trimmed-mean", "trimmed-mean"]
        for n in (1, 2, 3, 4, 5, 10):
            rules, note = robust.resolve(Rules(), method, n)
            robust.check(rules, method, n)
            assert not note
    unaligned = bnfed.build(bnfed.Config(), MODEL)
    rules, note = robust.resolve(Rules(), unaligned, 5)
    assert rules.aggregation == "plain" and "bnfed" in note
    asked = replace(Rules(), aggregation="krum")
    assert robust.resolve(asked, methods[0], 5) == (asked, "")


@pytest.mark.parametrize(("clients", "bad"), [(3, 1), (4, 1), (5, 1), (6, 2), (7, 2), (9, 3)])
def test_the_default_stays_between_honest_values(clients: int, bad: int) -> None:
    """Every coordinate of what it gives, whatever the bad ones send."""
    method = pfedbayes.build(pfedbayes.Config(), MODEL)
    rules, _ = robust.resolve(Rules(), method, clients)
    g = torch.Generator().manual_seed(clients)
    honest = torch.randn(clients - bad, 2, 10, generator=g)
    for value in (-1e6, 1e6):
        rows = torch.cat([honest, torch.full((bad, 2, 10), value)])
        update = robust.Update(tuple(range(clients)), {"v": rows}, torch.ones(clients))
        (row,) = robust.combine(rules, method, {"v": honest[0]}, update).update.message["v"]
        assert (row >= honest.amin(0)).all() and (row <= honest.amax(0)).all()


def test_a_run_says_which_rule_it_used(tmp_path: Path) -> None:
    ended = federate(tmp_path)
    assert {line["federation"]["aggregation"] for line in ended.lines} == {"trimmed-mean"}


def test_sigmas_far_from_those_sent_are_refused() -> None:
    sent = {"v": torch.stack([torch.zeros(4), torch.full((4,), -4.0)])}
    moved = {"v": sent["v"].clone()}
    moved["v"][1] -= 2.0
    assert checks.widths(moved, sent, ("v",), 30.0) is None
    for rho in (-100.0, 3.0):
        moved["v"][1, 2] = rho
        problem = checks.widths(moved, sent, ("v",), 30.0)
        assert problem is not None and "'v' has 1 of 4 standard deviations" in problem


def test_tiny_sigmas_do_not_stop_a_run(tmp_path: Path) -> None:
    def tiny(task: Task, reply: Reply) -> Reply:
        if task.kind != "train":
            return reply
        tree = {"v": reply.tree["v"].clone()}
        tree["v"][1] -= 8.0
        return reply._replace(tree=tree)

    flags: dict[str, Any] = {"method": "pfedbayes", "rounds": 9, "local_steps": 2}
    for rules in (DEFAULT, replace(DEFAULT, aggregation="plain")):
        ended = federate(tmp_path / rules.aggregation, tiny, rules, **flags)
        assert ended.summary["rounds"] == 9
        assert all("sigma" in line["federation"]["lost"][LIAR] for line in ended.lines)
