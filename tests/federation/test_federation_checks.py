"""Lengths in the Fisher metric, and every reason for which an update is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_rows import FEATURES, Row, build, every_method, federation, loop
from torch import Tensor

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Tree, Update
from corefed.bayes import gaussian
from corefed.federation.trust import checks, metric


def posterior(*shape: int, seed: int = 0) -> Tensor:
    """[..., 2, P] with sigma from 0.05 to 3, in float64."""
    g = torch.Generator().manual_seed(seed)
    mu = torch.randn(*shape, generator=g, dtype=torch.float64)
    rho = 6 * torch.rand(*shape, generator=g, dtype=torch.float64) - 3
    return torch.stack([mu, rho], -2)


# Lengths


def test_squared_length_is_twice_the_kl_to_third_order() -> None:
    """|2 KL(v + h d || v) - ||h d / s||^2| = O(h^3): halving h makes it an eighth."""
    v = posterior(40)
    d = torch.randn(v.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    unit = metric.scale({"v": v}, ("v",))
    d *= unit["v"]
    errors, squares = [], []
    for h in (0.02, 0.01, 0.005):
        square = metric.length({"v": h * d}, unit).item() ** 2
        errors.append(abs(2 * gaussian.kl(v + h * d, v).item() - square))
        squares.append(square)
    assert errors[2] < 0.01 * squares[2]
    orders = [math.log2(errors[i] / errors[i + 1]) for i in range(2)]
    assert orders == pytest.approx([3, 3], abs=0.1)  # the fourth order is h times as large


def test_units_are_the_curvature_of_the_kl() -> None:
    """s^-2 is the Hessian of KL(q || v) at q = v, by autograd."""
    v = posterior(3)

    def divergence(q: Tensor) -> Tensor:
        return gaussian.kl(q.view(2, 3), v)

    hessian = torch.autograd.functional.hessian(divergence, v.flatten())
    unit = metric.scale({"v": v}, ("v",))["v"].flatten()
    torch.testing.assert_close(hessian, torch.diag(unit.pow(-2)), rtol=1e-9, atol=1e-12)


def test_stacked_clients_have_their_own_lengths() -> None:
    sent = {"v": posterior(5), "w": torch.zeros(3, 2, dtype=torch.float64)}
    g = torch.Generator().manual_seed(2)
    moved = {k: torch.randn(4, *v.shape, generator=g, dtype=v.dtype) for k, v in sent.items()}
    unit = metric.scale(sent, ("v",))
    found = metric.length(moved, unit)
    assert found.shape == (4,)
    for i in range(4):
        by_hand = sum((moved[k][i] / unit[k]).square().sum().item() for k in sent)
        assert found[i].item() == pytest.approx(math.sqrt(by_hand), rel=1e-14)
    only = metric.length({"w": moved["w"]}, unit)  # Euclidean, and of part of what was sent
    torch.testing.assert_close(only, moved["w"].flatten(1).norm(dim=1))
    assert metric.length({}, unit) == 0


def test_units_stay_finite_at_both_ends() -> None:
    """Below the floor sigma is the floor, and s_rho has its limit 1/sqrt(2); far above, sigma."""
    rho = torch.tensor([-200.0, -20.0, 0.0, 1e5])
    unit = metric.scale({"v": torch.stack([torch.zeros(4), rho])}, ("v",))["v"]
    assert unit.dtype == torch.float64
    assert unit[0, 0] == unit[0, 1] == gaussian.SIGMA_FLOOR
    expected = [math.sqrt(0.5), math.sqrt(0.5), math.sqrt(2) * math.log(2), 1e5 / math.sqrt(2)]
    assert unit[1].tolist() == pytest.approx(expected, rel=1e-6)
    far = {"v": torch.full((2, 4), 3e38)}  # the largest of float32: no overflow in float64
    assert metric.length(far, {"v": unit}).isfinite()


# The template


@every_method
@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_the_template_is_what_a_trained_client_sends(row: Row, kind: str) -> None:
    method = build(row, kind)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    before = {name: value.clone() for name, value in server.items()}
    targets = 1 if kind == "targets" else 0
    found = checks.template(method, server, (FEATURES,), targets)
    trained = loop(row, 1, kind).messages[0]
    assert {name: shape for name, (shape, _) in found.items()} == {
        name: value.shape[1:] for name, value in trained.items()
    }
    assert all(dtype == torch.float32 for _, dtype in found.values())
    assert all(torch.equal(server[name], value) for name, value in before.items())
    assert set(method.traits.posteriors) <= set(found)
    if method.traits.aligned:
        assert all(server[name].shape == shape for name, (shape, _) in found.items())


@every_method
def test_honest_updates_pass(row: Row) -> None:
    """In each round of the loop runtime, each against the lengths of those before.

    Clients have from 1 to 30 points. With optimizer=sgd a posterior's step goes with zeta / n, so
    that such clients' lengths differ by up to 30 times what others' do.
    """
    method, outcome = build(row), loop(row, row.rounds)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    wanted = checks.template(method, server, (FEATURES,))
    server = {name: value.double() for name, value in server.items()}
    sizes = federation().size
    factor = 20 * 30 if ("optimizer", "sgd") in row.settings else 20
    history: list[float] = []
    for stacked, loss in zip(outcome.messages, outcome.losses, strict=True):
        updates = {i: {k: v[i] for k, v in stacked.items()} for i in range(len(sizes))}
        for i, update in updates.items():
            claimed = {"examples": sizes.tolist()[i], "loss": loss.item()}
            single = {name: value.float() for name, value in update.items()}
            assert refusal(single, wanted, method.traits.posteriors, claimed) is None
        refused, lengths = checks.outliers(
            server,
            updates,
            method.traits.posteriors,
            factor,
            history,
            aligned=method.traits.aligned,
        )
        assert refused == {}
        assert set(lengths) == set(updates)
        assert all(math.isfinite(length) for length in lengths.values())
        history += lengths.values()
        server = method.aggregate(server, Update(tuple(updates), stacked, sizes))


# Refusals, one by one

P = 4
TEMPLATE: checks.Template = {
    "v": (torch.Size([2, P]), torch.float32),
    "w": (torch.Size([3]), torch.float32),
    "count": (torch.Size([]), torch.int64),
}
CLAIMED: dict[str, object] = {"examples": 100, "loss": 0.7}


def good() -> Tree:
    v = torch.stack([torch.linspace(-1, 1, P), torch.full((P,), -3.0)])
    return {"v": v, "w": torch.zeros(3), "count": torch.tensor(3)}


def refusal(
    message: Tree,
    template: checks.Template = TEMPLATE,
    posteriors: tuple[str, ...] = ("v",),
    claimed: dict[str, object] = CLAIMED,
    **limits: Any,
) -> str | None:
    return checks.refusal(message, template, posteriors, claimed, **{"max_examples": 1000} | limits)


def changed(**entries: Tensor | None) -> Tree:
    return {k: v for k, v in {**good(), **entries}.items() if v is not None}


def with_rho(value: float) -> Tensor:
    v = good()["v"]
    v[1, 2] = value
    return v


def with_values(*values: float) -> Tensor:
    return torch.tensor([1.0, *values])


def test_a_good_update_is_accepted() -> None:
    assert refusal(good()) is None
    assert refusal(good(), claimed={"examples": 1}) is None  # a client that keeps its loss
    assert refusal(good(), claimed={"examples": 1000.0, "loss": -3}) is None
    assert checks.refusal({}, {}, (), {"examples": 5}, max_examples=9) is None


REASONS = {
    "missing": (changed(v=None), "lacks 'v'"),
    "empty": ({}, "lacks 'v', 'w', 'count'"),
    "unknown": (changed(extra=torch.zeros(1)), "has 'extra', which nobody asked for"),
    "broadcasts": (changed(w=torch.zeros(1)), "'w' has the shape (1) and not (3)"),
    "scalar": (changed(w=torch.zeros(())), "'w' has the shape () and not (3)"),
    "transposed": (changed(v=good()["v"].T), "'v' has the shape (4, 2) and not (2, 4)"),
    "client axis": (changed(v=good()["v"][None]), "(1, 2, 4) and not (2, 4)"),
    "no values": (changed(w=torch.zeros(0)), "'w' has the shape (0)"),
    "integers": (changed(w=torch.zeros(3, dtype=torch.int32)), "holds int32 and not float32"),
    "truth values": (changed(w=torch.zeros(3, dtype=torch.bool)), "holds bool and not float32"),
    "complex": (changed(w=torch.zeros(3, dtype=torch.complex64)), "holds complex64"),
    "half": (changed(w=torch.zeros(3, dtype=torch.float16)), "holds float16 and not float32"),
    "double": (changed(w=torch.zeros(3, dtype=torch.float64)), "holds float64 and not float32"),
    "float for int": (changed(count=torch.tensor(3.0)), "holds float32 and not int64"),
    "nan": (
        changed(w=with_values(math.nan, math.nan)),
        "'w' has 2 of 3 values that are not finite",
    ),
    "infinite": (changed(w=with_values(2, -math.inf)), "'w' has 1 of 3 values"),
    "nan in v": (changed(v=with_rho(math.nan)), "'v' has 1 of 8 values that are not finite"),
    "sigma 0": (changed(v=with_rho(-200)), "'v' has 1 of 4 standard deviations that are not above"),
    "wide": (changed(v=with_rho(2e6)), "'v' has 1 of 4 standard deviations above 1e+06"),
}


@pytest.mark.parametrize(("message", "reason"), REASONS.values(), ids=REASONS)
def test_a_bad_update_is_refused_in_one_sentence(message: Tree, reason: str) -> None:
    found = refusal(message)
    assert found is not None
    assert reason in found
    assert found.endswith(".") and "\n" not in found and len(found) < 200


CLAIMS: dict[str, tuple[object, str]] = {
    "1e12": (10**12, "claims 1000000000000 training examples; it must be at least 1 and at most"),
    "1e12 as float": (1e12, "max_examples, 1000"),
    "one too many": (1001, "claims 1001"),
    "none": (0, "claims 0"),
    "negative": (-5, "claims -5"),
    "endless": (10**5000, "claims more than 1e30"),
    "endless negative": (-(10**5000), "claims less than -1e30"),
    "broken": (3.5, "claims 3.5 training examples, which is not a whole number"),
    "nan": (math.nan, "not a whole number"),
    "infinite": (math.inf, "not a whole number"),
    "truth value": (True, "claims True training examples, which is not a number"),
    "text": ("100", "claims '100' training examples, which is not a number"),
    "long text": ("9" * 10**6, "..."),
    "list": ([100], "a list"),
    "table": ({"n": 10**5000}, "a dict"),
    "nothing": (None, "claims None"),
}


@pytest.mark.parametrize(("examples", "reason"), CLAIMS.values(), ids=CLAIMS)
def test_absurd_claims_are_refused(examples: object, reason: str) -> None:
    found = refusal(good(), claimed={"examples": examples, "loss": 0.5})
    assert found is not None
    assert reason in found
    assert len(found) < 200


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (math.nan, "training diverged: its loss is nan"),
        (math.inf, "training diverged: its loss is inf"),
        ("low", "loss is 'low', which is not a number"),
        (True, "loss is True"),
        ([0.5], "a list"),
    ],
)
def test_a_diverged_client_is_refused(loss: object, reason: str) -> None:
    found = refusal(good(), claimed={"examples": 10, "loss": loss})
    assert found is not None
    assert reason in found


def test_names_made_up_by_a_client_are_cut_short() -> None:
    message = {**good(), **{f"x{i}\n" + "y" * 10_000: torch.zeros(1) for i in range(50)}}
    found = refusal(message)
    assert found is not None
    assert "47 more" in found and "\n" not in found and len(found) < 250


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_widths_come_only_as_told(dtype: torch.dtype) -> None:
    message = {k: v.to(dtype) if v.is_floating_point() else v for k, v in good().items()}
    assert refusal(message) is not None
    assert refusal(message, dtypes=(dtype,)) is None
    message["v"] = with_rho(-200).to(dtype)
    assert "not above 0" in str(refusal(message, dtypes=(dtype,)))


@settings(max_examples=60, deadline=None)
@given(rho=st.floats(-300, 20, width=32))
def test_a_sigma_is_refused_where_float32_has_none(rho: float) -> None:
    """exp(-103.98) is below half of the least float32; a sigma below the floor is no fault."""
    sigma = torch.nn.functional.softplus(torch.tensor(rho))
    assert (refusal(changed(v=with_rho(rho))) is None) == (sigma.item() > 0)


# Outliers

SENT = {"v": posterior(6), "w": torch.zeros(2, dtype=torch.float64)}


def moved(length: float, seed: int = 0) -> Tree:
    """The broadcast and a difference of this length in some direction."""
    g = torch.Generator().manual_seed(seed)
    d = {k: torch.randn(v.shape, generator=g, dtype=v.dtype) for k, v in SENT.items()}
    unit = metric.scale(SENT, ("v",))
    factor = length / metric.length(d, unit).item()
    return {k: SENT[k] + factor * d[k] for k in SENT}


def judge(
    *lengths: float, factor: float = 20, history: tuple[float, ...] = ()
) -> tuple[dict[int, str], dict[int, float]]:
    updates = {i: moved(length, i) for i, length in enumerate(lengths)}
    refused, found = checks.outliers(SENT, updates, ("v",), factor, history)
    assert list(found.values()) == pytest.approx(lengths, rel=1e-9)
    return refused, found


def test_an_update_a_thousand_times_too_large_is_refused() -> None:
    refused, _ = judge(1.0, 1.2, 900.0, 0.9)
    assert set(refused) == {2}
    assert refused[2] == (
        "The update is 900 times as long as the usual one (900 against 1); at most 20 times is "
        "accepted."
    )
    assert set(judge(1.0, 1.2, 19.0, 0.9)[0]) == set()


def test_of_two_in_the_first_round_the_larger_is_refused() -> None:
    assert set(judge(1000.0, 1.0)[0]) == {0}
    assert judge(1000.0)[0] == {}  # alone it is all that is known


def test_lengths_accepted_before_count() -> None:
    assert set(judge(1000.0, history=(1.0, 1.1))[0]) == {0}
    assert set(judge(1000.0, 900.0, history=(1.0, 1.1, 1.0))[0]) == {0, 1}
    assert judge(1.0, 1.1, history=(1000.0,))[0] == {}


def test_a_factor_or_a_usual_length_of_zero_refuses_nobody() -> None:
    assert judge(1.0, 1.0, 1e9, factor=0)[0] == {}
    assert judge(0.0, 0.0, 5.0)[0] == {}
    assert judge(0.0, 0.0)[0] == {}
    assert judge(0.0, 1.0, 1.0)[0] == {}  # one that did not move is no outlier


def test_an_infinite_length_is_refused() -> None:
    """Values so large that even their squares in float64 are not finite."""
    updates = {"a": moved(1), "b": moved(1, 1), "c": {k: v + 1e200 for k, v in SENT.items()}}
    refused, _ = checks.outliers(SENT, updates, ("v",), 20)
    assert set(refused) == {"c"}


def test_updates_without_a_difference_are_compared_by_their_own_length() -> None:
    updates = {i: {"theta": torch.full((4,), value)} for i, value in enumerate((1.0, -1.0, 100.0))}
    sent = {"theta": torch.zeros(9), "clients": torch.zeros(())}  # of another shape
    refused, lengths = checks.outliers(sent, updates, (), 20, aligned=False)
    assert set(refused) == {2}
    assert list(lengths.values()) == pytest.approx([2, 2, 200])


def test_empty_messages_have_nothing_to_compare() -> None:
    assert checks.outliers({}, {0: {}, 1: {}}, (), 20) == ({}, {0: 0.0, 1: 0.0})
    assert checks.outliers(SENT, {}, ("v",), 20) == ({}, {})


@settings(max_examples=40, deadline=None)
@given(
    honest=st.lists(st.floats(0.5, 2), min_size=2, max_size=5),
    bad=st.floats(100, 1e6),
    place=st.integers(0, 5),
)
def test_one_bad_among_honest_ones_is_found_wherever_it_stands(
    honest: list[float], bad: float, place: int
) -> None:
    place = min(place, len(honest))
    refused, _ = judge(*honest[:place], bad, *honest[place:])
    assert set(refused) == {place}
