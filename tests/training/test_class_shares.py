"""The class shares that a newcomer starts with: a mixture of Dirichlets, against sums by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.methods import fedavg, pfedbayes
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.settings.config import resolve
from corefed.training import class_shares, fitted, newcomers, rounds
from corefed.training.class_shares import CONCENTRATIONS, VAGUE, ClassShares

MODEL = mlp((4, 3), Categorical(3))


def rows(counts: list[list[int]]) -> list[dict[str, object]]:
    return [{"name": str(i), "classes": each} for i, each in enumerate(counts)]


def known(counts: list[list[int]]) -> ClassShares:
    method = pfedbayes.build(pfedbayes.Config(), MODEL)
    found = class_shares.of_run(rows(counts), len(counts[0]), method)
    assert found is not None
    return found


def ratio(of: ClassShares, counts: list[int]) -> Tensor:
    return class_shares.log_ratio(torch.tensor([counts]), of)[0].exp()


def test_evidence_is_the_product_of_predictions() -> None:
    """p(labels) = prod_j (n_c so far + alpha_c) / (j + sum alpha): the Polya urn, in any order."""
    alpha = torch.tensor([[0.5, 1.5, 2.0], [3.0, 3.0, 3.0]], dtype=torch.float64)
    labels = [0, 2, 2, 1, 0, 2]
    expected = []
    for each in alpha:
        seen, p = each.clone(), 1.0
        for label in labels:
            p *= float(seen[label] / seen.sum())
            seen[label] += 1
        expected.append(math.log(p))
    counts = torch.tensor([[2.0, 1.0, 3.0]], dtype=torch.float64)
    found = class_shares.evidence(counts, alpha)
    torch.testing.assert_close(found, torch.tensor([expected], dtype=torch.float64))


def test_the_new_shares_are_the_posterior_mean_by_draws() -> None:
    """Importance sampling of the shares from the prior.

    200,000 draws; the largest relative weight leaves a standard error below 0.005 per share, by
    the spread over ten batches.
    """
    of = ClassShares(
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
        torch.tensor([[1.0, 0.6, 0.4], [10.0, 1.0, 1.0], [1.0, 1.0, 10.0]], dtype=torch.float64),
        torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64),
    )
    n, rng = np.array([3, 0, 1]), np.random.default_rng(0)
    means = []
    for _ in range(10):
        which = rng.choice(3, p=of.prior.numpy(), size=20_000)
        pi = rng.standard_gamma(of.alpha.numpy()[which])
        pi /= pi.sum(1, keepdims=True)
        weight = np.prod(pi**n, axis=1)
        means.append((weight[:, None] * pi).sum(0) / weight.sum())
    error = np.std(means, axis=0, ddof=1) / math.sqrt(10)
    found = (ratio(of, n.tolist()) * of.shares).numpy()
    assert found.sum() == pytest.approx(1)
    assert error.max() < 0.005
    assert (np.abs(found - np.mean(means, axis=0)) < 5 * error).all()


def test_where_members_are_alike_a_few_points_change_next_to_nothing() -> None:
    alike = known([[100, 101, 99], [99, 100, 101], [101, 99, 100], [100, 100, 100]])
    assert (ratio(alike, [3, 1, 1]) - 1).abs().max() < 0.1
    # Five of five have one chance in 81, and two hundred are none, whatever the members are.
    assert 1.5 < ratio(alike, [5, 0, 0])[0] < 2.5
    assert ratio(alike, [200, 0, 0])[1] < 0.05


def test_a_newcomer_like_a_kind_of_member_gets_its_classes() -> None:
    """Two kinds of clients: the first point says which. All classes of the kind are expected."""
    kinds = known([[50, 50, 0, 0], [0, 0, 50, 50]] * 4)
    found = ratio(kinds, [2, 0, 0, 0])
    assert found[0] > 1.5 and found[1] > 1.5
    assert found[2:].max() < 0.2


def test_members_that_differ_in_no_kind_leave_only_what_was_counted() -> None:
    g = np.random.default_rng(1)
    counts = [g.multinomial(200, each).tolist() for each in g.dirichlet([0.5] * 5, 30)]
    of = known(counts)
    around_all = of.prior[: len(CONCENTRATIONS)]
    assert int(around_all.argmax()) in (1, 2)  # a Dirichlet of 0.5 lies between 0.3 and 1
    seen, unseen = ratio(of, [10, 0, 0, 0, 0])[[0, 1]]
    assert seen > 3 and unseen < 0.6


def test_the_prior_is_a_distribution_with_a_vague_part() -> None:
    of = known([[50, 50, 0], [0, 50, 50], [50, 0, 50]])
    assert len(of.alpha) == len(of.prior) == len(CONCENTRATIONS) * 4
    assert float(of.prior.sum()) == pytest.approx(1)
    assert (of.prior[: len(CONCENTRATIONS)] >= VAGUE / len(CONCENTRATIONS) - 1e-12).all()
    alone = known([[50, 50, 0]])  # one member is a kind of its own
    assert len(alone.prior) == len(CONCENTRATIONS)
    assert alone.shares.min() > 0


def test_members_count_as_the_shared_model_counts_them() -> None:
    counts = [[30, 0], [0, 10]]
    equal = known(counts).shares
    assert float(equal[0]) == pytest.approx(0.5, abs=0.02)
    method = fedavg.build(fedavg.Config(), MODEL)
    assert method.traits.mean == "examples"
    by_points = class_shares.of_run(rows(counts), 2, method)
    assert by_points is not None
    assert float(by_points.shares[0]) == pytest.approx(0.75, abs=0.01)


def test_a_large_run_is_looked_at_in_part() -> None:
    of = known([[50, 50], [50, 0]] * 500)
    assert len(of.prior) == len(CONCENTRATIONS) * (1 + class_shares.MEMBERS)


def test_a_federation_does_not_tell_its_classes() -> None:
    method = pfedbayes.build(pfedbayes.Config(), MODEL)
    assert class_shares.of_run([{"name": "a", "train": 9}], 3, method) is None
    assert class_shares.of_run(rows([[1, 2]]), 0, method) is None  # a regression
    assert class_shares.of_run(rows([[0, 0]]), 2, method) is None  # nobody has a point


def test_a_client_without_points_does_not_count() -> None:
    some, more = known([[30, 0], [0, 10]]), known([[30, 0], [0, 0], [0, 10]])
    assert all(torch.equal(a, b) for a, b in zip(some, more, strict=True))


def test_only_biases_of_outputs_are_moved() -> None:
    of = known([[50, 50, 0], [0, 50, 50], [50, 0, 50]])
    data = ClientData(torch.zeros(1, 3, 4), torch.tensor([[0, 0, 2]]), torch.tensor([[1, 1, 0.0]]))
    v = torch.randn(1, 2, MODEL.size, dtype=torch.float64)
    sent = {"v": v, "drift": v[:, 0].clone()}
    found = class_shares.moved(sent, data, MODEL, of)
    assert found["drift"] is sent["drift"]
    change = found["v"] - v
    torch.testing.assert_close(change[0, 0, -3:], ratio(of, [2, 0, 0]).log())  # weight 0: no point
    cooled = class_shares.moved(sent, data, MODEL, of, 0.5)["v"] - v
    torch.testing.assert_close(cooled, 0.5 * change)  # its outputs are divided by 0.5
    change[0, 0, -3:] = 0
    assert not change.any()
    assert class_shares.able({"theta": v[0, 0], "c": v[0, 0]}, MODEL)
    assert not class_shares.able({"body": v[0, 0, 3:], "head": v[0, 0, :3]}, MODEL)
    assert not class_shares.able({"theta": v[0, 0]}, MODEL._replace(head=None))


@pytest.mark.parametrize("method", ["pfedbayes", "fedavg", "fedavg-ft", "pfedme"])
def test_a_newcomer_of_two_classes_starts_with_them(method: str, tmp_path: Path) -> None:
    """Ten digits of two classes, where each client has five of ten; nothing is trained (share 0).

    Its shared model stays as it is, and is worse.
    """
    from sklearn.datasets import load_digits

    settings = ["clients=6", "rounds=10", "hidden=20", "evaluate_draws=4", "checkpoint_every=10"]
    rounds.train(resolve(None, {"method": method, "device": "cpu"}, settings), tmp_path / "run")
    x, y = load_digits(return_X_y=True)
    at = np.flatnonzero(np.isin(y, (1, 2)))[:210]
    points = torch.from_numpy((x[at] / 16).astype(np.float32)).unsqueeze(0)
    whole = ClientData(points, torch.from_numpy(y[at]).unsqueeze(0), torch.ones(1, len(at)))
    train, test = (
        ClientData(*(field[:, part] for field in whole)) for part in (slice(10), slice(10, None))
    )
    data = FederatedData(train, test, 10, 0, ["south"], tuple(map(str, range(10))))
    model = fitted.load(tmp_path / "run")
    found = {
        own: newcomers.join(
            model, data, steps=4, device="cpu", compare=False, share=0, own_classes=own
        )
        for own in (True, False)
    }
    metrics = {own: each.summary["metrics"] for own, each in found.items()}
    assert [found[own].summary["personalized"]["own_classes"] for own in (True, False)] == [
        True,
        False,
    ]
    assert metrics[True]["global_nll"] == metrics[False]["global_nll"]
    assert metrics[True]["personal_nll"]["mean"] < metrics[False]["personal_nll"]["mean"]
    assert "start_nll" not in metrics[True]
