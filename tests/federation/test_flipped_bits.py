"""A flipped bit in any file that is read back is found: 1000 of them in each kind of file."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from corefed.base import digests, files, tensor_file
from corefed.base.errors import UserError
from corefed.coreset import coreset
from corefed.coreset.coreset import Coreset, Diagnostics
from corefed.federation import asked, audit, events, joining, store, told
from corefed.federation.operate.run_state import SUBMITTED, read_submission
from corefed.federation.protocol import Agreement, Reply
from corefed.federation.trust.privacy import Ledger
from corefed.settings.config import resolve, to_dict
from corefed.show.tracking import mlflow
from corefed.training import checkpoint, fitted, reach, record, segments, state_file
from corefed.training.search_folder import SearchFolder
from corefed.use import arguments, tuned

FLIPS = 1000
EXPERIMENT = resolve(flags={"method": "pfedbayes", "seeds": "0,1", "rounds": 9})
VALUES = to_dict(EXPERIMENT)
TREE = {"q": torch.arange(12.0).view(4, 3), "n": torch.arange(4)}
LINE = {
    "seconds": 1.5, "examples": [10, 10], "bytes_up": [4, 4], "bytes_down": [4, 4],
    "peak_memory_mb": 3.0, "coreset": {}, "loss": [1e-05, -2.5e-07],
}  # fmt: skip


REACH = reach.Reach(**{name: torch.ones(2, 2) for name in reach.Reach._fields})
REPLY = Reply("train", "run", 1, 0, {"examples": 3}, TREE)


class Kind(NamedTuple):
    name: str  # of the file
    write: Callable[[Path], object]
    read: Callable[[Path], object]  # an error, or what it gives if the file is accepted


def checkpointed(folder: Path) -> None:
    saves = checkpoint.Checkpoints(folder, VALUES, every=1, share=1.0, minutes=1.0)
    saves.mark(range(4))
    saves.save(
        1, [{"v": torch.arange(5.0)}], lambda rows: {k: v[list(rows)] for k, v in TREE.items()}
    )
    saves.close()


def resumed(folder: Path) -> object:
    found = checkpoint.load(folder, VALUES)
    assert found is not None
    return [segments.read_rows(found.folder, each) for each in found.segments]


def audited(folder: Path) -> object:
    found = audit.read(folder)
    if not found:  # a line that has lost its end was never sent
        raise digests.DamagedError(f"{audit.FILE} has lost its last line")
    return found


def lines(folder: Path) -> None:
    for round_ in (1, 2, 3):
        record.Folder(folder).append({"round": round_, **LINE})


def happened(folder: Path) -> object:
    found = events.read(folder / record.EVENTS)
    if any(event["event"] == "damaged" for event in found):
        raise digests.DamagedError("events.jsonl")
    return found


def log(folder: Path) -> None:
    for round_ in range(3):
        events.Log(folder / record.EVENTS)("missing", round_, "alice", "no answer")


def released(folder: Path) -> None:
    for round_ in range(3):
        Ledger(folder / "privacy.json").record("first", round_, 2.0, 1.0)


def kept(folder: Path) -> store.Store:
    found = store.Store(folder)
    found.claim("run", "e", "d", name="alice", agreement="a")
    found.save("run", 1, TREE)
    found.keep_upload("run", 1, "q", {"loss": 2.0}, TREE)
    return found


def small_coreset(folder: Path) -> None:
    d = Diagnostics(**{
        each: {"int": 3, "float": 0.5, "str": "omp", "bool": False}.get(str(kind), ())
        for each, kind in Diagnostics.__annotations__.items()
    })  # fmt: skip
    found = Coreset(torch.arange(3), torch.ones(3), d, torch.ones(2), torch.ones(2))
    files.write_folder(folder, coreset.encode(found).items())


GROUP = "group.safetensors"
AGREEMENT = Agreement((4,), ("no", "yes"), 0, (0.5,), (2.0,))
REPORT = {"schema": 1, "config": {"rounds": 3}, "rungs": [1, 2, 4]}
ABOUT = {"clients": ["a", "b"], "classes": ["x", "y"], "dtype": "<U1", "test_fraction": 0.2}
SUMMARY = {"schema": 1, "config": VALUES, "rounds": 3, "metrics": {"personal_accuracy": 0.9}}
DATA = {"schema": 1, "clients": [[{"name": "a", "train": 10}]], "preparations": [], "notes": []}
STATE = state_file.encode(VALUES, 3, [{"v": torch.arange(5.0)}], TREE)


def replaced(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: files.replace(folder / name, content)


KINDS = [
    Kind("checkpoint/state.json", checkpointed, resumed),
    Kind("checkpoint/000001-server.safetensors", checkpointed, resumed),
    Kind("checkpoint/000001-000.safetensors", checkpointed, resumed),
    Kind("experiment.toml", lambda f: record.Folder(f).create(EXPERIMENT), record.settings_file),
    Kind("rounds.jsonl", lines, lambda f: record.read_lines(f / record.ROUNDS)),
    Kind("summary.json", lambda f: record.Folder(f).finish(SUMMARY), record.read),
    Kind("data.json", replaced(fitted.DATA, digests.to_json(DATA)), fitted.read_data),
    Kind(
        "fitted.safetensors",
        replaced(fitted.MODELS, tensor_file.save(TREE, {"corefed": "{}"})),
        lambda f: fitted.read_tensors(f, fitted.MODELS),
    ),
    Kind(
        "held_out.safetensors",
        lambda f: files.replace_all(f, [(fitted.HELD_OUT, tensor_file.stream(TREE, {}))]),
        lambda f: fitted.read_tensors(f, fitted.HELD_OUT),
    ),
    Kind(reach.FILE, lambda f: reach.keep(f, [REACH]), lambda f: reach.read(f, 1)),
    Kind("search.toml", lambda f: SearchFolder(f).begin(EXPERIMENT, REPORT),
         lambda f: SearchFolder(f).settings_file()),
    Kind("tune.json", lambda f: SearchFolder(f).begin(EXPERIMENT, REPORT),
         lambda f: SearchFolder(f).read()),
    Kind("tune.json", lambda f: tuned.keep(f, REPORT), tuned.read),
    Kind(GROUP, replaced(GROUP, STATE),
         lambda f: state_file.decode((f / GROUP).read_bytes(), VALUES, GROUP)),
    Kind("estimator.json", replaced(arguments.FILE, digests.to_json(ABOUT)), arguments.read_about),
    Kind("coreset.json", small_coreset, coreset.decode),
    Kind("coreset.safetensors", small_coreset, coreset.decode),
    Kind("agreement.json", replaced("agreement.json", joining.encode_agreement(AGREEMENT)),
         lambda f: joining.read_agreement(f / "agreement.json")),
    Kind("events.jsonl", log, happened),
    Kind(SUBMITTED, replaced(SUBMITTED, digests.to_json({"run-id": "71"})),
         lambda f: read_submission(f / SUBMITTED)),
    Kind(told.JOINED, lambda f: told.save(f, told.Told({"alice": 7}, {"alice": 3})), told.load),
    Kind("run/asked.json", lambda f: asked._write(f / "run" / asked.ASKED, {"finished": 3}),
         lambda f: asked.Asked(f / "run")),
    Kind(audit.FILE, lambda f: audit.enter(f, REPLY, 0.5), audited),
    Kind("privacy.json", released, lambda f: Ledger(f / "privacy.json").spent(1e-5)),
    Kind("run/about.json", kept,
         lambda f: store.Store(f).claim("run", "e", "d", name="alice", agreement="a")),
    Kind("run/round-1.safetensors", kept, lambda f: store.Store(f).load("run", 1)),
    Kind("run/upload-1.safetensors", kept, lambda f: store.Store(f).upload("run", 1, "q")),
    Kind("mlflow.json",
         replaced("mlflow.json", digests.to_json({"tracking_uri": "mlruns", "run_id": "1"})),
         mlflow._remembered),
]  # fmt: skip


def bits(size: int) -> Iterator[int]:
    """A thousand at random, and all of the first and the last bytes, which say how to read on."""
    draw = random.Random(7)
    yield from (draw.randrange(8 * size) for _ in range(FLIPS))
    yield from range(8 * min(size, 40))
    yield from range(8 * max(0, size - 4), 8 * size)


def flip(path: Path, bit: int) -> None:
    """In place, which is a hundred times as fast as writing the file."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def refusal(kind: Kind, folder: Path) -> str:
    """Why the file is refused; empty if it is not."""
    try:
        kind.read(folder)
    except (UserError, digests.DamagedError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])
def test_no_flipped_bit_is_accepted(kind: Kind, tmp_path: Path) -> None:
    kind.write(tmp_path)
    path = tmp_path / kind.name
    assert refusal(kind, tmp_path) == ""
    for bit in bits(path.stat().st_size):
        flip(path, bit)
        said = refusal(kind, tmp_path)
        assert path.name in said, f"bit {bit}"
        flip(path, bit)
    assert refusal(kind, tmp_path) == ""
