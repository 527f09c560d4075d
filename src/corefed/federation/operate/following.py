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
from corefed.base.locks import is_locked, locked_since
from corefed.federation import events
from corefed.federation.operate import processes, run_state
from corefed.federation.operate.creating import as_federated
from corefed.federation.operate.folder import ServerFolder
from corefed.federation.operate.processes import LINK
from corefed.federation.operate.program import say
from corefed.federation.operate.run_state import ENDED, SUBMITTED
from corefed.federation.operate.vigil import LOST, NOTICE, Vigil
from corefed.federation.protocol import check_run
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.show import report
from corefed.training import record
from corefed.training.progress import progress

LOOK = 0.3
"""Seconds between looks at the files."""
ASK = (2.0, 15.0)
"""Fewest and most seconds between looks at the server: else, a quarter of the time so far."""
ABSENT, STARTING = 20.0, 180.0
"""Seconds that a run waits for a server's process, and for one that was just started to answer:
on a busy machine it imports for a minute."""


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
    going = {
        each: run for each, run in run_state.list_submitted(server).items() if not run["ended"]
    }
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


def _require_idle_server(server: ServerFolder) -> None:
    """A server that answers, and trains nothing else: clients do one task at a time."""
    _wait_for_server(server)
    for name, run in run_state.list_submitted(server).items():
        if run["ended"]:
            continue
        if not _is_abandoned(server, name):
            raise UserError(
                f"Run {name} is going on; wait for it, or stop it with: corefed federation stop "
                f"{_quoted(server.path)}"
            )
        processes.run_flwr(server, "stop", run["id"], LINK)


def _wait_for_server(server: ServerFolder) -> None:
    """Give a server that was just started some seconds, and more while its process starts."""
    began = time.monotonic()
    if not processes.is_answering(server):
        say(f"waiting for the server at {server.own_address}")
    while not processes.is_answering(server):
        patience = STARTING if is_locked(server.path) else ABSENT
        if time.monotonic() - began > patience:
            break
        time.sleep(LOOK)
    processes.require_answer(server)


def _is_abandoned(server: ServerFolder, name: str) -> bool:
    """Whether a run that Flower takes for running was left behind by a process that was killed.

    Nobody works in its folder, and somebody did, or the server was started after it was submitted.
    """
    folder = server.runs / name
    submitted = (folder / SUBMITTED).stat().st_mtime
    older = submitted <= locked_since(server.path)
    return (older or run_state.has_begun(folder)) and not is_locked(folder)


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
    since = time.time()
    answer = processes.run_flwr(server, "run", app, LINK, "--run-config", setting, quiet=quiet)
    about = {"run-id": str(answer["run-id"]), "since": since}
    files.replace(folder / SUBMITTED, digests.to_json(about))
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

    `before` is the number of events that earlier submissions of the run left. Where nothing comes
    for a while, what is waited for is said.
    """
    folder = server.runs / name
    shown, heard = 0, before
    began = looked = time.monotonic()
    vigil = Vigil(server, name)
    while True:
        lines, _ = record.read_lines(folder / record.ROUNDS)
        happened = events.read(folder / record.EVENTS)
        if not silent:
            for event in happened[heard:]:
                say(events.sentence(event))
            for line in lines[min(shown, len(lines)) :]:
                show(line)
        if (len(lines), len(happened)) != (shown, heard):
            vigil.news()
        shown, heard = len(lines), len(happened)
        if (folder / record.SUMMARY).exists():
            return ""
        if vigil.over is not None:  # and the files were read once more after that
            return _reason(vigil.over, happened)
        now = time.monotonic()
        if now - looked <= min(ASK[1], max(ASK[0], (now - began) / 4)):
            time.sleep(LOOK)
            continue
        vigil.look()
        looked = time.monotonic()


def _reason(run: dict[str, Any], happened: Sequence[dict[str, Any]]) -> str:
    """Why a run ended before its last round."""
    if run["status"] == f"{ENDED}stopped":
        return "The run was stopped."
    if run["status"] == LOST:
        return str(run["details"])
    last = happened[-1] if happened else {}
    if last.get("event") == "stopped":
        return str(last["reason"])
    return (
        "The training ended before its last round; server/flower/executor.log may say why. Flower "
        f"says: {run['status']}, {run['details'] or 'no reason given'}"
    )


def _last_run(server: ServerFolder) -> str:
    runs = [path.parent for path in server.runs.glob(f"*/{record.EXPERIMENT}")]
    if not runs:
        raise UserError(f"{server.runs} holds no run; start one with: corefed federation run")
    return max(runs, key=lambda path: (path / record.EXPERIMENT).stat().st_mtime).name


def _quoted(directory: Path) -> str:
    return shlex.quote(str(directory))
