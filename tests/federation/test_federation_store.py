"""A client's private state: every bit back, the right one for each round, whole after any crash."""

from __future__ import annotations

import errno
import json
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.federation import digest
from corefed.federation.store import Store


def tree(number: int) -> Tree:
    """A state that tells which one it is, in every kind a method may use."""
    generator = torch.Generator().manual_seed(number)
    return {
        "q": torch.randn(1, 2, 33, generator=generator),
        "half": torch.randn(1, 5, generator=generator).to(torch.bfloat16),
        "step": torch.tensor([number], dtype=torch.int64),
        "chosen": torch.rand(1, 7, generator=generator) > 0.5,
    }


def same(found: Tree | None, wanted: Tree) -> bool:
    return (
        found is not None
        and found.keys() == wanted.keys()
        and all(found[k].dtype == v.dtype and torch.equal(found[k], v) for k, v in wanted.items())
    )


def names(store: Store, run: str = "a") -> list[str]:
    return sorted(path.name for path in (store.path / run).iterdir())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "state")


# --- what comes back ------------------------------------------------------------------------------

ODD: dict[str, Tensor] = {
    "nan": torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]]),
    "none": torch.zeros(1, 0),
    "scalar": torch.tensor(3.0, dtype=torch.float64),
    "turned": torch.arange(6.0).reshape(1, 2, 3).transpose(1, 2),
    "large": torch.tensor([[2**62 + 1]]),
}


def test_every_bit_comes_back(store: Store) -> None:
    shared = torch.arange(4.0)
    odd = {**ODD, "first": shared[None, :2], "whole": shared[None]}  # share memory
    store.save("a", 1, odd)
    found = Store(store.path).load("a", 1)
    assert found is not None
    assert digest.hash_tree(found) == digest.hash_tree(
        odd
    )  # torch.equal would not take NaN for NaN
    assert {k: (v.dtype, v.shape) for k, v in found.items()} == {
        k: (v.dtype, v.shape) for k, v in odd.items()
    }


def test_an_empty_state_is_a_state(store: Store) -> None:
    store.save("a", 1, {})
    assert store.load("a", 1) == {}
    assert store.load("a", 0) is None


def test_digests_tell_trees_apart() -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
    others = [
        {"a": torch.zeros(3, 2), "b": torch.ones(1)},
        {"a": torch.zeros(2, 3), "c": torch.ones(1)},
        {"a": torch.zeros(2, 3, dtype=torch.int32), "b": torch.ones(1)},
        {"a": -torch.zeros(2, 3), "b": torch.ones(1)},
        {"b": torch.ones(1)},
    ]
    found = {digest.hash_tree(each) for each in (one, *others)}
    assert len(found) == 1 + len(others)
    assert digest.hash_tree(dict(reversed(one.items()))) == digest.hash_tree(one)
    assert digest.hash_tree(one, "a", "bc") != digest.hash_tree(one, "ab", "c")


def test_the_state_of_a_round_is_the_newest_that_is_not_later(store: Store) -> None:
    assert store.load("a", 0) is None
    store.save("a", 3, tree(3))  # first asked in round 2
    store.save("a", 6, tree(6))  # and then not before round 5
    assert store.load("a", 2) is None
    assert all(same(store.load("a", t), tree(3)) for t in (3, 4, 5))
    assert all(same(store.load("a", t), tree(6)) for t in (6, 7, 100))


def test_two_states_are_kept(store: Store) -> None:
    store.claim("a", "x", "d")
    for t in range(12):  # past 9, where names no longer sort as numbers do
        assert same(store.load("a", t), tree(t)) or t == 0
        store.save("a", t + 1, tree(t + 1))
    assert names(store) == ["about.json", "round-11.safetensors", "round-12.safetensors"]


def test_a_round_asked_again_gets_the_same_state_and_replaces_its_answer(store: Store) -> None:
    for t in (1, 2, 3):
        store.save("a", t, tree(t))
    assert same(store.load("a", 2), tree(2))
    store.save("a", 3, tree(30))
    assert same(store.load("a", 3), tree(30))
    assert same(store.load("a", 2), tree(2))


def test_a_future_that_the_server_went_back_from_is_removed(store: Store) -> None:
    store.save("a", 2, tree(2))
    store.save("a", 6, tree(6))
    assert same(store.load("a", 3), tree(2))
    store.save("a", 4, tree(4))
    assert same(store.load("a", 6), tree(4))  # this client sat out rounds 4 and 5
    assert names(store) == ["round-2.safetensors", "round-4.safetensors"]


def test_a_state_that_is_gone_is_not_taken_for_none(store: Store) -> None:
    for t in range(1, 6):
        store.save("a", t, tree(t))
    with pytest.raises(UserError, match=r"of round 3 .* not kept any more, only that of 4 and 5"):
        store.load("a", 3)
    assert store.load("a", 0) is None  # a run that begins anew


def test_the_first_round_is_remembered(store: Store) -> None:
    for t in (5, 6, 7, 8):
        store.save("a", t, tree(t))
    assert store.load("a", 4) is None  # it trained in round 4 for the first time
    with pytest.raises(UserError, match="not kept any more"):
        store.load("a", 5)


def test_runs_do_not_touch_each_other(store: Store) -> None:
    store.save("a", 1, tree(1))
    store.save("b", 9, tree(9))
    assert same(store.load("a", 9), tree(1)) and same(store.load("b", 9), tree(9))


@pytest.mark.parametrize(
    "run",
    ["../x", "/etc", "", ".", "..", "a/b", "a\\b", "A", "-a", "a\n", "a\0", "a" * 64, "ä", "a_b"],
)
def test_names_of_runs_never_leave_the_folder(store: Store, run: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.claim(run, "x", "d"),
        lambda: store.load(run, 0),
        lambda: store.save(run, 1, {}),
        lambda: store.upload(run, 0, "q"),
        lambda: store.keep_upload(run, 0, "q", {}, {}),
    ]
    for call in calls:
        with pytest.raises(UserError, match="is no name for a run"):
            call()
    assert not store.path.exists()
    store.save("a" * 63, 1, {})


def test_rounds_are_not_negative(store: Store) -> None:
    with pytest.raises(UserError, match="There is no round -4"):
        store.save("a", -4, {})


def test_only_the_owner_can_read(store: Store) -> None:
    before = os.umask(0)
    try:
        store.claim("a", "x", "d")
        store.save("a", 1, tree(1))
        store.keep_upload("a", 0, "q", {}, tree(1))
    finally:
        os.umask(before)
    paths = [store.path, *store.path.rglob("*")]
    assert len(paths) == 5
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    (store.path / "a").chmod(0o755)  # copied from elsewhere
    store.save("a", 2, tree(2))
    assert stat.S_IMODE((store.path / "a").stat().st_mode) == 0o700


# --- what a state belongs to ----------------------------------------------------------------------


def test_a_claim_holds(store: Store) -> None:
    store.claim("a", "x", "d", name="north")
    store.claim("a", "x", "d", name="north")
    Store(store.path).claim("a", "x", "d", name="north")
    store.claim("b", "y", "e", name="north")


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        (("y", "d"), {"name": "north"}, "has other settings .* start a new run"),
        (("x", "e"), {"name": "north"}, "other training data.*put the data back as they were, or"),
        (("x", "d"), {"name": "south"}, "the state of another client"),
        (("x", "d"), {"name": "north", "agreement": "z"}, "another agreement about classes"),
    ],
)
def test_a_run_cannot_change_under_its_state(
    store: Store, arguments: tuple[str, str], more: dict[str, str], words: str
) -> None:
    store.claim("a", "x", "d", name="north")
    before = (store.path / "a" / "about.json").read_bytes()
    with pytest.raises(UserError, match=words):
        store.claim("a", *arguments, **more)
    assert (store.path / "a" / "about.json").read_bytes() == before


def test_another_protocol_is_refused(store: Store) -> None:
    store.claim("a", "x", "d")
    path = store.path / "a" / "about.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "protocol": 0}))
    with pytest.raises(UserError, match="another protocol"):
        store.claim("a", "x", "d")


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff"])
def test_states_of_unknown_origin_are_refused(store: Store, content: bytes | None) -> None:
    store.claim("a", "x", "d")
    store.save("a", 1, tree(1))
    path = store.path / "a" / "about.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError, match=r"about.json is missing or damaged.*remove .*state/a"):
        store.claim("a", "x", "d")


# --- uploads --------------------------------------------------------------------------------------


def test_an_upload_answers_its_own_question_only(store: Store) -> None:
    assert store.upload("a", 3, "q") is None
    figures = {"examples": 7, "seconds": 0.25, "coreset": {"error": None}}
    store.keep_upload("a", 3, "q", figures, tree(3))
    found = Store(store.path).upload("a", 3, "q")
    assert found is not None and found[0] == figures and same(found[1], tree(3))
    assert store.upload("a", 3, "other") is None
    assert store.upload("a", 2, "q") is None
    for t in (4, 5):
        store.keep_upload("a", t, "q", {}, tree(t))
    assert names(store) == ["upload-4.safetensors", "upload-5.safetensors"]


def test_a_damaged_upload_is_not_drawn_again_in_silence(store: Store) -> None:
    store.keep_upload("a", 3, "q", {}, tree(3))
    damage(store.path / "a" / "upload-3.safetensors")
    with pytest.raises(UserError, match="costs privacy a second time"):
        store.upload("a", 3, "q")


# --- damage ---------------------------------------------------------------------------------------


def damage(path: Path, place: int = -3) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def rename_a_tensor(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"'))


def change_the_text(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(rb"\"first\": 0", rb"\"first\": 9"))


def huge_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


HARMS = [damage, cut, empty, rename_a_tensor, change_the_text, huge_header]


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_state_gives_way_to_the_one_before(
    store: Store, harm: Callable[[Path], None]
) -> None:
    store.save("a", 1, tree(1))
    store.save("a", 2, tree(2))
    path = store.path / "a" / "round-2.safetensors"
    before = path.read_bytes()
    harm(path)
    assert path.read_bytes() != before
    assert same(store.load("a", 2), tree(1))
    (note,) = store.notes
    assert "round-2.safetensors is damaged; this client goes on from its state of 1" in note
    store.save("a", 3, tree(3))
    assert same(store.load("a", 2), tree(1))  # it was not counted as one of the two
    assert same(store.load("a", 3), tree(3)) and len(store.notes) == 1


@pytest.mark.parametrize("harm", HARMS)
def test_without_a_whole_state_the_client_stops(store: Store, harm: Callable[[Path], None]) -> None:
    store.save("a", 1, tree(1))
    path = store.path / "a" / "round-1.safetensors"
    harm(path)
    content = path.read_bytes()
    for _ in range(2):
        with pytest.raises(UserError, match=r"round-1.safetensors is damaged .* remove .*state/a"):
            store.load("a", 1)
    assert path.read_bytes() == content


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("mine")
    store = Store(tmp_path / "state")
    with pytest.raises(UserError, match=r"Cannot (read|write)"):
        store.save("a", 1, {})
    with pytest.raises(UserError, match="Cannot read"):
        store.load("a", 1)


# --- full disks and kill -9 -----------------------------------------------------------------------


def snapshot(store: Store) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (store.path / "a").iterdir()}


@pytest.mark.parametrize("kind", ["state", "upload"])
def test_a_full_disk_keeps_the_state_before(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def no_space(handle: int, content: Any) -> int:
        write(handle, bytes(content)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.save("a", 4, tree(4))
    before = snapshot(store)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", no_space)
        if kind == "state":
            words = r"Cannot write into .*: No space left on device\. The state of round 4 is kept"
            with pytest.raises(UserError, match=words):
                store.save("a", 5, tree(5))
        else:
            with pytest.raises(UserError, match="No space left on device"):
                store.keep_upload("a", 4, "q", {}, tree(5))
        with pytest.raises(UserError, match=r"No space left on device\. No state is kept yet"):
            store.save("b", 1, tree(1))
        with pytest.raises(UserError, match="No space left on device"):
            store.claim("c", "x", "d")
    assert snapshot(store) == before
    store.save("a", 5, tree(5))
    store.claim("c", "x", "d")
    assert same(store.load("a", 5), tree(5))


def test_a_limit_of_the_system_keeps_the_state_before(store: Store) -> None:
    """The same by the kernel itself: no file of this process may grow past 600 bytes."""
    store.save("a", 4, tree(4))
    before = snapshot(store)
    assert len(before["round-4.safetensors"]) > 600
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(UserError, match=r"File too large\. The state of round 4 is kept"):
            store.save("a", 5, tree(5))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert snapshot(store) == before


class Killed(BaseException):
    """What a process that is killed does next: nothing."""


STEPS = ("open", "write", "fsync", "replace", "unlink", "mkdir", "chmod")


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The `step`-th change to the disk is half done, and none after it happens at all."""
    done: list[str] = []

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **more: Any) -> Any:
            done.append(name)
            if len(done) == step and name == "write":
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            if len(done) >= step:
                raise Killed
            return real(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(os, name, watched(name))
        yield done


def every_kill(
    act: Callable[[], None], begin: Callable[[], None], check: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> list[str]:  # fmt: skip
    """Kill `act` at each of its steps, from the same beginning; the steps of the whole act."""
    for step in range(1, 1000):
        begin()
        with killed_at(step, monkeypatch) as done:
            try:
                act()
            except Killed:
                killed = True
            else:
                killed = False
        check()
        if not killed:
            return done
    raise AssertionError("it never ends")


def clear(store: Store) -> None:
    for path in sorted(store.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    if store.path.exists():
        store.path.rmdir()


def test_kill_9_at_every_step_of_a_save(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        clear(store)
        store.claim("a", "x", "d")
        for t in (2, 3, 4):
            store.save("a", t, tree(t))

    def check() -> None:
        fresh = Store(store.path)
        fresh.claim("a", "x", "d")
        assert same(fresh.load("a", 4), tree(4))  # what round 4 is asked with once more
        assert same(fresh.load("a", 5), tree(4)) or same(fresh.load("a", 5), tree(5))
        fresh.save("a", 5, tree(5))
        assert names(fresh) == ["about.json", "round-4.safetensors", "round-5.safetensors"]
        assert same(fresh.load("a", 5), tree(5)) and fresh.notes == []

    done = every_kill(lambda: store.save("a", 5, tree(5)), begin, check, monkeypatch)
    assert done == ["open", "write", "fsync", "replace", "open", "fsync", "unlink"]


def test_kill_9_while_going_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never may the abandoned state of 6 be found beside the new one of 4."""

    def begin() -> None:
        clear(store)
        store.claim("a", "x", "d")
        store.save("a", 2, tree(2))
        store.save("a", 6, tree(6))

    def check() -> None:
        fresh = Store(store.path)
        assert same(fresh.load("a", 3), tree(2))
        if same(fresh.load("a", 4), tree(4)):
            assert same(fresh.load("a", 6), tree(4))

    done = every_kill(lambda: store.save("a", 4, tree(4)), begin, check, monkeypatch)
    assert done[0] == "unlink" and done.count("replace") == 1


def test_kill_9_at_the_beginning_of_a_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def act() -> None:
        store.claim("a", "x", "d")
        store.save("a", 1, tree(1))
        store.keep_upload("a", 0, "q", {"n": 1}, tree(1))

    def check() -> None:
        fresh = Store(store.path)
        fresh.claim("a", "x", "d")
        assert fresh.load("a", 0) is None
        kept, sent = fresh.load("a", 1), fresh.upload("a", 0, "q")
        assert kept is None or same(kept, tree(1))
        assert sent is None or (kept is not None and same(sent[1], tree(1)))

    done = every_kill(act, lambda: clear(store), check, monkeypatch)
    assert done.count("mkdir") == 2 and done.count("replace") == 3
