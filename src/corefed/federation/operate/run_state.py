"""What a run of a federation is doing: going on, waiting for somebody, dead, stopped, complete.

The training holds a lock on its folder as long as it lives, so it tells more than Flower, which
takes a killed training for running until its heartbeats have been missing for a minute.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base import digests
from corefed.base.errors import UserError
from corefed.base.locks import locked_since
from corefed.federation.operate import control
from corefed.federation.operate.folder import ServerFolder

ASKED, SUBMITTED = "asked.json", "flower.json"
ENDED = "finished:"
"""How the status of a run begins that Flower has ended."""
QUIET = 30.0
"""Seconds without news after which somebody is told what is waited for."""


class Silent(NamedTuple):
    """Who has been asked and has not answered, and since when nothing has happened."""

    names: tuple[str, ...] = ()
    since: float = 0.0  # seconds since the epoch


class Facts(NamedTuple):
    """What is known about a run that is not complete."""

    trains: bool  # its training process is there
    begun: bool  # it was, since the run was submitted
    answers: bool  # the server answers
    submitted: bool  # Flower takes it for pending or running; unknown where nobody answers
    silent: Silent


def read_silent(folder: Path) -> Silent:
    """Nobody where the training has not told."""
    try:
        about = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        return Silent(tuple(map(str, about["silent"])), float(about["since"]))
    except (OSError, ValueError, TypeError, KeyError):
        return Silent()


def describe(facts: Facts, now: float) -> str:
    """For `corefed federation status`."""
    silent = facts.silent
    if facts.trains:
        if not facts.answers:
            return "waiting for the server, which does not answer"
        if silent.names and now - silent.since > QUIET:
            clock = time.strftime("%H:%M:%S", time.localtime(silent.since))
            return f"waiting for {', '.join(silent.names)} since {clock}"
        return "going on"
    if not facts.submitted:
        return "stopped"
    if facts.begun:
        return "dead: its training process is gone; go on with it by: corefed federation resume"
    return "waiting for the server to begin"


def waits_for(facts: Facts, absent: Sequence[str]) -> str:
    """Why nothing happens, for somebody who follows the run; `absent` are not connected."""
    if not facts.answers:
        return "the server does not answer"
    if not facts.trains:
        return "its training process is gone" if facts.begun else "the server has not begun it yet"
    if facts.silent.names:
        return f"no answer yet from {', '.join(facts.silent.names)}"
    if absent:
        return f"not connected: {', '.join(absent)}"
    return "the training goes on"


def read_submission(path: Path) -> dict[str, Any]:
    """Flower's number of a run, and when it was submitted; a UserError if that is not known."""
    try:
        about = digests.read_json(path)
        return {"id": str(about["run-id"]), "since": float(about.get("since", 0.0))}
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path} is damaged ({error}).") from error


def submission(folder: Path) -> dict[str, Any]:
    """The last submission of a run; none where it is not known."""
    try:
        return read_submission(folder / SUBMITTED)
    except UserError:
        return {}


def has_begun(folder: Path) -> bool:
    """Whether a training process has worked in the folder since the last submission."""
    return locked_since(folder) > float(submission(folder).get("since", 0.0))


def list_submitted(server: ServerFolder) -> dict[str, dict[str, Any]]:
    """Name -> its last submission as Flower sees it: id, status, details, whether it ended."""
    paths = sorted(server.runs.glob(f"*/{SUBMITTED}"))
    known = {run["id"]: run for run in control.ask(server, "runs")} if paths else {}
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        number = submission(path.parent).get("id", "unknown")
        run = known.get(number, {"id": number, "status": "unknown", "details": ""})
        ended = run["status"].startswith(ENDED) or number not in known
        found[path.parent.name] = {**run, "ended": ended}
    return found
