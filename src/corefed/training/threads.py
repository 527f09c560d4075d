"""Clients side by side on a CPU: each thread trains its own clients, with operations of one thread.

An operation on the weights of a few clients is too short for several threads: they wait for each
other more than they work, and worse where other processes use the machine. Whole chunks of clients
do not wait for each other. PyTorch releases Python's lock during an operation, so threads suffice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

WORTH_THREADS = 1 << 14
"""Numbers per thread, in the vectors of its clients, from which a thread of its own saves time.
With fewer, threads wait for Python's lock."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def threads_for(numbers: int) -> int:
    """How many threads to use for clients whose vectors have so many numbers altogether."""
    return max(1, min(torch.get_num_threads(), numbers // WORTH_THREADS))


def map_parts(
    work: Callable[[Part], Result], parts: Sequence[Part], threads: int
) -> Iterator[Result]:
    """`work` of each part, in order; on `threads` threads that each compute on one core."""
    if threads == 1 or len(parts) == 1:
        yield from map(work, parts)
        return
    with _operations_of_one_thread():
        yield from _pool(threads).map(work, parts)


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    def one() -> None:
        torch.set_num_threads(1)

    return ThreadPoolExecutor(threads, "corefed-clients", initializer=one)


@contextmanager
def _operations_of_one_thread() -> Iterator[None]:
    """The number of threads of matrix products is one for the whole process: set, and set back."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
