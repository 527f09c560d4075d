"""Work on several threads: order, exceptions, numbers of threads, and forked processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from corefed.base.threads import AHEAD, WORTH_THREADS, map_parts, threads_for


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_parts():
    assert list(map_parts(lambda part: part * 2, list(range(9)), 2)) == [2 * i for i in range(9)]


def test_each_thread_computes_on_one_core_and_others_keep_their_threads():
    def work(_):
        return torch.get_num_threads(), threading.current_thread().name

    for _ in range(2):  # with threads that start, and that are there
        found = list(map_parts(work, [0, 1, 2, 3], 2))
        assert {count for count, _ in found} == {1}
        assert all(name.startswith("corefed") for _, name in found)
        assert torch.get_num_threads() == 2
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]


def test_a_failure_reaches_the_caller_and_nothing_goes_on():
    ended = []

    def work(part):
        ended.append(part)
        if part == 0:
            raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 0"):
        list(map_parts(work, range(100), 2))
    seen = len(ended)
    assert seen < 100
    assert list(map_parts(abs, [-1, -2], 2)) == [1, 2]
    assert len(ended) == seen


def test_few_parts_of_a_stream_are_read_ahead():
    read = []
    stream = map_parts(abs, (read.append(i) or i for i in range(50)), 2)
    next(stream)
    assert len(read) <= 2 * AHEAD + 2


def test_one_thread_stays_in_the_calling_thread():
    here = threading.current_thread()
    found = map_parts(lambda _: threading.current_thread(), [0, 1], 1)
    assert all(thread is here for thread in found)


def test_small_networks_are_not_worth_threads():
    assert threads_for(WORTH_THREADS) == 1
    assert threads_for(2 * WORTH_THREADS) == 2
    assert threads_for(100 * WORTH_THREADS) == 2  # no more than there are


FORKS = """
import os, signal, sys
import torch
from corefed.base.threads import map_parts

def work(part):
    return float(torch.full((200_000,), part, dtype=torch.float64).square().sum())  # exact

torch.set_num_threads(2)
expected = [*map(work, (1.0, 2.0))]  # on OpenMP's threads
assert [*map_parts(work, (1.0, 2.0), 2)] == expected
child = os.fork()
if child == 0:
    signal.alarm(60)
    assert [*map(work, (1.0, 2.0))] == expected
    assert [*map_parts(work, (1.0, 2.0), 2)] == expected
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_computes_and_does_not_wait_for_threads_that_it_has_not():
    subprocess.run([sys.executable, "-c", FORKS], check=True, timeout=120)
