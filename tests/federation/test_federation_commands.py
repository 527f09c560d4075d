"""What an operator types: demo, run, status, stop, resume, with real processes and mistakes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import corefed
from federation_processes import Federation

from corefed.base import machine
from corefed.base.errors import UserError
from corefed.federation.operate import creating, demo, following, processes, serving
from corefed.federation.operate.folder import ClientFolder, ServerFolder
from corefed.training import record

real = pytest.mark.federation
"""Tests with real processes; but for the demonstration, of the federation that several share."""


def test_help_needs_neither_flower_nor_torch() -> None:
    code = (
        "import sys, corefed.commands.cli as c\n"
        "for a in (['federation', '--help'], ['federation', 'init', '--help']):\n"
        "    try: c.main(a)\n"
        "    except SystemExit as stop: assert stop.code == 0, (a, stop.code)\n"
        "assert not {'torch', 'flwr', 'cryptography'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--clients" in done.stdout


@real
def test_the_demonstration(tmp_path: Path) -> None:
    """A client killed in a round that needs everybody: asked again, the round is as it would be."""
    assert demo.main(tmp_path / "demo") == 0
    run = tmp_path / "demo" / "federation" / "server" / "runs" / "demo"
    attempts = [
        line["federation"]["attempts"] for line in record.read_lines(run / record.ROUNDS)[0]
    ]
    assert max(attempts) > 1


# One training after the other: each needs what the ones before it left.


@real
def test_a_run_shows_its_progress_and_prints_the_summary(fed: Federation) -> None:
    process = fed.begin("run", "--name", "first")
    assert process.wait() == 0, process.said()
    words = process.said()
    assert "$ flwr run " in words
    assert "alice joined" in words
    assert "round 1/2  loss" in words
    assert "round 2/2  loss" in words
    assert "fedavg on local, seed 0" in words
    summary, lines = record.read(fed.path / "server" / "runs" / "first")
    assert (summary["clients"], summary["rounds"], len(lines)) == (3, 2, 2)


@real
def test_status_says_who_is_there_and_who_is_missing(fed: Federation) -> None:
    code, words = fed.command("status", "--json")
    assert code == 0
    about = json.loads(words[words.index("{") :])
    assert about["clients"] == {"alice": "connected", "bob": "connected", "carol": "never seen"}
    run = about["runs"]["first"]
    assert (run["state"], run["round"], run["rounds"]) == ("complete", 2, 2)
    assert list(run["missing"]) == ["carol"]


@real
def test_a_name_is_used_once_and_a_complete_run_is_not_resumed(fed: Federation) -> None:
    again = corefed("federation", "run", fed.path, "--name", "first")
    assert again.code == 2
    assert "There is a run first already" in again.err
    done = corefed("federation", "resume", fed.path)
    assert done.code == 2
    assert "complete with 2 rounds; ask for more by --rounds" in done.err
    fewer = corefed("federation", "resume", fed.path, "--rounds", 1)
    assert "has 2 rounds already" in fewer.err


@real
def test_a_run_that_fails_says_why_with_code_1(fed: Federation) -> None:
    code, words = fed.run("--name", "bad", "--set", "model=cnn")
    assert code == 1, words
    assert "error: " in words
    assert "Traceback" not in words
    assert "--name bad" in words  # how to go on


@real
def test_a_long_run_is_watched_left_stopped_and_resumed(fed: Federation) -> None:
    run = fed.begin("run", "--name", "long", "--set", "rounds=500")
    run.wait_for("round 2/500")
    second = corefed("federation", "run", fed.path, "--name", "second")
    assert second.code == 2
    assert "Run long is going on" in second.err
    assert not (fed.path / "server" / "runs" / "second").exists()

    assert run.process is not None
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "the run goes on at the server" in run.said()

    stopped = corefed("federation", "stop", fed.path)
    assert stopped.code == 0, stopped.err
    lines, _ = record.read_lines(fed.path / "server" / "runs" / "long" / record.ROUNDS)
    assert len(lines) < 500
    code, words = fed.command("resume", "--name", "long", "--rounds", len(lines) + 1, "--json")
    assert code == 0, words
    assert json.loads(words[words.index("{\n") :])["rounds"] == len(lines) + 1
    assert "round 1/" not in words


# Mistakes, without processes of Flower


@pytest.fixture
def made(tmp_path: Path) -> Path:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    creating.create(tmp_path / "fed", ["alice", "bob"], f"127.0.0.1:{port}")
    return tmp_path / "fed"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run"], "No server of this federation answers at 127.0.0.1:"),
        (["run", "--name", "Bad Name"], "is no name for a run"),
        (["run", "--set", "seeds=0,1"], "trains with one seed"),
        (["run", "--set", "roundz=1"], "did you mean 'rounds'"),
        (["run", "--set", "cohort=3"], "cohort is 3"),
        (["resume"], "holds no run"),
        (["resume", "--name", "first"], "start runs with"),
        (["stop"], "No server of this federation answers"),
        (["remove", "carol"], "'carol' is no client that may take part; those are: alice, bob"),
    ],
)
def test_mistakes(
    made: Path, arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "ABSENT", 0.5)
    command, *more = arguments
    result = corefed("federation", command, made, *more)
    assert result.code == 2
    assert sentence in result.err
    assert not (made / "server" / "runs").exists()


@pytest.mark.parametrize("command", ["run", "server", "status", "stop", "resume", "renew"])
def test_a_folder_that_is_no_federation(tmp_path: Path, command: str) -> None:
    result = corefed("federation", command, tmp_path)
    assert result.code == 2
    assert "make a federation with: corefed federation init" in result.err


def test_status_without_a_server(made: Path) -> None:
    result = corefed("federation", "status", made)
    assert result.code == 0
    assert "is not running" in result.out


def test_removing_a_client_without_a_server(made: Path) -> None:
    assert corefed("federation", "remove", made, "bob").code == 0
    assert list(ServerFolder.read(made).keys().values()) == ["alice"]


def test_a_port_that_is_taken(made: Path) -> None:
    server = ServerFolder.read(made)
    with socket.create_server(server.address):
        result = corefed("federation", "server", made)
    assert result.code == 2
    assert f"Cannot listen on {server.address}: Address already in use" in result.err


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("missing.npz", None, "There is no"),
        ("notes.txt", b"hello", "is none of what a client can read"),
        ("damaged.npz", b"PK nonsense", "damaged.npz"),
    ],
)
def test_data_are_looked_at_before_anything_is_started(
    made: Path, tmp_path: Path, name: str, content: bytes | None, sentence: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    result = corefed("federation", "client", made / "clients" / "bob", "--data", tmp_path / name)
    assert result.code == 2
    assert sentence in result.err
    assert "corefed.federation.engine.node" not in result.err


def test_a_device_that_is_not_there(made: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.zeros((9, 2), "float32"), y=np.arange(9) % 2)
    place = made / "clients" / "bob"
    result = corefed(
        "federation", "client", place, "--data", tmp_path / "x.npz", "--device", "abacus"
    )
    assert result.code == 2
    assert "There is no device 'abacus'" in result.err


def test_a_server_that_does_not_speak_tls(made: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", X=np.zeros((9, 2), "float32"), y=np.arange(9) % 2)
    client = ClientFolder.read(made / "clients" / "bob")
    with socket.create_server(client.address) as listener:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "corefed", "federation", "client", client.path),
                *("--data", tmp_path / "x.npz"),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        listener.settimeout(60)
        plain, _ = listener.accept()
        with plain:
            plain.recv(1 << 12)
            plain.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            _, words = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "does not speak TLS" in words


# Environment


def test_flower_is_told_to_stay_quiet_and_finds_none_of_its_programs(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("COREFED_SERVER", "/elsewhere")
    server, client = ServerFolder.read(made), ClientFolder.read(made / "clients" / "bob")
    for environment, path in (
        (processes.server_environment(server), server.path),
        (processes.client_environment(client, "data", None), client.path),
    ):
        assert environment["FLWR_TELEMETRY_ENABLED"] == "0"
        assert environment["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert environment["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert environment["FLWR_HOME"] == str(path / "flower")
        assert environment["PATH"] == "/usr/bin:/bin"
        assert environment["NO_PROXY"] == "example.org,127.0.0.1,localhost,::1"
    assert processes.server_environment(server)["COREFED_SERVER"] == str(server.path)
    assert "COREFED_SERVER" not in processes.client_environment(client, "data", None)


def test_flowers_programs_are_good_neighbours(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*machine.NUMBER, *machine.WAITING):
        monkeypatch.delenv(name, raising=False)
    client = ClientFolder.read(made / "clients" / "bob")
    environment = processes.client_environment(client, "data", None)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["OMP_NUM_THREADS"] == str(machine.usable_cores())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert processes.client_environment(client, "data", None)["OMP_NUM_THREADS"] == "3"


def test_commands_of_flower_carry_no_secret(made: Path) -> None:
    server, client = ServerFolder.read(made), ClientFolder.read(made / "clients" / "bob")
    processes.prepare_home(server.path, server)
    processes.prepare_home(client.path)
    link, *_ = server_parts = processes.server_parts(server)
    node, executor = client_parts = processes.client_parts(client, "data", None)
    assert [part.name for part in server_parts] == ["superlink", "executor", "gate"]
    assert [part.name for part in client_parts] == ["supernode", "executor"]
    assert "--enable-supernode-auth" in link.command
    assert "--disable-runtime-dependency-installation" in link.command
    for part in (*server_parts, *client_parts):
        home = Path(part.environment["FLWR_HOME"])
        assert part.log.parent == home
        assert "--insecure" not in part.command
        secret = (home / processes.SECRET).read_bytes()
        for word in part.command:
            assert "PRIVATE" not in word and secret not in word.encode()
    for part in (link, node):  # tasks are given to who knows the secret
        home = Path(part.environment["FLWR_HOME"])
        assert after(part, "--isolation") == "process"
        assert after(part, "--superexec-auth-secret-file") == str(home / processes.SECRET)
        assert after(part, "--host") == "127.0.0.1"  # and its API is for its own machine
    assert after(node, "--auth-supernode-private-key") == str(client.path / "key")
    assert after(executor, "--root-certificates") == after(node, "--ssl-ca-certfile")
    assert after(executor, "--runtime-api-address") == f"127.0.0.1:{after(node, '--port')}"


def after(part: processes.Part, flag: str) -> str:
    return part.command[part.command.index(flag) + 1]


def test_every_start_has_secrets_of_its_own(made: Path) -> None:
    server, client = ServerFolder.read(made), ClientFolder.read(made / "clients" / "bob")
    kept: dict[Path, bytes] = {}
    for _ in range(2):
        processes.prepare_home(server.path, server)
        processes.prepare_home(client.path)
        for path in (server.path, client.path):
            secret = path / "flower" / processes.SECRET
            assert secret.stat().st_mode & 0o777 == 0o600
            assert secret.read_bytes() != kept.get(secret)
            kept[secret] = secret.read_bytes()
        key = client.path / "flower" / "own.key"
        assert key.stat().st_mode & 0o777 == 0o600
        assert key.read_bytes() != kept.get(key)
        kept[key] = key.read_bytes()


def test_a_server_that_was_never_started_has_no_superlink(made: Path) -> None:
    (made / "server" / "flower" / processes.PORT).unlink(missing_ok=True)
    with pytest.raises(UserError, match="corefed federation server"):
        processes.link_address(ServerFolder.read(made))


def test_paths_of_data_mean_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    assert serving._absolute("points.npz") == "/tmp/points.npz"
    assert serving._absolute("table:a.csv") == "table:/tmp/a.csv"
    assert serving._absolute("image-folder:/x") == "image-folder:/x"
