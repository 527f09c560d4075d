"""Processes that a user forks after torch has computed in threads.

A fork has none of its parent's threads, and OpenMP in it would wait for them without end. With one
thread it waits for nobody. Processes that are spawned start anew, and have all threads.
"""

from __future__ import annotations

import os
from functools import cache

import torch


@cache
def compute_alone() -> None:
    """From now on, forks of this process compute on one thread each."""
    if hasattr(os, "register_at_fork"):  # where there is a fork
        os.register_at_fork(after_in_child=_one_thread)


def _one_thread() -> None:
    torch.set_num_threads(1)
