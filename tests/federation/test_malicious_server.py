"""A malicious server against one client: what it can learn about a record, channel by channel.

Every row of the table in docs/privacy.md names a test here. Each asks a client that has a certain
record and one that has not, and compares the replies. Noise is seeded, so that two replies may only
differ in the clipped difference under it.
"""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from malicious_server import (
    CLASSES,
    NOISE,
    ask,
    broadcast,
    client,
    linear,
    points,
)

from corefed.base.types import Tree
from corefed.data.columns import Column
from corefed.federation.client import FAILED, answer
from corefed.federation.limits import Limits
from corefed.federation.protocol import Agreement, Reply, Task
from corefed.federation.reading.description import check_description
from corefed.federation.task_context import ClientSettings
from corefed.federation.trust import metric, privacy
from corefed.methods import registry
from corefed.training import client_side

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _seeded_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def normals(count: int) -> torch.Tensor:
        g = torch.Generator().manual_seed(count)
        return torch.randn(count, generator=g, dtype=torch.float64)

    monkeypatch.setattr(privacy, "system_normals", normals)


def both(folder: Path, task: Task, **settings: Any) -> tuple[Reply, Reply]:
    """Replies of a client with the record and of one without."""
    one, two = (answer(task, client(folder, member, **settings)) for member in (True, False))
    return one, two


def releases(folder: Path, member: bool) -> int:
    path = folder / ("with" if member else "without") / "state" / "privacy.json"
    return len(privacy.Ledger(path).releases)


def check_alike(one: Reply, two: Reply, sent: Tree, clip: float) -> None:
    """The replies are equal in all but their tensors, and these differ by 2 clip at most."""
    assert one._replace(tree={}) == two._replace(tree={})
    assert one.tree.keys() == two.tree.keys()
    for name, value in one.tree.items():
        assert (value.shape, value.dtype) == (two.tree[name].shape, two.tree[name].dtype)
        assert bool(value.isfinite().all()) and bool(two.tree[name].isfinite().all())
    unit = metric.scale({name: sent[name] for name in one.tree}, ())
    gap = {name: value.double() - two.tree[name] for name, value in one.tree.items()}
    rounding = 1e-6 * sum(float(value.abs().max()) for value in sent.values())
    assert metric.length(gap, unit).item() <= 2 * clip * (1 + 1e-6) + rounding


# Numbers about training


def test_the_attack_by_the_loss_works_without_noise(tmp_path: Path) -> None:
    """So that the next test compares something: the loss of a crafted model tells membership."""
    one, two = both(tmp_path, ask("train", linear(2.0)))
    assert one.figures["loss"] > 5 * two.figures["loss"]


@pytest.mark.parametrize(
    ("clip", "noise"),
    [(0.0, 0.0), (1.0, 1e-3), (math.nan, 1.0), (1.0, math.nan), (-1.0, -1.0), (1.0, 3.0)],
)
@pytest.mark.parametrize("method", ["fedavg", "pfedbayes", "coreset-pfedbayes", "independent"])
def test_no_number_about_training(method: str, clip: float, noise: float, tmp_path: Path) -> None:
    """Whatever noise the server names, it sees that of the client or more, and no loss."""
    tree = linear(2.0) if method == "fedavg" else broadcast(method=method)
    task = ask("train", tree, clip=clip, noise=noise, method=method)
    one, two = both(tmp_path, task, **NOISE)
    assert not one.error and one.figures == {"examples": 100}
    assert bool(one.tree) == bool(tree)
    if method == "fedavg":
        check_alike(one, two, tree, 1.0)
    for member in (True, False):
        assert releases(tmp_path, member) == bool(tree)
    if tree:
        ledger = privacy.Ledger(tmp_path / "with" / "state" / "privacy.json")
        assert ledger.releases[0].noise == max(2.0, noise if noise > 2 else 0.0)


def test_the_own_clip_is_taken(tmp_path: Path) -> None:
    """A server's clip does not matter for epsilon; a client that sets one uses its own."""
    tree = linear(2.0)
    tasks = [ask("train", tree, clip=clip, noise=1.0) for clip in (0.0, 1e-3, 1e3)]
    replies = []
    for number, task in enumerate(tasks):
        here = tmp_path / str(number)
        here.mkdir()
        replies.append(answer(task, client(here, True, **NOISE)))
    assert all(torch.equal(replies[0].tree["theta"], each.tree["theta"]) for each in replies)


def test_without_any_clip_nothing_is_sent(tmp_path: Path) -> None:
    place = client(tmp_path, True, min_noise=2.0, classes=CLASSES)
    reply = answer(ask("train"), place)
    assert "there is no clip" in reply.error and not reply.tree and not reply.figures
    for clip in (math.inf, 1e30, 1e-30):
        reply = answer(ask("train", clip=clip, noise=1.0), place)
        assert "dp_clip is" in reply.error and not reply.tree
    assert releases(tmp_path, True) == 0


@pytest.mark.parametrize(
    "given", [{"deadline": 30.0}, {"deadline": 1e-6}, {"local_epochs": 3}, {"local_epochs": 9999}]
)
def test_a_deadline_adds_nothing_to_a_reply(given: dict[str, Any], tmp_path: Path) -> None:
    """Neither a speed nor how many steps were taken, nor that they are above a limit."""
    tree = linear(2.0)
    few = Limits(local_steps=10_000)
    one, two = both(tmp_path, ask("train", tree, batch_size=1, **given), **NOISE, limits=few)
    assert not one.error and one.figures == {"examples": 100}
    check_alike(one, two, tree, 1.0)
    kept = tmp_path / "with" / "state"
    assert bool(list(kept.glob("*/speed.json"))) == ("deadline" in given)


# Failures


def test_the_attack_by_overflow_works_without_noise(tmp_path: Path) -> None:
    one, two = both(tmp_path, ask("train", linear(5e37)), share_metrics=False)
    assert not bool(one.tree["theta"].isfinite().all())
    assert bool(two.tree["theta"].isfinite().all())


@pytest.mark.parametrize("size", [5e37, 3e36])
def test_a_training_that_fails_is_noise_and_counted(size: float, tmp_path: Path) -> None:
    """A model that overflows for a member alone: the same reply, the same entry in the ledger."""
    tree = linear(size)
    one, two = both(tmp_path, ask("train", tree), **NOISE)
    assert one._replace(tree={}) == two._replace(tree={}) and not one.error
    assert releases(tmp_path, True) == releases(tmp_path, False) == 1
    check_alike(one, two, tree, 1.0)


@pytest.mark.parametrize("method", registry.METHODS)
def test_a_failure_sends_what_the_method_sends(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same names, shapes and types, for every method."""
    task = ask("train", method=method, hidden="4")
    good = answer(task, client(tmp_path, False, **NOISE))
    monkeypatch.setattr(client_side, "train", lambda *arguments: 1 / 0)
    bad = answer(task, client(tmp_path, True, **NOISE))
    assert good._replace(tree={}) == bad._replace(tree={})
    forms = [[(k, v.shape, v.dtype) for k, v in each.tree.items()] for each in (good, bad)]
    assert forms[0] == forms[1]
    assert bool(good.error) == (method == "bnfed")


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError(), ValueError("secret 50.0")])
def test_an_error_in_training_is_noise_and_counted(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise error

    good = answer(ask("train"), client(tmp_path, False, **NOISE))
    monkeypatch.setattr(client_side, "train", fail)
    bad = answer(ask("train"), client(tmp_path, True, **NOISE))
    check_alike(bad, good, broadcast(), 1.0)
    assert releases(tmp_path, True) == 1
    # It is the broadcast under noise, and the run goes on from the state before.
    tree, normals = broadcast()["theta"], privacy.system_normals(8)
    assert torch.allclose(bad.tree["theta"], (tree + 2.0 * normals).float(), atol=1e-5)
    monkeypatch.undo()
    assert not answer(ask("train", round_=1), client(tmp_path, True, **NOISE)).error


def test_a_training_that_is_killed_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer is a bit too: max_epsilon bounds how often it can be asked for."""

    class Killed(BaseException):
        pass

    def kill(*arguments: object) -> None:
        raise Killed

    monkeypatch.setattr(client_side, "train", kill)
    with pytest.raises(Killed):
        answer(ask("train"), client(tmp_path, True, **NOISE))
    assert releases(tmp_path, True) == 1


def test_a_training_that_takes_too_long_is_noise(tmp_path: Path) -> None:
    slow = Limits(seconds=0.05)
    task = ask("train", local_steps=1000)
    late = answer(task, client(tmp_path, True, **NOISE, limits=slow))
    assert not late.error and late.tree and late.figures == {"examples": 100}
    plain = answer(task, client(tmp_path, False, limits=slow))
    assert plain.error == "The task took longer than the 0.05 s that this client allows."
    assert not plain.tree and not plain.figures


ERRORS: dict[str, dict[str, Any]] = {
    "gaps": {"missing": "refuse"},
    "an identifier": {"categorical": "x"},
    "a regression": {"task": "regression"},
    "one class": {"classes": "b"},
    "the other class": {"classes": "a"},
    "memory": {"memory_mb": 1},
}


@pytest.mark.parametrize("flags", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_whether_data_can_be_read_does_not_show(
    kind: Any, flags: dict[str, Any], tmp_path: Path
) -> None:
    """The server chooses how tables are read; one row can decide whether that works."""
    plain = "x,y\n" + "".join(f"{i / 10},{'ab'[i % 2]}\n" for i in range(30))
    (tmp_path / "without.csv").write_text(plain)
    (tmp_path / "with.csv").write_text(plain + ",c\n")
    agreement = Agreement((1,), CLASSES, 0, columns=(Column("x"),))
    tree = broadcast(agreement)
    replies = [
        answer(
            ask(kind, tree, agreement=agreement, **flags),
            ClientSettings(
                "north", tmp_path / name, str(tmp_path / f"{name}.csv"), target="y", **NOISE
            ),
        )
        for name in ("with", "without")
    ]
    assert not replies[0].error or "class" in replies[0].error  # of settings and client.toml alone
    assert replies[0]._replace(tree={}) == replies[1]._replace(tree={})
    assert replies[0].tree.keys() == replies[1].tree.keys()
    ledgers = [privacy.Ledger(tmp_path / name / "privacy.json") for name in ("with", "without")]
    assert ledgers[0].releases == ledgers[1].releases


@pytest.mark.parametrize("kind", ["train", "evaluate", "join"])
def test_errors_quote_nothing(kind: Any, tmp_path: Path) -> None:
    """Without noise an error says that there was one, in one fixed sentence."""
    for text in ("x,y\n1,a\n", "x,y\n" + "".join(f"t{i},a\n" for i in range(30))):
        (tmp_path / "data.csv").write_text(text)
        place = ClientSettings(
            "north", tmp_path / "state", str(tmp_path / "data.csv"), target="z",
            share_metrics=False,
        )  # fmt: skip
        last = 1 if kind == "evaluate" else 0  # before, there is nothing to do
        assert answer(ask(kind, round_=last), place).error == FAILED


@pytest.mark.parametrize(
    "tree",
    [
        {"theta": torch.zeros(7)},
        {"theta": torch.zeros(8).double()},
        {"w": torch.zeros(8)},
        {},
        {"theta": torch.full((8,), math.nan)},
        {"theta": torch.full((8,), -math.inf)},
    ],
)
def test_a_broadcast_that_is_none_is_refused_unread(tree: Tree, tmp_path: Path) -> None:
    place = client(tmp_path, True, **NOISE)._replace(data="npz:/there/is/none.npz")
    for kind in ("train", "evaluate"):
        reply = answer(ask(kind, tree), place)
        assert "The server sent" in reply.error
    assert releases(tmp_path, True) == 0


# Evaluation


@pytest.mark.parametrize("tree", [linear(2.0), linear(5e37)])
def test_an_evaluation_tells_nothing(tree: Tree, tmp_path: Path) -> None:
    """Without training, in the last round and before, and for data that cannot be evaluated."""
    for round_ in (0, 1):
        task = ask("evaluate", tree, round_=round_, validation=0.3)
        one, two = both(tmp_path, task, **NOISE, models=tmp_path / "models")
        assert one == two and one.figures == {"models": {}} and not one.error and not one.tree
    task = ask("evaluate", tree, round_=1, validation=0.3, temperature='{"global": 1.0, "x": 1}')
    one, two = both(tmp_path, task, **NOISE)
    assert one == two and one.figures == {"models": {}}


def test_evaluations_are_bounded(tmp_path: Path) -> None:
    """Without noise each is an exact answer about a model of the server's choice."""
    place = client(tmp_path, True, limits=Limits(attempts=3))
    replies = [answer(ask("evaluate", linear(size)), place) for size in (1.0, 2.0, 3.0, 4.0)]
    assert [bool(reply.error) for reply in replies] == [False, False, False, True]
    assert "3 different tasks of this kind in round 1" in replies[-1].error
    again = answer(ask("evaluate", linear(2.0)), place)  # the same one is no other
    assert again.figures["models"] == replies[1].figures["models"]
    assert "rounds = 1001" in answer(ask("evaluate", rounds=1001), place).error


# Joining


def test_joining_tells_no_value(tmp_path: Path) -> None:
    """The same outline with and without the record, which is all the client's own file says."""
    one, two = both(tmp_path, ask("join"), **NOISE, examples=50)
    assert one == two
    assert one.figures == {
        "train": 50, "test": 0, "classes": ["a", "b"], "targets": 0, "shape": [3], "count": 0,
        "mean": 0.0, "m2": 0.0,
    }  # fmt: skip
    assert not check_description(one.figures)


@pytest.mark.parametrize("flags", ERRORS.values(), ids=ERRORS)
def test_joining_with_a_table_tells_the_names_of_its_columns(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """No categories, no gaps, no classes: a row with a rare diagnosis does not show."""
    plain = "x,s,y,id\n" + "".join(f"{i / 10},u,{'ab'[i % 2]},p{i}\n" for i in range(30))
    (tmp_path / "without.csv").write_text(plain)
    (tmp_path / "with.csv").write_text(plain + ",rare,c,p30\n")
    one, two = (
        answer(
            ask("join", ignore="id", **flags),
            ClientSettings(
                "north", tmp_path / name, str(tmp_path / f"{name}.csv"), target="y", **NOISE
            ),
        )
        for name in ("with", "without")
    )
    assert one == two and not one.error and not check_description(one.figures)
    assert [each["name"] for each in one.figures["columns"]] == ["s", "x"]
    assert {each["kind"] for each in one.figures["columns"]} == {"empty"}
    assert one.figures["classes"] == ["a", "b"]


def test_joining_needs_the_classes_of_client_toml(tmp_path: Path) -> None:
    place = client(tmp_path, True, min_noise=2.0, clip=1.0)
    assert answer(ask("join"), place).error == FAILED
    full = answer(ask("join", run="second"), place._replace(join="full"))
    assert full.figures["train"] == 41  # the client's own decision
    later = answer(ask("train", run="second"), place)
    assert later.figures == {"examples": 41}  # as it was told, whatever the data are now
    outline = answer(ask("join", run="third"), client(tmp_path, False, join="shape", **NOISE))
    assert outline.figures["count"] == 0


def test_the_mean_of_one_class_is_not_told(tmp_path: Path) -> None:
    """The client chooses its classes. A server that names some is told all of them, or nothing."""
    place = client(tmp_path, True)
    for run, named in (("one", "a"), ("two", "b"), ("three", "b,c")):
        assert answer(ask("join", run=run, classes=named), place).error == FAILED
    all_ = answer(ask("join", run="four"), place).figures
    named_ = answer(ask("join", run="five", classes="B,A,c"), place).figures
    assert named_ == {**all_, "classes": ["A", "B"]}
    own = answer(ask("join", run="six", classes="a,b"), place._replace(classes=("b",))).figures
    x = points(True)
    assert own["classes"] == ["b"] and own["train"] == int((x["y_train"] == "b").sum())


def test_joining_is_answered_once_per_run(tmp_path: Path) -> None:
    place = client(tmp_path, False)
    first = answer(ask("join"), place)
    np.savez(place.data, **points(True))  # one record more
    assert answer(ask("join"), place) == first
    other = answer(ask("join", validation=0.5), place)
    assert "has described its data to the run first already" in other.error and not other.figures


def test_joining_again_under_new_names_has_a_limit(tmp_path: Path) -> None:
    place = client(tmp_path, True, limits=Limits(descriptions=3, runs=8))
    replies = [
        answer(ask("join", run=f"run-{seed}", validation=0.3, seeds=str(seed)), place)
        for seed in range(5)
    ]
    assert [bool(each.error) for each in replies] == [False] * 3 + [True] * 2
    assert "3 different descriptions of its data" in replies[-1].error
    same = [
        answer(ask("join", run=f"more-{i}", validation=0.3, seeds="0"), place) for i in range(6)
    ]
    assert [bool(each.error) for each in same] == [False] * 5 + [True]  # eight runs in all
    assert "keeps the state of 8 runs" in same[-1].error


# Uploads, and what is sent again


def test_an_upload_asked_for_again_has_the_same_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = client(tmp_path, True, **NOISE)
    first = answer(ask("train"), place)
    monkeypatch.setattr(privacy, "system_normals", lambda count: torch.zeros(count).double())
    assert torch.equal(answer(ask("train"), place).tree["theta"], first.tree["theta"])
    assert releases(tmp_path, True) == 1
    assert not torch.equal(
        answer(ask("train", linear(1.0)), place).tree["theta"], first.tree["theta"]
    )
    assert releases(tmp_path, True) == 2  # another question is another release


def test_uploads_end_at_max_epsilon(tmp_path: Path) -> None:
    two = privacy.epsilon(privacy.compose([0.5, 0.5]), 1e-5)
    place = client(tmp_path, True, **NOISE, max_epsilon=two + 1e-9)
    replies = [answer(ask("train", linear(size)), place) for size in (1.0, 2.0, 3.0)]
    assert [bool(each.error) for each in replies] == [False, False, True]
    assert "more than the epsilon of" in replies[-1].error
    assert releases(tmp_path, True) == 2


def test_methods_whose_uploads_have_no_bound_are_refused(tmp_path: Path) -> None:
    task = ask("train", method="bnfed", hidden="4")
    reply = answer(task, client(tmp_path, True, **NOISE))
    assert "bnfed cannot be made private" in reply.error and not reply.tree


def test_other_data_under_a_run_do_not_show(tmp_path: Path) -> None:
    """Without noise a client refuses to go on with other rows; with noise it does not say so."""
    one, two = (client(tmp_path, member, **NOISE) for member in (True, False))
    for place in (one, two):
        answer(ask("train"), place)
    shutil.copy(one.data, two.data)  # one record more
    replies = [answer(ask("train", round_=1), place) for place in (one, two)]
    check_alike(*replies, broadcast(), 1.0)


@pytest.mark.parametrize("kind", ["join", "train", "evaluate"])
def test_a_reply_repeats_the_task(kind: Any, tmp_path: Path) -> None:
    task = ask(kind, run="some-run", round_=1)._replace(client=7)
    for settings in ({}, NOISE, {"data": "npz:/there/is/none.npz"}):
        reply = answer(task, client(tmp_path, True)._replace(**settings))
        assert reply[:4] == (kind, "some-run", task.round, 7)


def test_own_scales_stay_at_the_client(tmp_path: Path) -> None:
    """Each client scales features by its own training rows; one row moves the scale, unseen."""
    plain = "x,y\n" + "".join(f"{i / 10},{'ab'[i % 2]}\n" for i in range(30))
    agreement = Agreement((1,), CLASSES, 0, (0.0,), (1.0,), (Column("x"),), own_scale=True)
    tree, replies = broadcast(agreement), []
    for name, text in (("with", plain + "1e30,a\n"), ("without", plain)):
        path = tmp_path / f"{name}.csv"
        path.write_text(text)
        place = ClientSettings("north", tmp_path / name, str(path), target="y", **NOISE)
        replies.append(answer(ask("train", tree, agreement=agreement, scale="client"), place))
    assert replies[0].tree and replies[0].figures == {"examples": 100}
    check_alike(*replies, tree, 1.0)


# The page


def test_the_page_names_every_channel_and_its_test() -> None:
    """Every row of the table has a test here, and every field of a reply a row."""
    text = (ROOT / "docs" / "privacy.md").read_text()
    part = text[text.index("<!-- channels: begin -->") : text.index("<!-- channels: end -->")]
    rows = [line.strip("|").split("|") for line in part.strip().splitlines()[3:]]
    assert len(rows) >= 15
    here = (
        Path(__file__).read_text() + (ROOT / "tests/federation/test_client_limits.py").read_text()
    )
    for channel, closed, tests in rows:
        assert channel.strip() and closed.strip()
        named = re.findall(r"`(test_\w+)`", tests)
        assert named or "residual" in closed, channel
        for name in named:
            assert f"def {name}(" in here, name
    for field in Reply._fields:
        assert f"`{field}`" in part, field
