"""Start a training run through Flower, follow it and report how it went.

The server's process writes runs/RUN as a simulation does, and we read those files. Flower tells
whether it still runs; the exit code of `flwr run --stream` does not.
"""

from __future__ import annotations

import json as jsonlib
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from corefed.base import digests, files, shown
from corefed.base.errors import INTERRUPTED, UserError
from corefed.federation import events
from corefed.federation.operate import control, processes
from corefed.federation.operate.creating import as_federated
from corefed.federation.operate.folder import ServerFolder, is_locked, locked_since
from corefed.federation.operate.processes import LINK, say
from corefed.federation.protocol import check_run
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.show import report
from corefed.training import record
from corefed.training.progress import progress

SUBMITTED = "flower.json"
LOOK = 0.3
"""Seconds between looks at the files."""
ASK = (2.0, 15.0)
"""Fewest and most seconds between looks at the server: else, a quarter of the time so far."""
HUNG = 60.0
"""Seconds between questions to Flower while a training holds its folder; each is a process."""
START = 20.0
"""Seconds that a run waits for a server that does not answer yet."""
NOTICE = 15.0
"""Seconds that a training has to notice that it was stopped."""
ENDED = "finished:"


def start(
    directory: Path, name: str | None, assignments: Sequence[str], *, json: bool, quiet: bool
) -> int:
    """Prepare a run, submit it and follow it; an exit code."""
    server = ServerFolder.read(directory)
    name = check_run(name or time.strftime("%Y%m%d-%H%M%S"))
    given = resolve(server.path / record.EXPERIMENT, assignments=assignments)
    experiment = as_federated(given, len(server.clients))
    folder = server.runs / name
    if record.begun(folder):
        raise UserError(
            f"There is a run {name} already; choose another --name, or go on with it by: "
            f"corefed federation resume {_quoted(directory)} --name {name}"
        )
    _require_idle_server(server)
    record.Folder(folder).create(experiment)
    return _submit(server, directory, name, experiment, json=json, quiet=quiet)


def resume(
    directory: Path, name: str | None, rounds: int | None, *, json: bool, quiet: bool
) -> int:
    """Go on with a run, by default the last one, perhaps to more rounds; an exit code."""
    server = ServerFolder.read(directory)
    name = check_run(name) if name else _last_run(server)
    folder = server.run_folder(name)
    assignments = [f"rounds={rounds}"] if rounds is not None else []
    experiment = resolve(record.settings_file(folder), assignments=assignments)
    done = len(record.read_lines(folder / record.ROUNDS)[0])
    if experiment.run.rounds < done:
        raise UserError(f"Run {name} has {done} rounds already; --rounds must be that or more.")
    if (folder / record.SUMMARY).exists() and experiment.run.rounds <= done:
        raise UserError(f"Run {name} is complete with {done} rounds; ask for more by --rounds.")
    _require_idle_server(server)
    record.Folder(folder).create(experiment)
    (folder / record.SUMMARY).unlink(missing_ok=True)  # of the run when it was shorter
    return _submit(server, directory, name, experiment, json=json, quiet=quiet)


def stop(directory: Path, name: str | None) -> None:
    """End the run that is going on, and wait until the training has noticed."""
    server = ServerFolder.read(directory)
    processes.require_answer(server)
    going = {each: run for each, run in list_submitted(server).items() if not run["ended"]}
    if name is not None:
        going = {each: run for each, run in going.items() if each == check_run(name)}
    if not going:
        raise UserError(f"Run {name} is not going on." if name else "No run is going on.")
    for each, run in going.items():
        processes.run_flwr(server, "stop", run["id"], LINK)
        until = time.monotonic() + NOTICE
        while is_locked(server.runs / each) and time.monotonic() < until:
            time.sleep(LOOK)
        say(f"{each} is stopped; go on with it by: corefed federation resume {_quoted(directory)}")


def list_submitted(server: ServerFolder) -> dict[str, dict[str, Any]]:
    """Name -> its last submission as Flower sees it: id, status, details, whether it ended."""
    paths = sorted(server.runs.glob(f"*/{SUBMITTED}"))
    known = {run["id"]: run for run in control.ask(server, "runs")} if paths else {}
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        number = _submission(path)
        run = known.get(number, {"id": number, "status": "unknown", "details": ""})
        ended = run["status"].startswith(ENDED) or number not in known
        found[path.parent.name] = {**run, "ended": ended}
    return found


def _submission(path: Path) -> str:
    """Flower's number of a run, from flower.json."""
    try:
        return str(digests.read_json(path)["run-id"])
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}); remove it if that run is not going on."
        ) from error


def _require_idle_server(server: ServerFolder) -> None:
    """A server that answers, and trains nothing else: clients do one task at a time."""
    _wait_for_server(server)
    for name, run in list_submitted(server).items():
        if run["ended"]:
            continue
        if not _is_abandoned(server, name):
            raise UserError(
                f"Run {name} is going on; wait for it, or stop it with: corefed federation stop "
                f"{_quoted(server.path)}"
            )
        processes.run_flwr(server, "stop", run["id"], LINK)


def _wait_for_server(server: ServerFolder) -> None:
    """Give a server that was just started some seconds."""
    until = time.monotonic() + START
    if not processes.is_answering(server):
        say(f"waiting for the server at {server.own_address}")
    while not processes.is_answering(server) and time.monotonic() < until:
        time.sleep(LOOK)
    processes.require_answer(server)


def _is_abandoned(server: ServerFolder, name: str) -> bool:
    """Whether a run that Flower takes for running was left behind by a killed server.

    Nobody works in its folder, and the server was started after it was submitted.
    """
    folder = server.runs / name
    submission = (folder / SUBMITTED).stat().st_mtime
    return submission <= locked_since(server.path) and not is_locked(folder)


def _submit(
    server: ServerFolder,
    directory: Path,
    name: str,
    experiment: Experiment,
    *,
    json: bool,
    quiet: bool,
) -> int:
    folder = server.runs / name
    before = len(events.read(folder / record.EVENTS))
    app = str(server.path / "app")
    setting = f"run={jsonlib.dumps(name)}"
    answer = processes.run_flwr(server, "run", app, LINK, "--run-config", setting, quiet=quiet)
    submission = digests.to_json({"run-id": str(answer["run-id"])})
    files.replace(folder / SUBMITTED, submission)
    if not quiet:
        say(f"run {name}: {experiment.run.rounds} rounds of {experiment.run.method}")
    try:
        with progress(experiment.run.rounds) as show:
            failure = _follow(server, name, show, before, silent=quiet or json)
    except KeyboardInterrupt:
        place = _quoted(directory)
        say(f"the run goes on at the server; look with: corefed federation status {place}")
        say(f"stop it with: corefed federation stop {place}")
        return INTERRUPTED
    if failure:
        say(f"error: {' '.join(failure.split())}")
        say(f"go on with it by: corefed federation resume {_quoted(directory)} --name {name}")
        return 1
    summary, _ = record.read(folder)
    if json:
        shown.say(jsonlib.dumps(summary, indent=1))
    elif quiet:
        shown.say(folder)
    else:
        report.console().print(report.metrics_table(summary))
        shown.say(f"written to {folder}")
    return 0


def _follow(
    server: ServerFolder,
    name: str,
    show: Callable[[dict[str, Any]], None],
    before: int,
    *,
    silent: bool,
) -> str:
    """Show rounds and events as they come; why the run failed, or nothing when it is complete.

    `before` is the number of events that earlier submissions of the run left.
    """
    folder = server.runs / name
    shown, heard = 0, before
    began = looked = asked = time.monotonic()
    ended: dict[str, Any] | None = None
    while True:
        lines, _ = record.read_lines(folder / record.ROUNDS)
        happened = events.read(folder / record.EVENTS)
        if not silent:
            for event in happened[heard:]:
                say(events.sentence(event))
            for line in lines[min(shown, len(lines)) :]:
                show(line)
        shown, heard = len(lines), len(happened)
        if (folder / record.SUMMARY).exists():
            return ""
        if ended is not None:  # and the files were read once more after that
            return _reason(ended, happened)
        now = time.monotonic()
        if now - looked <= min(ASK[1], max(ASK[0], (now - began) / 4)):
            time.sleep(LOOK)
            continue
        if not processes.is_answering(server, 10.0):
            return "The server does not answer any more."
        # After its first event a training holds its folder until it ends, and Flower is not asked.
        if now - asked > HUNG or heard == before or not is_locked(folder):
            run = list_submitted(server)[name]
            ended = run if run["ended"] else None
            asked = time.monotonic()
        looked = time.monotonic()


def _reason(run: dict[str, Any], happened: Sequence[dict[str, Any]]) -> str:
    """Why a run ended before its last round."""
    if run["status"] == f"{ENDED}stopped":
        return "The run was stopped."
    last = happened[-1] if happened else {}
    if last.get("event") == "stopped":
        return str(last["reason"])
    return f"The run ended ({run['status']}): {run['details'] or 'no reason given'}"


def _last_run(server: ServerFolder) -> str:
    runs = [path.parent for path in server.runs.glob(f"*/{record.EXPERIMENT}")]
    if not runs:
        raise UserError(f"{server.runs} holds no run; start one with: corefed federation run")
    return max(runs, key=lambda path: (path / record.EXPERIMENT).stat().st_mtime).name


def _quoted(directory: Path) -> str:
    return shlex.quote(str(directory))
