"""Metrics against values worked out by hand, with padding, clients, runs and chunks in play."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from corefed.base.errors import UserError
from corefed.base.types import ClientData, Method, Traits, Tree, Work
from corefed.settings.config import resolve
from corefed.training import evaluate, rounds, scoring
from corefed.training.evaluate import Evaluation
from corefed.training.local import LocalClients
from corefed.training.setup import prepare

# Three points, two classes: right with .9, wrong with .6, right with .6.
P = torch.tensor([[[0.9, 0.1], [0.6, 0.4], [0.4, 0.6]]], dtype=torch.float64)
Y = torch.tensor([[0, 1, 1]])


def test_classification_by_hand() -> None:
    each = {name: value[0] for name, value in scoring.score_classes(P, Y).items()}
    found = scoring.metrics_of(scoring.totals(each, Y[0], classes=2))
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["nll"] == pytest.approx(-(math.log(0.9) + math.log(0.4) + math.log(0.6)) / 3)
    assert found["brier"] == pytest.approx((2 * 0.1**2 + 2 * 0.6**2 + 2 * 0.4**2) / 3)
    # Bins of 1/15: .9 is in (13/15, 14/15], alone: |1 - .9|. Both .6 are in (8/15, 9/15]: their
    # accuracy is .5, their confidence .6. Weighted: (1/3) .1 + (2/3) .1.
    assert found["ece"] == pytest.approx(0.1)


def test_too_bold_and_too_cautious() -> None:
    """Gaps of bins keep their sign: confidence .9, .6 and .6 (mean .7), accuracy 2/3."""
    each = {name: value[0] for name, value in scoring.score_classes(P, Y).items()}
    sums = scoring.totals(each, Y[0], classes=2)
    assert scoring.overconfidence(sums) == pytest.approx(0.7 - 2 / 3)
    right = {name: value[0] for name, value in scoring.score_classes(P, P.argmax(-1)).items()}
    assert scoring.overconfidence(scoring.totals(right, Y[0], 2)) == pytest.approx(0.7 - 1)


@pytest.mark.parametrize(("confidence", "index"), [(1 / 15, 0), (1 / 15 + 1e-9, 1), (1.0, 14)])
def test_bins_are_closed_above(confidence: float, index: int) -> None:
    """Two points share a bin, and their gaps cancel, only if they are on the same side."""
    middle = (index + 0.5) / 15
    both = torch.tensor([confidence, middle], dtype=torch.float64)
    gap = abs(2 * 0.5 - both.sum().item())
    correct = torch.tensor([1.0, 0.0], dtype=torch.float64)
    each = {"confidence": both, "correct": correct, "nll": both, "brier": both}
    sums = scoring.totals(each, torch.tensor([0, 1]), classes=2)
    assert scoring.metrics_of(sums)["ece"] == pytest.approx(gap / 2)


def test_a_probability_of_zero_is_not_infinite() -> None:
    each = scoring.score_classes(torch.tensor([[[1.0, 0.0]]]), torch.tensor([[1]]))
    assert 80 < each["nll"].item() < 100


def test_regression_by_hand() -> None:
    prediction = torch.tensor([[[1.0, 4.0], [2.0, 1.0]]])  # [mean | variance]
    each = scoring.score_targets(prediction, torch.tensor([[[3.0], [2.0]]]))
    flat = {name: value[0] for name, value in each.items()}
    found = scoring.metrics_of(scoring.totals(flat, torch.tensor([[3.0], [2.0]]), classes=0))
    assert found["rmse"] == pytest.approx(math.sqrt(2.0))
    assert found["nll"] == pytest.approx((0.5 * (1 + math.log(4)) + math.log(2 * math.pi)) / 2)


def test_totals_add_over_clients() -> None:
    """The metrics of all points from the totals of two clients, and without points none."""
    each = {name: value[0] for name, value in scoring.score_classes(P, Y).items()}
    whole = scoring.totals(each, Y[0], classes=2)
    parts = [
        scoring.totals({k: v[rows] for k, v in each.items()}, Y[0][rows], classes=2)
        for rows in (slice(0, 1), slice(1, 3), slice(3, 3))
    ]
    together = scoring.add(parts)
    assert scoring.metrics_of(together) == pytest.approx(scoring.metrics_of(whole), rel=1e-14)
    assert scoring.accuracy_by_class(together) == [1.0, 0.5]
    assert scoring.first_metric(parts[2]) is None
    assert scoring.accuracy_by_class(parts[2]) == [None, None]


def table_method(probabilities: torch.Tensor) -> Method:
    """A 'method' whose personal model is a table of predictions; its global one is uniform."""

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {"personal": {"p": private["p"]}, "global": {"p": broadcast["p"]}}

    def nothing(*_: object) -> Tree:
        raise AssertionError

    return Method(
        name="table", init_server=nothing, init_client=lambda b, d: {"p": probabilities},
        begin=nothing, step=nothing, end=nothing,
        aggregate=nothing, models=models, predict=lambda model, x, noise: model["p"], noise=(1, 0),
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("chunk", [1, 3, 4])
def test_pooled_over_clients_by_run_and_without_padding(chunk: int) -> None:
    """Two runs of two clients: (3 points, 1 point) and (0 points, 2 points)."""
    p = P.float().repeat(4, 1, 1)
    y = Y.repeat(4, 1)
    weight = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]]).float()
    data = ClientData(torch.zeros(4, 3, 1), y, weight)
    method = table_method(p)
    servers = [{"p": torch.full((3, 2), 0.5)}, {"p": torch.full((3, 2), 0.5)}]
    clients = LocalClients(method, data, (0, 1), servers, Work(1, 1), chunk * 2)
    found = evaluate.evaluate(clients, method, servers, data, 0, draws=2, classes=2)
    assert [m["personal_accuracy"] for m in found.metrics] == [3 / 4, 1 / 2]
    assert [m["global_nll"] for m in found.metrics] == pytest.approx([math.log(2)] * 2)
    assert found.clients == [[pytest.approx(2 / 3), 1.0], [None, 0.5]]
    # Class 0 is point 0; class 1 has one right of two at the first client, one of one in run 1.
    assert [run["personal"] for run in found.classes] == [[1.0, 0.5], [1.0, 0.0]]
    assert set(found.metrics[0]) == {
        f"{model}_{metric}"
        for model in ("personal", "global")
        for metric in ("accuracy", "nll", "ece", "brier")
    }


@pytest.mark.parametrize("chunk", [1, 2, 6])
def test_personal_models_on_the_other_clients_points(chunk: int) -> None:
    """Client c of a run always answers c; the points of client j have label j, j + 1 of them."""
    per_run, runs = 3, 2
    answers = torch.eye(per_run).repeat(runs, 1)
    y = torch.arange(per_run).repeat(runs).view(-1, 1).expand(-1, per_run)
    weight = torch.ones(per_run, per_run).tril().repeat(runs, 1)
    data = ClientData(torch.zeros(runs * per_run, per_run, 1), y, weight)

    def predict(model: Tree, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return model["p"].unsqueeze(1).expand(-1, per_run, -1)

    method = table_method(answers)._replace(predict=predict, traits=Traits(sent=()))
    servers = [{"p": torch.zeros(per_run)}] * runs
    clients = LocalClients(method, data, (0, 1), servers, Work(1, 1), chunk * 2)
    found = evaluate.evaluate(clients, method, servers, data, 0, draws=2, classes=per_run)
    for metrics in found.metrics:
        assert metrics["personal_accuracy"] == 1.0
        assert metrics["others_accuracy"] == 0.0
    swapped = data._replace(y=1 - y.clamp_max(1))  # clients 1 and 2 have label 0, client 0 label 1
    found = evaluate.evaluate(clients, method, servers, swapped, 0, draws=2, classes=per_run)
    # Client 0 answers 0: right on the 5 points of the others. Client 1 answers 1: right on client
    # 0's one point, wrong on client 2's three. Client 2 is never right.
    assert found.metrics[0]["others_accuracy"] == pytest.approx((5 + 1 + 0) / (5 + 4 + 3))


def test_metrics_that_are_no_numbers_end_a_run() -> None:
    """A NaN in the metrics is not a result; without any test point it says nothing."""
    experiment = resolve(flags={"method": "fedavg", "seeds": "4,5"})

    def tested(nll: float, clients: list[float | None]) -> Evaluation:
        good = {"personal_accuracy": 0.9, "personal_nll": 0.3}
        return Evaluation([good, {**good, "personal_nll": nll}], [[0.9], clients], [], [], [], {})

    rounds.refuse_no_numbers(experiment, 0, tested(0.2, [0.9, None]))
    rounds.refuse_no_numbers(experiment, 0, tested(math.nan, [None, None]))
    for wrong in (math.nan, math.inf):
        words = f"after round 3 personal_nll of seed 5 is {wrong}.*lower learning_rate .0.07 now"
        with pytest.raises(UserError, match=words):
            rounds.refuse_no_numbers(experiment, 2, tested(wrong, [0.9, None]))


@pytest.mark.parametrize("method", ["pfedbayes", "independent"])
def test_padding_is_left_out_where_it_is_most_of_the_points(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of very different sizes: the same scores, from fewer points."""
    flags = {
        "method": method, "partition": "quantity:0.2", "clients": 6, "seeds": "0,1", "hidden": "4",
        "evaluate_draws": 2, "device": "cpu", "runtime": "loop",
    }  # fmt: skip
    setup = prepare(resolve(None, flags))
    looked: list[int] = []
    score = evaluate.score

    def counted(prediction: torch.Tensor, *more: Any) -> Tree:
        looked.append(prediction.shape[0] * prediction.shape[1])
        return score(prediction, *more)

    monkeypatch.setattr(evaluate, "score", counted)
    found, points = [], []
    for bound in (1, 1e9):
        monkeypatch.setattr(evaluate, "MOSTLY_PADDING", bound)
        looked.clear()
        found.append(rounds.Simulation(setup)._evaluate(0, setup.servers, setup.data.test))
        points.append(sum(looked))
    short, padded = found
    assert points[0] < points[1] / (2 if method == "pfedbayes" else 1)
    for one, two in zip(short.metrics, padded.metrics, strict=True):
        assert one == pytest.approx(two, rel=1e-4)
    assert short.classes == padded.classes
    for mine, theirs in zip(short.clients, padded.clients, strict=True):
        assert mine == theirs
    real = setup.data.test.weight > 0
    for name, value in short.points.items():
        assert torch.allclose(value[real], padded.points[name][real], rtol=1e-4, atol=1e-6)
