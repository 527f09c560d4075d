"""Work side by side on a CPU: each thread does its own part, with operations of one thread.

An operation on the weights of a few clients is too short for several threads: they wait for each
other more than they work, and worse where other processes use the machine. Whole chunks of clients
do not wait for each other. PyTorch releases Python's lock during an operation, so threads suffice.

The threads stay, and only their own operations have one thread: nothing is set for others, so that
any number of Python threads may train at the same time.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

WORTH_THREADS = 1 << 14
"""Numbers per thread, in the vectors of its clients, from which a thread of its own saves time.
With fewer, threads wait for Python's lock."""
AHEAD = 2
"""Parts per thread that are read before the first result is taken: a stream need not fit in
memory."""

Part = TypeVar("Part")
Result = TypeVar("Result")


def threads_for(numbers: int) -> int:
    """How many threads to use for clients whose vectors have so many numbers altogether."""
    return max(1, min(torch.get_num_threads(), numbers // WORTH_THREADS))


def map_parts(
    work: Callable[[Part], Result], parts: Iterable[Part], threads: int
) -> Iterator[Result]:
    """`work` of each part, in order; on `threads` threads that each compute on one core."""
    if threads <= 1:
        yield from map(work, parts)
        return
    pool, waiting = _pool(threads), deque[Future[Result]]()
    try:
        for part in parts:
            waiting.append(pool.submit(work, part))
            if len(waiting) > AHEAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:  # after an error, nothing goes on unseen
        for future in waiting:
            future.cancel()
        for future in waiting:
            future.cancelled() or future.exception()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    others, ready = torch.get_num_threads(), threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first call takes the number that others have set
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, "corefed", initializer=begin)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(others)  # threads that start later take the number that was set last
    return pool


def _after_fork() -> None:
    """A forked process has none of these threads, nor those of OpenMP, and would wait for them."""
    _pool.cache_clear()
    torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
