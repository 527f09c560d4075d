"""Processes that work side by side, each with one thread."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from corefed.base import machine


@contextmanager
def workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """`jobs` processes of one thread, whatever the user set; what waits is dropped on an error.

    A new process has our environment before it imports torch, and torch reads it only then. So the
    environment is changed here for as long as processes may be started.
    """
    before = dict(os.environ)
    changed = machine.polite(before, threads=1).items() - before.items()
    os.environ.update(changed)
    try:
        spawn = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
        with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
            try:
                yield pool
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    finally:
        for name, _ in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
