"""Robust aggregation: against numpy and scipy, by hand, under attack, and for every method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_rows import Row, build, every_method, loop
from scipy import stats
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.bayes import gaussian
from corefed.federation.rules import Rules
from corefed.federation.trust import metric, robust
from corefed.methods import fedavg, pfedbayes
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.training.local import LocalClients

P = 7
ROBUST = ("median", "trimmed-mean", "krum", "clip")
MODEL = mlp((2, 2), Categorical(2))
BAYES = pfedbayes.build(pfedbayes.Config(), MODEL)
FEDAVG = fedavg.build(fedavg.Config(), MODEL)


def rules(aggregation: str, **values: Any) -> Rules:
    return replace(Rules(), aggregation=aggregation, **values)


def cohort(S: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tree, Update]:
    """A broadcast posterior and S clients around it, in no order of their numbers."""
    g = torch.Generator().manual_seed(seed)
    v = torch.stack([torch.randn(P, generator=g), torch.randn(P, generator=g) - 3]).to(dtype)
    rows = v + 0.1 * torch.randn(S, 2, P, generator=g).to(dtype)
    clients = tuple(torch.randperm(2 * S, generator=g)[:S].tolist())
    return {"v": v}, Update(clients, {"v": rows}, torch.randint(1, 99, (S,), generator=g))


def shuffled(update: Update, seed: int) -> Update:
    order = torch.randperm(len(update.clients), generator=torch.Generator().manual_seed(seed))
    return Update(
        tuple(update.clients[i] for i in order),
        {k: v[order] for k, v in update.message.items()},
        update.examples[order],
    )


def row_of(found: robust.Combined) -> Tensor:
    (row,) = found.update.message["v"]
    return row


# Against numpy and scipy


@pytest.mark.parametrize("S", [1, 2, 3, 4, 5, 10])
def test_median_is_numpys(S: int) -> None:
    server, update = cohort(S)
    found = robust.combine(rules("median"), BAYES, server, update)
    expected = np.median(update.message["v"].numpy(), axis=0)
    torch.testing.assert_close(row_of(found), torch.from_numpy(expected), rtol=1e-14, atol=0)
    assert found.kept == update.clients
    assert found.update.examples.tolist() == [int(update.examples.sum())]
    assert (found.note == "") == (S >= 3)


@pytest.mark.parametrize(("S", "trim"), [(3, 0.34), (5, 0.2), (10, 0.25), (10, 0.49), (7, 0.3)])
def test_trimmed_mean_is_scipys(S: int, trim: float) -> None:
    server, update = cohort(S)
    found = robust.combine(rules("trimmed-mean", trim=trim), BAYES, server, update)
    expected = stats.trim_mean(update.message["v"].numpy(), trim, axis=0)
    torch.testing.assert_close(row_of(found), torch.from_numpy(expected), rtol=1e-13, atol=0)
    assert found.note == ""


def test_nothing_trimmed_is_the_mean_and_nearly_half_is_the_median() -> None:
    server, update = cohort(9)
    mean = row_of(robust.combine(rules("trimmed-mean", trim=0.0), BAYES, server, update))
    torch.testing.assert_close(mean, update.message["v"].mean(0), rtol=1e-13, atol=1e-15)
    most = row_of(robust.combine(rules("trimmed-mean", trim=0.49), BAYES, server, update))
    median = row_of(robust.combine(rules("median"), BAYES, server, update))
    assert torch.equal(most, median)


def test_a_part_that_is_a_whole_number_of_clients_is_not_rounded_down() -> None:
    """0.29 x 100 is 28.999999999999996 in floating point."""
    assert robust._trimmed(0.29, 100) == 29
    assert [robust._trimmed(0.2, S) for S in (1, 4, 5, 9, 10)] == [0, 0, 1, 1, 2]


def test_krum_is_the_slow_definition() -> None:
    for seed in range(5):
        server, update = cohort(8, seed)
        f, S = 2, 8
        unit = metric.scale(server, ("v",))["v"]
        rows = update.message["v"] / unit
        scores = {}
        for i in range(S):
            others = sorted(float((rows[i] - rows[j]).square().sum()) for j in range(S) if j != i)
            scores[update.clients[i]] = sum(others[: S - f - 2])
        found = robust.combine(rules("krum", byzantine=f), BAYES, server, update)
        best = min(scores, key=scores.__getitem__)
        assert found.kept == found.update.clients == (best,)
        at = update.clients.index(best)
        assert torch.equal(row_of(found), update.message["v"][at])
        assert found.update.examples.tolist() == [int(update.examples[at])]


def test_clip_by_hand() -> None:
    """Lengths 1, 2, 4 with clip = 1.5: the median is 2, so the third is shortened to 3."""
    server = {"theta": torch.tensor([1.0, 1.0])}
    steps = torch.tensor([[1.0, 0.0], [0.0, -2.0], [0.0, 4.0]])
    update = Update((0, 1, 2), {"theta": server["theta"] + steps}, torch.tensor([1, 1, 2]))
    found = robust.combine(rules("clip", clip=1.5), FEDAVG, server, update)
    assert found.update.message["theta"].tolist() == [[2, 1], [1, -1], [1, 4]]
    assert torch.equal(found.update.examples, update.examples)
    assert found.kept == (0, 1, 2)


def test_clip_leaves_what_is_short_enough_to_the_bit() -> None:
    server, update = cohort(5, dtype=torch.float32)
    long = update.message["v"].clone()
    long[2] = server["v"] + 1000 * (long[2] - server["v"])
    found = robust.combine(
        rules("clip", clip=3.0), BAYES, server, update._replace(message={"v": long})
    ).update.message["v"]
    kept = [0, 1, 3, 4]
    assert torch.equal(found[kept], long[kept])
    unit = metric.scale(server, ("v",))
    lengths = metric.length({"v": found - server["v"]}, unit)
    median = lengths.median()
    assert float(lengths[2] / median) == pytest.approx(3.0, rel=1e-5)  # float32
    shorter, whole = found[2] - server["v"], long[2] - server["v"]
    cosine = torch.nn.functional.cosine_similarity(shorter.flatten(), whole.flatten(), dim=0)
    assert float(cosine) == pytest.approx(1, abs=1e-5)


def test_clip_where_most_or_all_clients_stood_still() -> None:
    server, update = cohort(3)
    still = server["v"].expand(3, 2, P).clone()
    found = robust.combine(rules("clip"), BAYES, server, update._replace(message={"v": still}))
    assert torch.equal(found.update.message["v"], still)
    one = still.clone()
    one[1] += 5.0
    found = robust.combine(rules("clip"), BAYES, server, update._replace(message={"v": one}))
    assert torch.equal(found.update.message["v"], still)  # the median length is 0


# Posteriors


@settings(max_examples=40, deadline=None)
@given(S=st.sampled_from([3, 5, 7]), seed=st.integers(0, 1000), shift=st.floats(-60, 60))
def test_the_medians_sigma_is_the_median_sigma_and_above_zero(
    S: int, seed: int, shift: float
) -> None:
    server, update = cohort(S, seed)
    update.message["v"][0, 1] += shift
    row = row_of(robust.combine(rules("median"), BAYES, server, update))
    sigmas = torch.nn.functional.softplus(update.message["v"][:, 1])
    found = torch.nn.functional.softplus(row[1])
    torch.testing.assert_close(found, sigmas.median(0).values, rtol=1e-12, atol=0)
    assert (found > 0).all()


def test_clip_keeps_sigma_between_the_two() -> None:
    server, update = cohort(5)
    update.message["v"][3, 1] -= 40
    found = robust.combine(rules("clip"), BAYES, server, update).update.message["v"]
    both = torch.stack([server["v"].expand_as(found), update.message["v"]])
    sigma, bounds = gaussian.sigma(found[:, 1]), gaussian.sigma(both[:, :, 1])
    slack = 1e-12
    assert (sigma >= bounds.amin(0) - slack).all() and (sigma <= bounds.amax(0) + slack).all()


# Under attack

Attack = Callable[[Tree, Tensor], Tensor]
ATTACKS: dict[str, Attack] = {
    "huge": lambda server, rows: torch.full_like(rows, 1e30),
    "sign": lambda server, rows: 2 * server["v"] - rows,
    "long sign": lambda server, rows: server["v"] - 1e3 * (rows - server["v"]),
    "narrow": lambda server, rows: torch.stack(
        [rows[:, 0] + 5, gaussian.rho_of(torch.full_like(rows[:, 1], 1e-6))], 1
    ),
    "wide": lambda server, rows: torch.stack([rows[:, 0] - 5, torch.full_like(rows[:, 1], 1e6)], 1),
    "zero": lambda server, rows: torch.zeros_like(rows),
}


def attacked(name: str, S: int, f: int, seed: int = 0) -> tuple[Tree, Update, Tensor]:
    """The broadcast, an update whose last f rows are bad, and the honest rows."""
    server, update = cohort(S, seed)
    rows = update.message["v"].clone()
    rows[S - f :] = ATTACKS[name](server, rows[S - f :])
    return server, update._replace(message={"v": rows}), rows[: S - f]


every_attack = pytest.mark.parametrize("attack", ATTACKS)


@every_attack
@pytest.mark.parametrize("fusion", ["average", "precision"])
@pytest.mark.parametrize("rule", [rules("median"), rules("trimmed-mean", trim=0.3)])
def test_order_statistics_stay_among_the_honest(attack: str, fusion: str, rule: Rules) -> None:
    """3 of 10 bad; with beta = 1 the method's own rule hands the one row on as it is."""
    server, update, honest = attacked(attack, S=10, f=3)
    method = pfedbayes.build(pfedbayes.Config(fusion=fusion), MODEL)  # type: ignore[arg-type]
    combined = robust.combine(rule, method, server, update)
    row = row_of(combined)
    assert (row >= honest.amin(0)).all() and (row <= honest.amax(0)).all()
    after = method.aggregate(server, combined.update)["v"]
    torch.testing.assert_close(after, row, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {"sign"}))
def test_krum_hands_on_an_honest_row(attack: str) -> None:
    """2 of 7 bad. (Flipped signs alone are as near to all others as an honest row is.)"""
    for seed in range(5):
        server, update, honest = attacked(attack, S=7, f=2, seed=seed)
        row = row_of(robust.combine(rules("krum", byzantine=2), BAYES, server, update))
        assert any(torch.equal(row, each) for each in honest)


@every_attack
@pytest.mark.parametrize("clip", [0.5, 1.0, 2.0])
def test_clip_bounds_what_bad_clients_move(attack: str, clip: float) -> None:
    """The mean differs from the honest rows' own part by at most f / S clip median length."""
    S, f = 10, 3
    server, update, _ = attacked(attack, S, f)
    unit = metric.scale(server, ("v",))
    lengths = metric.length({"v": update.message["v"] - server["v"]}, unit)
    clipped = robust.combine(rules("clip", clip=clip), BAYES, server, update).update
    bad = (clipped.message["v"][S - f :] - server["v"]).sum(0) / S
    bound = f / S * clip * lengths.sort().values[(S - 1) // 2]
    assert float(metric.length({"v": bad}, unit)) <= float(bound) * (1 + 1e-9)


def test_one_narrow_posterior_owns_a_plain_precision_fusion() -> None:
    """Why: its precision is 1e12. The median of the same rows is unmoved."""
    server, update, honest = attacked("narrow", S=10, f=1)
    method = pfedbayes.build(pfedbayes.Config(fusion="precision"), MODEL)
    plain = method.aggregate(server, update)["v"]
    torch.testing.assert_close(plain[0], update.message["v"][9, 0], rtol=0, atol=1e-3)
    safe = method.aggregate(server, robust.combine(rules("median"), method, server, update).update)
    assert (safe["v"][0] - honest[:, 0].mean(0)).abs().max() < 0.3


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), rule=st.sampled_from(ROBUST))
def test_the_order_of_clients_does_not_matter(seed: int, rule: str) -> None:
    server, update = cohort(6, seed)
    one = robust.combine(rules(rule), BAYES, server, update)
    other = robust.combine(rules(rule), BAYES, server, shuffled(update, seed + 1))
    assert set(one.kept) == set(other.kept)
    first, second = (BAYES.aggregate(server, each.update)["v"] for each in (one, other))
    if rule == "clip":  # a mean of rows, added in another order
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)
    else:
        assert torch.equal(first, second)


def test_krum_breaks_ties_by_the_clients_number() -> None:
    """With f = 0 and three clients, the closest two have the same score."""
    server = {"theta": torch.zeros(1)}
    message = {"theta": torch.tensor([[0.0], [1.0], [9.0]])}
    for clients, best in (((5, 2, 1), 2), ((2, 5, 1), 2), ((1, 2, 0), 1)):
        update = Update(clients, message, torch.ones(3))
        assert robust.combine(rules("krum", byzantine=0), FEDAVG, server, update).kept == (best,)


# Every method


@every_method
@pytest.mark.parametrize("rule", ["plain", *ROBUST])
def test_every_method_under_every_rule(row: Row, rule: str) -> None:
    method, outcome = build(row), loop(row, 1)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    server = {name: value.double() for name, value in server.items()}
    update = outcome.updates[0]
    if rule != "plain" and not method.traits.aligned:
        for attempt in (
            lambda: robust.check(rules(rule), method, 10),
            lambda: robust.combine(rules(rule), method, server, update),
        ):
            with pytest.raises(UserError, match=f"aggregation is {rule}.*of bnfed.*use plain"):
                attempt()
        return
    robust.check(rules(rule), method, len(update.clients))
    before = {name: value.clone() for name, value in update.message.items()}
    found = robust.combine(rules(rule), method, server, update)
    after = method.aggregate(server, found.update)
    assert {n: v.shape for n, v in after.items()} == {n: v.shape for n, v in server.items()}
    assert all(value.isfinite().all() for value in after.values())
    assert found.note == ""
    assert all(torch.equal(update.message[name], value) for name, value in before.items())
    if rule == "plain" or not update.message:
        assert found.update is update
        assert found.kept == update.clients


# Too few clients


@pytest.mark.parametrize(
    ("rule", "clients", "match"),
    [
        (rules("krum", byzantine=1), 4, "needs at least 5 clients in a round, and there are 4"),
        (rules("krum", byzantine=3), 8, "needs at least 9"),
        (rules("median"), 2, "withstands nobody with 2 in a round"),
        (rules("trimmed-mean", trim=0.2), 4, "nobody of 4 in a round; use at least 0.25"),
        (rules("trimmed-mean", trim=0.2), 3, "use at least 0.34"),
        (rules("trimmed-mean", trim=0.2), 2, "it needs 3"),
    ],
)
def test_too_few_clients_are_refused_before_a_run(rule: Rules, clients: int, match: str) -> None:
    with pytest.raises(UserError, match=match):
        robust.check(rule, BAYES, clients)


def test_what_is_enough_passes() -> None:
    robust.check(rules("krum", byzantine=1), BAYES, 5)
    robust.check(rules("median"), BAYES, 3)
    robust.check(rules("trimmed-mean", trim=0.34), BAYES, 3)
    robust.check(rules("trimmed-mean", trim=0.0), BAYES, 1)
    robust.check(rules("clip"), BAYES, 1)
    robust.check(rules("plain"), BAYES, 1)
    silent = BAYES._replace(
        traits=BAYES.traits._replace(sent=())
    )  # nothing is sent, so nothing is joined
    robust.check(rules("krum"), silent, 1)


@pytest.mark.parametrize(
    ("rule", "S", "note"),
    [
        ("krum", 4, "4 acceptable updates: too few for krum, so the median was taken."),
        ("trimmed-mean", 4, "4 acceptable updates: too few for trimmed-mean, so the median was"),
        ("krum", 2, "the median was taken; the median of fewer than 3 withstands nobody."),
        ("median", 1, "1 acceptable update: the median of fewer than 3 withstands nobody."),
    ],
)
def test_a_round_with_too_few_answers_falls_back_to_the_median(
    rule: str, S: int, note: str
) -> None:
    server, update = cohort(S)
    found = robust.combine(rules(rule, trim=0.2), BAYES, server, update)
    assert note in found.note
    expected = np.median(update.message["v"].numpy(), axis=0)
    torch.testing.assert_close(row_of(found), torch.from_numpy(expected))


# A federation with one attacker


def blobs(clients: int = 5, n: int = 40) -> ClientData:
    """Two classes, either side of a line; 0 mistakes are possible."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(clients, n, 2, generator=g)
    y = (x[..., 0] > 0).long()
    x[..., 0] += 2.0 * y - 1
    return ClientData(x, y, torch.ones(clients, n))


def flipped(server: Tree, rows: Tensor) -> Tensor:
    return server["v"] - 10 * (rows - server["v"])


LEARNING = pfedbayes.build(pfedbayes.Config(eta_1=0.02, eta_2=0.02), MODEL)


@cache
def accuracy(method: Method, rule: Rules, attack: Attack | None, rounds: int = 15) -> float:
    """Of the global model on all points, client 2 being bad where there is an attack."""
    data, everyone = blobs(), range(5)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    clients = LocalClients(method, data, [0], [server], Work(steps=10, batch=20), chunk=5)
    for t in range(rounds):
        (update,), _, _ = clients.train(t, [server], [everyone])
        if attack is not None:
            rows = update.message["v"].clone()
            rows[2:3] = attack(server, rows[2:3])
            update = update._replace(message={"v": rows})
        server = method.aggregate(server, robust.combine(rule, method, server, update).update)
    broadcast = {k: v.expand(5, *v.shape) for k, v in server.items()}
    noise = torch.randn(5, 10, MODEL.size, generator=torch.Generator().manual_seed(1))
    found = method.predict(broadcast, data.x, noise).argmax(-1)
    return float((found == data.y).double().mean())


@pytest.mark.parametrize("rule", ROBUST)
def test_one_attacker_breaks_the_plain_average_and_no_robust_one(rule: str) -> None:
    """The model without an attacker is right on nearly all points; chance is a half."""
    assert accuracy(LEARNING, rules("plain"), None) > 0.95
    assert accuracy(LEARNING, rules("plain"), flipped) < 0.6
    assert accuracy(LEARNING, rules(rule), None) > 0.95
    assert accuracy(LEARNING, rules(rule), flipped) > 0.95


def test_a_narrow_attacker_breaks_precision_fusion_and_not_its_median() -> None:
    config = pfedbayes.Config(eta_1=0.02, eta_2=0.02, fusion="precision")
    method = pfedbayes.build(config, MODEL)

    def narrow(server: Tree, rows: Tensor) -> Tensor:
        wrong = torch.zeros_like(rows[:, 0])
        return torch.stack([wrong, gaussian.rho_of(torch.full_like(wrong, 1e-6))], 1)

    assert accuracy(method, rules("plain"), narrow) < 0.6
    assert accuracy(method, rules("median"), narrow) > 0.95
