"""`corefed federation status`: who is connected, which runs there are, who is missing and why."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table

from corefed.base.locks import is_locked
from corefed.federation import events
from corefed.federation.operate import processes, registering, run_state
from corefed.federation.operate.folder import ServerFolder
from corefed.federation.operate.run_state import Facts
from corefed.settings import toml
from corefed.training import record

WORDS = {
    "online": "connected",
    "offline": "gone",
    "registered": "never seen",
    "unregistered": "taken off",
}


def read_status(directory: Path) -> dict[str, Any]:
    """{"server", "clients": {name: state}, "runs": {name: {...}}}; works without a server, too."""
    server = ServerFolder.read(directory)
    up = processes.is_answering(server)
    states = registering.client_states(server) if up else {}
    flower = run_state.list_submitted(server) if up else {}
    runs = {}
    for path in sorted(server.runs.glob(f"*/{record.EXPERIMENT}")):
        folder = path.parent
        runs[folder.name] = _run(folder, flower.get(folder.name), answers=up)
    return {
        "server": f"answers at {server.own_address}" if up else "is not running",
        "clients": {
            name: WORDS.get(states.get(name, ""), states.get(name, "unknown"))
            for name in server.clients
        },
        "runs": runs,
    }


def _run(folder: Path, flower: dict[str, Any] | None, *, answers: bool) -> dict[str, Any]:
    values = toml.read(record.settings_file(folder))
    lines, _ = record.read_lines(folder / record.ROUNDS)
    happened = events.read(folder / record.EVENTS)
    facts = Facts(
        trains=is_locked(folder),
        begun=run_state.has_begun(folder),
        answers=answers,
        submitted=flower is not None and not flower["ended"],
        silent=run_state.read_silent(folder),
    )
    complete = (folder / record.SUMMARY).exists()
    state = "complete" if complete else run_state.describe(facts, time.time())
    absent = {
        str(event["client"]): str(event["reason"])
        for event in happened
        if event["event"] in ("missing", "refused")
        and isinstance(event["round"], int)
        and event["round"] >= len(lines)
        and event["client"]
    }
    about = {"state": state, "method": values["method"], "round": len(lines)}
    return {**about, "rounds": values["rounds"], "missing": absent}


def tables(about: dict[str, Any]) -> list[Table]:
    """For a terminal."""
    clients = Table("client", "state")
    for name, state in about["clients"].items():
        clients.add_row(name, state)
    runs = Table("run", "method", "round", "state", "missing or refused in the last round")
    for name, run in about["runs"].items():
        missing = "; ".join(f"{who}: {why}" for who, why in run["missing"].items())
        done = f"{run['round']}/{run['rounds']}"
        runs.add_row(name, run["method"], done, run["state"], missing)
    return [clients, runs] if about["runs"] else [clients]
