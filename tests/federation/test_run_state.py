"""What `run` and `status` say about a run on which nothing seems to happen."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from corefed.base import digests, locks
from corefed.base.errors import UserError
from corefed.federation.flower.asked import NotedGrid
from corefed.federation.operate import (
    creating,
    following,
    processes,
    registering,
    run_state,
    status,
    vigil,
)
from corefed.federation.operate.folder import ServerFolder
from corefed.federation.operate.run_state import Facts, Silent
from corefed.training import record

NOW = 1_000_000.0
ALIVE = Facts(trains=True, begun=True, answers=True, submitted=True, silent=Silent())


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        (ALIVE, "going on"),
        (ALIVE._replace(silent=Silent(("bob",), NOW - 5)), "going on"),
        (ALIVE._replace(silent=Silent(("bob", "carol"), NOW - 90)), "waiting for bob, carol since"),
        (ALIVE._replace(answers=False), "waiting for the server, which does not answer"),
        (ALIVE._replace(trains=False), "dead: its training process is gone; go on with it by"),
        (ALIVE._replace(trains=False, begun=False), "waiting for the server to begin"),
        (ALIVE._replace(trains=False, submitted=False), "stopped"),
    ],
)
def test_the_state_of_a_run(facts: Facts, state: str) -> None:
    assert run_state.describe(facts, NOW).startswith(state)


@pytest.mark.parametrize(
    ("facts", "absent", "why"),
    [
        (ALIVE._replace(answers=False), [], "the server does not answer"),
        (ALIVE._replace(silent=Silent(("bob",), NOW)), ["carol"], "no answer yet from bob"),
        (ALIVE, ["carol"], "not connected: carol"),
        (ALIVE, [], "the training goes on"),
        (ALIVE._replace(trains=False, begun=False), [], "the server has not begun it yet"),
        (ALIVE._replace(trains=False), [], "its training process is gone"),
    ],
)
def test_why_nothing_happens(facts: Facts, absent: list[str], why: str) -> None:
    assert run_state.waits_for(facts, absent) == why


@pytest.fixture
def server(tmp_path: Path) -> ServerFolder:
    """A server's folder with a run that was just submitted."""
    creating.create(tmp_path / "fed", ["alice", "bob"], "127.0.0.1:9")
    made = ServerFolder.read(tmp_path / "fed")
    folder = made.runs / "first"
    folder.mkdir(parents=True)
    text = (made.path / record.EXPERIMENT).read_text()
    (folder / record.EXPERIMENT).write_text(text)
    about = {"run-id": "7", "since": time.time() - 5}
    (folder / run_state.SUBMITTED).write_bytes(digests.to_json(about))
    return made


@pytest.fixture
def flower(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the server and Flower answer, and which commands of Flower were called."""
    world: dict[str, Any] = {"answers": True, "status": "running", "called": [], "absent": {}}

    def submitted(server: ServerFolder) -> dict[str, Any]:
        ended = world["status"].startswith("finished")
        run = {"id": "7", "status": world["status"], "details": "for a reason", "ended": ended}
        return {"first": run}

    monkeypatch.setattr(processes, "is_answering", lambda server, timeout=2.0: world["answers"])
    monkeypatch.setattr(run_state, "list_submitted", submitted)
    monkeypatch.setattr(
        processes, "run_flwr", lambda server, *words, quiet=False: world["called"].append(words)
    )
    monkeypatch.setattr(registering, "client_states", lambda server: world["absent"])
    monkeypatch.setattr(vigil, "GONE", 0.2)
    monkeypatch.setattr(vigil, "TAKEN", 0.6)
    monkeypatch.setattr(vigil, "NOTICE", 0.2)
    monkeypatch.setattr(run_state, "QUIET", 0.1)
    monkeypatch.setattr(following, "LOOK", 0.01)
    monkeypatch.setattr(following, "ASK", (0.02, 0.02))
    return world


def follow(server: ServerFolder) -> str:
    return following._follow(server, "first", lambda line: None, 0, silent=False)


def test_a_run_that_nobody_begins(
    server: ServerFolder, flower: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with locks.exclusively(server.path):
        assert "No process of the server began the run" in follow(server)
    assert "the server has not begun it yet" in capsys.readouterr().err
    assert flower["called"] == [("stop", "7", processes.LINK)]


def test_a_run_whose_training_process_is_gone(
    server: ServerFolder, flower: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with locks.exclusively(server.runs / "first"):
        pass  # it was there after the submission
    reason = follow(server)
    assert "The training process is gone" in reason and "executor.log" in reason
    assert flower["called"] == [("stop", "7", processes.LINK)]
    flower["answers"] = False
    assert "The training process is gone, and the server is not there" in follow(server)
    monkeypatch.setattr(vigil, "ROOM", 1 << 60)
    assert follow(server).endswith(f"the disk of {server.path} is full.")


def test_a_server_that_does_not_answer_for_a_while_does_not_end_a_run(
    server: ServerFolder, flower: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The training holds its folder, and completes."""
    folder, looks = server.runs / "first", []

    def answering(server: ServerFolder, timeout: float = 2.0) -> bool:
        looks.append(timeout)
        if len(looks) > 30:
            (folder / record.SUMMARY).touch()
        return False

    monkeypatch.setattr(processes, "is_answering", answering)
    with locks.exclusively(folder):
        assert follow(server) == ""
    assert "nothing new for 0 s: the server does not answer" in capsys.readouterr().err


def test_a_run_that_flower_has_ended(server: ServerFolder, flower: dict[str, Any]) -> None:
    flower["status"] = "finished:failed"
    reason = follow(server)
    assert "server/flower/executor.log may say why" in reason
    assert reason.endswith("Flower says: finished:failed, for a reason")


def test_whom_a_run_waits_for_is_said(
    server: ServerFolder, flower: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = server.runs / "first"
    about = {"since": time.time() - 100, "silent": ["bob"]}
    (folder / run_state.ASKED).write_text(json.dumps(about))
    watch = vigil.Vigil(server, "first")
    with locks.exclusively(folder):
        time.sleep(0.15)
        watch.look()
        assert "no answer yet from bob" in capsys.readouterr().err
        state = status.read_status(server.path)["runs"]["first"]["state"]
        assert state.startswith("waiting for bob since ")
    state = status.read_status(server.path)["runs"]["first"]["state"]
    assert state.startswith("dead: its training process is gone")
    (folder / run_state.ASKED).unlink()
    flower["absent"] = {"alice": "online", "bob": "offline"}
    with locks.exclusively(folder):
        watch.news()
        time.sleep(0.15)
        watch.look()
        assert "not connected: bob" in capsys.readouterr().err


def test_damaged_notes_are_none(server: ServerFolder) -> None:
    folder = server.runs / "first"
    for text in ("", "[]", '{"silent": 3}', "\x00"):
        (folder / run_state.ASKED).write_text(text)
        (folder / run_state.SUBMITTED).write_text(text)
        assert run_state.read_silent(folder) == Silent()
        assert run_state.submission(folder) == {}


def test_a_question_that_never_ends_is_a_sentence(
    server: ServerFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PATIENCE", 0.01)
    with pytest.raises(UserError, match="Flower does not answer"):
        run_state.control.ask(server, "runs")
    with pytest.raises(UserError, match="did not end within"):
        processes.run_flwr(server, "ls", quiet=True)


def test_coloured_answers_are_read(server: ServerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notebooks set FORCE_COLOR, and Flower then colours its JSON too."""
    coloured = '\x1b[1m{\x1b[0m\x1b[34m"success"\x1b[0m: \x1b[3;92mtrue\x1b[0m, "run-id": "7"}'
    done = subprocess.CompletedProcess([], 0, stdout=coloured, stderr="")
    monkeypatch.setattr(processes.subprocess, "run", lambda *_, **__: done)
    assert processes.run_flwr(server, "ls", quiet=True) == {"success": True, "run-id": "7"}


# Who has been asked


class Grid:
    """Two nodes; replies are put into `ready`."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.sent = 0

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=i, public_key=str(i).encode()) for i in (1, 2)]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.sent += 1
        return [f"m{self.sent}"]

    def pull_messages(self, identities: list[str]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=each))
            for each in identities
            if each in self.ready
        ]


def test_the_training_notes_who_has_not_answered(tmp_path: Path) -> None:
    inner = Grid()
    grid: Any = NotedGrid(inner, {b"1": "alice", b"2": "bob"}, tmp_path)  # type: ignore[arg-type]

    def ask(node: int, round_: str) -> str:
        about = SimpleNamespace(message_type="train", group_id=round_, dst_node_id=node)
        (identity,) = grid.push_messages([SimpleNamespace(metadata=about)])
        return str(identity)

    grid.get_nodes()
    first, second = ask(1, "1"), ask(2, "1")
    assert run_state.read_silent(tmp_path).names == ("alice", "bob")
    inner.ready = [first]
    assert grid.pull_messages([second]) == []
    assert len(grid.pull_messages([first])) == 1
    assert run_state.read_silent(tmp_path).names == ("bob",)
    again = ask(2, "1")  # the round is asked again
    inner.ready = [again]
    grid.pull_messages([again])
    assert run_state.read_silent(tmp_path).names == ()
    ask(2, "1")
    ask(1, "2")  # bob is given up
    assert run_state.read_silent(tmp_path).names == ("alice",)
    assert grid.sent == 5  # the rest is the grid's own
