"""Where clients' state is kept: every store gives the same training, and takes what it should."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from method_rows import SIZES, WORK, Row, assert_same_tree, build, every_method, federation

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Tree
from corefed.settings.config import resolve
from corefed.training import rounds, storing
from corefed.training import store as store_module
from corefed.training.local import LocalClients
from corefed.training.store import InFile, InHost, OnDevice, Store
from corefed.training.storing import Choose

CPU = torch.device("cpu")
CLIENTS = len(SIZES)
COHORTS: list[Sequence[int]] = [[0, 3], [1, 2, 3]]  # client 4 never takes part

STORES: dict[str, Choose] = {
    "device": storing.on_device,
    "host": lambda start, clients: InHost(start, clients, CPU),
    "file": lambda start, clients: InFile(start, clients, CPU, None),
}
every_store = pytest.mark.parametrize("name", STORES)


def state(rows: Sequence[int]) -> Tree:
    """Tensors of several types and widths, one of them empty, that depend on the row."""
    which = torch.tensor(list(rows))
    return {
        "a": which.float().unsqueeze(-1).expand(-1, 7).clone(),
        "b": which.double(),
        "c": which.view(-1, 1, 1).expand(-1, 3, 2).clone(),
        "d": (which % 2 == 0),
        "e": torch.empty(len(rows), 0),
    }


@every_store
def test_what_is_put_is_taken_and_the_rest_is_as_at_the_start(name: str) -> None:
    store = STORES[name](state, 20)
    store.put([3, 4, 17], {k: v.clone() for k, v in state([103, 104, 117]).items()})
    found = store.take([17, 2, 4, 3])
    assert_same_tree(found, state([117, 2, 104, 103]), rtol=0, atol=0)
    assert store.touched.nonzero().flatten().tolist() == [3, 4, 17]
    assert store.layout.content == 7 * 4 + 8 + 6 * 8 + 1
    store.put([4], state([5]))
    assert_same_tree(store.take(range(3, 6)), state([103, 5, 5]), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["host", "file"])
def test_what_is_taken_does_not_change_the_store(name: str) -> None:
    store = STORES[name](state, 5)
    store.put([1], state([7]))
    for rows in ([1], [0, 1], [0]):
        for value in store.take(rows).values():
            value.zero_()
    assert_same_tree(store.take([0, 1]), state([0, 7]), rtol=0, atol=0)


def _clients(row: Row, choose: Choose, chunk: int) -> LocalClients:
    return LocalClients(build(row), federation(), (0,), [_server(row)], WORK, chunk, choose=choose)


def _server(row: Row) -> Tree:
    first = build(row).init_server(Streams([Who(0, SERVER)], 0))
    return {k: v.to(federation().x) for k, v in first.items()}


def _trained(row: Row, choose: Choose, chunk: int) -> LocalClients:
    clients, servers = _clients(row, choose, chunk), [_server(row)]
    method = clients.method
    for t, cohort in enumerate(COHORTS):
        updates, _, _ = clients.train(t, servers, [cohort])
        servers = [method.aggregate(servers[0], updates[0])]
    return clients


@every_method
def test_every_store_trains_alike(row: Row) -> None:
    expected = _trained(row, STORES["device"], 2)
    for name in ("host", "file"):
        found = _trained(row, STORES[name], 2)
        assert_same_tree(found.private, expected.private, rtol=0, atol=0)
        assert_same_tree(found.report(), expected.report(), rtol=0, atol=0)
        ours, theirs = found.selection_cost(), expected.selection_cost()
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert torch.equal(ours, theirs)
        assert found.store.touched.tolist() == [i in {0, 1, 2, 3} for i in range(CLIENTS)]


def test_numbers_follow_a_state_that_is_put_back() -> None:
    """As a resumed run does: the rows that took part, nothing else."""
    row = Row.of("coreset-pfedbayes", {"fraction": 0.4, "draws": 40, "max_iterations": 10})
    trained = _trained(row, STORES["device"], 2)
    rows = trained.store.touched.nonzero().flatten().tolist()
    fresh = _clients(row, STORES["file"], 2)
    fresh.put(rows, trained.take(rows))
    assert_same_tree(fresh.report(), trained.report(), rtol=0, atol=0)
    assert_same_tree(fresh.private, trained.private, rtol=0, atol=0)


def test_a_client_that_never_took_part_takes_no_space(tmp_path: Path) -> None:
    def start(rows: Sequence[int]) -> Tree:
        return {"w": torch.ones(len(rows), 1 << 18)}  # a megabyte each

    store = InFile(start, 10_000, CPU, tmp_path)
    store.put([5000, 9999], start([0, 1]))
    about = os.fstat(store._file)
    assert about.st_size == 10_000 << 20
    assert about.st_blocks * 512 < 4 << 20
    assert list(tmp_path.iterdir()) == []  # the file has no name
    handle = store._file
    del store
    with pytest.raises(OSError, match=r"Bad file descriptor"):
        os.fstat(handle)


# --- the choice -----------------------------------------------------------------------------------


def _chosen(clients: int, *words: str, folder: Path | None = None) -> tuple[Store, str]:
    run = resolve(None, {}, [f"clients={clients}", "device=cpu", *words]).run
    return storing.choose(run, _megabyte, clients, folder)


def _megabyte(rows: Sequence[int]) -> Tree:
    assert len(rows) < 1000, "all of it is allocated"
    return {"w": torch.zeros(1, 1 << 18).expand(len(rows), -1)}


def test_the_choice_is_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "free_memory", lambda device: 1 << 30)
    store, note = _chosen(500)
    assert isinstance(store, OnDevice)
    assert note == ""
    assert isinstance(_chosen(500, "cohort=5", "memory_mb=100")[0], InFile)  # most clients wait
    assert isinstance(_chosen(500, "memory_mb=100")[0], OnDevice)  # all take part
    store, note = _chosen(900, folder=tmp_path / "run")
    assert isinstance(store, InFile)
    assert "The state of 900 clients (0.9 GB) is kept in a file" in note
    assert isinstance(_chosen(5, "client_state=host")[0], InHost)
    assert isinstance(_chosen(5, "client_state=file")[0], InFile)
    assert not (tmp_path / "run").exists()


def test_too_little_room_is_said_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storing, "free_memory", lambda device: 1 << 30)
    with pytest.raises(UserError, match=r"takes 4.9 GB, and 1.0 GB are free on cpu; use --set"):
        _chosen(5000, "client_state=device")
    with pytest.raises(UserError, match=r"need 4.9 GB, and 1.0 GB are free on the memory"):
        _chosen(5000, "client_state=host")
    # 30 rounds of 100 of 5000 clients: 1 - 0.98^30 = 45 % of them
    with pytest.raises(UserError, match=r"need 2.2 GB, and 1.0 GB are free on the memory"):
        _chosen(5000, "client_state=host", "cohort=100", "rounds=30")
    monkeypatch.setattr(storing.shutil, "disk_usage", lambda path: type("", (), {"free": 1000}))
    with pytest.raises(UserError, match=r"need 4.9 GB, and 0.0 MB are free on the disk of"):
        _chosen(5000, "client_state=file")


def test_a_file_system_without_sparse_files(monkeypatch: pytest.MonkeyPatch) -> None:
    true = os.fstat

    def dense(handle: int) -> object:
        about = true(handle)
        every = {name: getattr(about, name) for name in dir(about) if name.startswith("st_")}
        return SimpleNamespace(**{**every, "st_blocks": about.st_size // 512})

    monkeypatch.setattr(store_module.os, "fstat", dense)
    with pytest.raises(UserError, match=r"has no sparse files, which the state of 50 clients"):
        InFile(state, 50, CPU, None)


def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store_module.tempfile, "TemporaryFile", refuse)
    with pytest.raises(UserError, match=r"Cannot keep the clients' state in a file in .*Read-only"):
        InFile(state, 50, CPU, None)


def test_a_full_disk_ends_the_run_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was recorded before stays, and the run goes on from it to the same result."""
    words = ["client_state=file", "clients=4", "rounds=3", "cohort=2", "local_steps=2"]
    words += ["method=pfedbayes", "hidden=5", "evaluate_draws=2", "device=cpu"]
    experiment = resolve(None, {}, words)
    expected = rounds.train(experiment, tmp_path / "whole")
    write, room = os.pwrite, [3]

    def pwrite(handle: int, content: bytes, place: int) -> int:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, content, place)

    monkeypatch.setattr(store_module.os, "pwrite", pwrite)
    with pytest.raises(UserError, match=r"No space left on device. The rounds before this one"):
        rounds.train(experiment, tmp_path / "run")
    monkeypatch.undo()
    found = rounds.train(experiment, tmp_path / "run", resume=True)
    assert found.summary["metrics"] == expected.summary["metrics"]
    assert_same_tree(found.setup.clients.private, expected.setup.clients.private, rtol=0, atol=0)


def test_runs_do_not_depend_on_the_store() -> None:
    words = ["clients=4", "rounds=2", "cohort=2", "local_steps=2", "hidden=5", "validation=0.2"]
    words += ["evaluate_draws=2", "device=cpu"]
    found = [
        rounds.train(resolve(None, {}, [*words, f"client_state={where}"])).summary
        for where in ("device", "host", "file")
    ]
    for name in ("metrics", "coreset", "calibration"):
        assert found[0][name] == found[1][name] == found[2][name]
