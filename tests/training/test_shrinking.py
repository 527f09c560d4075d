"""How much of its own training a newcomer keeps: what its points say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from corefed.base.errors import UserError
from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.settings.config import resolve
from corefed.training import fitted, newcomers, rounds, shrinking
from corefed.training.fitted import Fitted

SHARES = list(shrinking.PRIOR)


def test_the_way_between_two_models() -> None:
    models = {"personal": {"v": torch.tensor([4.0])}, "global": {"v": torch.tensor([0.0])}}
    assert shrinking.between(models, 0.25)["personal"]["v"].tolist() == [1.0]
    assert shrinking.between(models, 0)["personal"]["v"].tolist() == [0.0]
    assert shrinking.between(models, 1) is models
    sizes = {"personal": {"v": torch.zeros(2)}, "global": {"v": torch.zeros(3)}}
    assert len(shrinking.between(sizes, 0.4)["personal"]["v"]) == 3
    assert len(shrinking.between(sizes, 0.6)["personal"]["v"]) == 2
    assert shrinking.temperature(0.5, 2.0, 0.5) == pytest.approx(1.0)


def test_the_share_is_a_posterior_mean() -> None:
    same = shrinking.posterior_mean(dict.fromkeys(SHARES, -7.0))
    assert same == pytest.approx(0.125 * (0.25 + 0.5 + 0.75 + 1))  # the prior's mean
    assert shrinking.posterior_mean({s: 100 * s for s in SHARES}) == pytest.approx(1)
    assert shrinking.posterior_mean({s: -100 * s for s in SHARES}) == pytest.approx(0)
    assert shrinking.posterior_mean({**dict.fromkeys(SHARES, math.nan), 0.5: -1.0}) == 0.5
    assert shrinking.posterior_mean(dict.fromkeys(SHARES, -math.inf)) == 0


def digits(classes: tuple[int, ...], number: int, first: int = 0) -> ClientData:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    at = np.flatnonzero(np.isin(y, classes))[first : first + number]
    points = torch.from_numpy((x[at] / 16).astype(np.float32)).unsqueeze(0)
    return ClientData(points, torch.from_numpy(y[at]).unsqueeze(0), torch.ones(1, number))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A shared model of all digits."""
    folder = tmp_path_factory.mktemp("run") / "run"
    settings = {"method": "pfedbayes", "data": "digits", "partition": "iid", "clients": 4}
    more = ["rounds=10", "local_steps=20", "hidden=16", "evaluate_draws=4", "device=cpu"]
    rounds.train(resolve(None, {**settings}, more), folder)
    return fitted.load(folder)


def joined(model: Fitted, train: ClientData, test: ClientData, share: float | None) -> dict:
    data = FederatedData(train, test, 10, 0, ["south"], tuple(map(str, range(10))))
    found = newcomers.join(model, data, steps=60, device="cpu", compare=False, share=share)
    metrics = {k: v["mean"] for k, v in found.summary["metrics"].items()}
    return {**metrics, "share": found.summary["personalized"]["share"]}


def test_points_that_tell_are_kept_and_misleading_ones_are_not(model: Fitted) -> None:
    """Two classes only: its own model is better. Labels by chance: the shared one is."""
    few = joined(model, digits((3, 8), 60), digits((3, 8), 100, 100), None)
    assert few["share"] > 0.6
    assert few["personal_nll"] < few["global_nll"]
    train, test = digits(tuple(range(10)), 40), digits(tuple(range(10)), 200, 100)
    shuffled = train.y[:, torch.randperm(40, generator=torch.Generator().manual_seed(0))]
    misled = joined(model, train._replace(y=shuffled), test, 1.0)
    saved = joined(model, train._replace(y=shuffled), test, None)
    assert saved["share"] < 0.5
    assert saved["global_nll"] < saved["personal_nll"] < misled["personal_nll"]


def test_two_points_are_enough(model: Fitted) -> None:
    found = joined(model, digits((3, 8), 2), digits((3, 8), 20, 100), None)
    assert 0 <= found["share"] <= 1


def test_a_share_out_of_range(model: Fitted) -> None:
    with pytest.raises(UserError, match=r"--share is 1\.5; it must be from 0 to 1"):
        joined(model, digits((3, 8), 5), digits((3, 8), 5, 100), 1.5)


def test_parts_are_stacked_without_padding_that_counts() -> None:
    data = digits((3, 8), 5)
    parts = shrinking._stacked(data, [torch.tensor([0, 2, 4]), torch.tensor([1, 3])])
    assert parts.weight.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert torch.equal(parts.x[1, 0], data.x[0, 1]) and bool((parts.x[1, 2] == 0).all())
    assert parts.y[0].tolist() == data.y[0][[0, 2, 4]].tolist()
