"""A client's private state on its own disk, which outlives the process, the node and the run.

    RUN/about.json              what the state belongs to: experiment, data, protocol, client
    RUN/round-T.safetensors     the state after T rounds, with which round T (counted from 0) begins
    RUN/upload-T.safetensors    what was sent in round T, where noise must not be drawn twice
    RUN/join.json, asked.json   what the client was asked before (`asked.py`)
    RUN/speed.json              how fast it was, where a run has a deadline (`own_speed.py`)

Two of each kind are kept: a server that was killed asks its last round again, and gets the same
answer from the state before it. Files are replaced as a whole (`base/files.py`), and a state is
removed only when a later one is safe, so kill -9 costs a round at most. Only their owner can read
files and folders.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from corefed.base import digests, files, tensor_file
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.federation import digest
from corefed.federation.protocol import VERSION, check_run

ABOUT, STATE, UPLOAD, DAMAGED = "about.json", "round", "upload", "damaged"
KEPT = 2
"""Files of each kind: the newest, and the one before it for a round that is asked again."""

_CHANGED = {
    "protocol": "was begun by a version of corefed that speaks another protocol; finish it with "
    "that version, or start a new run",
    "client": "has the state of another client in this folder; give each client a folder of its "
    "own",
    "experiment": "has other settings than when this client began it; start a new run under "
    "another name",
    "agreement": "has another agreement about classes and scale than when this client began it; "
    "start a new run under another name",
    "data": "was begun with other training data, and a client's state refers to their rows; put "
    "the data back as they were, or start a new run",
}


class _DamagedError(Exception):
    """A file that is not what was written, and why."""


class Store:
    """The private state of all runs of one client, in the folder `path`.

    `notes` are sentences for the client's operator about what was found and mended.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []

    def claim(
        self,
        run: str,
        fingerprint: str,
        data_fingerprint: str | None,
        *,
        name: str = "",
        agreement: str = "",
    ) -> None:
        """Record what a run's state belongs to; refuse it if that has changed.

        Without a fingerprint of the data all else is compared, before the data are read.
        """
        folder = self.folder(run)
        about = {
            "protocol": VERSION,
            "client": name,
            "experiment": fingerprint,
            "agreement": agreement,
            "data": data_fingerprint,
        }
        kept = self._about(folder)
        for key, words in _CHANGED.items():
            if kept is None or (key == "data" and None in (kept[key], about[key])):
                continue
            if kept.get(key) != about[key]:
                raise UserError(f"Run {run!r} {words}. Its state is in {folder}.")
        if kept is None or (kept["data"] is None and data_fingerprint is not None):
            with _writing(folder, "Nothing of this run is kept yet"):
                self._make(folder)
                files.replace(folder / ABOUT, digests.to_json(about), 0o600)

    def load(self, run: str, round_: int) -> Tree | None:
        """The state with which round `round_` begins; None for a client that has not trained yet.

        A state after that round is never taken: it would give another answer. A damaged state is
        put aside for the one before it, with a note.
        """
        folder = self.folder(run)
        numbers = _numbers(folder, STATE)
        damaged: list[Path] = []
        for number in (one for one in reversed(numbers) if one <= round_):
            path = _path(folder, STATE, number)
            try:
                _, tree = _decode(_read(path))
            except _DamagedError as error:
                damaged.append(path)
                reason = str(error)
                continue
            for one in damaged:
                self._put_aside(one, number)
            return tree
        if damaged:
            raise UserError(
                f"{damaged[0]} is damaged ({reason}), and no state before it is whole; put back a "
                f"copy, or remove {folder} to let this client begin the run again."
            )
        if numbers and _first(folder, numbers) < round_:
            raise UserError(
                f"The state of round {round_} of run {run!r} is not kept any more, only that of "
                f"{' and '.join(map(str, numbers))}; go on from a later checkpoint of the server, "
                "or start a new run."
            )
        return None

    def save(self, run: str, round_: int, private: Tree) -> None:
        """Keep the state with which round `round_` begins, and one before it.

        States of later rounds are removed: the server has gone back behind them.
        """
        folder = self.folder(run)
        before = [number for number in _numbers(folder, STATE) if number < round_]
        first = _first(folder, before) if before else round_ - 1
        kept = f"The state of round {before[-1]} is kept" if before else "No state is kept yet"
        with _writing(folder, kept):
            self._make(folder)
            self._rotate(folder, STATE, round_, _encode(private, {"first": first}))

    def upload(self, run: str, round_: int, question: str) -> tuple[dict[str, Any], Tree] | None:
        """Numbers and tree that answered this very question (a digest of it) before, if any."""
        path = _path(self.folder(run), UPLOAD, round_)
        if not path.exists():
            return None
        try:
            about, tree = _decode(_read(path))
        except _DamagedError as error:
            raise UserError(
                f"{path} is damaged ({error}); remove it to let this client answer round {round_} "
                "again with new noise, which costs privacy a second time."
            ) from error
        return (about["figures"], tree) if about["question"] == question else None

    def keep_upload(
        self, run: str, round_: int, question: str, figures: Mapping[str, Any], tree: Tree
    ) -> None:
        """Keep an answer that must not be made twice.

        Call it after `save`: the question may come again at any moment, and is then answered from
        here without another `save`.
        """
        folder = self.folder(run)
        with _writing(folder, "The state is kept, the upload is not"):
            self._make(folder)
            about = {"question": question, "figures": dict(figures)}
            self._rotate(folder, UPLOAD, round_, _encode(tree, about))

    def folder(self, run: str) -> Path:
        """The name comes from the server, so it is checked before it becomes a path."""
        return self.path / check_run(run)

    def _make(self, folder: Path) -> None:
        for one in (self.path, folder):
            if not one.exists():
                one.mkdir(mode=0o700, parents=True)
                files.flush(one.parent)
            elif one.stat().st_mode & 0o077:  # copied from elsewhere
                one.chmod(0o700)

    def _about(self, folder: Path) -> dict[str, Any] | None:
        path = folder / ABOUT
        if not path.exists() and not _numbers(folder, STATE):
            return None
        try:
            about = digests.from_json(_read(path), path)
            if "data" in about:
                return about
        except (ValueError, _DamagedError):
            pass
        raise UserError(
            f"{path} is missing or damaged, so that it is not known what the state beside it "
            f"belongs to; put back a copy, or remove {folder} to begin the run again."
        )

    def _rotate(self, folder: Path, kind: str, number: int, content: bytes) -> None:
        """Abandoned numbers go first, old ones last: no crash leaves a wrong newer file."""
        for later in (one for one in _numbers(folder, kind) if one > number):
            _path(folder, kind, later).unlink(missing_ok=True)
        files.replace(_path(folder, kind, number), content, 0o600)
        for old in _numbers(folder, kind)[:-KEPT]:
            _path(folder, kind, old).unlink(missing_ok=True)

    def _put_aside(self, path: Path, number: int) -> None:
        """So that it does not count as one of the states that are kept."""
        with suppress(OSError):
            os.replace(path, path.with_name(path.name.replace(STATE, DAMAGED, 1)))
        self.notes.append(f"{path} is damaged; this client goes on from its state of {number}.")


def _path(folder: Path, kind: str, number: int) -> Path:
    if number < 0:
        raise UserError(f"There is no round {number}; rounds are counted from 0.")
    return folder / f"{kind}-{number}.safetensors"


def _numbers(folder: Path, kind: str) -> list[int]:
    """Of the files of a kind, ascending."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read the folder {folder}: {error.strerror}.") from error
    found = (re.fullmatch(rf"{kind}-(\d+)\.safetensors", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def _first(folder: Path, numbers: list[int]) -> int:
    """The first round that the client trained in, as its states record it."""
    for number in reversed(numbers):
        with suppress(_DamagedError):
            about, _ = _decode(_read(_path(folder, STATE, number)))
            return int(about["first"])
    return 0


def _encode(tree: Tree, about: Mapping[str, Any]) -> bytes:
    return tensor_file.save(tree, {"corefed": json.dumps(dict(about))})


def _decode(content: bytes) -> tuple[dict[str, Any], Tree]:
    """Every bit of what was encoded, or a refusal."""
    try:
        # Loaded tensors share the file's bytes, whose alignment can change a sum's last bit.
        tree = {k: v.clone() for k, v in tensor_file.load(content, "a client's state").items()}
        metadata = tensor_file.metadata_of(content)
        text = metadata["corefed"]
        if "digest" in metadata and metadata["digest"] != digest.hash_tree(tree, text):
            raise _DamagedError("its content is not what was written")  # of an earlier version
        about: dict[str, Any] = json.loads(text)
    except (ValueError, KeyError, TypeError) as error:
        raise _DamagedError(str(error)) from error
    return about, tree


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _DamagedError("it is missing") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


@contextmanager
def _writing(folder: Path, kept: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"Cannot write into {folder}: {error.strerror}. {kept}.") from error
