"""The default selector: the calibrated weights, the turns that points take, what is unbiased."""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom
from selector_cases import CASES, look_of
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.selectors import calibrated, matching, sampling
from corefed.selectors.calibrated import take_turns
from corefed.selectors.settings import Score, Selection

SIZES, KEEP, N, S = (40, 25, 33), (30, 20, 9), 45, 8


def drawn_case() -> tuple[Tensor, Tensor]:
    """Rows g [3, 45, 8] with padding, and the weights of a drawing; the last keeps k close to S."""
    draws = torch.Generator().manual_seed(0)
    mask = torch.arange(N) < torch.tensor(SIZES).unsqueeze(-1)
    g = torch.randn(3, N, S, generator=draws, dtype=torch.float64) * mask.unsqueeze(-1)
    pi = sampling.inclusion(torch.rand(3, N, generator=draws), mask, torch.tensor(KEEP), 0.3)
    chosen = sampling.draw(pi, torch.tensor(KEEP), mask, streams(3, 2), "test")
    return g, torch.where(chosen, 1 / pi.clamp_min(1e-9), 0.0)


def streams(clients: int, seed: int = 0) -> Streams:
    return Streams([Who(seed, c) for c in range(clients)], 0)


# The calibrated weights


def reference(g: Tensor, d: Tensor, shrink: float) -> Tensor:
    """One client's minimiser as a stacked least-squares problem over the support."""
    at = d > 0
    phi, near = g[at].numpy().T, d[at].numpy()
    ridge = shrink * float((near * (phi**2).sum(0)).mean())
    tall = np.concatenate([phi, math.sqrt(ridge) * np.diag(near**-0.5)])
    aim = np.concatenate([g.sum(0).numpy(), math.sqrt(ridge) * near**0.5])
    w = torch.zeros_like(d)
    w[at] = torch.from_numpy(np.linalg.lstsq(tall, aim, rcond=None)[0])
    return w


@pytest.mark.parametrize("shrink", [0.01, 0.1, 3.0])
def test_weights_minimise_the_ridge_problem(shrink: float) -> None:
    g, drawn = drawn_case()
    w = calibrated.calibrate(g, drawn, shrink, 1e9)
    free = 0
    for row in range(3):
        expected = reference(g[row], drawn[row], shrink)
        if (expected[drawn[row] > 0] > 1e-6).all():  # where no bound binds, 0 included
            torch.testing.assert_close(w[row], expected, rtol=1e-9, atol=1e-9)
            free += 1
    assert free >= 2
    assert (w[drawn == 0] == 0).all()


def test_much_shrinkage_or_nothing_to_match_leaves_the_drawn_weights() -> None:
    g, drawn = drawn_case()
    far = calibrated.calibrate(g, drawn, 1e9, 4.0)
    torch.testing.assert_close(far, drawn, rtol=1e-6, atol=0)
    nothing = calibrated.calibrate(torch.zeros_like(g), drawn, 0.1, 4.0)
    torch.testing.assert_close(nothing, drawn, rtol=1e-14, atol=0)  # a root, squared
    broken = g.clone()
    broken[1, 0, 0] = torch.nan
    w = calibrated.calibrate(broken, drawn, 0.1, 4.0)
    torch.testing.assert_close(w[1], drawn[1], rtol=1e-14, atol=0)
    assert torch.equal(w[0], calibrated.calibrate(g, drawn, 0.1, 4.0)[0])


def test_without_shrinkage_more_points_than_draws_match_all_data() -> None:
    """The solution is within y's rounding times the condition of a random 8 x 20 system."""
    g, drawn = drawn_case()
    w = calibrated.calibrate(g, drawn, 0.0, 1e9)
    y, found = g.sum(1), torch.bmm(w.unsqueeze(1), g).squeeze(1)
    for row in range(2):
        assert (w[row][drawn[row] > 0] > 1e-6).all()  # no bound binds
        assert float((y - found)[row].norm()) < 1e-6 * float(y[row].norm())


@pytest.mark.parametrize("bound", [1.0, 1.2, 4.0])
def test_bounds_are_kept_and_clients_do_not_mix(bound: float) -> None:
    g, drawn = drawn_case()
    g = g * 30 ** torch.rand(3, N, 1, generator=torch.Generator().manual_seed(1)).double()
    w = calibrated.calibrate(g, drawn, 1e-3, bound)
    assert (w[drawn == 0] == 0).all()
    ratio = (w / drawn)[drawn > 0]
    assert float(ratio.min()) >= 1 / bound - 1e-12 and float(ratio.max()) <= bound + 1e-12
    assert bound == 4.0 or float(ratio.max()) > bound - 1e-9  # so that the test says something
    for row, size in enumerate(SIZES):
        alone = calibrated.calibrate(
            g[row : row + 1, :size], drawn[row : row + 1, :size], 1e-3, bound
        )
        torch.testing.assert_close(w[row, :size], alone[0], rtol=1e-9, atol=1e-9)


# The selector's settings


@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("case", CASES)
def test_any_score_gives_k_points_in_turn_or_not(case: str, score: Score) -> None:
    for in_turn_, balance in ((True, True), (True, False), (False, True)):
        settings = Selection(score=score, in_turn=in_turn_, balance=balance)
        look = look_of(case, (40, 25), (8, 5), padding=2)._replace(settings=settings)
        weight, memory = calibrated.select(look)
        assert torch.equal((weight > 0).sum(-1), look.k) and (weight[~look.mask] == 0).all()
        # No chance is below floor k / n, so no weight is above this.
        most = settings.bound * look.n / (settings.floor * look.k)
        assert (weight <= most.unsqueeze(-1) * (1 + 1e-6)).all()
        assert torch.equal(memory, look.memory) != in_turn_


def test_without_a_score_or_calibration_it_is_a_simple_random_sample() -> None:
    settings = Selection(score="none", in_turn=False, shrink=1e9)
    look = look_of("classes", (40, 25), (8, 5))._replace(settings=settings)
    weight = calibrated.select(look).weight
    expected = (look.n / look.k).unsqueeze(-1) * (weight > 0)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=0)


# Turns


class Turns(NamedTuple):
    """Choices of one client one after the other."""

    gap: Tensor  # [T, n] times taken less the sum of pi so far
    by_class: Tensor  # [T, groups] the same of a class
    seats: Tensor  # [T, groups] points of a class in each choice


def turns(pis: list[Tensor], k: int, mask: Tensor, group: Tensor, seed: int, groups: int) -> Turns:
    owed = torch.zeros_like(mask, dtype=torch.float64)
    gap = torch.zeros_like(owed)
    members = torch.nn.functional.one_hot(group[0], groups).double() * mask[0].unsqueeze(-1)
    gaps, seats = [], []
    for pi in pis:
        chosen, owed = take_turns(pi, torch.tensor([k]), mask, group, owed, streams(1, seed))
        assert int(chosen.sum()) == k and not bool(chosen[~mask].any())
        assert bool((owed[~mask] == 0).all())
        gap = gap + chosen.double() - pi
        gaps.append(gap[0])
        seats.append(chosen[0].double() @ members)
    together = torch.stack(gaps)
    return Turns(together, together @ members, torch.stack(seats))


def scores_case(seed: int) -> tuple[torch.Generator, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    mask = (torch.arange(64) < 60).unsqueeze(0)
    return draws, mask, torch.randint(0, 4, (1, 64), generator=draws)


def chances(draws: torch.Generator, mask: Tensor, k: int) -> Tensor:
    scores = torch.rand(1, mask.shape[1], generator=draws).pow(3)
    return sampling.inclusion(scores, mask, torch.tensor([k]), 0.3)


@pytest.mark.parametrize("seed", range(5))
def test_points_and_classes_are_taken_as_often_as_their_chances_say(seed: int) -> None:
    """After any number of choices, whether or not the chances change.

    That a class is never ahead by 1 is a theorem, as long as none runs out of points: the debts of
    all classes sum to 0 after a choice, and a class takes its last place only where no other is
    owed more; had it been owed nothing, no debt would be above 0 and its own below. The rest is
    measured, over a hundred clients of 60 to 500 points and up to 300 choices: classes are off by
    0.76 at most, and points by 1.4.
    """
    draws, mask, group = scores_case(seed)
    constant = [chances(draws, mask, 7)] * 100
    changing = [chances(draws, mask, 7) for _ in range(100)]
    for pis in (constant, changing):
        found = turns(pis, 7, mask, group, seed, 4)
        assert float(found.by_class.max()) < 1
        assert float(found.by_class.min()) > -1
        assert float(found.gap.abs().max()) < 1.5


def test_what_is_taken_in_turn_adds_up_to_all_data_over_time() -> None:
    """With weights 1 / pi the mean over T choices of sum_j w_j f_j is sum_j f_j, but for 1.5 / pi_j
    of each f_j over T: not a Monte-Carlo error, which would fall as the root of T."""
    draws, mask, group = scores_case(1)
    pi = chances(draws, mask, 7)
    f = torch.randn(64, generator=draws, dtype=torch.float64) * mask[0]
    scaled = f / pi[0].clamp_min(1e-9)
    found = turns([pi] * 200, 7, mask, group, 1, 4)
    for t in (10, 50, 200):
        mean = f.sum() + found.gap[t - 1] @ scaled / t
        assert abs(float(mean - f.sum())) < 1.5 * float(scaled.abs().sum()) / t
    # Independent draws have this standard deviation at T = 200 (of a Poisson sample; no bound).
    alone = float((f.square() * (1 / pi[0].clamp_min(1e-9) - 1) * mask[0]).sum().sqrt())
    assert abs(float(found.gap[-1] @ scaled / 200)) < 0.5 * alone / math.sqrt(200)


def test_a_class_that_holds_a_fifth_is_in_every_choice() -> None:
    """Ten points, five classes of two chances each. By the theorem above a class is owed more than
    1 before a choice, all of them 10 together; those that come before it are fewer than what the
    others are owed, 9: it never goes without."""
    draws = torch.Generator().manual_seed(0)
    mask, group = torch.ones(1, 100, dtype=torch.bool), (torch.arange(100) % 5).unsqueeze(0)
    scores = torch.rand(1, 100, generator=draws)
    share = torch.zeros(1, 5).double().scatter_add(1, group, scores.double())
    pi = 2 * scores / share.gather(1, group)
    found = turns([pi] * 200, 10, mask, group, 0, 5)
    assert float(found.seats.min()) >= 1
    changing = [sampling.inclusion(torch.rand(1, 100, generator=draws), mask, torch.tensor([10]), 1)
                for _ in range(50)]  # fmt: skip
    assert float(turns(changing, 10, mask, group, 0, 5).seats.min()) >= 1


def test_without_balance_a_class_is_absent_as_chance_has_it() -> None:
    """First choices with equal chances are simple random samples: hypergeometric, within 5
    standard errors. (Drawn with replacement it would be 0.8^10 = 0.107.)"""
    many = 5000
    mask = torch.ones(many, 100, dtype=torch.bool)
    pi, k = torch.full((many, 100), 0.1).double(), torch.full((many,), 10)
    every = torch.zeros(many, 100, dtype=torch.int64)
    chosen, _ = take_turns(pi, k, mask, every, torch.zeros(many, 100), streams(many))
    absent = float((~chosen[:, :20].any(-1)).double().mean())
    expected = float(hypergeom.pmf(0, 100, 20, 10))
    assert abs(absent - expected) < 5 * math.sqrt(expected * (1 - expected) / many)
    by_class = (torch.arange(100) // 20).expand(many, -1)
    chosen, _ = take_turns(pi, k, mask, by_class, torch.zeros(many, 100), streams(many))
    assert bool((chosen.view(many, 5, 20).sum(-1) == 2).all())


def test_a_memory_that_was_kept_goes_on_as_if_nothing_had_happened() -> None:
    draws, mask, group = scores_case(2)
    pi, k = chances(draws, mask, 7), torch.tensor([7])
    _, owed = take_turns(pi, k, mask, group, torch.zeros(1, 64), streams(1))
    kept = owed.clone()
    first = take_turns(pi, k, mask, group, owed, streams(1, 5))
    again = take_turns(pi, k, mask, group, kept, streams(1, 6))  # draws nothing any more
    assert torch.equal(owed, kept)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_pool_of_half_the_points_is_the_other_half_next_time() -> None:
    """In turn with equal chances; the solver's target stays that of all points."""
    settings = Selection(pool=0.5, draws=30)
    look = look_of("classes", (40, 24), (8, 5))._replace(settings=settings)
    first = matching.select(look)
    second = matching.select(look._replace(memory=first.memory))
    third = matching.select(look._replace(memory=second.memory))
    for weight in (first.weight, second.weight, third.weight):
        assert ((weight > 0).sum(-1) <= look.k).all() and (weight > 0).any(-1).all()
    assert not ((first.weight > 0) & (second.weight > 0)).any()
    assert not ((second.weight > 0) & (third.weight > 0)).any()


# The first choice


BIAS = 0.012
"""Of a first choice's frequencies, where places are not shared by class: the debt at which points
are cut off is random, and the chance to exceed it is not quite linear. Set by what was measured:
a point with pi = 1 is left out by one first choice in 90, which no standard error explains."""


def test_first_choices_are_as_frequent_as_pi_but_for_a_small_bias() -> None:
    """10000 seeds, within five standard errors and the bias stated above; and so are sums."""
    many, n = 10_000, 60
    draws = torch.Generator().manual_seed(0)
    mask = torch.ones(many, n, dtype=torch.bool)
    for keep in (7, 20):
        k = torch.full((many,), keep)
        one = chances(draws, mask[:1], keep)
        pi = one.expand(many, -1)
        every = torch.zeros(many, n, dtype=torch.int64)
        chosen, _ = take_turns(pi, k, mask, every, torch.zeros(many, n), streams(many))
        found = chosen.double().mean(0)
        spread = (found * (1 - found) / many).sqrt()
        assert bool(((found - one[0]).abs() <= 5 * spread + BIAS).all())
        f = torch.randn(n, generator=draws, dtype=torch.float64)
        total = (chosen.double() / pi) @ f
        error = 5 * float(total.std()) / math.sqrt(many) + BIAS * float((f / one[0]).abs().sum())
        assert abs(float(total.mean() - f.sum())) < error


def test_first_places_are_shared_by_class_by_largest_remainders() -> None:
    """The same whatever the seed: not drawn, so that a first choice alone is unbiased only up to
    the rounding of a class's share; its debts make up for that in the choices after it."""
    sums = torch.tensor([0.55, 0.75, 2.6, 3.1], dtype=torch.float64)  # of 7: 0, 1, 3, 3
    mask, group = torch.ones(50, 40, dtype=torch.bool), (torch.arange(40) % 4).expand(50, -1)
    pi = (sums / 10)[group]
    k = torch.full((50,), 7)
    chosen, _ = take_turns(pi, k, mask, group, torch.zeros(50, 40), streams(50))
    seats = chosen.view(50, 10, 4).sum(1)
    assert seats.tolist() == [[0, 1, 3, 3]] * 50
    found = turns([pi[:1]] * 100, 7, mask[:1], group[:1], 0, 4)
    assert bool(((found.seats.mean(0) - sums).abs() < 1 / 100).all())
