"""Systems solved by Newton's iteration, against LAPACK."""

from __future__ import annotations

import pytest
import torch

from corefed.selectors import newton


@pytest.mark.parametrize("condition", [1.0, 10.0, 1e3, 1e5])
def test_newtons_iteration_solves_the_system(condition: float) -> None:
    g = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(3, 12, 12, generator=g, dtype=torch.float64))
    values = torch.logspace(0, float(torch.tensor(condition).log10()), 12, dtype=torch.float64)
    sizes = torch.tensor([1e-3, 1.0, 1e4], dtype=torch.float64).view(-1, 1, 1)  # of whole systems
    system = sizes * (basis * values) @ basis.mT
    right = torch.randn(3, 12, 1, generator=g, dtype=torch.float64)
    found = newton.solve(system, right, sizes, newton.steps_for(12 * condition))
    expected = torch.linalg.solve(system, right)
    torch.testing.assert_close(found, expected, rtol=1e-12 * condition, atol=0)


def test_steps_grow_with_the_logarithm_of_the_condition() -> None:
    assert newton.steps_for(1.0) == 1
    assert newton.steps_for(1e3) <= 17
    assert newton.steps_for(1e6) - newton.steps_for(1e3) == pytest.approx(10, abs=1)


def test_a_system_of_no_numbers_has_no_solution() -> None:
    """A posterior that has diverged: the caller keeps the weights that points were drawn with."""
    system = torch.full((1, 2, 2), torch.nan, dtype=torch.float64)
    found = newton.solve(system, torch.ones(1, 2, 1).double(), torch.ones(1, 1, 1).double(), 3)
    assert found.isnan().all()
