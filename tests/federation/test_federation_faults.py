"""Real processes that are killed, frozen, short of disk, or bad, while they train together.

One SuperLink and three SuperNodes with TLS and keys on the loopback, started once; each test is a
run of its own. A run that loses nothing must end, bit for bit, where the simulation ends.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_points import deal
from federation_processes import Federation, Process, federation, process_tree
from saved_state import loaded

from corefed.base.types import Tree
from corefed.federation import events
from corefed.federation.operate import supervising
from corefed.settings import config
from corefed.training import record, rounds

pytestmark = pytest.mark.federation

SPLIT: dict[str, Any] = {"data": "digits", "partition": "iid", "clients": 3}
QUICK: dict[str, Any] = {
    "rounds": 3, "local_steps": 10, "hidden": [16], "evaluate_every": 3, "evaluate_draws": 3,
}  # fmt: skip
RULES: dict[str, Any] = {
    "deadline": 60.0, "join_wait": 60.0, "quorum": 1.0, "attempts": 5,
    "aggregation": "plain", "join": "pooled", "class_quorum": 1, "max_weight": 0.0,
}  # fmt: skip
NAMES = ("alice", "bob", "carol")
HOOKS = Path(__file__).parents[1] / "support" / "federation_hooks"
"""With which clients can be held in the middle of a training; one of them lies in the run `bad`."""


@pytest.fixture(scope="module")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("faults")
    deal(config.resolve(flags=SPLIT).run, folder / "data")
    data = {name: folder / "data" / f"client-{i}.npz" for i, name in enumerate(NAMES)}
    paths = os.pathsep.join(filter(None, [str(HOOKS), os.environ.get("PYTHONPATH")]))
    with federation(folder / "fed", data, rules=RULES, started=False) as running:
        for client in running.clients.values():
            client.environment["PYTHONPATH"] = paths
        running.start()
        running.wait_connected()
        yield running


@pytest.fixture(autouse=True)
def released(fed: Federation) -> Iterator[None]:
    """A test that fails leaves nobody held for the next one."""
    yield
    for name in ("h[eo]ld*", "slow"):
        for path in fed.path.glob(f"clients/*/{name}"):
            path.unlink(missing_ok=True)


def experiment(fed: Federation, **settings: Any) -> None:
    """What the next run trains."""
    wanted = config.resolve(flags={**QUICK, **settings, "data": "local", "clients": 3})
    (fed.path / "server" / "experiment.toml").write_text(config.to_toml(wanted))


def ruled(fed: Federation, **rules: Any) -> None:
    """Rules of the next run, the module's where none are named."""
    path = fed.path / "server" / "federation.toml"
    text = path.read_text()
    for name, value in {**RULES, **rules}.items():
        line = next(line for line in text.splitlines() if line.startswith(f"{name} = "))
        text = text.replace(f"\n{line}\n", f"\n{name} = {json.dumps(value)}\n")
    path.write_text(text)


def folder(fed: Federation, run: str) -> Path:
    return fed.path / "server" / "runs" / run


def lines_of(fed: Federation, run: str) -> list[dict[str, Any]]:
    return record.read_lines(folder(fed, run) / record.ROUNDS)[0]


def accepted(fed: Federation, run: str) -> list[list[str]]:
    return [line["federation"]["accepted"] for line in lines_of(fed, run)]


def events_of(fed: Federation, run: str, *kinds: str) -> list[dict[str, Any]]:
    found = events.read(folder(fed, run) / "events.jsonl")
    return [event for event in found if event["event"] in kinds]


def server_of(fed: Federation, run: str) -> Tree:
    (server,) = loaded(folder(fed, run)).servers
    return server


def simulated(**settings: Any) -> Tree:
    flags = {**SPLIT, **QUICK, **settings, "runtime": "loop"}
    return rounds.train(config.resolve(flags=flags)).servers[0]


def assert_same(fed: Federation, run: str, wanted: Mapping[str, torch.Tensor]) -> None:
    found = server_of(fed, run)
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def until(true: Callable[[], bool], seconds: float = 90.0) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def hold(fed: Federation, name: str, round_: int) -> Path:
    """Stop a client in the middle of the next training of that round.

    The file is there while it is stopped, with the process that trains; remove it to let it go on.
    """
    folder = fed.path / "clients" / name
    (folder / f"hold-{round_}").touch()
    return folder / "held"


def freeze(process: Process, sign: signal.Signals) -> None:
    assert process.process is not None
    for pid in process_tree(process.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


@pytest.mark.parametrize("method", ["coreset-pfedbayes", "fedavg"])
def test_the_simulations_numbers(fed: Federation, method: str) -> None:
    experiment(fed, method=method)
    ruled(fed)
    run = f"plain-{method}"
    code, said = fed.run("--name", run)
    assert code == 0, said
    assert_same(fed, run, simulated(method=method))
    summary = json.loads((folder(fed, run) / record.SUMMARY).read_text())
    assert summary["metrics"]["global_accuracy"]["mean"] > 0.1
    assert accepted(fed, run) == [list(NAMES)] * 3


def test_a_client_killed_in_training_is_left_out_and_rejoins(fed: Federation) -> None:
    experiment(fed, method="pfedbayes", rounds=4)
    ruled(fed, quorum=0.6, deadline=12.0)
    bob, killed, waiting = fed.clients["bob"], hold(fed, "bob", 2), hold(fed, "alice", 3)
    run = fed.begin("run", "--name", "killed-client")
    until(killed.exists)
    bob.kill9()
    killed.unlink()
    bob.start()
    until(waiting.exists)
    fed.wait_connected("bob")  # however slow the machine is, before the last round
    waiting.unlink()
    assert run.wait(180) == 0, run.said()
    took_part = ["bob" in names for names in accepted(fed, "killed-client")]
    assert took_part[0] and not took_part[1] and took_part[-1]
    missing = events_of(fed, "killed-client", "missing")
    assert {(event["round"], event["client"]) for event in missing} >= {(2, "bob")}
    assert "bob missing" in run.said()


def test_a_killed_server_goes_on_to_the_same_result(fed: Federation) -> None:
    experiment(fed, method="pfedbayes")
    ruled(fed)
    held = hold(fed, "bob", 2)
    run = fed.begin("run", "--name", "killed-server")
    until(held.exists)
    fed.server.kill9()
    run.gone()
    held.unlink()
    assert len(lines_of(fed, "killed-server")) == 1
    fed.server.start()
    fed.wait_ready()
    code, said = fed.command("resume", "--name", "killed-server", seconds=180)
    assert code == 0, said
    assert events_of(fed, "killed-server", "resumed")
    assert_same(fed, "killed-server", simulated(method="pfedbayes"))


def test_a_client_that_never_answers_is_named_and_its_late_answer_left_out(
    fed: Federation,
) -> None:
    experiment(fed, method="pfedbayes", rounds=4)
    ruled(fed, quorum=0.6, deadline=12.0)
    alice, held = fed.clients["alice"], hold(fed, "alice", 1)
    run = fed.begin("run", "--name", "frozen")
    until(held.exists)
    freeze(alice, signal.SIGSTOP)
    held.unlink()
    try:
        until(lambda: len(lines_of(fed, "frozen")) >= 1)
    finally:
        freeze(alice, signal.SIGCONT)
    assert run.wait(180) == 0, run.said()
    first = lines_of(fed, "frozen")[0]["federation"]
    assert first["accepted"] == ["bob", "carol"]
    assert "no answer within 12 s" in first["lost"]["alice"]
    assert "alice" in accepted(fed, "frozen")[-1]
    assert [event["client"] for event in events_of(fed, "frozen", "late")] == ["alice"]


def test_a_full_disk_at_a_client(fed: Federation) -> None:
    """No file may grow beyond 150 kB for a while: its state, twice that, cannot be kept."""
    experiment(fed, method="pfedbayes", hidden=[128])
    ruled(fed, quorum=0.6)
    carol, held = fed.clients["carol"], hold(fed, "carol", 2)
    assert carol.log.stat().st_size < 100_000  # or it could not say what is wrong
    run = fed.begin("run", "--name", "full-disk")
    until(held.exists)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(bounds: tuple[int, int]) -> None:
        for pid in process_tree(carol.process.pid):  # type: ignore[union-attr]
            with suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, bounds)

    limit((150_000, before[1]))
    held.unlink()
    until(lambda: len(lines_of(fed, "full-disk")) >= 2)
    limit(before)
    assert run.wait(180) == 0, run.said()
    refused = events_of(fed, "full-disk", "refused")
    assert refused and {event["client"] for event in refused} == {"carol"}
    assert "its own log says why" in refused[0]["reason"]
    assert "Cannot write" in carol.said() and "is kept" in carol.said()
    assert "carol" in accepted(fed, "full-disk")[0]


def test_a_bad_client_over_the_wire(fed: Federation) -> None:
    """NaN in its second round, 64 MiB in its third (1 is allowed); then it is honest again."""
    experiment(fed, method="pfedbayes", rounds=4)
    ruled(fed, quorum=0.6)
    code, said = fed.run("--name", "bad", seconds=180)
    assert code == 0, said
    _, nan, long, _ = (line["federation"] for line in lines_of(fed, "bad"))
    assert "not finite" in nan["lost"]["bob"]
    assert "bytes allowed" in long["lost"]["bob"]
    took_part = ["bob" in names for names in accepted(fed, "bad")]
    assert took_part == [True, False, False, True]
    assert server_of(fed, "bad")["v"].isfinite().all()


def test_a_killed_executor_is_started_again_and_its_client_answers(fed: Federation) -> None:
    """SuperNode lives on, connected. Without an executor it would answer nothing for ever."""
    experiment(fed, method="pfedbayes", rounds=3)
    ruled(fed, deadline=15.0, attempts=10)
    carol, held = fed.clients["carol"], hold(fed, "carol", 2)
    run = fed.begin("run", "--name", "killed-executor")
    until(held.exists)
    assert carol.process is not None
    table = supervising.read_processes()
    _, programs, *_ = supervising.generations(table, carol.process.pid)
    (executor,) = (
        each.pid
        for each in programs
        if "engine.warm" in Path(f"/proc/{each.pid}/cmdline").read_text()
    )
    os.kill(executor, signal.SIGKILL)
    held.unlink()
    assert run.wait(180) == 0, run.said()
    assert "executor ended. Starting it again" in carol.said()
    assert accepted(fed, "killed-executor") == [list(NAMES)] * 3
    assert_same(fed, "killed-executor", simulated(method="pfedbayes"))


def test_a_slow_client_does_what_fits_into_the_deadline(fed: Federation) -> None:
    """Ten steps take it 3 s, and it has 1 s; the others need a few hundredths."""
    experiment(fed, method="pfedbayes", rounds=2, deadline=1.0, late="partial")
    ruled(fed)
    (fed.path / "clients" / "bob" / "slow").touch()
    began = {name: len(client.said()) for name, client in fed.clients.items()}
    code, words = fed.run("--name", "slow")
    assert code == 0, words
    assert accepted(fed, "slow") == [list(NAMES)] * 2
    said = {name: client.said()[began[name] :] for name, client in fed.clients.items()}
    late = re.findall(
        r"This client takes (\d+) of 10 local steps: the deadline is 1 s", said["bob"]
    )
    assert len(late) == 2 and all(1 <= int(steps) <= 3 for steps in late), said["bob"]
    assert "local steps" not in said["alice"]
    kept = json.loads((fed.path / "clients" / "bob" / "state" / "slow" / "speed.json").read_text())
    assert set(kept["measured"]) == {"probe", "0", "1"}  # of three processes
    assert max(kept["measured"].values()) < 100 / 0.3  # passes of a step, over its least time
