"""The Flower runtime inside one process: the simulation's numbers, and whatever clients may send.

How closely it agrees. A client of a federation is a client of the loop runtime without its padding,
so sums may be taken in another order: roundings of 1e-7, of which the steps of a few rounds make
1e-5 (`test_runtimes.py` explains why not more). Metrics are means over test points of which a
rounding can turn one around at most where two classes are equally likely.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_inprocess import LOST, QUICK, Folders, changed, federation
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from saved_state import loaded

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Tree
from corefed.federation import events, wire
from corefed.federation.flower import app, records
from corefed.federation.flower import link as flower_link
from corefed.federation.rules import Rules
from corefed.federation.trust import metric, privacy
from corefed.methods import pfedbayes, registry
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.settings import config
from corefed.settings.fields import list_settings
from corefed.show import report
from corefed.training import fitted, record, rounds

DIGITS: dict[str, Any] = {
    "method": "pfedbayes", "data": "digits", "partition": "iid", "clients": 3, "keep": 0.15,
    "rounds": 3, "local_steps": 4, "batch_size": 20, "hidden": "8", "evaluate_every": 1,
    "evaluate_draws": 3,
}  # fmt: skip
SMALL = {"fraction": 0.4, "draws": 40, "feature_draws": 4, "check_draws": 8}


def simulate(flags: dict[str, Any]) -> tuple[list[dict[str, Any]], Tree]:
    """Lines and final server of the loop runtime."""
    lines: list[dict[str, Any]] = []
    trained = rounds.train(
        config.resolve(flags={**flags, "runtime": "loop"}), on_round=lines.append
    )
    return lines, trained.servers[0]


def lines_of(folders: Folders) -> list[dict[str, Any]]:
    return record.read_lines(folders.run / record.ROUNDS)[0]


def server_of(folders: Folders) -> Tree:
    """The server's state in the run's checkpoint."""
    (server,) = loaded(folders.run).servers
    return server


def events_of(folders: Folders, event: str) -> list[dict[str, Any]]:
    return [line for line in events.read(folders.run / "events.jsonl") if line["event"] == event]


def with_small(method: str, **more: Any) -> dict[str, Any]:
    fields = {each.name for each in list_settings(registry.config_class(method))}
    small = {key: value for key, value in SMALL.items() if key in fields}
    return {**DIGITS, "method": method, **small, **more}


CASES = [
    *(pytest.param(with_small(name), id=name) for name in registry.METHODS),
    pytest.param(with_small("pfedbayes", cohort=2, rounds=4), id="cohort of two"),
    pytest.param(with_small("pfedbayes", scale="standard", seeds="3"), id="standard scale"),
    pytest.param(with_small("fedavg", partition="labels:4", batch_size=500), id="four labels"),
    pytest.param(with_small("pfedbayes", fusion="precision", beta=0.5), id="precision fusion"),
    pytest.param(
        {**DIGITS, "data": "synthetic-regression", "partition": "natural", "keep": 0.5,
         "learn_noise": True, "noise": 0.5},
        id="regression",
    ),
    pytest.param(with_small("pfedbayes", validation=0.3, scale="standard"), id="validation"),
    pytest.param(
        {**DIGITS, "data": "synthetic-regression", "partition": "natural", "validation": 0.2,
         "noise": 0.5},
        id="validation, regression",
    ),
    pytest.param(
        with_small("pfedbayes", model="cnn", channels="4,4,4", scale="standard"), id="cnn"
    ),
]  # fmt: skip


@pytest.mark.parametrize("flags", CASES)
def test_the_simulations_numbers(flags: dict[str, Any], tmp_path: Path) -> None:
    expected, server = simulate(flags)
    folders = federation(tmp_path, flags)
    summary = folders.federate()
    lines = lines_of(folders)
    assert len(lines) == len(expected) == summary["rounds"]
    found = server_of(folders)
    assert found.keys() == server.keys()
    for name, value in server.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(lines, expected, strict=True):
        assert mine["examples"] == theirs["examples"]
        assert mine["passes"] == pytest.approx(theirs["passes"])
        assert mine.get("passes_complete") == theirs.get("passes_complete")
        assert mine["overconfidence"].keys() == theirs["overconfidence"].keys()
        assert mine["bytes_up"] == theirs["bytes_up"]
        assert mine["bytes_down"] == theirs["bytes_down"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        wanted = {k: v for k, v in theirs["metrics"].items() if not k.startswith("others_")}
        assert mine["metrics"].keys() == wanted.keys()
        for name, value in wanted.items():
            if name.endswith(("accuracy", "ece")):  # one of the 120 or so test points
                assert mine["metrics"][name][0] == pytest.approx(value[0], abs=0.01), name
            else:
                assert mine["metrics"][name][0] == pytest.approx(value[0], rel=1e-3), name
        assert mine["coreset"].keys() == theirs["coreset"].keys()
        assert mine["classes"].keys() == theirs["classes"].keys()
        for name, value in theirs.get("validation", {}).items():  # a client has nine points
            assert mine["validation"][name][0] == pytest.approx(value[0], rel=1e-3, abs=0.04), name
    calibrated, theirs = lines[-1].get("calibration"), expected[-1].get("calibration")
    assert bool(calibrated) == bool(theirs) == ("validation" in flags)
    if calibrated and theirs:
        for name, value in theirs["pooled"].items():
            assert calibrated["pooled"][name] == pytest.approx(value, rel=1e-3), name
        for name, value in theirs["temperature"].items():
            assert calibrated["temperature"][name][0] == pytest.approx(value[0], rel=1e-3), name
        for name, value in theirs["metrics"].items():
            if name.endswith("nll"):
                assert calibrated["metrics"][name] == pytest.approx(value, rel=1e-3), name
                assert summary["metrics"][name]["mean"] == calibrated["metrics"][name][0]


@pytest.mark.parametrize("method", ["coreset-pfedbayes", "fedavg", "per-fedavg"])
def test_bit_for_bit_where_nothing_is_padded_away(method: str, tmp_path: Path) -> None:
    """With the solver's usual hundred iterations, which turn a rounding into another coreset."""
    flags = {**DIGITS, "method": method, "partition": "quantity:0.5", "evaluate_every": 3}
    _, server = simulate(flags)
    folders = federation(tmp_path, flags)
    folders.federate()
    sizes = lines_of(folders)[0]["federation"]["examples"]
    assert len(set(sizes)) > 1  # in the simulation the smaller ones are padded
    for name, value in server.items():
        assert torch.equal(server_of(folders)[name], value)


def test_a_second_run_of_the_same_federation_is_bitwise_the_same(tmp_path: Path) -> None:
    flags = with_small("coreset-pfedbayes")
    one, two = (federation(tmp_path / name, flags) for name in ("one", "two"))
    one.federate()
    two.federate()
    for name, value in server_of(one).items():
        assert torch.equal(value, server_of(two)[name])


# Restarts


class Killed(BaseException):
    """What kill -9 is to the code: nothing after it runs."""


@pytest.mark.parametrize("method", ["coreset-pfedbayes", "fedavg", "bnfed"])
def test_a_killed_server_goes_on_to_the_same_result(method: str, tmp_path: Path) -> None:
    """Killed when some of the clients have trained the round that will be asked again."""
    flags = with_small(method, evaluate_every=3)
    undisturbed = federation(tmp_path / "undisturbed", flags)
    undisturbed.federate()
    for answers_before in (4, 5, 6, 7):
        seen = 0

        def kill(name: str, reply: Message, last: int = 3 + answers_before) -> Message:
            nonlocal seen
            seen += 1
            if seen == last:  # three of them joined
                raise Killed
            return reply

        folders = federation(tmp_path / f"killed-{answers_before}", flags, tamper=kill)
        with pytest.raises(Killed):
            folders.federate()
        assert len(lines_of(folders)) < 3
        folders.federate()
        assert events_of(folders, "resumed")
        for name, value in server_of(undisturbed).items():
            assert torch.equal(server_of(folders)[name], value), name
        last, expected = lines_of(folders)[-1], lines_of(undisturbed)[-1]
        assert last["metrics"] == expected["metrics"]
        assert len(lines_of(folders)) == 3


def test_a_finished_run_can_be_given_more_rounds(tmp_path: Path) -> None:
    flags = with_small("pfedbayes") | {"planned_rounds": 5}
    longer = federation(tmp_path / "longer", {**flags, "rounds": 5})
    longer.federate()
    folders = federation(tmp_path / "short", flags)
    folders.federate()
    _, text = (folders.run / record.EXPERIMENT).read_text().split("\n", 1)  # without its digest
    (folders.run / record.EXPERIMENT).write_text(text.replace("rounds = 3", "rounds = 5"))
    folders.federate()
    for name, value in server_of(longer).items():
        assert torch.equal(server_of(folders)[name], value)


def test_a_client_that_lost_its_state_begins_anew(tmp_path: Path) -> None:
    """It is told nothing of its past, trains from its first state, and the run goes on."""
    folders = federation(tmp_path, with_small("pfedbayes"))

    def forget(name: str, reply: Message) -> Message:
        if name == "client-1" and reply.metadata.group_id == "2":
            for file in folders.grid.places[name].state.rglob("round-*"):
                file.unlink()
        return reply

    folders.grid.tamper = forget
    assert folders.federate()["rounds"] == 3


def test_data_that_change_during_a_run_are_noticed(tmp_path: Path) -> None:
    """A coreset's weights refer to rows: those of another order would be trained on silently."""
    folders = federation(tmp_path, with_small("coreset-pfedbayes"))
    file = tmp_path / "data" / "client-1.npz"

    def shuffle(name: str, reply: Message) -> Message:
        train = reply.metadata.message_type == "train"
        if train and name == "client-2" and reply.metadata.group_id == "1":
            arrays = dict(np.load(file))
            np.savez(file, **{key: value[::-1] for key, value in arrays.items()})
        return reply

    folders.grid.tamper = shuffle
    folders.federate()
    assert "client-1" in lines_of(folders)[0]["federation"]["accepted"]
    assert "client-1" not in lines_of(folders)[1]["federation"]["accepted"]
    refused = [event["client"] for event in events_of(folders, "refused")]
    assert refused and set(refused) == {"client-1"}


# Clients that do not answer


def test_a_silent_client_is_left_out_and_named(tmp_path: Path) -> None:
    def silent(name: str, reply: Message) -> Message | str:
        return LOST if name == "client-2" and reply.metadata.group_id == "2" else reply

    folders = federation(tmp_path, with_small("fedavg"), tamper=silent)
    folders.federate()
    second = lines_of(folders)[1]["federation"]
    assert second["accepted"] == ["client-0", "client-1"]
    assert "no answer within 0.3 s" in second["lost"]["client-2"]
    (missing, *_) = events_of(folders, "missing")
    assert (missing["client"], missing["round"]) == ("client-2", 2)
    assert lines_of(folders)[2]["federation"]["accepted"] == folders.names


def test_an_average_of_those_who_answered(tmp_path: Path) -> None:
    """The round's result is that of a cohort without the silent client."""
    flags = with_small("fedavg", rounds=1)

    def silent(name: str, reply: Message) -> Message | str:
        return LOST if name == "client-0" and reply.metadata.message_type == "train" else reply

    folders = federation(tmp_path / "a", flags, tamper=silent)
    folders.federate()
    sent: dict[str, Tree] = {}

    def keep(name: str, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            sent[name] = records.reply_from(reply.content, 1 << 30).tree
        return reply

    federation(tmp_path / "b", flags, tamper=keep).federate()
    sizes = json.loads(json.dumps(lines_of(folders)[0]["federation"]))["accepted"]
    assert sizes == ["client-1", "client-2"]
    mean = torch.stack([sent[name]["theta"] for name in sizes]).mean(0)  # equal numbers of points
    torch.testing.assert_close(server_of(folders)["theta"], mean, rtol=2e-2, atol=2e-3)


def test_a_dead_process_and_a_client_that_is_away(tmp_path: Path) -> None:
    def dies(name: str, reply: Message) -> Message | None:
        return None if name == "client-0" and reply.metadata.group_id == "1" else reply

    folders = federation(tmp_path, with_small("pfedbayes"), tamper=dies)
    folders.grid.connected.discard("client-1")
    folders.federate(Rules(deadline=0.3, join_wait=0.0, attempts=1, quorum=0.3))
    first = lines_of(folders)[0]["federation"]
    assert first["lost"] == {
        "client-0": "Flower says: the process died",
        "client-1": "not connected",
    }
    assert lines_of(folders)[1]["federation"]["accepted"] == ["client-0", "client-2"]


def test_without_a_quorum_the_run_stops_and_can_be_resumed(tmp_path: Path) -> None:
    flags = with_small("pfedbayes")
    undisturbed = federation(tmp_path / "undisturbed", flags)
    undisturbed.federate()
    gone = True

    def silent(name: str, reply: Message) -> Message | str:
        return LOST if gone and name != "client-0" and reply.metadata.group_id == "2" else reply

    folders = federation(tmp_path / "two of three", flags, tamper=silent)
    with pytest.raises(UserError, match="Round 2 had no quorum of 2 acceptable updates in 2"):
        folders.federate(dataclasses.replace(QUICK, attempts=2))
    assert len(events_of(folders, "no-quorum")) == 2
    gone = False
    folders.federate()
    for name, value in server_of(undisturbed).items():
        assert torch.equal(server_of(folders)[name], value)


def test_a_run_needs_a_quorum_to_begin(tmp_path: Path) -> None:
    folders = federation(tmp_path, with_small("pfedbayes"))
    folders.grid.connected = {"client-2"}
    with pytest.raises(UserError, match=r"1 of 3 clients are connected.*client-0, client-1"):
        folders.federate()
    assert not (folders.run / record.ROUNDS).exists()
    (stopped,) = events_of(folders, "stopped")
    assert "client-0, client-1" in stopped["reason"]


def test_a_late_answer_is_noted_and_changes_nothing(tmp_path: Path) -> None:
    flags = with_small("fedavg")
    held: list[tuple[str, Message]] = []
    folders = federation(tmp_path / "late", flags)
    grid = folders.grid

    def delay(name: str, reply: Message) -> Message | str:
        train = reply.metadata.message_type == "train"
        if train and name == "client-1" and reply.metadata.group_id == "1":
            held.append((reply.metadata.reply_to_message_id, reply))
            return LOST
        if train and name == "client-2" and reply.metadata.group_id == "2":
            for identity, late in held:
                grid.replies[identity] = late
            time.sleep(2 * flower_link.POLL)  # somebody looks
        return reply

    grid.tamper = delay
    folders.federate()
    (late,) = events_of(folders, "late")
    assert late["client"] == "client-1" and late["round"] in (2, 3)  # when it was looked at
    assert "answer to round 1" in late["reason"]

    def lose(name: str, reply: Message) -> Message | str:
        train = reply.metadata.message_type == "train"
        first = train and name == "client-1" and reply.metadata.group_id == "1"
        return LOST if first else reply

    lost = federation(tmp_path / "lost", flags, tamper=lose)
    lost.federate()
    assert torch.equal(server_of(folders)["theta"], server_of(lost)["theta"])


def test_a_round_asked_again_takes_the_answer_to_the_first_question(tmp_path: Path) -> None:
    """A client slower than the deadline: each answer is there only when the next is asked."""
    flags = with_small("fedavg")
    folders = federation(tmp_path / "slow", flags)
    grid, held = folders.grid, []

    def slow(name: str, reply: Message) -> Message | str:
        if name != "client-1" or reply.metadata.message_type != "train":
            return reply
        for identity, late in held:
            grid.replies[identity] = late
        held[:] = [(reply.metadata.reply_to_message_id, reply)]
        return LOST

    grid.tamper = slow
    folders.federate(dataclasses.replace(QUICK, quorum=1.0, attempts=2))
    assert [line["federation"]["accepted"] for line in lines_of(folders)] == [folders.names] * 3
    undisturbed = federation(tmp_path / "undisturbed", flags)
    undisturbed.federate()
    assert torch.equal(server_of(folders)["theta"], server_of(undisturbed)["theta"])


# Clients that send what they should not


def scaled(factor: float) -> Any:
    """The means alone: a thousand times rho = -3 would be a sigma of 0."""
    return lambda reply: {"tree": {"v": reply.tree["v"] * torch.tensor([[factor], [1.0]])}}


def with_value(value: float) -> Any:
    def change(reply: Any) -> dict[str, Any]:
        (name, tensor), *_ = reply.tree.items()
        flat = tensor.clone().flatten()
        flat[3] = value
        return {"tree": {**reply.tree, name: flat.view(tensor.shape)}}

    return change


def claiming(count: Any) -> Any:
    return lambda reply: {"figures": {**reply.figures, "examples": count}}


def renamed(reply: Any) -> dict[str, Any]:
    return {"tree": {f"{name}x": value for name, value in reply.tree.items()}}


def with_rho(value: float) -> Any:
    def change(reply: Any) -> dict[str, Any]:
        v = reply.tree["v"].clone()
        v[1] = value
        return {"tree": {"v": v}}

    return change


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (with_value(float("nan")), "not finite"),
    "infinite": (with_value(float("inf")), "not finite"),
    "one number": (lambda r: {"tree": {k: v.flatten()[:1] for k, v in r.tree.items()}}, "shape"),
    "transposed": (lambda r: {"tree": {k: v.mT.contiguous() for k, v in r.tree.items()}}, "shape"),
    "other names": (renamed, "lacks 'v'"),
    "a name too many": (lambda r: {"tree": {**r.tree, "w": torch.zeros(2)}}, "nobody asked for"),
    "nothing": (lambda r: {"tree": {}}, "lacks 'v'"),
    "whole numbers": (lambda r: {"tree": {k: v.long() for k, v in r.tree.items()}}, "int64"),
    "half precision": (lambda r: {"tree": wire.narrow(r.tree, "float16")}, "float16"),
    "10^12 examples": (claiming(10**12), "training examples"),
    "no examples": (claiming(0), "training examples"),
    "negative examples": (claiming(-5), "training examples"),
    "NaN examples": (claiming(float("nan")), "training examples"),
    "examples as text": (claiming("many"), "not a number"),
    "a thousand times": (scaled(1000.0), "times as long"),
    "sigma 0": (with_rho(-200.0), "standard deviations"),
    "sigma huge": (with_rho(1e9), "standard deviations"),
    "a stale round": (lambda r: {"round": r.round - 1}, "another question"),
    "another run": (lambda r: {"run": "other"}, "another question"),
    "another client": (lambda r: {"client": 0}, "another question"),
    "another kind": (lambda r: {"kind": "evaluate"}, "another question"),
    "a diverged loss": (
        lambda r: {"figures": {**r.figures, "loss": float("nan")}}, "diverged"
    ),
    "too large": (lambda r: {"tree": {"v": torch.zeros(2, 400_000)}}, "bytes"),
}  # fmt: skip


TWO_ROUNDS = with_small("pfedbayes", rounds=2)


@pytest.fixture(scope="module")
def lost(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The server of a run in which a client's update was lost on its way."""

    def lose(client: str, reply: Message) -> Message | str:
        train = reply.metadata.message_type == "train"
        bad = client == "client-2" and train and reply.metadata.group_id == "2"
        return LOST if bad else reply

    folders = federation(tmp_path_factory.mktemp("lost"), TWO_ROUNDS, tamper=lose)
    folders.federate()
    return server_of(folders)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_update_changes_nothing_and_is_named(name: str, lost: Tree, tmp_path: Path) -> None:
    """The result is that of a run in which the client's update was lost on its way."""
    change, words = BAD[name]
    flags = TWO_ROUNDS

    def spoil(client: str, reply: Message) -> Message:
        if client != "client-2" or reply.metadata.group_id != "2":
            return reply
        if reply.metadata.message_type != "train":
            return reply
        return changed(reply, **change(records.reply_from(reply.content, 1 << 30)))

    spoiled = federation(tmp_path / "spoiled", flags, tamper=spoil)
    spoiled.federate()
    for key, value in lost.items():
        assert torch.equal(server_of(spoiled)[key], value)
    noted = [e for e in events.read(spoiled.run / "events.jsonl") if e["client"] == "client-2"]
    noted = [e for e in noted if e["event"] in ("refused", "missing")]
    assert [(e["round"], words in str(e["reason"])) for e in noted] == [(2, True)], noted
    assert "client-2" in lines_of(spoiled)[1]["federation"]["lost"]


def test_garbage_in_place_of_a_reply(tmp_path: Path) -> None:
    """Other records than ours, another version, figures that are no JSON."""
    from flwr.app import ArrayRecord, ConfigRecord

    def garbage(client: str, reply: Message) -> Message:
        if reply.metadata.message_type != "train" or client == "client-0":
            return reply
        content = RecordDict(dict(reply.content))
        if client == "client-1":
            content["corefed"] = ConfigRecord({**content["corefed"], "version": "0.0.0"})
        else:
            content["corefed"] = ConfigRecord({**content["corefed"], "figures": "[" * 100_000})
            content["tree"] = ArrayRecord()
        spoilt = changed(reply)
        spoilt.content = content
        return spoilt

    folders = federation(tmp_path, with_small("fedavg", rounds=1), tamper=garbage)
    folders.federate(dataclasses.replace(QUICK, quorum=0.3))
    lost = lines_of(folders)[0]["federation"]["lost"]
    assert "install the same version" in lost["client-1"]
    assert "no JSON" in lost["client-2"]


@pytest.mark.parametrize(
    "figures",
    [
        {}, {"models": 3}, {"models": {"personal": {"points": 1e12}}},
        {"models": {"evil": {}}}, {"models": {"global": {"points": float("nan")}}},
    ],
)  # fmt: skip
def test_made_up_test_figures_do_not_enter_the_metrics(
    figures: dict[str, Any], tmp_path: Path
) -> None:
    def boast(client: str, reply: Message) -> Message:
        if client == "client-1" and reply.metadata.message_type == "evaluate":
            return changed(reply, figures=figures)
        return reply

    folders = federation(tmp_path, with_small("pfedbayes", rounds=1), tamper=boast)
    folders.federate()
    line = lines_of(folders)[0]
    assert line["clients"][0][1] is None
    assert all(0 <= v[0] <= 1 for k, v in line["metrics"].items() if k.endswith("accuracy"))
    assert [e["client"] for e in events_of(folders, "refused")] == ["client-1"]


CALIBRATED: dict[str, Any] = {"validation": 0.3, "rounds": 1}
RISING = list(range(-30, 35))


@pytest.mark.parametrize(
    "slopes",
    [
        3, {"evil": RISING}, {"personal": [1.0]}, {"personal": RISING[::-1]},
        {"personal": [*RISING[:-1], float("nan")]}, {"personal": [1e6 * each for each in RISING]},
    ],
)  # fmt: skip
def test_made_up_slopes_do_not_enter_the_temperature(slopes: Any, tmp_path: Path) -> None:
    """Temperatures are those without that client, which is named."""

    def spoil(client: str, reply: Message) -> Message:
        figures = records.reply_from(reply.content, 1 << 30).figures
        if client != "client-0" or "slopes" not in figures:
            return reply
        return changed(reply, figures={**figures, "slopes": slopes})

    def silent(client: str, reply: Message) -> Message | str:
        figures = records.reply_from(reply.content, 1 << 30).figures
        return LOST if client == "client-0" and "slopes" in figures else reply

    flags = with_small("pfedbayes", **CALIBRATED)
    spoilt, without = (
        federation(tmp_path / name, flags, tamper=tamper)
        for name, tamper in (("spoilt", spoil), ("without", silent))
    )
    found, wanted = (each.federate()["calibration"] for each in (spoilt, without))
    (said,) = events_of(spoilt, "refused")
    assert said["client"] == "client-0" and "slopes" in said["reason"]
    for kind, section in wanted.items():
        assert found[kind]["temperature"] == section["temperature"]


def test_clients_keep_their_temperatures(tmp_path: Path) -> None:
    """With their models, also one that shares no numbers, around the temperature of the others."""
    flags = with_small("pfedbayes", **CALIBRATED)
    folders = federation(tmp_path, flags)
    for name, place in folders.grid.places.items():
        own = place._replace(models=tmp_path / "models" / name, share_metrics=name != "client-1")
        folders.grid.places[name] = own
    summary = folders.federate()
    T = lines_of(folders)[-1]["calibration"]["temperature"]["personal"][0]
    (pooled,) = lines_of(folders)[-1]["calibration"]["pooled"]["personal"]
    assert T[1] is None and summary["calibration"]["personal"]["temperature"]["max"] == max(T[::2])
    for i, name in enumerate(folders.names):
        model = fitted.load(tmp_path / "models" / name / "first")
        (kept,) = model.models["temperature.personal"].tolist()
        assert kept == T[i] if i != 1 else 0 < abs(kept - pooled) < 0.2
        assert model.models["temperature.newcomer"].tolist() == [pooled]
        raw = model._replace(models={k: v for k, v in model.models.items() if "temp" not in k})
        x = torch.rand(5, 64)
        before = raw.predict(name, x).mean.pow(1 / kept)
        torch.testing.assert_close(
            model.predict(name, x).mean, before / before.sum(-1, keepdim=True)
        )


def test_off_asks_no_second_time(tmp_path: Path) -> None:
    folders = federation(tmp_path, with_small("pfedbayes", calibrate="off", **CALIBRATED))
    summary = folders.federate()
    assert "validation" in summary and "calibration" not in summary
    assert folders.grid.asked.count(("client-0", "evaluate")) == 1


def test_a_client_that_describes_nonsense_does_not_join(tmp_path: Path) -> None:
    def nonsense(client: str, reply: Message) -> Message:
        if client == "client-1" and reply.metadata.message_type == "query":
            return changed(reply, figures={"train": -1, "shape": "x"})
        return reply

    folders = federation(tmp_path, with_small("pfedbayes", rounds=1), tamper=nonsense)
    folders.federate()
    assert [e["client"] for e in events_of(folders, "refused")] == ["client-1"]
    assert [e["client"] for e in events_of(folders, "joined")] == ["client-0", "client-2"]


# What travels


def test_no_more_bytes_than_the_posterior_and_one_percent(tmp_path: Path) -> None:
    """On the network of the paper's MNIST tables, with Flower's own serialisation counted."""
    flags = with_small("pfedbayes", rounds=1, local_steps=1, hidden="1000")
    folders = federation(tmp_path, flags)
    sizes: dict[str, int] = {}

    def measure(client: str, reply: Message) -> Message:
        if reply.metadata.message_type == "train":
            sizes["tree"] = wire.size(records.reply_from(reply.content, 1 << 30).tree)
            sizes["down"] = folders.grid.bytes_down
        if reply.metadata.message_type == "evaluate":
            sizes.setdefault("up", folders.grid.bytes_up[client])
        return reply

    folders.grid.tamper = measure
    folders.federate()
    assert sizes["tree"] > 500_000
    assert sizes["tree"] < sizes["up"] < 1.01 * sizes["tree"]
    assert sizes["tree"] < sizes["down"] < 1.01 * sizes["tree"]


@pytest.mark.parametrize(
    ("upload", "difference", "bound"),
    [("float32", True, 1e-6), ("float16", True, 2e-5), ("bfloat16", True, 2e-4),
     ("float16", False, 3e-3)],
)  # fmt: skip
def test_smaller_uploads(upload: Any, difference: bool, bound: float, tmp_path: Path) -> None:
    """Halves of differences lose 2^-11 (2^-8) of a step of 1e-3; of weights, 2^-11 of rho = -3."""
    flags = with_small("pfedbayes", rounds=1)
    plain = federation(tmp_path / "plain", flags)
    plain.federate()
    small = federation(tmp_path / "small", flags)
    small.federate(dataclasses.replace(QUICK, upload=upload, difference=difference))
    gap = (server_of(plain)["v"] - server_of(small)["v"]).abs().max().item()
    assert gap < bound
    factor = 1 if upload == "float32" else 2
    up = [lines_of(each)[0]["bytes_up"][0] for each in (plain, small)]
    assert up[0] == factor * up[1]


def test_a_client_may_keep_its_figures_to_itself(tmp_path: Path) -> None:
    folders = federation(tmp_path, with_small("coreset-pfedbayes", rounds=1), share_metrics=False)
    said: list[dict[str, Any]] = []

    def listen(client: str, reply: Message) -> Message:
        said.append(records.reply_from(reply.content, 1 << 30).figures)
        return reply

    folders.grid.tamper = listen
    summary = folders.federate()
    assert summary["metrics"] == {}
    assert summary["cost"]["passes_complete"] is False  # nobody knows
    trained = [figures for figures in said if "examples" in figures]
    assert all(set(figures) == {"examples", "seconds"} for figures in trained)


def test_errors_of_a_client_do_not_quote_its_machine(tmp_path: Path) -> None:
    folders = federation(tmp_path, with_small("pfedbayes", rounds=1))
    place = folders.grid.places["client-1"]
    folders.grid.places["client-1"] = place._replace(data="npz:/secret/ward-7.npz")
    folders.federate()
    (refused, *_) = events_of(folders, "refused")
    assert refused["client"] == "client-1"
    text = (folders.run / "events.jsonl").read_text()
    assert "secret" not in text and "its own log says why" in text


# Privacy


PRIVATE = dataclasses.replace(QUICK, dp_clip=0.5, dp_noise=1.5)


def test_private_uploads_are_counted_on_both_sides(tmp_path: Path) -> None:
    """Three rounds of three clients: epsilon of mu = sqrt(3) / 1.5, and of 1 / 1.5 on average."""
    folders = federation(tmp_path, with_small("pfedbayes"))
    summary = folders.federate(PRIVATE)
    assert summary["privacy"] == pytest.approx(
        {
            "server": privacy.epsilon(3**0.5 / 1.5, 1e-5),
            "average": privacy.epsilon(1 / 1.5, 1e-5),
            "delta": 1e-5,
        }
    )
    caption = str(report.metrics_table(summary).caption)
    assert f"epsilon {summary['privacy']['server']:.3g} against anyone who sees uploads" in caption
    assert "of them not training" in caption
    ledger = privacy.Ledger(folders.grid.places["client-1"].state / "privacy.json")
    assert [(each.run, each.round) for each in ledger.releases] == [("first", t) for t in range(3)]
    assert ledger.spent(1e-5) == pytest.approx(summary["privacy"]["server"])


def test_noise_of_the_size_that_was_promised(tmp_path: Path) -> None:
    """Two runs differ in their noise alone: sqrt(2/3) noise clip in the metric's units."""
    flags = with_small("pfedbayes", rounds=1)
    one, two = (federation(tmp_path / name, flags) for name in ("one", "two"))
    one.federate(PRIVATE)
    two.federate(PRIVATE)
    first = registry.build("pfedbayes", pfedbayes.Config(), mlp((64, 8, 10), Categorical(10)))
    unit = metric.scale(first.init_server(Streams([Who(0, SERVER)], 0)), ("v",))["v"]
    gap = (server_of(one)["v"] - server_of(two)["v"]) / unit
    # Of n normals the standard deviation is known to 1 / sqrt(2 n): five of these.
    wanted, error = (2 / 3) ** 0.5 * 1.5 * 0.5, 5 / (2 * gap.numel()) ** 0.5
    assert gap.std().item() == pytest.approx(wanted, rel=error)


def test_a_question_asked_again_gets_the_same_noise(tmp_path: Path) -> None:
    sent: list[Tree] = []
    folders = federation(tmp_path, with_small("pfedbayes", rounds=1))

    def listen(client: str, reply: Message) -> Message | str:
        if client == "client-0" and reply.metadata.message_type == "train":
            sent.append(records.reply_from(reply.content, 1 << 30).tree)
            return LOST if len(sent) < 3 else reply
        return reply

    folders.grid.tamper = listen
    folders.federate(dataclasses.replace(PRIVATE, quorum=1.0, attempts=3))
    assert len(sent) == 3
    assert torch.equal(sent[0]["v"], sent[1]["v"]) and torch.equal(sent[1]["v"], sent[2]["v"])
    ledger = privacy.Ledger(folders.grid.places["client-0"].state / "privacy.json")
    assert len(ledger.releases) == 1
    spent = json.loads((folders.run / record.SUMMARY).read_text())["privacy"]["server"]
    assert spent == pytest.approx(ledger.spent(1e-5))


TEN = tuple(map(str, range(10)))
"""Classes of the digits: with noise of its own, a client names them itself."""


def test_a_client_has_the_last_word_about_its_privacy(tmp_path: Path) -> None:
    flags = with_small("pfedbayes", rounds=1)
    folders = federation(tmp_path, flags, max_epsilon=1.0, classes=TEN)
    with pytest.raises(UserError, match="no quorum"):
        folders.federate(PRIVATE)
    assert {"epsilon of 1" in str(e["reason"]) for e in events_of(folders, "refused")} == {True}
    assert not any("privacy.json" in str(f) for f in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("rules", [QUICK, PRIVATE], ids=["no rule", "a weaker rule"])
def test_a_client_adds_its_own_noise(rules: Rules, tmp_path: Path) -> None:
    """Whatever the server's rules are; the run goes on without its numbers."""
    flags = with_small("coreset-pfedbayes", rounds=2, partition="labels:4", scale="standard")
    folders = federation(tmp_path, flags, min_noise=2.0, clip=0.1, classes=TEN)
    summary = folders.federate(rules)
    assert not events_of(folders, "refused") and summary["metrics"] == {}
    assert lines_of(folders)[0]["federation"]["examples"] == [100] * 3
    for place in folders.grid.places.values():
        ledger = privacy.Ledger(place.state / "privacy.json")
        assert [(each.noise, each.clip) for each in ledger.releases] == [(2.0, 0.1)] * 2


def test_a_bound_on_epsilon_needs_noise(tmp_path: Path) -> None:
    flags = with_small("pfedbayes", rounds=1)
    folders = federation(tmp_path, flags, max_epsilon=50.0, classes=TEN)
    with pytest.raises(UserError, match="no quorum"):
        folders.federate()
    assert "without noise spends everything" in (folders.run / "events.jsonl").read_text()


def test_no_noise_where_it_would_mean_nothing(tmp_path: Path) -> None:
    folders = federation(tmp_path, with_small("bnfed", rounds=1))
    with pytest.raises(UserError, match="bnfed"):
        folders.federate(PRIVATE)


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "clip"])
def test_robust_rules_through_the_whole_federation(rule: Any, tmp_path: Path) -> None:
    """A client that sends a plausible lie, its step the other way around and ten times as long."""
    flags = with_small("pfedbayes", rounds=2, clients=5, eta_2=0.01)
    broadcasts: dict[str, Tree] = {}

    def lie(client: str, reply: Message) -> Message:
        if client != "client-3" or reply.metadata.message_type != "train":
            return reply
        told = records.reply_from(reply.content, 1 << 30)
        start = broadcasts[reply.metadata.group_id]["v"]
        return changed(reply, tree={"v": start - 10 * (told.tree["v"] - start)})

    def gap(rules: Rules, name: str) -> float:
        honest = federation(tmp_path / f"{name} honest", flags)
        honest.federate(dataclasses.replace(QUICK, outlier=0.0))
        folders = federation(tmp_path / f"{name} lying", flags, tamper=lie)
        push = folders.grid.push_messages

        def listen(messages: Any) -> Any:
            for message in messages:
                task = records.task_from(message.content)
                broadcasts[message.metadata.group_id] = task.tree
            return push(messages)

        folders.grid.push_messages = listen  # type: ignore[method-assign]
        folders.federate(rules)
        return (server_of(folders)["v"] - server_of(honest)["v"]).norm().item()

    plain = gap(dataclasses.replace(QUICK, outlier=0.0), "plain")
    robustly = gap(dataclasses.replace(QUICK, outlier=0.0, aggregation=rule), rule)
    assert robustly < plain / 2


def test_a_clients_own_folder_is_not_quoted_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    monkeypatch.setenv("COREFED_CLIENT", str(tmp_path / "secret ward"))
    message = Message(RecordDict(), dst_node_id=1, message_type="train")
    with pytest.raises(RuntimeError) as raised:
        app._answer(message, Context(1, 1, {}, RecordDict(), {}))
    assert "secret" not in str(raised.value) and raised.value.__cause__ is None
