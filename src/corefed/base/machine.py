"""What a process may use of its machine: its number of threads, and how they wait for each other.

OpenMP reads both from the environment when torch is loaded. As it comes, it starts a thread on
every core it sees, also where a container may use a fraction of them, and its threads spin while
they wait: beside other processes, each wait then takes a core from whoever has work. Nothing here
imports torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath

NUMBER = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Either is a user's choice of a number of threads; for torch, the second goes before the first."""

WAITING = ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT")
"""Any is a user's choice of how threads wait: OpenMP's name, Intel's and GNU's."""

PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""A thread that waits sleeps."""


def polite(environment: Mapping[str, str], threads: int | None = None) -> dict[str, str]:
    """The environment for a process that shares its machine.

    Threads sleep while they wait, and are as many as the process may use cores. What the user has
    set stays. With `threads` the process has this number whatever is set: it is one of several that
    are started side by side.
    """
    changed = dict(environment)
    if not any(environment.get(name) for name in WAITING):
        changed |= PASSIVE
    if threads is not None:
        changed |= dict.fromkeys(NUMBER, str(threads))
    elif not any(environment.get(name) for name in NUMBER):
        changed[NUMBER[0]] = str(usable_cores())
    return changed


def usable_cores(root: Path = Path("/"), cpus: frozenset[int] | None = None) -> int:
    """Cores that this process may use, at least one.

    Those of its affinity (`cpus`), each counted once if it is seen as several CPUs, and no more
    than the CPU time that its cgroups allow, rounded up. `root` is where /proc and /sys are.
    """
    allowed = _affinity() if cpus is None else cpus
    cores = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min([len(cores), *(math.ceil(quota) for quota in _quotas(root))]))


def _affinity() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))  # macOS


def _siblings(root: Path, cpu: int) -> str:
    """The CPUs that share a core with this one, as Linux lists them; else the CPU itself."""
    path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return _read(path) or str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """CPU seconds per second that each cgroup of this process allows, from its own to the top."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if not controllers:  # version 2
            tops = (mounted, mounted / "unified")
        elif "cpu" in controllers.split(","):  # version 1
            tops = (mounted / "cpu", mounted / controllers)
        else:
            continue
        inside = PurePosixPath(name.lstrip("/"))
        for top in tops:
            # In a container the name may be that of the host, and only the top is there.
            for group in (inside, *inside.parents):
                yield from _quota(top / group)


def _quota(group: Path) -> Iterator[float]:
    """The quota of one cgroup, if it has one."""
    words = _read(group / "cpu.max").split()
    if not words:
        words = [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
    with suppress(ValueError):  # "max" and no file: no quota
        quota, period = map(float, words)
        if quota > 0 and period > 0:  # version 1 says -1 for none
            yield quota / period


def _read(path: Path) -> str:
    """The text of a small file of the kernel's; nothing if it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
