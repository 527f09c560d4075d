"""The run folder: atomic writes, refusals, resuming from any half-written state, the summary."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from saved_state import Stacked

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.settings.config import resolve, to_dict
from corefed.settings.run import Experiment
from corefed.training import checkpoint, record, rounds, state_file, summaries
from corefed.training.checkpoint import Checkpoints
from corefed.training.record import Folder

SERVERS = [{"v": torch.arange(4.0)}, {"v": -torch.arange(4.0)}]
PRIVATE = {"q": torch.randn(3, 4), "step": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)}


@pytest.fixture
def experiment() -> Experiment:
    return resolve(flags={"method": "pfedbayes", "seeds": "0,1", "rounds": 9})


def line(round_: int, **more: Any) -> dict[str, Any]:
    return {
        "round": round_, "loss": [1.0, 2.0], "examples": [10, 20], "bytes_up": [3, 3],
        "bytes_down": [4, 4], "seconds": 0.5, "coreset": {}, "peak_memory_mb": 7.0, **more,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, experiment: Experiment) -> Folder:
    """A run after three rounds, its checkpoint of the second."""
    one = Folder(tmp_path / "run")
    one.create(experiment)
    one.append(line(1))
    one.append(line(2))
    save(one, experiment)
    one.append(line(3))
    return one


def save(folder: Folder, experiment: Experiment, round_: int = 2) -> None:
    folder.checkpoint(to_dict(experiment), round_, SERVERS, range(3), Stacked(PRIVATE).take)


def test_resume_gives_back_every_bit(folder: Folder, experiment: Experiment) -> None:
    lines, state = folder.resume(experiment)
    assert [each["round"] for each in lines] == [1, 2]  # the third was not in the checkpoint
    assert (folder.path / record.ROUNDS).read_text().count("\n") == 2
    assert state is not None
    fresh = Stacked({k: torch.zeros_like(v) for k, v in PRIVATE.items()})
    servers = checkpoint.restore(state, SERVERS, fresh)
    assert all(torch.equal(a["v"], b["v"]) for a, b in zip(servers, SERVERS, strict=True))
    assert all(torch.equal(fresh.private[k], PRIVATE[k]) for k in PRIVATE)
    assert fresh.private["step"].dtype == torch.float64


@pytest.mark.parametrize(
    "tail", [b'{"round": 3', b'{"round": 3}', b"\x00\x00\n", b'{"round": 9}\n']
)
def test_a_half_written_line_is_dropped(
    folder: Folder, experiment: Experiment, tail: bytes
) -> None:
    lines, _ = folder.resume(experiment)
    whole = (folder.path / record.ROUNDS).read_bytes()
    (folder.path / record.ROUNDS).write_bytes(whole + tail)
    assert folder.resume(experiment)[0] == lines
    assert (folder.path / record.ROUNDS).read_bytes() == whole


def test_a_run_without_checkpoint_starts_again(folder: Folder, experiment: Experiment) -> None:
    (folder.path / record.STATE).unlink()
    assert folder.resume(experiment) == ([], None)


def test_missing_rounds_are_refused(folder: Folder, experiment: Experiment) -> None:
    (folder.path / record.ROUNDS).write_text(json.dumps(line(1)) + "\n")
    with pytest.raises(UserError, match="has 1 whole rounds but the checkpoint is of round 2"):
        folder.resume(experiment)


def test_every_truncated_checkpoint_is_refused(folder: Folder, experiment: Experiment) -> None:
    """Whichever of its files it is, and before anything else is changed."""
    rounds = (folder.path / record.ROUNDS).read_bytes()
    for path in (folder.path / "checkpoint").iterdir():
        content = path.read_bytes()
        for length in [*range(0, len(content), 37), len(content) - 2]:
            path.write_bytes(content[:length])
            with pytest.raises(UserError, match=r"truncated or damaged .* cannot be resumed"):
                folder.resume(experiment)
        path.write_bytes(content)
    assert (folder.path / record.ROUNDS).read_bytes() == rounds
    assert folder.resume(experiment)[1] is not None


def test_another_config_is_refused_by_key(folder: Folder) -> None:
    other = resolve(flags={"method": "pfedbayes", "seeds": "0,1", "rounds": 9, "zeta": 3.0})
    with pytest.raises(UserError, match=r"another experiment: zeta \(1.0 there, 3.0 here\)"):
        folder.resume(other)


@pytest.mark.parametrize("change", [{"version": "9.9.9"}, {"schema": 99}])
def test_another_version_is_refused(
    folder: Folder, experiment: Experiment, change: dict[str, Any]
) -> None:
    path = folder.path / record.STATE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"was written by corefed .* and this is"):
        folder.resume(experiment)


def test_a_checkpoint_in_one_file_is_of_another_version(
    folder: Folder, experiment: Experiment
) -> None:
    (folder.path / record.STATE).unlink()
    old = folder.path / "checkpoint" / state_file.NAME
    content = state_file.encode(to_dict(experiment), 2, SERVERS, PRIVATE)
    old.write_bytes(content)
    with pytest.raises(UserError, match=r"\(checkpoint schema 2\) and this is .* \(schema 4\)"):
        folder.resume(experiment)
    for length in (0, 7, 100):
        old.write_bytes(content[:length])
        with pytest.raises(UserError, match="truncated or damaged"):
            folder.resume(experiment)


def test_another_file_of_the_same_length_is_refused(folder: Folder, experiment: Experiment) -> None:
    (path,) = (folder.path / "checkpoint").glob("*-000.safetensors")
    rounds = (folder.path / record.ROUNDS).read_bytes()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="its content is not what was written"):
        folder.resume(experiment, lambda state: [*state.pieces()] and None)
    assert (folder.path / record.ROUNDS).read_bytes() == rounds


@pytest.mark.parametrize(
    "other",
    [
        {**PRIVATE, "q": torch.zeros(3, 5)},
        {**PRIVATE, "q": torch.zeros(3, 4, dtype=torch.float64)},
        {**PRIVATE, "more": torch.zeros(3)},
        {k: v[:2] for k, v in PRIVATE.items()},
    ],
)
def test_state_of_other_data_is_refused(
    folder: Folder, experiment: Experiment, other: Tree
) -> None:
    _, state = folder.resume(experiment)
    assert state is not None
    with pytest.raises(UserError, match="the data may have changed"):
        checkpoint.restore(state, SERVERS, Stacked(other))
    with pytest.raises(UserError, match="the data may have changed"):
        checkpoint.restore(state, [{"v": torch.zeros(3)}] * 2, Stacked(PRIVATE))


def test_rounds_may_grow_but_not_shrink(folder: Folder) -> None:
    flags = {"method": "pfedbayes", "seeds": "0,1", "planned_rounds": 9}
    assert len(folder.resume(resolve(flags=flags | {"rounds": 99}))[0]) == 2
    assert resolve(folder.path / record.EXPERIMENT).run.rounds == 99
    with pytest.raises(UserError, match="stopped after round 2, before an evaluation"):
        folder.resume(resolve(flags=flags | {"rounds": 2}))
    with pytest.raises(UserError, match="has 2 rounds already"):
        folder.resume(resolve(flags=flags | {"rounds": 1}))


def test_the_summary_of_a_shorter_run_does_not_outlive_it(
    folder: Folder, experiment: Experiment
) -> None:
    folder.finish({})
    folder.resume(experiment)
    assert not (folder.path / record.SUMMARY).exists()


@pytest.mark.parametrize("name", [record.EXPERIMENT, record.ROUNDS, record.SUMMARY, record.STATE])
def test_a_folder_with_any_trace_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"is not empty, it has {name}; choose another"):
        Folder(tmp_path).refuse_existing()


def break_writes(monkeypatch: pytest.MonkeyPatch, code: int, after: int = 10) -> None:
    """Every write puts `after` bytes on the disk and then fails, as a full disk does."""
    write = os.write

    def fail(handle: int, content: Any) -> int:
        write(handle, bytes(content)[:after])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(record.os, "write", fail)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("stage", ["append", "checkpoint", "finish", "resume"])
def test_a_failing_disk_leaves_the_run_as_it_was(
    folder: Folder,
    experiment: Experiment,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    stage: str,
) -> None:
    folder.resume(experiment)
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    calls = {
        "append": lambda: folder.append(line(3)),
        "checkpoint": lambda: save(folder, experiment, 3),
        "finish": lambda: folder.finish({}),
        "resume": lambda: folder.resume(experiment),
    }
    with monkeypatch.context() as patch:
        break_writes(patch, code)
        with pytest.raises(UserError, match=f"Cannot write into .*{os.strerror(code)}.*(kept|was)"):
            calls[stage]()
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before
    assert len(folder.resume(experiment)[0]) == 2


def test_a_folder_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_writes(monkeypatch, errno.ENOSPC)
    with pytest.raises(UserError, match=r"No space left on device\. Nothing was written"):
        Folder(tmp_path / "a" / "b").create(experiment)
    assert list(tmp_path.iterdir()) == []


def test_short_writes_are_completed(
    folder: Folder, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """os.write may take less than it is given (signals, 2 GiB at a time)."""
    write = os.write
    monkeypatch.setattr(record.os, "write", lambda handle, content: write(handle, content[:1000]))
    save(folder, experiment)
    assert folder.resume(experiment)[1] is not None


def test_summary_by_hand(experiment: Experiment) -> None:
    lines = [
        line(1, metrics={"personal_accuracy": [0.9, 0.9]}),
        line(2, metrics={"personal_accuracy": [0.5, 0.7]}, evaluate_seconds=1.0,
             coreset={"held_out_error": [0.1, 0.3], "age": [1.0, None]}),
    ]  # fmt: skip
    summary = summaries.summarise(to_dict(experiment), lines, {"torch": "x"})
    assert summary["schema"] == 1
    assert summary["rounds"] == 2
    assert summary["seeds"] == [0, 1]
    accuracy = summary["metrics"]["personal_accuracy"]  # the last, not the best
    assert accuracy["per_seed"] == [0.5, 0.7]
    assert accuracy["mean"] == pytest.approx(0.6)
    assert accuracy["std"] == pytest.approx(0.02**0.5)  # divisor seeds - 1
    assert summary["coreset"] == {"fraction": 1.0, "held_out_error": pytest.approx(0.2)}
    assert summary["cost"]["examples_processed"] == summary["cost"]["passes"] == 60
    assert summary["cost"]["passes_complete"]
    assert summary["overconfidence"] == {}
    assert summary["cost"]["bytes_up"] == 12
    assert summary["cost"]["bytes_down"] == 16
    assert summary["cost"]["seconds"] == 1.0
    assert summary["cost"]["seconds_per_round"] == 0.5


def test_a_single_seed_has_no_spread() -> None:
    assert summaries.over_seeds([0.5]) == {"mean": 0.5, "std": 0.0, "per_seed": [0.5]}
    assert math.isnan(summaries.over_seeds([0.5, math.nan])["std"])


def test_an_unfinished_run_can_be_read(folder: Folder) -> None:
    summary, lines = record.read(folder.path)
    assert summary["rounds"] == len(lines) == 3
    assert summary["config"]["rounds"] == 9


@pytest.mark.parametrize("content", ["{", '{"schema": 2}', "[]"])
def test_a_damaged_summary_is_refused(folder: Folder, content: str) -> None:
    (folder.path / record.SUMMARY).write_text(content)
    with pytest.raises(UserError, match=r"damaged|schema"):
        record.read(folder.path)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        record.read(tmp_path)
    with pytest.raises(UserError, match="holds no run to resume"):
        Folder(tmp_path).refuse_missing()


def test_default_folders_are_free_and_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = record.default_folder("image-folder:/a b/c", "pfedbayes")
    first.mkdir(parents=True)
    assert first.parent == Path("runs")
    assert first.name.startswith("image-folder-a-b-c-pfedbayes-")
    assert not record.default_folder("image-folder:/a b/c", "pfedbayes").exists()


def test_changed_settings_are_refused_unless_the_digest_is_removed(
    folder: Folder, experiment: Experiment
) -> None:
    """The digest finds a change; who takes its line out says that the change is wanted."""
    path = folder.path / record.EXPERIMENT
    assert resolve(record.settings_file(folder.path)) == experiment
    first, *rest = path.read_text().splitlines(keepends=True)
    assert first.startswith("# sha256: ")
    changed = "".join(rest).replace("evaluate_draws = ", "evaluate_draws = 1")
    path.write_text(first + changed)
    with pytest.raises(UserError, match="was changed or damaged after the run wrote it"):
        record.settings_file(folder.path)
    path.write_text(changed)
    assert resolve(record.settings_file(folder.path)) != experiment


def test_a_finished_run_that_lost_lines_is_refused(folder: Folder, experiment: Experiment) -> None:
    folder.finish(summaries.summarise(to_dict(experiment), [line(t) for t in (1, 2, 3)], {}))
    path = folder.path / record.ROUNDS
    whole = path.read_bytes()
    record.read(folder.path)
    path.write_bytes(whole[: whole.index(b"\n") + 20])
    with pytest.raises(UserError, match=r"rounds.jsonl has 1 whole lines and the run has 3 rounds"):
        record.read(folder.path)


def test_a_resumed_run_goes_on_behind_a_damaged_checkpoint(
    folder: Folder, experiment: Experiment, capsys: pytest.CaptureFixture[str]
) -> None:
    """`Folder.checkpoint`, which a federation's server calls, keeps the one before."""
    folder.checkpoint(to_dict(experiment), 3, SERVERS)
    (newest,) = (folder.path / "checkpoint").glob("000002-server.safetensors")
    content = newest.read_bytes()
    newest.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    lines, state = folder.resume(experiment)
    assert state is not None and state.round == len(lines) == 2
    assert "is truncated or damaged" in capsys.readouterr().err
    assert folder.resume(experiment)[1] is not None
    assert capsys.readouterr().err == ""


def test_lines_are_on_the_disk_before_a_checkpoint_of_them(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint they are of no use after a power failure, so rounds do not wait."""
    flushed: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flushed.append)
        folder.append({"round": 3}, flush=False)
        assert not flushed
        folder.append({"round": 4})
        folder.flush()
        assert len(flushed) == 2
    events: list[str] = []
    for kind, name in ((Folder, "append"), (Folder, "flush"), (Checkpoints, "save")):
        monkeypatch.setattr(kind, name, _told(events, name, getattr(kind, name)))
    flags = {"data": "digits", "rounds": 3, "local_steps": 1, "clients": 3}
    rounds.train(resolve(None, {**flags, "checkpoint_every": 2}), tmp_path / "other")
    assert events == ["append", "append", "flush", "save", "append", "flush", "save"]


def _told(events: list[str], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def method(*given: Any, **named: Any) -> Any:
        events.append(name)
        return own(*given, **named)

    return method
