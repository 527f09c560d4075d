"""Who goes on at a rung, and when a candidate replaces the given settings: made-up scores."""

from __future__ import annotations

import math

import pytest
import torch

from corefed.training import halving
from corefed.training.candidates import Candidate, in_order, standing


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [(30, [8, 15, 30]), (100, [25, 50, 100]), (4, [1, 2, 4]), (2, [1, 2]), (1, [1])],
)
def test_rungs(rounds: int, expected: list[int]) -> None:
    assert halving.rungs(rounds) == expected


def test_the_better_half_goes_on_beside_the_given() -> None:
    nll = {0: 9.0, 1: 0.5, 2: 0.1, 3: 0.4, 4: 0.2, 5: 0.3, 6: 0.6}
    assert halving.survivors(nll) == [0, 2, 4, 5]
    assert halving.survivors({each: nll[each] for each in (0, 2, 4, 5)}) == [0, 2, 4]
    assert halving.survivors({0: 1.0, 1: 2.0}) == [0, 1]
    assert halving.survivors({0: 1.0}) == [0]
    assert halving.survivors({3: 0.4, 2: 0.1, 5: 0.3}) == [2, 5]  # the given diverged


def test_sixteen_candidates() -> None:
    nll = {number: float((7 * number) % 16) for number in range(16)}
    first = halving.survivors(nll)
    second = halving.survivors({number: nll[number] for number in first})
    assert (len(first), len(second)) == (9, 5)
    assert min(nll, key=nll.__getitem__) in second
    assert halving.planned(16, [8, 15, 30]) == 16 * 8 + 9 * 7 + 5 * 15


def test_equal_scores_keep_the_earlier_ones() -> None:
    assert halving.survivors(dict.fromkeys(range(5), 1.0)) == [0, 1, 2]


GIVEN = torch.tensor([1.0, 2.0, 3.0, 4.0])
"""NLL of four points."""


def chosen(gains: list[float]) -> halving.Choice:
    """The choice between the given and a candidate that is lower by this on the four points."""
    return halving.choose({0: GIVEN, 1: GIVEN - torch.tensor(gains)})


def test_a_gain_of_more_than_two_standard_errors_is_taken() -> None:
    found = chosen([0.4, 0.2, 0.4, 0.2])
    assert (found.chosen, found.best) == (1, 1)
    assert found.difference is not None
    assert found.difference.mean == pytest.approx(-0.3)
    assert found.difference.error == pytest.approx(0.1 * math.sqrt(4 / 3) / 2, rel=1e-5)


def test_a_smaller_one_is_not() -> None:
    for gains in ([2.0, -1.0, 0.5, -1.0], [0.3, 0.1, -0.1, 0.3]):  # 0.2 and 1.6 standard errors
        found = chosen(gains)
        assert (found.chosen, found.best) == (0, 1)
        assert found.difference is not None and not found.difference.is_gain


def test_the_given_are_kept_where_nothing_is_better() -> None:
    found = chosen([-0.1, -0.1, -0.1, -0.1])
    assert (found.chosen, found.best, found.difference) == (0, 0, None)
    assert chosen([0.0] * 4).chosen == 0


def test_a_single_point_moves_nothing() -> None:
    one = torch.tensor([1.0])
    assert halving.choose({0: one, 1: one - 0.9}).chosen == 0


def test_without_the_given_the_best_is_taken() -> None:
    found = halving.choose({2: GIVEN, 4: GIVEN - 0.1})
    assert (found.chosen, found.difference) == (4, None)


def test_an_imagined_error() -> None:
    """Of two binary models that are right on every point, the bolder one is not always better."""
    confidence = torch.tensor([0.9, 0.8], dtype=torch.float64)
    found = halving.with_imagined_error(-confidence.log(), confidence)
    assert found[:2].tolist() == (-confidence.log()).tolist()
    assert found[2].item() == pytest.approx(-(math.log(0.1) + math.log(0.2)) / 2)
    certain = torch.ones(50, dtype=torch.float64)
    assert halving.with_imagined_error(-certain.log(), certain)[-1].item() == 24 * math.log(2)
    careful = torch.full((50,), 0.95, dtype=torch.float64)
    bold, meek = (halving.with_imagined_error(-c.log(), c) for c in (certain, careful))
    assert bold[:-1].mean() < meek[:-1].mean() and bold.mean() > meek.mean()
    many = torch.full((5000,), 0.95, dtype=torch.float64)
    bold, meek = (halving.with_imagined_error(-c.log(), c) for c in (torch.ones_like(many), many))
    assert bold.mean() < meek.mean()  # with many points it matters no more


def candidate(number: int, outcome: str, round_: int, nll: float) -> Candidate:
    history = [{"round": round_, "score": nll, "nll": nll}] if math.isfinite(nll) else []
    return Candidate(number, {"zeta": float(number)}, outcome, round_, 10.0, history)


def test_order_and_standing() -> None:
    mine = [
        candidate(0, "training", 2, 0.9),
        candidate(1, "dropped", 1, 0.3),
        candidate(2, "training", 2, 0.5),
        candidate(3, "diverged", 1, math.inf),
        candidate(4, "training", 1, 0.4),
    ]
    assert [each.number for each in in_order(mine)] == [2, 0, 1, 4, 3]
    now = standing(mine, 1, [1, 2, 4], compared=False)
    assert (now.done, now.left, now.rung) == (7, 3, 2)
    assert now.total == 7 + 1 + 2 * 2  # candidate 4 to round 2, then two of them to round 4
    assert (now.leader, now.nll) == ({"zeta": 4.0}, 0.4)
    fresh = standing(
        [candidate(n, "training", 0, math.inf) for n in range(4)], 0, [4], compared=False
    )
    assert (fresh.done, fresh.total, fresh.leader) == (0, 16, {})
    assert "nll" not in mine[3].to_json()
    assert mine[1].to_json()["nll"] == 0.3
