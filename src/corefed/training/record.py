"""The folder of a run: experiment.toml, rounds.jsonl, checkpoint/, summary.json.

    experiment.toml                 every setting, so that the run can be repeated; written first
    data.json                       what each client has, and how points are prepared
    reach.safetensors               how far the training points reach, see `reach.py`
    rounds.jsonl                    one line per round
    checkpoint/                     the last checkpoint, see `checkpoint.py`
    fitted.safetensors              the models, see `fitted.py`
    held_out.safetensors            their predictions of the test points, see `fitted.py`
    validation.safetensors          and of the validation points, where there are some
    summary.json                    the result; written last, so the run is complete where it exists

Files are replaced whole (temporary file, fsync, rename), except rounds.jsonl, which grows; a
resumed run cuts it back to the rounds of its checkpoint. `summary.json` can be made from
experiment.toml and rounds.jsonl, so that an unfinished run can be read too. Every file, and every
line of rounds.jsonl, has a digest (`base/digests.py`); one that does not match is refused.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.settings import toml
from corefed.settings.config import to_dict, to_toml
from corefed.settings.run import Experiment
from corefed.training import cost
from corefed.training.cost import Line as Line
from corefed.training.kinds import MODELS as MODELS
from corefed.training.kinds import main_model as main_model
from corefed.training.summaries import SCHEMA, summarise

if TYPE_CHECKING:  # a record is read without torch
    from corefed.base.types import Tree
    from corefed.training.checkpoint import Loaded

EXPERIMENT, ROUNDS, SUMMARY = "experiment.toml", "rounds.jsonl", "summary.json"
STATE = "checkpoint/state.json"
EVENTS = "events.jsonl"
"""Of a real federation: which clients were missing, refused or late."""


def default_folder(data: str, method: str) -> Path:
    """runs/<data>-<method>-<time>, a folder that does not exist."""
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{data}-{method}").strip("-")
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 100))]
    return next((path for path in names if not path.exists()), base)


def settings_file(path: Path) -> Path:
    """experiment.toml of a run, which must be there and be what was written."""
    file = path / EXPERIMENT
    try:
        digests.check_toml(file)
    except FileNotFoundError as error:
        raise UserError(f"{path} holds no run of corefed: it has no {EXPERIMENT}.") from error
    except OSError as error:
        raise UserError(f"Cannot read {file}: {error.strerror}.") from error
    except digests.DamagedError as error:
        raise UserError(
            f"{file} was changed or damaged after the run wrote it; put it back as it was and give "
            "other settings by --set. If you changed it on purpose, remove its first line."
        ) from error
    return file


def begun(path: Path) -> bool:
    """Whether the folder has a run, finished or not."""
    return (path / EXPERIMENT).exists()


class Folder:
    """One run's folder. A failing write is a UserError that says what is left."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def refuse_existing(self, hint: str = "") -> None:
        """Two runs must not mix, and a result must not be overwritten."""
        hint = hint or f"choose another --out, or go on with the run by --resume {self.path}"
        files.refuse_existing(self.path, hint, among=(EXPERIMENT, ROUNDS, SUMMARY, STATE))

    def refuse_missing(self) -> None:
        if not begun(self.path):
            raise UserError(f"{self.path} holds no run to resume; start one with --out.")

    def create(self, experiment: Experiment) -> None:
        """Make the folder and write the settings."""
        made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            with self._writing("Nothing was written"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._replace(EXPERIMENT, digests.to_toml(to_toml(experiment)))
        except UserError:
            for path in made:
                with suppress(OSError):
                    path.rmdir()
            raise

    def resume(
        self,
        experiment: Experiment,
        restore: Callable[[Loaded], None] = lambda state: None,
    ) -> tuple[list[Line], Loaded | None]:
        """The lines and the state to resume from; unfinished rounds are cut off.

        `restore` gets the state before any file is changed, so that a damaged one changes none. A
        run that was killed before its first checkpoint starts again.
        """
        from corefed.training.checkpoint import forget, load  # torch takes a second

        self.refuse_missing()
        values = to_dict(experiment)
        state = load(self.path, values)
        if state is not None:
            restore(state)
        lines = self.cut_back(experiment, state.round if state is not None else 0)
        if state is not None:
            forget(self.path, values, "", state.round)  # a damaged one after it
        return lines, state

    def cut_back(self, experiment: Experiment, done: int) -> list[Line]:
        """The lines of the first `done` rounds; what is later is cut off, to go on from there."""
        rounds = experiment.run.rounds
        if done > rounds:
            raise UserError(
                f"{self.path} has {done} rounds already; rounds must be that or more, not {rounds}."
            )
        with self._writing("The run in it is as it was"):
            lines = self._cut(done)
            if done == rounds and "metrics" not in lines[-1]:
                raise UserError(
                    f"{self.path} stopped after round {done}, before an evaluation; ask for more "
                    "rounds."
                )
            # rounds may have grown
            self._replace(EXPERIMENT, digests.to_toml(to_toml(experiment)))
            if done < rounds:
                (self.path / SUMMARY).unlink(missing_ok=True)  # of the run when it was shorter
        return lines

    def append(self, line: Line, *, flush: bool = True) -> None:
        """Add a round; a line that does not fit on the disk is removed.

        Without `flush` it outlives this process, but not a power failure.
        """
        path = self.path / ROUNDS
        size = path.stat().st_size if path.exists() else 0
        with self._writing(f"The rounds before {line['round']} are kept"):
            try:
                with path.open("ab") as file:
                    files.write(file.fileno(), digests.to_line(line), flush=flush)
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)
                raise

    def flush(self) -> None:
        """The lines so far, to the disk."""
        with self._writing("The rounds before are kept"), (self.path / ROUNDS).open("ab") as file:
            os.fsync(file.fileno())

    def checkpoint(
        self,
        values: Mapping[str, object],
        round_: int,
        servers: Sequence[Tree],
        rows: Sequence[int] = (),
        take: Callable[[Sequence[int]], Tree] = lambda rows: {},
    ) -> None:
        """Write a checkpoint at once; if that fails, the previous one is kept.

        `rows` are those of private state that changed since, which `take` gives. The one before it
        is kept too, for the case that the new one is damaged.
        """
        from corefed.training.checkpoint import Checkpoints  # torch takes a second

        saves = Checkpoints(self.path, values, every=1, share=1.0, minutes=1.0, kept=2)
        saves.mark(rows)
        saves.save(round_, servers, take)
        saves.close()

    def keep(self, write: Callable[[Path], None]) -> None:
        """Let `write` add its files to the folder."""
        with self._writing("What was recorded before is kept"):
            write(self.path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self._writing("The rounds and the checkpoint are kept"):
            self._replace(SUMMARY, digests.to_json(summary))

    def _replace(self, name: str, content: bytes) -> None:
        files.replace(self.path / name, content)

    def _cut(self, done: int) -> list[Line]:
        """The first `done` lines of rounds.jsonl; the rest is cut off."""
        path = self.path / ROUNDS
        lines, end = read_lines(path, done)
        if len(lines) < done:
            raise UserError(
                f"{path} has {len(lines)} whole rounds but the checkpoint is of round {done}; "
                "the folder is damaged, start a new run."
            )
        if path.exists():
            os.truncate(path, end)
        return lines

    @contextmanager
    def _writing(self, kept: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(f"Cannot write into {self.path}: {error.strerror}. {kept}.") from error


def read_lines(path: Path, most: int | None = None) -> tuple[list[Line], int]:
    """The lines of rounds.jsonl, at most `most`, and where the last one ends.

    The last line may be unfinished, and is then left out. A damaged one is refused.
    """
    lines: list[Line] = []
    end = 0
    content = path.read_bytes() if path.exists() else b""
    while end < len(content) and len(lines) != most:
        after = content.find(b"\n", end) + 1
        raw = content[end:after] if after else content[end:]
        if not after and not digests.ends_sealed(raw):
            break
        try:
            lines.append(read_line(raw, len(lines) + 1, path))
        except ValueError as error:
            raise UserError(
                f"Line {len(lines) + 1} of {path} is damaged ({error}); resume the run if it is "
                "unfinished, or put back a copy of the file."
            ) from error
        end = after
    return lines, end


def read_line(raw: bytes, round_: int, path: Path) -> Line:
    """A line of rounds.jsonl; a ValueError unless it is what was written for that round."""
    line = digests.from_line(raw, path)
    if line.get("round") != round_:
        raise digests.DamagedError(f"it is not that of round {round_}")
    return line


def read(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """Summary and lines of a run; an unfinished run is summarised from its lines."""
    try:
        lines, _ = read_lines(path / ROUNDS)
        if (path / SUMMARY).exists():
            summary = digests.read_json(path / SUMMARY)
            schema = summary.get("schema")
            if schema != SCHEMA:
                raise UserError(f"{path / SUMMARY} has schema {schema}, not {SCHEMA}.")
            _refuse_shortened(path, summary, lines)
            return summary, cost.completed(summary["config"], lines)
        values = toml.read(settings_file(path))
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path / SUMMARY} is damaged: {error}.") from error
    if not lines:
        raise UserError(f"The run in {path} has not finished its first round.")
    return summarise(values, lines, {}), cost.completed(values, lines)


def _refuse_shortened(path: Path, summary: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Refuse a finished run that has lost lines. A client of a federation has none at all."""
    if lines and len(lines) < summary["rounds"]:
        raise UserError(
            f"{path / ROUNDS} has {len(lines)} whole lines and the run has {summary['rounds']} "
            "rounds; put back a copy of the file, or run it again."
        )
