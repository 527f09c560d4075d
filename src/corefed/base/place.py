"""Where a process stands among several that train together, and which clients are its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from corefed.base.errors import UserError


class Place(NamedTuple):
    """Where a worker stands among the others."""

    rank: int
    size: int
    local: int  # its number on its machine
    restarted: bool  # the group was started again after a worker had died


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place that torchrun, Slurm or `--workers` gave this process; None: it works alone."""
    slurm = "MASTER_ADDR" in environment and "SLURM_PROCID" in environment
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if "WORLD_SIZE" not in environment or "RANK" not in environment:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if not slurm or "SLURM_NTASKS" not in environment:
            return None
    try:
        rank, size, local = (int(environment.get(name, "0")) for name in names)
        restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    except ValueError as error:
        raise UserError(
            f"{', '.join(names)} say which worker this is, and one of them is no whole number "
            f"({error}); start corefed by torchrun or srun, or unset them."
        ) from error
    if not 0 <= rank < size:
        raise UserError(
            f"{names[0]} is {rank} and {names[1]} is {size}: workers count from 0 to {size - 1}."
        )
    return Place(rank, size, local, restarts > 0) if size > 1 else None


def share(clients: int, size: int, rank: int) -> range:
    """The clients of a worker: a block of numbers; blocks differ by at most one client."""
    return range(clients * rank // size, clients * (rank + 1) // size)
