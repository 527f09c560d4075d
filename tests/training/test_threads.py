"""Clients on several threads: order, exceptions, and the number of threads that is set back."""

from __future__ import annotations

import threading

import pytest
import torch

from corefed.training.threads import WORTH_THREADS, map_parts, threads_for


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_parts():
    assert list(map_parts(lambda part: part * 2, list(range(9)), 2)) == [2 * i for i in range(9)]


def test_each_thread_computes_on_one_core_and_the_caller_has_its_threads_back():
    def work(_):
        return torch.get_num_threads(), threading.current_thread().name

    found = list(map_parts(work, [0, 1, 2, 3], 2))
    assert {count for count, _ in found} == {1}
    assert all(name.startswith("corefed-clients") for _, name in found)
    assert torch.get_num_threads() == 2


def test_a_failure_reaches_the_caller_and_sets_the_threads_back():
    def work(part):
        raise ValueError(f"part {part}")

    with pytest.raises(ValueError, match="part 0"):
        list(map_parts(work, [0, 1], 2))
    assert torch.get_num_threads() == 2


def test_one_part_or_one_thread_stays_in_the_calling_thread():
    here = threading.current_thread()
    for parts, count in (([0], 2), ([0, 1], 1)):
        assert all(
            thread is here
            for thread in map_parts(lambda _: threading.current_thread(), parts, count)
        )


def test_small_networks_are_not_worth_threads():
    assert threads_for(WORTH_THREADS) == 1
    assert threads_for(2 * WORTH_THREADS) == 2
    assert threads_for(100 * WORTH_THREADS) == 2  # no more than there are
