"""Differential privacy: mechanism by Monte-Carlo, accountant by closed forms, ledger, page."""

from __future__ import annotations

import errno
import json
import math
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_rows import FEATURES, Row, build, every_method, loop
from scipy import integrate, stats
from torch import Tensor

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.tables import markdown_table
from corefed.base.types import Tree, Update
from corefed.federation.trust import checks, metric, privacy
from corefed.settings import config
from corefed.training import client_side
from corefed.training.evaluate import evaluate
from corefed.training.setup import prepare
from corefed_studies.pages import Marked
from corefed_studies.reproduce.cells import published

ROOT = Path(__file__).parents[2]


def tree(seed: int, dtype: torch.dtype = torch.float64) -> Tree:
    """A posterior of 3 weights and 2 weights without one: 8 coordinates."""
    g = torch.Generator().manual_seed(seed)
    v = torch.stack([torch.randn(3, generator=g), torch.randn(3, generator=g) - 1])
    return {"v": v.to(dtype), "w": torch.randn(2, generator=g).to(dtype)}


SENT = tree(0)
UNIT = metric.scale(SENT, ("v",))


def silence(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.float64)


def seeded(seed: int) -> privacy.Normals:
    g = torch.Generator().manual_seed(seed)
    return lambda count: torch.randn(count, generator=g, dtype=torch.float64)


def in_units(message: Tree) -> Tensor:
    """(message - broadcast) / s, flat."""
    return torch.cat([((message[k] - SENT[k]) / UNIT[k]).flatten() for k in SENT])


def released(
    message: Tree, clip: float, noise: float, generator: privacy.Normals
) -> tuple[Tree, float]:
    return privacy.privatise(message, SENT, ("v",), clip, noise, generator)


# Mechanism


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(1, 10**6), clip=st.floats(1e-3, 1e3))
def test_clipping_is_exact(seed: int, clip: float) -> None:
    """Without noise: the same direction, the length itself or `clip`, never more."""
    message = tree(seed)
    u = in_units(message)
    found, length = released(message, clip, 1.0, silence)
    assert length == pytest.approx(float(u.norm()), rel=1e-12)
    after = in_units(found)
    # Adding the broadcast and taking it away again costs 1e-16 of it, in units down to 0.05.
    assert float(after.norm()) <= clip * (1 + 1e-12) + 1e-13
    assert float(after.norm()) == pytest.approx(min(clip, length), rel=1e-9)
    torch.testing.assert_close(after, u * min(1.0, clip / length), rtol=1e-9, atol=1e-12)


def test_noise_has_the_stated_moments() -> None:
    """M releases: unbiased for the clipped message, covariance (noise clip)^2 I in public units.

    Of 8 means, 8 variances and 28 covariances the standard deviations are 1, sqrt 2 and 1 over
    sqrt M; all within 4.5 of them has a probability of 1 - 3e-4, and the seed is fixed.
    """
    M, clip, noise = 4000, 0.7, 1.3
    message, generator = tree(1), seeded(2)
    exact = in_units(released(message, clip, noise, silence)[0])
    draws = torch.stack([in_units(released(message, clip, noise, generator)[0]) for _ in range(M)])
    standard = (draws - exact) / (noise * clip)
    assert standard.mean(0).abs().max() < 4.5 / math.sqrt(M)
    covariance = standard.mT @ standard / M
    allowed = 4.5 * (1 + torch.eye(8)).sqrt() / math.sqrt(M)
    assert ((covariance - torch.eye(8)).abs() < allowed).all()


def test_noise_does_not_depend_on_what_is_hidden() -> None:
    """The same draws shift every message alike, long or short: only the clipped part differs."""
    first, second = tree(1), {k: SENT[k] + 1e-3 * (v - SENT[k]) for k, v in tree(2).items()}
    shifts = [
        in_units(released(m, 0.5, 2.0, seeded(7))[0]) - in_units(released(m, 0.5, 2.0, silence)[0])
        for m in (first, second)
    ]
    torch.testing.assert_close(shifts[0], shifts[1], rtol=1e-9, atol=1e-12)
    assert torch.equal(in_units(released(SENT, 1.0, 1.0, silence)[0]), torch.zeros(8).double())


def test_float32_messages_stay_float32_and_lose_one_rounding() -> None:
    message, broadcast = tree(1, torch.float32), tree(0, torch.float32)
    found, _ = privacy.privatise(message, broadcast, ("v",), 0.5, 1.0, seeded(3))
    wide = ({k: v.double() for k, v in each.items()} for each in (message, broadcast))
    expected, _ = privacy.privatise(*wide, ("v",), 0.5, 1.0, seeded(3))
    for name, value in found.items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, expected[name].float(), rtol=1e-7, atol=0)


def test_an_empty_message_is_no_release() -> None:
    def never(count: int) -> Tensor:
        raise AssertionError

    assert released({}, 1.0, 1.0, never) == ({}, 0.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_mechanism_without_noise_or_bound_is_refused(value: float) -> None:
    """As a server that wants to see more might ask for."""
    with pytest.raises(UserError, match="dp_clip is"):
        released(tree(1), value, 1.0, silence)
    with pytest.raises(UserError, match="dp_noise is"):
        released(tree(1), 1.0, value, silence)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_upload_is_noise_around_the_broadcast(value: float) -> None:
    """Whether training diverged does not show: it counts as a difference of zero."""
    message = tree(1)
    message["v"][1, 0] = value
    silent, length = released(message, 1.0, 1.0, silence)
    assert not math.isfinite(length)
    assert all(torch.equal(silent[name], value) for name, value in SENT.items())
    noisy, nothing = (released(m, 1.0, 1.0, seeded(4))[0] for m in (message, SENT))
    assert all(torch.equal(noisy[name], value) for name, value in nothing.items())


def test_an_upload_that_cannot_be_compared_is_not_sent() -> None:
    for message in ({"v": torch.zeros(2, 4)}, {"other": torch.zeros(2)}, {"w": torch.zeros(1)}):
        with pytest.raises(UserError, match="differs in shape"):
            released(message, 1.0, 1.0, silence)


@every_method
def test_every_method_is_private_or_refused(row: Row) -> None:
    method = build(row)
    if not method.traits.aligned:
        with pytest.raises(UserError, match="bnfed has no such distance"):
            privacy.check(method)
        return
    privacy.check(method)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    message = {k: v[1].float() for k, v in loop(row, 1).messages[0].items()}
    found, _ = privacy.privatise(
        message, server, method.traits.posteriors, 0.1, 1.0, privacy.system_normals
    )
    wanted = checks.template(method, server, (FEATURES,))
    claimed = {"examples": 5}
    assert checks.refusal(found, wanted, method.traits.posteriors, claimed, max_examples=9) is None
    assert all(not torch.equal(found[k], message[k]) for k in message)


# Secret numbers


def test_secret_normals_are_normal_and_never_the_same() -> None:
    """By Kolmogorov and Smirnov; the system's numbers have no seed, so once in 10^6 runs fails."""
    normals = privacy.system_normals
    torch.manual_seed(0)
    first = normals(20_000)
    torch.manual_seed(0)
    second = normals(20_000)
    assert first.dtype == torch.float64
    assert len(torch.cat([first, second]).unique()) == 40_000
    assert stats.kstest(first.numpy(), "norm").pvalue > 5e-7
    assert stats.kstest(second.numpy(), "norm").pvalue > 5e-7


@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_the_most_extreme_bits_are_finite_normals(
    byte: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privacy.os, "urandom", lambda count: bytes([byte]) * count)
    (extreme,) = privacy.system_normals(1).tolist()
    assert extreme == pytest.approx(stats.norm.ppf(2.0**-53) * (1 if byte == 0 else -1), rel=1e-9)


# Accountant


def direct(epsilon: float, mu: float) -> float:
    """delta(epsilon) as it is printed."""
    a, b = -epsilon / mu + mu / 2, -epsilon / mu - mu / 2
    return float(stats.norm.cdf(a) - math.exp(epsilon) * stats.norm.cdf(b))


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 0.5, 3.0, 10.0])
def test_delta_is_the_integral_of_the_privacy_loss(epsilon: float, mu: float) -> None:
    """delta = E[(1 - e^(epsilon - L))_+] with the loss L ~ N(mu^2 / 2, mu^2): numerically."""

    def integrand(z: float) -> float:
        loss = mu * mu / 2 + mu * z
        return max(0.0, -math.expm1(epsilon - loss)) * math.exp(-z * z / 2)

    start = (epsilon - mu * mu / 2) / mu
    begin = max(-12.0, start)
    area, _ = integrate.quad(integrand, begin, max(12.0, start + 12), epsabs=0, limit=500)
    expected = area / math.sqrt(2 * math.pi)
    assert math.exp(privacy.log_delta(epsilon, mu)) == pytest.approx(expected, rel=1e-6)
    if expected > 1e-6:  # below, the printed form cancels
        assert direct(epsilon, mu) == pytest.approx(expected, rel=1e-6)


def test_known_values() -> None:
    """At epsilon 0, delta is the total variation 2 Phi(mu / 2) - 1 between N(0, 1) and N(mu, 1)."""
    assert math.exp(privacy.log_delta(0.0, 1.0)) == pytest.approx(0.3829249225480262, rel=1e-12)
    assert privacy.epsilon(1.0, 0.3829249225480262) == pytest.approx(0, abs=1e-9)
    assert privacy.epsilon(1.0, 0.5) == 0
    assert privacy.epsilon(0.0, 1e-5) == 0
    assert privacy.epsilon(1e-30, 1e-5) == 0
    assert privacy.epsilon(math.inf, 1e-5) == math.inf
    assert privacy.epsilon(1e7, 1e-5) == math.inf
    # One release with noise 1: by bisection of the printed formula, 60 halvings.
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if direct(middle, 1.0) > 1e-5 else (low, middle)
    assert privacy.epsilon(1.0, 1e-5) == pytest.approx(low, rel=1e-9)
    assert privacy.epsilon(1.0, 1e-5) == pytest.approx(4.3772, abs=1e-4)


MU = st.floats(1e-3, 1e3)
DELTA = st.floats(1e-12, 0.1)


@settings(max_examples=150, deadline=None)
@given(mu=MU, delta=DELTA)
def test_epsilon_inverts_delta_and_is_below_renyis_bound(mu: float, delta: float) -> None:
    """Renyi: min over alpha of alpha mu^2 / 2 + log(1 / delta) / (alpha - 1), in closed form."""
    found = privacy.epsilon(mu, delta)
    renyi = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))
    assert 0 <= found < renyi
    if found > 0:
        assert privacy.log_delta(found, mu) == pytest.approx(math.log(delta), rel=1e-6)
    else:
        assert math.erf(mu / math.sqrt(8)) <= delta


@settings(max_examples=60, deadline=None)
@given(mu=MU, delta=DELTA, more=st.floats(1.01, 3))
def test_epsilon_grows_with_mu_and_falls_with_delta(mu: float, delta: float, more: float) -> None:
    found = privacy.epsilon(mu, delta)
    assert privacy.epsilon(more * mu, delta) >= found
    assert privacy.epsilon(mu, delta / more) >= found
    if found > 0:
        assert privacy.epsilon(more * mu, delta) > found


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_a_delta_that_is_none_is_refused(delta: float) -> None:
    with pytest.raises(UserError, match="delta is"):
        privacy.epsilon(1.0, delta)


def test_releases_compose_as_one_with_less_noise() -> None:
    """T releases of N(u, s^2 I) tell what one of N(u, s^2 / T I) does: their mean is sufficient."""
    assert privacy.compose([1 / 2.0] * 16) == pytest.approx(1 / (2.0 / 4))
    assert privacy.compose([3.0, 4.0]) == 5
    assert privacy.compose([]) == 0


# Those who see only averages


def test_averages_by_hand() -> None:
    assert privacy.average_mu(2.0, [0.25] * 4) == pytest.approx(1 / (2 * 2))
    assert privacy.average_mu(1.0, [0.75, 0.25]) == pytest.approx(0.75 / math.sqrt(0.625))
    assert privacy.average_mu(1.0, [3, 1]) == privacy.average_mu(1.0, [0.75, 0.25])  # any scale
    assert privacy.average_mu(4.0, [1.0]) == 1 / 4  # alone, an average hides nothing


@settings(max_examples=50, deadline=None)
@given(shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=9), noise=st.floats(0.1, 10))
def test_averages_hide_more_than_uploads_and_most_among_equals(
    shares: list[float], noise: float
) -> None:
    found = privacy.average_mu(noise, shares)
    assert found <= 1 / noise * (1 + 1e-12)
    assert found >= 1 / (noise * math.sqrt(len(shares))) * (1 - 1e-12)


def test_shift_and_noise_of_an_average_are_those_of_the_formula() -> None:
    """FedAvg's weights: how far one client at the bound moves it, over the noise of all."""
    method = build(Row("fedavg"))
    server = {k: v.double() for k, v in method.init_server(Streams([Who(0, SERVER)], 0)).items()}
    clip, noise, examples = 0.8, 1.5, torch.tensor([10, 30, 60])
    size = server["theta"].numel()
    away = {"theta": server["theta"] + 5.0}

    def average(moves: list[Tree], normals: list[privacy.Normals]) -> Tensor:
        rows = [
            privacy.privatise(message, server, (), clip, noise, generator)[0]["theta"]
            for message, generator in zip(moves, normals, strict=True)
        ]
        update = Update((0, 1, 2), {"theta": torch.stack(rows)}, examples)
        return method.aggregate(server, update)["theta"]

    def first(count: int) -> Tensor:
        return torch.eye(size, dtype=torch.float64)[0][:count]

    nobody = average([server] * 3, [silence] * 3)
    shift = (average([server, server, away], [silence] * 3) - nobody).norm()
    each = [
        float((average([server] * 3, [first if j == i else silence for j in range(3)]) - nobody)[0])
        for i in range(3)
    ]  # what one draw of client i's noise becomes
    found = float(shift) / math.hypot(*each)
    assert found == pytest.approx(privacy.average_mu(noise, examples.tolist()), rel=1e-9)


@every_method
def test_the_weights_of_every_methods_average_are_found(row: Row) -> None:
    method = build(row)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    expected = method.traits.mean or None
    if len(client_side.sent(method, server)) != 1:  # nothing, or more than what is averaged
        expected = None
    before = {name: value.clone() for name, value in server.items()}
    assert privacy.averaging_weights(method, server) == expected
    assert all(torch.equal(server[name], value) for name, value in before.items())


# Ledger


def test_a_ledger_counts_over_runs_and_restarts(tmp_path: Path) -> None:
    path = tmp_path / "state" / "privacy.json"
    ledger = privacy.Ledger(path)
    assert ledger.spent(1e-5) == 0
    ledger.record("first", 0, 2.0, 1.0)
    ledger.record("first", 1, 2.0, 1.0)
    ledger.record("second", 0, 1.0, 5.0)
    again = privacy.Ledger(path)
    assert again.releases == ledger.releases
    expected = privacy.epsilon(math.sqrt(0.25 + 0.25 + 1), 1e-5)
    assert again.spent(1e-5) == ledger.spent(1e-5) == pytest.approx(expected)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert digests.read_json(path) == {
        "schema": 1,
        "releases": [
            {"run": "first", "round": 0, "noise": 2.0, "clip": 1.0},
            {"run": "first", "round": 1, "noise": 2.0, "clip": 1.0},
            {"run": "second", "round": 0, "noise": 1.0, "clip": 5.0},
        ],
    }


def test_a_ledger_allows_up_to_its_bound_and_not_beyond(tmp_path: Path) -> None:
    ledger = privacy.Ledger(tmp_path / "privacy.json")
    three = privacy.epsilon(privacy.compose([0.5] * 3), 1e-5)
    for t in range(3):
        assert ledger.allows(2.0, three + 1e-9, 1e-5)
        assert not ledger.allows(1.0, three + 1e-9, 1e-5) or t == 0
        ledger.record("run", t, 2.0, 1.0)
    assert ledger.spent(1e-5) == pytest.approx(three)
    assert not ledger.allows(2.0, three + 1e-9, 1e-5)
    for none in (0.0, -1.0, math.nan):
        assert not ledger.allows(none, 1e9, 1e-5)


def test_a_bound_is_checked_where_a_release_is_entered(tmp_path: Path) -> None:
    """Two processes of a client that both look first must not both spend the rest."""
    path, bound = tmp_path / "privacy.json", privacy.epsilon(0.5, 1e-5) + 1e-9
    first, second = privacy.Ledger(path), privacy.Ledger(path)
    assert first.allows(2.0, bound, 1e-5) and second.allows(2.0, bound, 1e-5)
    first.record("run", 0, 2.0, 1.0, most=bound)
    with pytest.raises(privacy.SpentError, match="more than the epsilon of"):
        second.record("run", 1, 2.0, 1.0, most=bound)
    assert len(privacy.Ledger(path).releases) == 1


DAMAGE = {
    "empty": b"",
    "cut": b'{"schema": 1, "releases": [{"run": "a", "rou',
    "no text": b"\xff\xfe\x00",
    "a list": b"[]",
    "another schema": b'{"schema": 2, "releases": []}',
    "no releases": b'{"schema": 1}',
    "a field too few": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": 1.0}]}',
    "a field too many": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": 1.0, '
    b'"clip": 1.0, "x": 0}]}',
    "negative noise": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": -1.0, '
    b'"clip": 1.0}]}',
    "infinite noise": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": Infinity, '
    b'"clip": 1.0}]}',
    "nan noise": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": NaN, '
    b'"clip": 1.0}]}',
    "text for a number": b'{"schema": 1, "releases": [{"run": "a", "round": 0, "noise": "1", '
    b'"clip": 1.0}]}',
}


@pytest.mark.parametrize("content", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_ledger_is_refused_and_left_alone(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    ledger = privacy.Ledger(path)
    path.write_bytes(content)
    for attempt in (lambda: privacy.Ledger(path), lambda: ledger.record("run", 0, 1.0, 1.0)):
        with pytest.raises(UserError, match=r"is damaged .* nothing is sent before it is restored"):
            attempt()
    assert path.read_bytes() == content


def test_a_release_that_cannot_be_entered_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "privacy.json"
    ledger = privacy.Ledger(path)
    ledger.record("run", 0, 1.0, 1.0)
    before = path.read_bytes()

    def full(handle: int, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        with pytest.raises(UserError, match=r"No space left on device; the upload was not sent"):
            ledger.record("run", 1, 1.0, 1.0)
    assert path.read_bytes() == before
    assert len(ledger.releases) == 1
    ledger.record("run", 1, 1.0, 1.0)  # the lock was given back
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"Cannot (read|write)"):
        privacy.Ledger(tmp_path / "file" / "privacy.json").record("run", 0, 1.0, 1.0)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match="Cannot read"):
        privacy.Ledger(tmp_path / "folder.json")


@pytest.mark.parametrize("noise", [0.0, -1.0, math.nan, math.inf])
def test_what_could_not_be_read_again_is_not_entered(noise: float, tmp_path: Path) -> None:
    ledger = privacy.Ledger(tmp_path / "privacy.json")
    with pytest.raises(UserError, match="no release that could be counted"):
        ledger.record("run", 0, noise, 1.0)
    assert not ledger.path.exists()


def test_processes_of_one_client_do_not_forget_each_other(tmp_path: Path) -> None:
    """A lock belongs to an open file, so that threads stand in for processes here."""
    path = tmp_path / "privacy.json"

    def enter(i: int) -> None:
        privacy.Ledger(path).record(f"run-{i}", 0, 1.0, 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(40)))
    assert {release.run for release in privacy.Ledger(path).releases} == {
        f"run-{i}" for i in range(40)
    }


# docs/privacy.md


def test_flowers_secure_aggregation_is_as_the_page_says() -> None:
    """A Flower that has it for messages, or with keys that clients can check, is worth a look."""
    from flwr import clientapp, serverapp
    from flwr.app import Context, RecordDict
    from flwr.client.mod.secure_aggregation import secaggplus_mod
    from flwr.server.workflow import SecAggPlusWorkflow

    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, Context(1, 1, {}, RecordDict(), {}))  # type: ignore[arg-type]
    here = [*dir(clientapp), *dir(clientapp.mod), *dir(serverapp), *dir(serverapp.strategy)]
    assert not [name for name in here if "secagg" in name.lower()]
    code = Path(str(secaggplus_mod.__code__.co_filename)).read_text()
    assert "recorddict_to_fitres" in code
    assert not re.search(r"\bsign|verify_signature", code.replace("Assigning", ""))


def epsilon_table() -> list[str]:
    """The page's table of epsilon at delta = 1e-5."""
    rows = []
    for noise in (0.5, 1.0, 2.0, 4.0):
        for rounds in (1, 10, 50, 100):
            views = [1 / noise, *(privacy.average_mu(noise, [1.0] * S) for S in (3, 10, 100))]
            spent = [privacy.epsilon(privacy.compose([mu] * rounds), 1e-5) for mu in views]
            rows.append([f"{noise:g}", f"{rounds}", *(f"{each:.3g}" for each in spent)])
    columns = ["noise", "rounds", "the server", "average of 3", "average of 10", "average of 100"]
    return markdown_table(columns, rows)


def test_the_pages_table_is_what_the_accountant_says() -> None:
    part = Marked(ROOT / "docs" / "privacy.md", "epsilon").part
    assert part.strip().splitlines() == epsilon_table()


def digits(
    method: str, clip: float, noise: float, seed: int, rounds: int = 10, **flags: Any
) -> dict[str, float]:
    """Metrics of ten clients on the digits, each upload privatised: the page's measured example.

    A clip of 0 switches it off. Noise is seeded here, to be measured again. Learning rates are
    those of published tables.
    """
    wanted = {"method": method, "rounds": rounds, "seeds": (seed,), "device": "cpu", **flags}
    setup = prepare(config.resolve(flags=published(wanted)))
    trained, server, generator = setup.clients, setup.servers[0], seeded(1000 + seed)
    everyone = range(setup.experiment.run.clients)
    for t in range(rounds):
        (update,), _, _ = trained.train(t, [server], [everyone])
        if clip:
            rows = [
                privacy.privatise(
                    {name: value[i] for name, value in update.message.items()},
                    server,
                    setup.method.traits.posteriors,
                    clip,
                    noise,
                    generator,
                )[0]
                for i in everyone
            ]
            stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            update = update._replace(message=stacked)
        server = setup.method.aggregate(server, update)
    draws, classes = setup.experiment.run.evaluate_draws, setup.data.classes
    found = evaluate(trained, setup.method, [server], setup.data.test, rounds - 1, draws, classes)
    return found.metrics[0]


def test_without_clipping_and_noise_a_private_run_is_a_plain_one() -> None:
    """And with noise it is not: what the measured example is made by."""
    small = {"rounds": 2, "clients": 3, "local_steps": 5, "hidden": (8,), "evaluate_draws": 2}
    plain = digits("pfedbayes", 0, 0, 0, **small)
    open_ = digits("pfedbayes", 1e6, 1e-13, 0, **small)
    assert open_["global_nll"] == pytest.approx(plain["global_nll"], rel=1e-4)  # float32
    noisy = digits("pfedbayes", 1.0, 4.0, 0, **small)
    assert noisy["global_nll"] > 2 * plain["global_nll"]


def test_a_ledger_never_loses_its_digest_nor_its_file(tmp_path: Path) -> None:
    """A file of an earlier version is read, and has a digest from the next entry on."""
    path = tmp_path / "privacy.json"
    old = {"schema": 1, "releases": [{"run": "a", "round": 0, "noise": 2.0, "clip": 1.0}]}
    path.write_text(json.dumps(old, indent=1) + "\n")
    before = privacy.Ledger(path)
    assert len(before.releases) == 1
    before.record("a", 1, 2.0, 1.0)
    assert len(privacy.Ledger(path).releases) == 2
    whole = path.read_bytes()
    path.write_text(json.dumps(old, indent=1) + "\n")
    with pytest.raises(UserError, match="it has no digest any more"):
        privacy.Ledger(path)
    path.unlink()
    with pytest.raises(UserError, match="it is missing, and had entries"):
        privacy.Ledger(path)
    with pytest.raises(UserError, match="it is missing, and had entries"):
        before.record("a", 2, 2.0, 1.0)
    path.write_bytes(whole)
    assert len(privacy.Ledger(path).releases) == 2
