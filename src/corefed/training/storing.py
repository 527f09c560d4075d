"""Choose where the state of simulated clients is kept, by its size and what is free."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from corefed.base.errors import UserError
from corefed.settings.run import Run
from corefed.training.store import InFile, InHost, Layout, OnDevice, Start, Store, existing

Choose = Callable[[Start, int], Store]
"""(initial state of rows, number of clients) -> where to keep them."""


def on_device(start: Start, clients: int) -> Store:
    """Stacked on the device, whatever their size."""
    return OnDevice(start(range(clients)), clients)


def choose(
    run: Run, start: Start, clients: int, folder: Path | None, beside: int = 1
) -> tuple[Store, str]:
    """The store of a run that is recorded in `folder`, and a note for readers; empty: none.

    `beside` processes of this machine need as much each, and have GPUs of their own. Nothing of the
    size of all clients is allocated before the size is checked.
    """
    device = torch.device(run.device)
    needed = Layout.of(start([0])).size * clients
    free = free_memory(device) // (1 if device.type == "cuda" else beside)
    where = run.client_state
    if where == "auto":
        bound = free // 2
        if run.cohort and 2 * run.cohort <= run.clients:  # most clients wait in every round
            bound = min(bound, run.memory_mb << 20)
        where = "device" if needed <= bound else "file"
    if where == "device":
        if needed > free:
            raise UserError(
                f"The state of {clients:,} clients takes {gigabytes(needed)}, and "
                f"{gigabytes(free)} are free on {run.device}; use --set client_state=file, or "
                "fewer clients."
            )
        return on_device(start, clients), ""
    expected = needed * taking_part(run) / run.clients
    what = f"The state of {clients:,} clients ({gigabytes(needed)}) is kept in"
    if where == "host":
        room = free_memory(torch.device("cpu")) // beside
        _refuse_too_little(expected, room, "memory of this machine")
        return InHost(start, clients, device), f"{what} the memory of this machine."
    room = shutil.disk_usage(existing(folder)).free // beside
    _refuse_too_little(expected, room, f"disk of {existing(folder)}")
    note = f"{what} a file on the disk; --set client_state=device keeps it on {device.type}."
    return InFile(start, clients, device, folder), note


def taking_part(run: Run) -> float:
    """The expected number of different clients in the cohorts of all rounds, per seed."""
    share = (run.cohort or run.clients) / run.clients
    return run.clients * (1 - (1 - min(1.0, share)) ** run.rounds)


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still take on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_available(), *_unused_of_group()]
    return min(limits)


def _available() -> int:
    """Memory of the machine that is free or can be made free."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:  # not Linux
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _unused_of_group() -> list[int]:
    """What the limit of a container leaves, where there is one."""
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = (group / "memory.current").read_text(encoding="ascii").strip()
        return [max(0, int(limit) - int(used))] if limit != "max" else []
    except (OSError, ValueError):
        return []


def gigabytes(size: float) -> str:
    return f"{size / 2**30:.1f} GB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MB"


def _refuse_too_little(needed: float, room: int, where: str) -> None:
    if needed > room:
        raise UserError(
            f"The state of the clients that take part is expected to need {gigabytes(needed)}, "
            f"and {gigabytes(room)} are free on the {where}; use fewer rounds or clients, or a "
            "smaller network."
        )
