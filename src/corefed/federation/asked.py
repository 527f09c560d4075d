"""What a client was asked before, kept beside the state of a run: join.json and asked.json.

    RUN/join.json     the description of its data that the client sent, and the question
    RUN/asked.json    digests of the tasks that it did, by kind and round; whether it is finished

From these a client tells a task that comes again, which it may answer again, from another one, of
which it does a limited number. A finished run is one whose last round was evaluated: its model is
kept, and no task that comes late changes it. A server may give the run more rounds; then it goes
on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.federation import digest
from corefed.federation.limits import LimitError, Limits
from corefed.federation.protocol import check_run

if TYPE_CHECKING:
    from corefed.federation.protocol import Task

JOIN, ASKED = "join.json", "asked.json"


def question_of(task: Task) -> str:
    """A digest of all that the answer to a task depends on."""
    terms = (task.kind, task.round, task.client, task.upload, task.difference)
    noise = (task.dp_clip, task.dp_noise)
    agreement = task.agreement.to_json() if task.agreement else ""
    texts = (task.settings, agreement, task.temperature, repr((*terms, *noise)))
    return digest.hash_tree(task.tree, *texts)


def check_room(state: Path, run: str, limits: Limits) -> None:
    """Refuse a new run where the state of as many as allowed is kept."""
    kept = _runs(state)
    if check_run(run) not in kept and len(kept) >= limits.runs:
        raise LimitError(
            f"This client keeps the state of {len(kept)} runs, as many as it allows (runs in the "
            "table [limits] of its client.toml); its operator removes old ones, or raises runs."
        )


# --- descriptions ---------------------------------------------------------------------------------


def told(state: Path, task: Task) -> dict[str, Any] | None:
    """The description that this run's server was sent before; None where it was sent none."""
    kept = _read(state / check_run(task.run) / JOIN)
    if kept is None:
        return None
    if kept["question"] != question_of(task):
        raise LimitError(
            f"This client has described its data to the run {task.run} already, for other "
            "settings; start a new run under another name."
        )
    answer: dict[str, Any] = kept["answer"]
    return answer


def told_points(state: Path, run: str) -> int | None:
    """The number of training points in that description; None where there is none."""
    kept = _read(state / check_run(run) / JOIN)
    return None if kept is None else int(kept["answer"]["train"])


def keep_told(state: Path, task: Task, answer: dict[str, Any], limits: Limits) -> None:
    """Keep a description before it is sent; one that differs from too many others is refused."""
    folders = [state / name for name in _runs(state)]
    others = [_read(folder / JOIN) for folder in folders]
    different = {json.dumps(each["answer"]) for each in others if each is not None}
    if json.dumps(answer) not in different and len(different) >= limits.descriptions:
        raise LimitError(
            f"This client has sent {len(different)} different descriptions of its data, as many "
            "as it allows (descriptions in the table [limits] of its client.toml)."
        )
    content = {"question": question_of(task), "answer": answer}
    _write(state / check_run(task.run) / JOIN, content)


# --- rounds ---------------------------------------------------------------------------------------


class Asked:
    """The tasks of one run that this client did, in the folder of the run's state."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ASKED
        kept = _read(self.path) or {}
        self.finished: int = kept.get("finished", 0)  # rounds of the finished run; 0: it is not
        self.model: str = kept.get("model", "")  # what it finished with
        self.calibrated: bool = kept.get("calibrated", False)
        self.tasks: dict[str, list[str]] = kept.get("tasks", {})

    def note(self, task: Task, rounds: int, limits: Limits) -> None:
        """Enter a task before it is done; refuse one too many, and one that comes too late."""
        question, key = question_of(task), f"{task.kind} {task.round}"
        before = self.tasks.get(key, [])
        if rounds <= self.finished and not self._belongs(task, before):
            raise LimitError(
                f"The run {task.run} of {self.finished} rounds is finished at this client, which "
                "does no other task of it; give the run more rounds, or start a new one."
            )
        if question not in before and len(before) >= limits.attempts:
            raise LimitError(
                f"This client was asked {len(before)} different tasks of this kind in round "
                f"{task.round + 1}, as many as it allows (attempts in the table [limits] of its "
                "client.toml)."
            )
        if question not in before:
            self.tasks[key] = [*before, question]
        self._save()

    def _belongs(self, task: Task, before: list[str]) -> bool:
        """Whether a finished run's server may still ask this, after a restart or to calibrate."""
        gone_on = any(int(key.split()[1]) >= self.finished for key in self.tasks)
        last = task.round + 1 == self.finished and not gone_on
        if question_of(task) in before:
            return last
        return last and task.kind == "evaluate" and bool(task.temperature) and self._same(task)

    def keeps(self, task: Task, rounds: int) -> bool:
        """Whether the model of this evaluation is the one to keep."""
        if task.round + 1 != rounds:
            return False
        if rounds > self.finished:
            return True
        return bool(task.temperature) and not self.calibrated and self._same(task)

    def finish(self, task: Task, rounds: int) -> None:
        """Enter that the model is kept."""
        self.finished, self.model = rounds, digest.hash_tree(task.tree)
        self.calibrated = bool(task.temperature)
        self._save()

    def _same(self, task: Task) -> bool:
        return self.model == digest.hash_tree(task.tree)

    def _save(self) -> None:
        about = {"finished": self.finished, "model": self.model}
        _write(self.path, {**about, "calibrated": self.calibrated, "tasks": self.tasks})


# --- files ----------------------------------------------------------------------------------------


def _runs(state: Path) -> set[str]:
    try:
        return {each.name for each in state.iterdir() if each.is_dir()} if state.exists() else set()
    except OSError as error:
        raise UserError(f"Cannot read the folder {state}: {error.strerror}.") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return digests.read_json(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError:
        pass
    raise UserError(
        f"{path} is damaged, so that it is not known what was asked before; put back a copy, or "
        f"remove {path.parent} to begin the run again."
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    try:
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files.replace(path, digests.to_json(content), 0o600)
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}; nothing is sent.") from error
