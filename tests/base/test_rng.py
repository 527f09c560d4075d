"""Streams depend on (seed, round, client, purpose) and on nothing else."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations, product

import pytest
import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.rng import SERVER, Streams, Who

CLIENTS = [Who(0, 0), Who(0, 1), Who(0, 2), Who(7, 0), Who(7, 1)]


def draw(who: list[Who], round_: int = 3, purpose: str = "theta") -> dict[Who, Tensor]:
    """Two draws of a purpose for each client, the second going on from the first."""
    streams = Streams(who, round_)
    first, second = streams.normal(purpose, 4, 5), streams.normal(purpose, 3)
    return {w: torch.cat([a.flatten(), b]) for w, a, b in zip(who, first, second, strict=True)}


def test_keys_differ_whenever_an_argument_does() -> None:
    """No two of 5 x 5 x 7 x 4 tuples collide; (1, 12, 1) must not run into (11, 2, 1)."""
    numbers = (0, 1, 2, 11, 12)
    grid = product(numbers, numbers, (-1, 21, *numbers), ("a", "a/head", "b", ""))
    keys = [rng.key(*arguments) for arguments in grid]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)


def test_keys_are_the_same_on_every_machine() -> None:
    """Worked out once: were they to change, a resumed run would not continue the killed one."""
    assert rng.key(0, 0, 0, "theta") == 8271628604795779015


@pytest.mark.parametrize(
    "who",
    [
        pytest.param([w], id=f"alone {w.seed}/{w.client}")  # the loop runtime
        for w in CLIENTS
    ]
    + [
        pytest.param(CLIENTS[::-1], id="reversed"),
        pytest.param(CLIENTS[1:4], id="a chunk across seeds"),
    ],
)
def test_a_client_draws_the_same_in_any_company(who: list[Who]) -> None:
    together = draw(CLIENTS)
    for w, drawn in draw(who).items():
        assert torch.equal(drawn, together[w])


def test_large_draws_are_the_same_in_any_company() -> None:
    streams = Streams(CLIENTS, 3)
    together = [streams.normal("theta", 20_000) for _ in range(3)]
    for row, who in enumerate(CLIENTS):
        alone = Streams([who], 3)
        for many in together:
            assert torch.equal(alone.normal("theta", 20_000)[0], many[row])


@pytest.mark.parametrize(
    ("who", "round_", "purpose"),
    [
        (Who(1, 0), 3, "theta"),
        (Who(0, 1), 3, "theta"),
        (Who(0, 0), 4, "theta"),
        (Who(0, 0), 3, "theta/head"),
        (Who(0, SERVER), 3, "theta"),
    ],
)
def test_a_stream_changes_with_each_argument(who: Who, round_: int, purpose: str) -> None:
    """Unrelated, not merely different: a correlation of 4 / sqrt(n) has probability 6e-5."""
    first = Streams([Who(0, 0)], 3).normal("theta", 10_000)[0]
    second = Streams([who], round_).normal(purpose, 10_000)[0]
    assert abs(float((first * second).mean())) < 4 / math.sqrt(10_000)


def test_purposes_do_not_move_each_other_on() -> None:
    plain = Streams(CLIENTS, 0)
    first = plain.normal("theta", 6)
    busy = Streams(CLIENTS, 0)
    busy.uniform("subset", 11)
    busy.words("batch", 3)
    assert torch.equal(busy.normal("theta", 6), first)


def test_a_second_draw_goes_on_and_a_restart_begins_again() -> None:
    streams = Streams(CLIENTS, 0)
    first, second = streams.uniform("subset", 8), streams.uniform("subset", 8)
    assert not torch.equal(first, second)
    assert torch.equal(first, Streams(CLIENTS, 0).uniform("subset", 16)[:, :8])
    assert torch.equal(streams.restart().uniform("subset", 8), first)


def test_a_subset_continues_the_parent_and_moves_it_on() -> None:
    whole = Streams(CLIENTS, 2)
    expected = [whole.normal("theta", 7) for _ in range(3)]
    parent = Streams(CLIENTS, 2)
    assert torch.equal(parent.normal("theta", 7), expected[0])
    child = parent.subset([3, 1])
    assert child.who == [CLIENTS[3], CLIENTS[1]]
    assert torch.equal(child.normal("theta", 7), expected[1][[3, 1]])
    after = parent.normal("theta", 7)  # 1 and 3 have drawn twice before, the others once
    for row in range(5):
        assert torch.equal(after[row], expected[2 if row in (1, 3) else 1][row])
    # A subset that opens a stream before its parent does, and a subset of a subset.
    fresh = Streams(CLIENTS, 2)
    assert torch.equal(fresh.subset([0, 4]).subset([1]).normal("theta", 7), expected[0][[4]])
    assert torch.equal(fresh.normal("theta", 7)[4], expected[1][4])


def test_host_streams_are_drawn_on_the_cpu() -> None:
    generators = Streams(CLIENTS, 0).generators("batch", host=True)
    assert [g.device.type for g in generators] == ["cpu"] * 5
    values = torch.rand(3, generator=generators[2])
    alone = rng.generator(0, 0, 2, "batch")
    assert torch.equal(values, torch.rand(3, generator=alone))


def test_stretches_are_the_same_in_pieces_of_any_length() -> None:
    whole = Streams(CLIENTS, 1).stretches("theta", 2, 9)(0, 7)
    assert whole.shape == (5, 7, 2, 9)
    draw = Streams(CLIENTS, 1).stretches("theta", 2, 9)
    pieces = [draw(first, count) for first, count in ((0, 3), (3, 1), (4, 3))]
    assert torch.equal(torch.cat(pieces, 1), whole)
    alone = Streams(CLIENTS[2:3], 1).stretches("theta", 2, 9)(5, 1)
    assert torch.equal(alone[0, 0], whole[2, 5])


def test_words_do_not_depend_on_how_many_are_asked_for() -> None:
    """Rows of a padded client are longer, and others may need more calls."""
    short = Streams(CLIENTS, 1).words("batch", 5, calls=2)
    long = Streams(CLIENTS, 1).words("batch", 50, calls=6)
    assert torch.equal(short, long[:, :2, :5])
    streams = Streams(CLIENTS, 1)
    streams.words("batch", 5, calls=2, counted=4)
    assert torch.equal(streams.words("batch", 50), long[:, 4:5])


def test_moments_of_the_draws() -> None:
    """n draws: the mean has std 1 / sqrt n, the variance sqrt(2 / n); 4 of them."""
    n = 40_000
    normal = Streams([Who(0, 0)], 0).normal("theta", n)[0].double()
    uniform = Streams([Who(0, 0)], 0).uniform("subset", n)[0].double()
    assert abs(float(normal.mean())) < 4 / math.sqrt(n)
    assert abs(float(normal.var()) - 1) < 4 * math.sqrt(2 / n)
    assert abs(float(uniform.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / n)
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1


# Cohorts


def test_choose_is_deterministic_sorted_and_without_replacement() -> None:
    for clients, size in ((10, 3), (10, 9), (1, 1), (500, 50)):
        cohort = rng.choose(3, 5, clients, size)
        assert cohort == rng.choose(3, 5, clients, size)
        assert list(cohort) == sorted(set(cohort))
        assert len(cohort) == size
        assert cohort[0] >= 0 and cohort[-1] < clients
    assert rng.choose(3, 5, 4, 4) == rng.choose(3, 5, 4, 9) == (0, 1, 2, 3)
    assert len({rng.choose(seed, t, 100, 10) for seed in range(5) for t in range(5)}) == 25


def test_choose_is_uniform() -> None:
    """Over T rounds a client is in Binomial(T, S/N) cohorts, a pair in Binomial(T, p_2) of them.

    With 10 + 45 counts, 4.5 standard deviations have a family-wise probability of 4e-4.
    """
    rounds, clients, size = 4000, 10, 3
    cohorts = [rng.choose(11, t, clients, size) for t in range(rounds)]
    singles = Counter(i for cohort in cohorts for i in cohort)
    pairs = Counter(pair for cohort in cohorts for pair in combinations(cohort, 2))
    for counts, p, total in (
        (singles, size / clients, clients),
        (pairs, size * (size - 1) / (clients * (clients - 1)), math.comb(clients, 2)),
    ):
        assert len(counts) == total
        std = math.sqrt(rounds * p * (1 - p))
        assert max(abs(count - rounds * p) for count in counts.values()) < 4.5 * std


def test_the_same_client_twice_draws_once() -> None:
    """Several settings of a run have the same clients; together or not, the numbers are alike."""
    who = [Who(0, 0), Who(0, 1), Who(0, 0), Who(1, 0)]
    together, apart = Streams(who, 3), Streams(who, 3)
    for shape in ((5,), (2, 3)):
        drawn = together.stretches("theta", *shape)(0, 1)[:, 0]
        assert torch.equal(drawn, apart.normal("theta", *shape))
        assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[3])
