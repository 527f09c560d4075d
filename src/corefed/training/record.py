"""The folder of a run: experiment.toml, rounds.jsonl, checkpoint/, summary.json.

    experiment.toml                 every setting, so that the run can be repeated; written first
    data.json                       what each client has, and how points are prepared
    rounds.jsonl                    one line per round
    checkpoint/                     the last checkpoint, see `checkpoint.py`
    fitted.safetensors              the models, see `fitted.py`
    held_out.safetensors            their predictions of the test points, see `fitted.py`
    summary.json                    the result; written last, so the run is complete where it exists

Files are replaced whole (temporary file, fsync, rename), except rounds.jsonl, which grows; a
resumed run cuts it back to the rounds of its checkpoint. `summary.json` can be made from
experiment.toml and rounds.jsonl, so that an unfinished run can be read too.

Where temperatures are fitted, the last line has `calibration` (`calibration.py`): the temperatures,
and the metrics of the test and the validation points at them. Metrics in rounds.jsonl are without
temperatures in every line, so that they make one curve. `metrics` in summary.json are of the models
as they are kept and predict, with temperatures; `calibration` has the values before and after.
Accuracy and RMSE are the same in both. `validation` is without: settings are compared by it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import statistics
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corefed import __version__
from corefed.base import files
from corefed.base.errors import UserError
from corefed.settings.config import to_dict, to_toml
from corefed.settings.run import Experiment
from corefed.training import before_and_after, cost

if TYPE_CHECKING:  # a record is read without torch
    from corefed.base.types import Tree
    from corefed.training.checkpoint import Loaded

SCHEMA = 1
"""Of summary.json; increase it when a key changes its meaning."""

EXPERIMENT, ROUNDS, SUMMARY = "experiment.toml", "rounds.jsonl", "summary.json"
STATE = "checkpoint/state.json"
EVENTS = "events.jsonl"
"""Of a real federation: which clients were missing, refused or late."""

Line = dict[str, Any]

MODELS = ("personal", "global", "localized", "others")
"""Kinds of models; the first that a method has is its main model."""


def default_folder(data: str, method: str) -> Path:
    """runs/<data>-<method>-<time>, a folder that does not exist."""
    stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{data}-{method}").strip("-")
    base = Path("runs") / f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 100))]
    return next((path for path in names if not path.exists()), base)


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
                self._replace(EXPERIMENT, to_toml(experiment).encode())
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
        from corefed.training.checkpoint import load  # torch takes a second

        self.refuse_missing()
        state = load(self.path, to_dict(experiment))
        if state is not None:
            restore(state)
        return self.cut_back(experiment, state.round if state is not None else 0), state

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
            self._replace(EXPERIMENT, to_toml(experiment).encode())  # rounds may have grown
            if done < rounds:
                (self.path / SUMMARY).unlink(missing_ok=True)  # of the run when it was shorter
        return lines

    def append(self, line: Line) -> None:
        """Add a round; a line that does not fit on the disk is removed."""
        path = self.path / ROUNDS
        size = path.stat().st_size if path.exists() else 0
        with self._writing(f"The rounds before {line['round']} are kept"):
            try:
                with path.open("ab") as file:
                    files.write(file.fileno(), (json.dumps(line) + "\n").encode())
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)
                raise

    def checkpoint(
        self,
        values: Mapping[str, object],
        round_: int,
        servers: Sequence[Tree],
        rows: Sequence[int] = (),
        take: Callable[[Sequence[int]], Tree] = lambda rows: {},
    ) -> None:
        """Write a checkpoint at once; if that fails, the previous one is kept.

        `rows` are those of private state that changed since, which `take` gives.
        """
        from corefed.training.checkpoint import Checkpoints  # torch takes a second

        saves = Checkpoints(self.path, values, every=1, share=1.0, minutes=1.0)
        saves.mark(rows)
        saves.save(round_, servers, take)
        saves.close()

    def keep(self, write: Callable[[Path], None]) -> None:
        """Let `write` add its files to the folder."""
        with self._writing("What was recorded before is kept"):
            write(self.path)

    def finish(self, summary: Mapping[str, Any]) -> None:
        with self._writing("The rounds and the checkpoint are kept"):
            self._replace(SUMMARY, (json.dumps(summary, indent=1) + "\n").encode())

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


def main_model(metrics: Mapping[str, Any]) -> str:
    """The first kind in MODELS that has metrics."""
    return next((m for m in MODELS if any(name.startswith(f"{m}_") for name in metrics)), MODELS[0])


def read_lines(path: Path, most: int | None = None) -> tuple[list[Line], int]:
    """The complete lines of rounds.jsonl, at most `most`, and where the last one ends."""
    lines: list[Line] = []
    end = 0
    content = path.read_bytes() if path.exists() else b""
    for raw in content.splitlines(keepends=True):
        if len(lines) == most or not raw.endswith(b"\n"):
            break
        try:
            line = json.loads(raw)
        except ValueError:
            break
        if not isinstance(line, dict) or line.get("round") != len(lines) + 1:
            break
        lines.append(line)
        end += len(raw)
    return lines, end


def read(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """Summary and lines of a run; an unfinished run is summarised from its lines."""
    try:
        lines, _ = read_lines(path / ROUNDS)
        if (path / SUMMARY).exists():
            summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
            schema = summary.get("schema") if isinstance(summary, dict) else None
            if schema != SCHEMA:
                raise UserError(f"{path / SUMMARY} has schema {schema}, not {SCHEMA}.")
            return summary, cost.completed(summary["config"], lines)
        values = tomllib.loads((path / EXPERIMENT).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{path} holds no run of corefed: it has no {EXPERIMENT}.") from error
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:  # both JSON's and TOML's
        raise UserError(f"{path} holds a damaged file: {error}.") from error
    if not lines:
        raise UserError(f"The run in {path} has not finished its first round.")
    return summarise(values, lines, {}), cost.completed(values, lines)


def summarise(
    values: Mapping[str, Any], lines: Sequence[Line], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of summary.json. Metrics are of the last evaluated round, not of the best.

    Metrics of a calibrated run are at its temperatures, as the module says. Costs are sums over
    seeds. Seconds are of training, selection included and evaluation not; passes include selection
    (`cost.py`). A simulation adds passes over its training points and wall_seconds, which start-up,
    evaluation and files take part in. `evaluated_clients` is there where metrics are of a sample.
    """
    last = next((line for line in reversed(lines) if "metrics" in line), {})
    calibrated: Line = last.get("calibration", {})
    evaluated: dict[str, list[float]] = last.get("metrics", {}) | calibrated.get("metrics", {})
    bold: Line = last.get("overconfidence", {}) | calibrated.get("overconfidence", {})
    coreset = lines[-1]["coreset"] if lines else {}
    seconds = sum(line["seconds"] for line in lines)
    return {
        "schema": SCHEMA,
        **{key: values[key] for key in ("method", "data", "partition", "clients")},
        "rounds": len(lines),
        "seeds": values["seeds"],
        **({"evaluated_clients": last["evaluated_clients"]} if "evaluated_clients" in last else {}),
        "config": dict(values),
        "metrics": {name: over_seeds(each) for name, each in evaluated.items()},
        **_validation(last),
        **before_and_after.section(last, over_seeds),
        "classes": {
            model: {label: over_seeds(each) for label, each in row.items() if None not in each}
            for model, row in last.get("classes", {}).items()
        },
        "overconfidence": {model: over_seeds(each) for model, each in bold.items()},
        "coreset": {
            "fraction": values.get("fraction", 1.0),  # a method without one trains on all data
            **{name: statistics.fmean(each) for name, each in coreset.items() if None not in each},
        },
        "cost": {
            "seconds": seconds,
            "seconds_per_round": seconds / max(1, len(lines)),
            "evaluate_seconds": sum(line.get("evaluate_seconds", 0.0) for line in lines),
            "examples_processed": sum(sum(line["examples"]) for line in lines),
            **cost.of_lines(values, lines),
            "bytes_up": sum(sum(line["bytes_up"]) for line in lines),
            "bytes_down": sum(sum(line["bytes_down"]) for line in lines),
            "peak_memory_mb": max((line["peak_memory_mb"] for line in lines), default=0.0),
        },
        "environment": dict(environment),
    }


def _validation(line: Line) -> dict[str, Any]:
    """Metrics of the validation points, where the run has some."""
    found = line.get("validation", {})
    return {"validation": {k: over_seeds(v) for k, v in found.items()}} if found else {}


def over_seeds(each: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation (divisor: seeds - 1; 0 for a single seed)."""
    std = 0.0
    if len(each) > 1:  # of Python 3.11, stdev of NaN raises
        std = statistics.stdev(each) if all(map(math.isfinite, each)) else math.nan
    return {"mean": statistics.fmean(each), "std": std, "per_seed": list(each)}


def environment(device: str) -> dict[str, Any]:
    """What results may depend on beside the settings."""
    import numpy  # torch takes a second
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()
    return {
        "corefed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": name,
        "threads": torch.get_num_threads(),
    }
