"""Choosing for clients: stacked widths, every solver through one door, sizes and groups.

The uniform subset's expectation and the number of draws are in test_coreset_pfedbayes.py.
"""

from __future__ import annotations

import itertools
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.bayes import gaussian
from corefed.coreset import refit, solvers
from corefed.coreset.problem import problem
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.selectors import matching, potentials
from corefed.selectors.quality import judge
from corefed.selectors.settings import Selection, Solver

NAMES = [name for name in solvers.SOLVERS if name != "sparse-vi"]


def ragged() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(g, y, k, mask): clients of 20, 12 and 6 points, the last with k = n."""
    real, k = torch.tensor([20, 12, 6]), torch.tensor([5, 3, 6])
    mask = torch.arange(20) < real.unsqueeze(-1)
    draws = torch.Generator().manual_seed(0)
    g = torch.randn(3, 20, 30, generator=draws, dtype=torch.float64) * mask.unsqueeze(-1)
    return g, g.sum(1), k, mask


@pytest.mark.parametrize("shrink", [0.0, 0.1])
@pytest.mark.parametrize("name", NAMES)
def test_every_solver_with_and_without_shrinkage(name: str, shrink: float) -> None:
    g, y, k, mask = ragged()

    everyone = [Who(0, c) for c in range(3)]
    settings: Any = {"solver": name, "shrink": shrink, "max_iterations": 50}
    w = matching.solve(Selection(**settings), g, y, k, mask, Streams(everyone, 0))
    assert (w >= 0).all() and ((w > 0).sum(-1) <= k).all() and (w[~mask] == 0).all()
    posed = problem(g, k, mask, y)
    generators = Streams(everyone, 0).generators("solver", host=True)
    plain = solvers.get(name)(posed, iterations=50, generators=generators).w
    if shrink and name != "uniform":  # whose weights are n/k already
        plain = refit.refit(posed, plain > 0, mask.sum(-1) / k, shrink)
    assert torch.equal(w[:2], plain[:2])
    assert torch.equal(w[2], mask[2].double())  # k = n: the coreset is the data


def test_more_shrinkage_is_nearer_to_the_plain_weight() -> None:
    g, y, k, mask = ragged()
    gaps = []
    for shrink in (0.01, 1.0, 100.0):
        settings, streams = Selection(solver="exchange", shrink=shrink), Streams([Who(0, 0)] * 3, 0)
        w = matching.solve(settings, g, y, k, mask, streams)
        gaps.append(float((w - (mask.sum(-1) / k).unsqueeze(-1))[w > 0].abs().max()))
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 0.1


def test_the_method_offers_every_solver_that_needs_no_posterior_of_its_own() -> None:
    assert set(get_args(Solver)) == set(NAMES)
    g, y, k, mask = ragged()
    settings: Any = {"solver": "sparse-vi"}
    streams = Streams([Who(0, 0)] * 3, 0)
    with pytest.raises(UserError, match="resample"):
        matching.solve(Selection(**settings), g, y, k, mask, streams)


def test_several_widths_are_stacked_with_equal_weight() -> None:
    """Each block is potentials of its own width, with ||y|| = 1; one width alone is not scaled."""
    draws = torch.Generator().manual_seed(0)
    model = mlp((3, 4, 2), Categorical(2))
    weight = torch.ones(2, 9)
    weight[1, 6:] = 0
    x = torch.randn(2, 9, 3, generator=draws)
    data = ClientData(x, torch.randint(0, 2, (2, 9), generator=draws), weight)
    rho = torch.full((2, model.size), -2.0)
    q = torch.stack([torch.randn(2, model.size, generator=draws), rho], 1)

    def stacked(*widths: float) -> Tensor:
        settings, streams = (
            Selection(widths=widths, feature_draws=8),
            Streams([Who(0, 0), Who(0, 1)], 0),
        )
        return matching.matched_potentials(model, q, data, settings, 60, streams)

    both = stacked(1.0, 4.0)
    assert both.shape == (2, 9, 60)
    assert (both[1, 6:] == 0).all()
    for block in both.split(30, -1):
        torch.testing.assert_close(block.sum(1).norm(dim=-1), torch.ones(2))
    log_p = potentials.draw(
        model, gaussian.widen(q, 4.0), data, 30, Streams([Who(0, 0), Who(0, 1)], 0), "coreset/4", 4
    )
    wide = potentials.potentials(log_p, weight > 0)
    wide = wide / wide.sum(1).norm(dim=-1).view(-1, 1, 1)
    torch.testing.assert_close(both[..., 30:], wide)
    alone = stacked(4.0)
    assert (alone.sum(1).norm(dim=-1) - 1).abs().min() > 0.1


def test_a_coreset_of_all_points_is_judged_perfect() -> None:
    g, _, _, mask = ragged()
    quality = judge(g, mask.double(), mask.sum(-1), mask)
    assert (quality.error < 1e-28).all()
    assert (quality.uniform == 0).all()
    assert (quality.over_uniform < 1e-12).all()


def test_the_expected_error_of_uniform_subsets_is_their_mean() -> None:
    """Over all 20 subsets of 3 of 6 points: no sampling, so to rounding."""
    g, _, _, mask = ragged()
    g, mask = g[2:, :6], mask[2:, :6]
    subsets = list(itertools.combinations(range(6), 3))
    errors = []
    for subset in subsets:
        w = torch.zeros(1, 6).double()
        w[0, list(subset)] = 2.0
        errors.append(float(potentials.relative_error(g, w)))
    expected = judge(g, w, torch.tensor([3]), mask).uniform
    assert float(expected) == pytest.approx(sum(errors) / len(errors), rel=1e-12)


def test_groups_hold_each_due_client_once_with_its_own_draws() -> None:
    weight = (torch.arange(50) < torch.tensor([[50], [30], [50], [10]])).float()
    data = ClientData(torch.zeros(4, 50, 2), torch.zeros(4, 50).long(), weight)
    k, due = torch.tensor([25, 3, 25, 2]), torch.tensor([True, True, True, False])
    found = matching.groups(due, data, k, 0, 2048)
    assert sorted(row for rows, _ in found for row in rows) == [0, 1, 2]
    for rows, draws in found:
        assert len(rows) == 1  # on a CPU one after the other
        for row in rows:
            size = int(weight[row].sum())
            assert draws == matching.draws_for(int(k[row]), size, 0, 2048)
    assert matching.groups(torch.zeros(4).bool(), data, k, 0, 2048) == []
    assert {draws for _, draws in matching.groups(due, data, k, 77, 2048)} == {77}


def test_sizes_are_rounded_up_by_an_eighth_at_most() -> None:
    for number in range(1, 3000):
        size = matching.round_up(number)
        assert number <= size <= number * 1.125 + 1
    assert len({matching.round_up(number) for number in range(1024, 2048)}) <= 9
