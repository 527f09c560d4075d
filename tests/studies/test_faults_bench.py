"""`corefed bench faults`: its table, its page, and what of its federation needs no Flower."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from commands import corefed

from corefed_studies.bench import fault_federation, faults

ROOT = Path(__file__).parents[2]
PAGE, FILE = ROOT / "docs" / "faults.md", ROOT / "results" / "faults.json"


def test_the_page_is_what_the_file_makes_it(tmp_path: Path) -> None:
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    done = corefed("bench", "faults", "--from", FILE, "--page", copy, "--out", tmp_path / "out")
    assert done.code == 0, done.err
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8")


def test_every_fault_ended_as_promised() -> None:
    """In recovery, or in an exit with a reason and a run that was resumed; never another model."""
    rows = json.loads(FILE.read_text())["rows"]
    tried = [row for row in rows if "seconds" in row]
    assert {(row["side"], row["role"], row["kind"]) for row in tried} >= {
        ("client", "executor", "killed"),
        ("client", "SuperNode", "frozen"),
        ("server", "SuperLink", "killed"),
        ("server", "disk", "full"),
    }
    for row in tried:
        assert row["outcome"] in ("recovered", "run ended"), row
        assert row["outcome"] == "recovered" or row["sentence"], row
        assert row["equal"], row


ROW = {
    "side": "client", "role": "executor", "kind": "killed", "outcome": "recovered",
    "seconds": 26.3, "sentence": "", "again": 1, "equal": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "next round after 26 s"),
        (
            {"outcome": "run ended", "sentence": "The training process is gone."},
            "`run` ended after 26 s: The training process is gone. Resumed.",
        ),
        ({"outcome": "hung"}, "HUNG"),
        ({"outcome": "lost", "sentence": "No quorum."}, "LOST: No quorum."),
        (
            {"service": {"seconds": 1.0, "code": 1, "sentence": "x"}},
            "next round after 26 s (the service ended with code 1 and was started again)",
        ),
    ],
)
def test_what_happened_in_words(change: dict[str, object], words: str) -> None:
    found = faults.table({"undisturbed_seconds": 9.0, "rows": [{**ROW, **change}]})
    assert found.rows[0][:3] == ("client", "executor killed", words)
    assert found.rows[0][3:] == ("1", "yes")


def test_a_disk_that_cannot_be_mounted_is_said() -> None:
    row = {"side": "server", "role": "disk", "kind": "full", "outcome": "not tried: no mounts"}
    found = faults.table({"undisturbed_seconds": 9.0, "rows": [row]})
    assert found.rows[0][2:] == ("not tried: no mounts", "", "")


def test_a_port_that_stops_forwarding() -> None:
    with socket.create_server(("127.0.0.1", 0)) as target:
        forwarder = fault_federation.Forwarder(target.getsockname()[1])
        with socket.create_connection(("127.0.0.1", forwarder.port), timeout=5) as here:
            there, _ = target.accept()
            there.settimeout(0.3)
            here.sendall(b"one")
            assert there.recv(9) == b"one"
            forwarder.open.clear()
            here.sendall(b"two")
            with pytest.raises(TimeoutError):
                there.recv(9)
            forwarder.open.set()
            there.settimeout(5)
            assert there.recv(9) == b"two"
            there.close()
        forwarder.close()


def test_the_last_sentence_that_says_why() -> None:
    assert fault_federation.last_error("a\nerror: it broke\nb\n") == "it broke"
    assert fault_federation.last_error("a\n\nb\n") == "b"
    assert fault_federation.last_error("") == ""


def test_devices_other_than_a_cpu_are_refused(tmp_path: Path) -> None:
    done = corefed("bench", "faults", "--device=cuda", "--out", tmp_path / "out")
    assert done.code == 2
    assert "trains on a CPU" in done.err
