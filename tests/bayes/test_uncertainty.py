"""The predictive taken apart, against closed forms and values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import Method, Tree
from corefed.bayes import gaussian, uncertainty
from corefed.bayes.uncertainty import Prediction
from corefed.methods import fedavg, pfedbayes
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import mlp

NOISE = 0.7


def says(each: Tensor) -> Method:
    """A method whose k-th draw says each[k], whatever the model and the point."""
    method = fedavg.build(fedavg.Config(), mlp((1, 2), Categorical(2)))

    def predict(model: Tree, x: Tensor, noise: Tensor) -> Tensor:
        return each[int(noise[0, 0, 0])]

    return method._replace(predict=predict)


def taken_apart(each: Tensor, classes: int) -> Prediction:
    """Of the draws' own predictions [K, n, out]."""
    number = torch.arange(len(each)).view(1, -1, 1)
    method = says(each.unsqueeze(1))
    return uncertainty.predict(method, {}, each.new_zeros(1, 1), number, classes).client(0)


# --- regression -----------------------------------------------------------------------------------


def test_a_gaussian_posterior_of_a_linear_model() -> None:
    """N(mu, diag s^2) and y = w.x + b + noise: mean mu.x, variance noise^2 + sum_p s_p^2 x_p^2.

    The 2 P draws +-sqrt(P) e_p have mean 0 and covariance 1, as standard normals have, so the first
    two moments are exact for a linear model: what is left is the rounding of float64.
    """
    mu = torch.tensor([0.5, -2.0, 0.25, 3.0]).double()  # three weights and the bias
    std = torch.tensor([0.3, 0.1, 0.8, 0.4]).double()
    model = {"v": torch.stack([mu, gaussian.rho_of(std)]).unsqueeze(0)}
    method = pfedbayes.build(pfedbayes.Config(), mlp((3, 1), Gaussian(1, NOISE)))
    x = torch.randn(1, 6, 3, generator=torch.Generator().manual_seed(0)).double()
    draws = math.sqrt(4) * torch.cat([torch.eye(4), -torch.eye(4)]).double().unsqueeze(0)
    said = uncertainty.predict(method, model, x, draws, 0)
    design = torch.cat([x, torch.ones(1, 6, 1).double()], -1)
    spread = (design**2 @ gaussian.sigma(gaussian.rho_of(std)).square()).unsqueeze(-1)
    torch.testing.assert_close(said.mean, (design @ mu).unsqueeze(-1))
    torch.testing.assert_close(said.aleatoric, torch.full_like(said.mean, NOISE**2))
    torch.testing.assert_close(said.epistemic, spread)
    torch.testing.assert_close(said.total, NOISE**2 + spread)


def test_the_variance_of_a_mixture_by_hand() -> None:
    """N(1, 4) and N(5, 16), half each: mean 3, noise 10, means 2 from theirs: 4."""
    said = taken_apart(torch.tensor([[[1.0, 4.0]], [[5.0, 16.0]]]).double(), 0)
    assert [field.item() for field in said] == [3.0, 14.0, 10.0]
    assert said.epistemic.item() == 4.0


def test_means_far_from_zero_lose_no_digits() -> None:
    """The mean of squares less the square of the mean has steps of 128 at 1e18."""
    each = torch.tensor([[[1e9 - 1, 0.0]], [[1e9 + 1, 0.0]]], dtype=torch.float64)
    assert taken_apart(each, 0).epistemic.item() == 1.0


def test_units_scale_standard_deviations() -> None:
    said = taken_apart(torch.tensor([[[1.0, 4.0]], [[5.0, 16.0]]]).double(), 0)
    own = said.in_unit(torch.tensor([100.0]), torch.tensor([10.0]))
    assert [field.item() for field in own] == [130.0, 1400.0, 1000.0]


# --- classification -------------------------------------------------------------------------------


def test_draws_that_disagree_are_all_epistemic() -> None:
    said = taken_apart(torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]]).double(), 2)
    assert said.mean.tolist() == [[0.5, 0.5]]
    assert said.total.item() == pytest.approx(math.log(2))
    assert said.aleatoric.item() == 0.0
    assert said.epistemic.item() == pytest.approx(math.log(2))


def test_draws_that_agree_are_all_aleatoric() -> None:
    said = taken_apart(torch.tensor([[[0.25, 0.75]]] * 3).double(), 2)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert said.total.item() == pytest.approx(entropy)
    assert said.aleatoric.item() == pytest.approx(entropy)
    assert 0 <= said.epistemic.item() < 1e-15


def test_entropies_by_hand() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [1 / 3, 1 / 3, 1 / 3]]).double()
    expected = torch.tensor([0.0, math.log(2), math.log(3)]).double()
    torch.testing.assert_close(uncertainty.entropy(p), expected)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(2, 5), st.floats(0.01, 100), st.integers(0, 10_000))
def test_bounds(draws: int, classes: int, sharpness: float, seed: int) -> None:
    """0 <= aleatoric <= total <= log classes (Jensen), up to rounding; epistemic is not below 0."""
    g = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(draws, 7, classes, generator=g, dtype=torch.float64)
    said = taken_apart(logits.softmax(-1), classes)
    assert (said.aleatoric >= 0).all()
    assert (said.aleatoric <= said.total + 1e-12).all()
    assert (said.total <= math.log(classes) + 1e-12).all()
    assert (said.epistemic >= 0).all()
    if draws == 1:
        assert (said.epistemic == 0).all()


def test_a_point_estimate_has_one_draw_and_nothing_epistemic() -> None:
    model = mlp((4, 3), Categorical(3))
    method = fedavg.build(fedavg.Config(), model)
    noise = uncertainty.draws_for(method, Streams([Who(0, 0)], 1), 10)
    assert noise.shape == (1, 1, 0)
    theta = torch.randn(1, model.size, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 5, 4, generator=torch.Generator().manual_seed(2))
    said = uncertainty.predict(method, {"theta": theta}, x, noise, 3)
    assert (said.epistemic == 0).all()
    assert (said.total > 0).all()
