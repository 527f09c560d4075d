"""Weights of rare classes: in the likelihood, filled in from the data, and what they shift."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from corefed import resolve, train
from corefed.base.errors import UserError
from corefed.models.likelihood import Categorical
from corefed.settings import class_weights
from corefed.training import fitted
from corefed.training.setup import network, prepare


def test_a_point_counts_as_many_points_as_its_weight() -> None:
    g = torch.Generator().manual_seed(0)
    output, y = torch.randn(2, 5, 3, generator=g), torch.tensor([0, 2, 1, 1, 0])
    plain = Categorical(3).log_prob(output, output, y)
    weighted = Categorical(3, weights=(1.0, 2.0, 5.0)).log_prob(output, output, y)
    torch.testing.assert_close(weighted, plain * torch.tensor([1.0, 5.0, 2.0, 2.0, 1.0]))
    same = Categorical(3, weights=(1.0, 2.0, 5.0)).predictive(output, output.unsqueeze(0))
    assert torch.equal(same, Categorical(3).predictive(output, output.unsqueeze(0)))


def test_balanced_is_that_of_scikit_learn() -> None:
    """n / (classes n_c), a mean of 1 over points; a class without points stays at 1."""
    found = class_weights.weights(class_weights.balance([90, 10]), 2)
    assert found == pytest.approx((100 / 180, 100 / 20), rel=1e-5)
    assert class_weights.balance([5, 0, 5]) == "1,1,1"


@pytest.mark.parametrize("text", ["", "equal", "1,", "1,-2", "0,1", "1,inf", "nan,1"])
def test_weights_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"class_weights is .*none, balanced, or one number above"):
        resolve(assignments=[f"class_weights={text}"])


def test_weights_that_do_not_fit_the_data() -> None:
    flags = {"data": "digits", "device": "cpu", "clients": 2}
    with pytest.raises(UserError, match="class_weights has 2 numbers, and there are 10 classes"):
        prepare(resolve(flags={**flags, "class_weights": "1,5"}))
    with pytest.raises(UserError, match="these data are a regression"):
        prepare(resolve(flags={"data": "synthetic-linear", "class_weights": "balanced"}))
    run = resolve(flags={"class_weights": "balanced"}).run  # as a site of a federation sees it
    with pytest.raises(UserError, match="sites of a federation do not tell; give the weights"):
        network(run, (4,), 2, 0)


def test_probabilities_shift_by_the_weights(tmp_path: Path) -> None:
    """Of pure noise a model learns the classes' shares: 1 in 10, and balanced 1 in 2."""
    g = np.random.default_rng(0)
    x, y = g.normal(size=(400, 2)), np.arange(400) % 10 == 0
    np.savez(tmp_path / "rare.npz", X=x, y=y.astype(int), site=np.arange(400) % 2)
    shares = {}
    for weights in ("none", "balanced"):
        flags = {
            "method": "fedavg", "data": f"npz:{tmp_path}/rare.npz", "client_column": "site",
            "class_weights": weights, "hidden": "", "rounds": 20, "local_steps": 10,
            "learning_rate": 0.1, "device": "cpu", "evaluate_every": 20,
        }  # fmt: skip
        out = tmp_path / weights
        train(resolve(flags=flags), out)
        fit = fitted.load(out)
        shares[weights] = float(fit.predict("0", torch.zeros(1, 2)).mean[0, 1])
    kept = fit.experiment.run.class_weights
    assert class_weights.weights(kept, 2) == pytest.approx((1 / 1.8, 5.0), rel=0.02)
    # 320 training points, 32 of the rare class: five standard errors of its share are 0.08.
    assert shares["none"] == pytest.approx(0.1, abs=0.08)
    assert shares["balanced"] == pytest.approx(0.5, abs=0.2)
    odds = shares["balanced"] / (1 - shares["balanced"]) / 9  # what dividing by the weights gives
    assert odds / (1 + odds) == pytest.approx(shares["none"], abs=0.03)
    assert math.isfinite(odds)
