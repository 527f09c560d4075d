"""Checkpoints as a log: what is written and removed, and a writer in the background."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved_state import Stacked

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.training import checkpoint, segments
from corefed.training.checkpoint import Checkpoints, forget, load, restore

VALUES: dict[str, object] = {"method": "x", "zeta": 1.0}
SERVER = [{"v": torch.arange(4.0)}]


def fresh(clients: int = 12) -> Stacked:
    return Stacked({"q": torch.zeros(clients, 3), "n": torch.zeros(clients, dtype=torch.int64)})


def checkpoints(folder: Path, part: str = "") -> Checkpoints:
    return Checkpoints(folder, VALUES, every=1, share=0.1, minutes=5.0, part=part)


def change(clients: Stacked, rows: Sequence[int], value: int) -> None:
    clients.put(
        rows, {k: torch.full_like(v[: len(rows)], value) for k, v in clients.private.items()}
    )


def save(saves: Checkpoints, clients: Stacked, rows: Sequence[int], round_: int) -> None:
    change(clients, rows, round_)
    saves.mark(rows)
    saves.save(round_, [{"v": torch.full((4,), float(round_))}], clients.take)


def assert_restores(folder: Path, clients: Stacked, round_: int, part: str = "") -> None:
    found = load(folder, VALUES, part)
    assert found is not None
    assert found.round == round_
    again = fresh()
    (server,) = restore(found, SERVER, again)
    assert server["v"].tolist() == [round_] * 4
    assert all(torch.equal(again.private[k], v) for k, v in clients.private.items())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").rglob("*") if path.is_file())


@pytest.mark.parametrize("part", ["", "2-of-4"])
def test_random_cohorts_are_restored_from_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """40 saves of random cohorts, some of them by a new process, with files of a few rows."""
    monkeypatch.setattr(segments, "PIECE", 4 * 20)  # a row has 3 * 4 + 8 bytes
    monkeypatch.setattr(segments, "MOST_FILES", 6)
    draw = random.Random(3)
    clients, saves = fresh(), checkpoints(tmp_path, part)
    touched: set[int] = set()
    for round_ in range(1, 41):
        rows = draw.sample(range(10), draw.randint(1, 6))  # two clients never take part
        touched.update(rows)
        save(saves, clients, rows, round_)
        saves.close()
        assert_restores(tmp_path, clients, round_, part)
        found = load(tmp_path, VALUES, part)
        assert found is not None
        stored = [row for mine, _ in found.pieces() for row in mine]
        assert set(stored) == touched
        assert len(stored) <= 2 * len(touched)
        assert len(found.segments) <= 6 + 3  # and those of the new rows
        if draw.random() < 0.3:
            saves = checkpoints(tmp_path, part)


@pytest.mark.parametrize("small", [0, segments.SMALL])
def test_files_are_what_safetensors_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(segments, "SMALL", small)
    tensors = {
        f"{kind}".removeprefix("torch."): torch.arange(15).to(kind) for kind in segments.TYPES
    }
    tensors |= {"none": torch.zeros(0, 3), "one": torch.tensor(2.5), "turned": torch.randn(4, 3).T}
    content = segments.encode(tensors)
    assert len(list(content)) == (1 if small else 1 + len(tensors))
    content = segments.encode(tensors)
    files.replace_all(tmp_path, [("x.safetensors", content)])
    segment = segments.Segment("x.safetensors", content.bytes, content.hexdigest())
    for found in (segment.read(tmp_path), load_file(tmp_path / "x.safetensors")):
        assert found.keys() == tensors.keys()
        for name, value in tensors.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value)


def test_a_full_cohort_is_one_file_and_a_federation_has_none(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    for round_ in (1, 2, 3):
        save(saves, clients, range(12), round_)
    saves.close()
    assert names(tmp_path) == ["000003-000.safetensors", "000003-server.safetensors", "state.json"]
    server = checkpoints(tmp_path / "server")
    for round_ in (1, 2):
        server.save(round_, SERVER, clients.take)
    server.close()
    assert names(tmp_path / "server") == ["000002-server.safetensors", "state.json"]


def test_a_save_writes_only_what_changed(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, range(12), 1)
    save(saves, clients, [7, 3], 2)
    saves.close()
    found = load(tmp_path, VALUES)
    assert found is not None
    assert [rows for rows, _ in found.pieces()] == [list(range(12)), [3, 7]]
    assert_restores(tmp_path, clients, 2)


def test_a_round_can_be_saved_twice(tmp_path: Path) -> None:
    """A file that the manifest names is never written over."""
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, range(12), 4)
    save(saves, clients, [5], 4)
    saves.close()
    assert_restores(tmp_path, clients, 4)
    assert "000001-000.safetensors" in names(tmp_path)
    assert "000002-000.safetensors" in names(tmp_path)


def test_processes_that_are_one_save_apart_meet_at_the_older_one(tmp_path: Path) -> None:
    part = "2-of-4"
    clients, saves = fresh(), checkpoints(tmp_path, part)
    save(saves, clients, [0, 1], 3)
    save(saves, clients, [1, 2], 5)
    saves.close()
    older = fresh()
    change(older, [0, 1], 3)
    save(saves, clients, range(12), 8)  # no row of the files before is left
    save(saves, clients, [4], 9)
    saves.close()
    assert load(tmp_path, VALUES, part, upto=5) is None  # two saves are kept, not three
    saves = checkpoints(tmp_path / "again", part)
    clients = fresh()
    save(saves, clients, [0, 1], 3)
    save(saves, clients, range(12), 5)
    saves.close()
    found = load(tmp_path / "again", VALUES, part, upto=4)
    assert found is not None
    assert found.round == 3
    assert_restores(tmp_path / "again", clients, 5, part)
    forget(tmp_path / "again", VALUES, part, after=4)
    assert_restores(tmp_path / "again", older, 3, part)
    saves = checkpoints(tmp_path / "again", part)
    save(saves, older, [2], 4)
    saves.close()
    assert_restores(tmp_path / "again", older, 4, part)
    assert load(tmp_path / "again", VALUES, "1-of-4") is None
    forget(tmp_path / "again", VALUES, part, after=0)
    assert load(tmp_path / "again", VALUES, part) is None


def test_only_the_wanted_rows_are_restored(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, [0, 1], 1)
    save(saves, clients, [1, 2, 3], 2)
    saves.close()
    found = load(tmp_path, VALUES)
    assert found is not None
    again = fresh()
    restore(found._replace(wanted=frozenset([1, 3, 9])), SERVER, again)
    assert again.private["n"].tolist() == [0, 2, 0, 2, *[0] * 8]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, [1], 1)
    saves.close()
    whole = names(tmp_path)
    for name in (".000002-000.safetensors.tmp", "000002-000.safetensors", ".state.json.tmp"):
        (tmp_path / "checkpoint" / name).write_bytes(b"half")
    saves = checkpoints(tmp_path)
    assert names(tmp_path) == whole
    assert_restores(tmp_path, clients, 1)


class Gate:
    """Holds the writer at its first file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        encode = segments.encode

        def held(*arguments: Any) -> Any:
            self.reached.set()
            assert self.opened.wait(60)
            return encode(*arguments)

        monkeypatch.setattr(segments, "encode", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    found = Gate(monkeypatch)
    yield found
    found.opened.set()


def test_the_run_goes_on_while_a_slow_writer_writes(tmp_path: Path, gate: Gate) -> None:
    """What is written is the state of its round, whatever the run has changed since."""
    clients, saves = fresh(), checkpoints(tmp_path)
    clients.take = (
        lambda rows: {  # type: ignore[method-assign]
            k: v[rows[0] : rows[-1] + 1] for k, v in clients.private.items()
        }
    )  # views
    servers = [{"v": torch.ones(4)}]
    change(clients, range(12), 1)
    saves.mark(range(12))
    saves.save(1, servers, clients.take)
    then = Stacked({k: v.clone() for k, v in clients.private.items()})
    change(clients, range(12), 2)
    servers[0]["v"] += 1
    assert gate.reached.wait(60)
    assert load(tmp_path, VALUES) is None
    gate.opened.set()
    saves.close()
    assert_restores(tmp_path, then, 1)


def test_a_failing_writer_is_told_after_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, [0], 1)
    saves.close()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    then = Stacked({k: v.clone() for k, v in clients.private.items()})

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        save(saves, clients, [1], 2)
        while saves._writer.busy:
            pass
    with pytest.raises(UserError, match=r"No space left on device\. .* before round 2 is kept"):
        saves.due(3, False)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    assert_restores(tmp_path, then, 1)


@pytest.mark.parametrize("failing", ["unlink", "flush"])
def test_a_failure_after_the_manifest_was_replaced_leaves_the_new_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, range(12), 1)
    saves.close()
    flush = files.flush

    def fail(folder: Path, *_: object, **__: object) -> None:
        """Files cannot be removed, or the folder not be flushed once the manifest is new."""
        if failing == "flush" and '"round": 2' not in (folder / segments.MANIFEST).read_text():
            return flush(folder)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os if failing == "unlink" else files, failing, fail)
        save(saves, clients, range(12), 2)
        if failing == "flush":
            with pytest.raises(UserError, match="Input/output error"):
                saves.close()
        saves.close()
    assert_restores(tmp_path, clients, 2)
    checkpoints(tmp_path)
    assert names(tmp_path) == ["000002-000.safetensors", "000002-server.safetensors", "state.json"]


def test_a_second_ctrl_c_leaves_the_save_before(tmp_path: Path, gate: Gate) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    gate.opened.set()
    save(saves, clients, [0], 1)
    saves.close()
    then = Stacked({k: v.clone() for k, v in clients.private.items()})
    gate.opened.clear()
    gate.reached.clear()
    save(saves, clients, [1], 2)
    assert gate.reached.wait(60)
    threading.Timer(0.05, gate.opened.set).start()
    with pytest.raises(KeyboardInterrupt), saves:
        raise KeyboardInterrupt
    assert not saves._writer.busy
    assert_restores(tmp_path, then, 1)
    assert len(names(tmp_path)) == 3


def test_an_error_of_the_run_waits_for_the_save(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, [1], 2)
    with pytest.raises(UserError, match="diverged"), saves:
        raise UserError("diverged")
    assert_restores(tmp_path, clients, 2)


def test_state_that_cannot_be_read_leaves_the_save_before(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, [0], 1)

    def take(rows: Sequence[int]) -> Tree:
        raise RuntimeError("out of memory")

    saves.mark([1])
    with pytest.raises(RuntimeError, match="out of memory"):
        saves.save(2, SERVER, take)
    assert not saves._writer.busy
    assert_restores(tmp_path, clients, 1)


def test_the_run_waits_where_the_writer_is_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many pieces are in memory: those that wait, the one being written, the one at hand."""
    monkeypatch.setattr(segments, "PIECE", 20)
    monkeypatch.setattr(checkpoint, "AHEAD", 2)
    taken, written, most = [0], [0], [0]
    clients, encode = fresh(), segments.encode

    def take(rows: Sequence[int]) -> Tree:
        taken[0] += 1
        most[0] = max(most[0], taken[0] - written[0])
        return clients.take(rows)

    def slow(tensors: Tree) -> Any:
        if "rows" in tensors:
            threading.Event().wait(0.002)
            written[0] += 1
        return encode(tensors)

    monkeypatch.setattr(segments, "encode", slow)
    saves = checkpoints(tmp_path)
    saves.mark(range(12))
    saves.save(1, [{"v": torch.ones(4)}], take)
    saves.close()
    assert taken == [13]  # one of them to see how large a row is
    assert most[0] <= 1 + 2 + 1 + 1
    assert_restores(tmp_path, clients, 1)


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a federation's server, which keeps two; it then adds to the older one."""
    server = Checkpoints(tmp_path, VALUES, every=1, share=1.0, minutes=1.0, kept=2)
    for round_ in (1, 2, 3):
        server.save(round_, [{"v": torch.full((4,), float(round_))}], fresh().take)
    server.close()
    assert len(names(tmp_path)) == 3
    damage(tmp_path / "checkpoint" / "000003-server.safetensors")
    found = load(tmp_path, VALUES)
    assert found is not None and found.round == 2
    assert found.servers[0]["v"].tolist() == [2.0] * 4
    said = capsys.readouterr().err
    assert "000003-server.safetensors is truncated or damaged" in said and "of round 2" in said
    forget(tmp_path, VALUES, "", after=2)
    again = load(tmp_path, VALUES)
    assert again is not None and again.round == 2 and capsys.readouterr().err == ""
    damage(tmp_path / "checkpoint" / "000002-server.safetensors")
    with pytest.raises(UserError, match=r"000002-server\.safetensors is truncated or damaged"):
        load(tmp_path, VALUES)


def test_a_file_of_rows_is_checked_wherever_it_is_read(tmp_path: Path) -> None:
    clients, saves = fresh(), checkpoints(tmp_path)
    save(saves, clients, range(12), 1)
    saves.close()
    damage(tmp_path / "checkpoint" / "000001-000.safetensors")
    for read in (lambda: load(tmp_path, VALUES), lambda: checkpoints(tmp_path)):
        with pytest.raises(UserError, match="its content is not what was written"):
            read()
