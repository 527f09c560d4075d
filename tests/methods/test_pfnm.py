"""The matching of neurons against enumeration, closed forms and hand-worked cases.

The references know nothing of the code's algebra: the Gaussian part of the density is a
least-squares residual, the process's part a product of Bernoulli and Poisson probabilities, and the
maximum is found by trying everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest

from corefed.methods import pfnm
from corefed.methods.layers import Array, Index, Network, join, split, take
from corefed.methods.pfnm import Local, Prior, find, match, match_networks

stats = pytest.importorskip("scipy.stats")

CLOSE = {"rtol": 1e-12, "atol": 1e-12}  # sums of tens of float64 terms of size 1


def generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def network(g: np.random.Generator, widths: Sequence[int], std: float = 1.0) -> Network:
    size = sum((a + 1) * b for a, b in pairwise(widths))
    return split(std * g.standard_normal(size), widths)


def output(network: Network, x: Array) -> Array:
    for w, b in zip(network.weights[:-1], network.biases[:-1], strict=True):
        x = np.maximum(x @ w.T + b, 0)
    return x @ network.weights[-1].T + network.biases[-1]


def permuted(network: Network, orders: Sequence[Index]) -> Network:
    """The same function with the neurons of each hidden layer in another order."""
    return take(network, orders)


def hidden(network: Network) -> list[int]:
    return [len(b) for b in network.biases[:-1]]


# References


def gaussian(groups: Sequence[tuple[Array, Array]], prior: Prior) -> float:
    """max over theta of -sum_i |theta_i|^2 / 2 sigma_0^2 - sum |v - theta_i|^2 / 2 sigma^2.

    A group holds the copies [m, D] of one global neuron and which weights [m, D] are observed.
    """
    total = 0.0
    for copies, seen in groups:
        for column, mask in zip(copies.T, seen.T, strict=True):
            y = column[mask]
            rows = np.concatenate([[1 / prior.sigma_0], np.full(len(y), 1 / prior.sigma)])
            right = np.concatenate([[0.0], y / prior.sigma])
            theta = np.linalg.lstsq(rows[:, None], right, rcond=None)[0]
            total -= 0.5 * np.square(rows * theta - right).sum()
    return total


class Case:
    """Clients with few neurons, some of whose weights are not observed."""

    def __init__(self, seed: int, clients: int, neurons: int, partial: int = 2) -> None:
        g = generator(seed)
        self.prior = Prior(*np.exp(g.normal(size=3) * 0.7), sweeps=50)
        centres = g.normal(size=(neurons + 1, 2 + partial))
        self.v, self.seen, self.locals = [], [], []
        for _ in range(clients):
            picks = g.permutation(len(centres))[:neurons]
            v = centres[picks] + 0.5 * g.normal(size=(neurons, centres.shape[1]))
            seen = np.concatenate([np.ones(2, bool), g.random(partial) < 0.6])
            self.v.append(v)
            self.seen.append(np.broadcast_to(seen, v.shape))
            precision = seen[1:] / self.prior.sigma**2  # the first two weights share one
            self.locals.append(Local(v * seen / self.prior.sigma**2, precision))

    def gaussian(self, assigned: Sequence[Index]) -> float:
        owner = [(j, row) for j, a in enumerate(assigned) for row in range(len(a))]
        flat = np.concatenate(assigned)
        groups = []
        for i in np.unique(flat):
            rows = [owner[r] for r in np.flatnonzero(flat == i)]
            copies, seen = (np.stack([x[j][row] for j, row in rows]) for x in (self.v, self.seen))
            groups.append((copies, seen))
        return gaussian(groups, self.prior)


def last_customer(others: Sequence[Index], mine: Index, prior: Prior) -> float:
    """log P(b_j | b_-j) of the Indian buffet, from its definition."""
    clients = len(others) + 1
    members = np.bincount(np.concatenate(others)) if others else np.zeros(0, int)
    has = np.isin(np.arange(len(members)), mine)
    old = stats.bernoulli.logpmf(has, members / clients)[members > 0].sum()
    new = sum(i >= len(members) or members[i] == 0 for i in mine)
    return float(old + stats.poisson.logpmf(new, prior.gamma / clients))


def choices(neurons: int, known: int) -> Iterator[Index]:
    """All ways to be one of the known neurons, or new, without regard to the names of new ones."""
    for shared in range(min(neurons, known) + 1):
        for rows in combinations(range(neurons), shared):
            for columns in permutations(range(known), shared):
                a = np.full(neurons, -1)
                a[list(rows)] = columns
                a[a < 0] = known + np.arange(neurons - shared)
                yield a


def numbered(assigned: Sequence[Index]) -> list[list[int]]:
    """Global neurons by first appearance."""
    names: dict[int, int] = {}
    return [[names.setdefault(int(i), len(names)) for i in a] for a in assigned]


# One layer, against enumeration


@pytest.mark.parametrize("seed", range(12))
def test_scores_are_the_log_density_up_to_a_constant(seed: int) -> None:
    """For every assignment of a client given the others, not only the best; and `best` is it."""
    case = Case(seed, clients=4, neurons=3)
    before = match(case.locals[:3], case.prior, limit=100).assigned
    known = 1 + max(a.max() for a in before)
    slots = known + 3
    sums = pfnm._nobody(slots, case.locals[0], case.prior)
    for local, a in zip(case.locals, before, strict=False):
        pfnm._count(sums, local, a, +1, case.prior)
    table = pfnm.scores(sums, case.locals[3], 4, case.prior)
    densities, totals, tried = [], [], list(choices(3, known))
    for mine in tried:
        density = case.gaussian([*before, mine]) + last_customer(before, mine, case.prior)
        densities.append(density)
        totals.append(table[np.arange(3), mine].sum())
    gap = np.subtract(densities, totals)
    np.testing.assert_allclose(gap, gap[0], rtol=1e-10)  # lstsq's roundings
    found = pfnm.best(sums, case.locals[3], 4, case.prior)
    assert found.tolist() == tried[int(np.argmax(densities))].tolist()


@pytest.mark.parametrize("seed", range(20))
def test_two_clients_are_matched_to_the_global_optimum(seed: int) -> None:
    """The joint density is P(b_1) P(b_2 | b_1) times the Gaussians; b_1 is all new in any case."""
    case = Case(seed, clients=2, neurons=3)
    first = np.arange(3)
    best = max(
        choices(3, 3),
        key=lambda a: case.gaussian([first, a]) + last_customer([first], a, case.prior),
    )
    assert numbered(match(case.locals, case.prior, 100).assigned) == numbered([first, best])


@pytest.mark.parametrize("seed", range(8))
def test_of_three_clients_none_could_do_better_alone(seed: int) -> None:
    case = Case(seed, clients=3, neurons=3)
    assigned = match(case.locals, case.prior, 100).assigned
    for j in range(3):
        others = [a for i, a in enumerate(assigned) if i != j]
        names, inverse = np.unique(np.concatenate(others), return_inverse=True)
        others = np.split(inverse, 2)

        def density(mine: Index, j: int = j, others: Sequence[Index] = others) -> float:
            everyone = [*others[:j], mine, *others[j:]]
            return case.gaussian(everyone) + last_customer(others, mine, case.prior)

        best = max(choices(3, len(names)), key=density)
        best_all = [*others[:j], best, *others[j:]]
        assert numbered(assigned) == numbered(best_all)


@pytest.mark.parametrize("seed", range(8))
def test_the_first_pass_lets_clients_in_one_by_one(seed: int) -> None:
    """Each is the last customer of those so far."""
    case = Case(seed, clients=4, neurons=2)
    before: list[Index] = [np.arange(2)]
    for _ in range(3):
        tried = choices(2, 1 + max(a.max() for a in before))
        best = max(
            tried,
            key=lambda a: case.gaussian([*before, a]) + last_customer(before, a, case.prior),
        )
        before.append(best)
    found = match(case.locals, case.prior._replace(sweeps=1), 100).assigned
    assert numbered(found) == numbered(before)


def test_taking_a_client_out_leaves_no_trace() -> None:
    """Not even roundings: 1 / sigma_0^2 + 1 / sigma^2 - 1 / sigma^2 would."""
    case = Case(0, clients=2, neurons=3)
    prior = Prior(sigma=1e-3, sigma_0=0.7)
    sums, fresh = (pfnm._nobody(6, case.locals[0], prior) for _ in range(2))
    local = Local(case.v[0] * 1e6, np.full(3, 1e6))
    pfnm._count(sums, local, np.array([4, 0, 3]), +1, prior)
    pfnm._count(sums, local, np.array([4, 0, 3]), -1, prior)
    assert all(np.array_equal(a, b) for a, b in zip(sums, fresh, strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_copies_with_little_noise_are_recovered(seed: int) -> None:
    """6 neurons of which each of 5 clients has 4.

    Apart, two copies cost a second |theta|^2 / 2 sigma_0^2, about 4; as one |v - v'|^2 / 4 sigma^2,
    about 0.04 for the same neuron and 144 for two of them.
    """
    g = generator(seed)
    theta = 3 * g.normal(size=(6, 8))
    truth = [g.permutation(6)[:4] for _ in range(5)]
    v = [theta[a] + 0.05 * g.normal(size=(4, 8)) for a in truth]
    found = match([Local(4 * x, np.array([4.0])) for x in v], Prior(sigma=0.5, sigma_0=3.0), 20)
    assert numbered(found.assigned) == numbered(truth)
    order = list(dict.fromkeys(np.concatenate(truth).tolist()))
    assert found.members.tolist() == [sum(i in a for a in truth) for i in order]
    for mean, i in zip(found.mean, order, strict=True):
        copies = [x[a == i].sum(0) for x, a in zip(v, truth, strict=True)]
        m = sum(i in a for a in truth)
        np.testing.assert_allclose(mean, sum(copies) / (m + 0.5**2 / 3.0**2), **CLOSE)


def local(v: object) -> Local:
    return Local(np.array(v, dtype=float), np.ones(1))


def test_by_hand() -> None:
    """sigma = sigma_0 = gamma = 1, neurons of one weight; client 1 has 2, client 2 has 2.2.

    As the same: (2 + 2.2)^2 / 6 - 2^2 / 4 + log 1 = 1.94. As another: 2.2^2 / 4 + log 1/2 = 0.517.
    With -2.2 the same is (0.2)^2 / 6 - 1 < 0.517.
    """
    together = match([local([[2.0]]), local([[2.2]])], Prior(), 10)
    assert together.members.tolist() == [2]
    np.testing.assert_allclose(together.mean, [[4.2 / 3]])
    apart = match([local([[2.0]]), local([[-2.2]])], Prior(), 10)
    assert apart.members.tolist() == [1, 1]
    np.testing.assert_allclose(apart.mean, [[1.0], [-1.1]])


def test_many_new_neurons_are_less_likely() -> None:
    """The k-th new one has log k against it: four of size 2 at right angles.

    Each as new: 4 / 4 + log 1/2 - log k = 0.31, -0.39, -0.79, -1.08. As the same as a neuron at a
    right angle: 8 / 6 - 1 = 0.33 > 0.31, though barely.
    """
    mine, yours = 2 * np.eye(8)[:4], 2 * np.eye(8)[4:]
    assert len(match([local(mine), local(yours)], Prior(), 100).members) == 4
    assert len(match([local(mine), local(yours)], Prior(gamma=10.0), 100).members) == 8
    # log 1.2 / 2 = -0.51 lets one be new (0.49 > 0.33 > 0.49 - log 2).
    assert len(match([local(mine), local(yours)], Prior(gamma=1.2), 100).members) == 5


# Networks, by closed forms


@pytest.mark.parametrize("widths", [(4, 6, 3), (4, 6, 5, 3), (3, 5, 1, 6, 2), (2, 1, 1)])
def test_permuted_copies_are_recovered(widths: tuple[int, ...]) -> None:
    """With a flat prior (sigma_0 large) the global network is the network; posterior factor 1."""
    g = generator(1)
    original = network(g, widths)
    orders = [[g.permutation(n) for n in widths[1:-1]] for _ in range(4)]
    copies = [original, *(permuted(original, order) for order in orders)]
    prior = Prior(sigma=0.1, sigma_0=1e4)
    world = match_networks(copies, prior, [5 * n for n in widths[1:-1]])
    assert hidden(world.network) == list(widths[1:-1])
    assert all((m == 5).all() for m in world.counts)
    for layer, assigned in enumerate(world.assigned):
        assert assigned[0].tolist() == list(range(widths[1 + layer]))
        for order, a in zip(orders, assigned[1:], strict=True):
            assert a.tolist() == order[layer].tolist()
    x = g.normal(size=(20, widths[0]))
    # The factor is 1 / (1 + (sigma / sigma_0)^2 / 5) = 1 - 2e-11.
    np.testing.assert_allclose(output(world.network, x), output(original, x), rtol=1e-8, atol=1e-8)


def test_shrinkage_of_permuted_copies() -> None:
    """sigma = sigma_0: all is times f = m / (m + 1), and f^2 what has come through one layer."""
    g = generator(2)
    original = network(g, (4, 7, 3), std=3.0)
    copies = [permuted(original, [g.permutation(7)]) for _ in range(3)]
    world = match_networks(copies, Prior(), [35])
    x, f = g.normal(size=(10, 4)), 3 / 4
    bias = original.biases[-1]
    expected = bias + f**2 * (output(original, x) - bias)
    np.testing.assert_allclose(output(world.network, x), expected, **CLOSE)


@pytest.mark.parametrize("widths", [(4, 6, 3), (4, 6, 5, 3)])
def test_one_client_keeps_its_network_but_for_shrinkage(widths: tuple[int, ...]) -> None:
    """m = 1: factor (1 / sigma^2) / (1 / sigma^2 + 1 / sigma_0^2) = 0.8; outputs' biases stay."""
    only = network(generator(3), widths)
    world = match_networks([only], Prior(sigma=1.0, sigma_0=2.0), [5 * n for n in widths[1:-1]])
    for found, given in zip(world.network.weights, only.weights, strict=True):
        np.testing.assert_allclose(found, 0.8 * given, **CLOSE)
    for found, given in zip(world.network.biases[:-1], only.biases[:-1], strict=True):
        np.testing.assert_allclose(found, 0.8 * given, **CLOSE)
    np.testing.assert_array_equal(world.network.biases[-1], only.biases[-1])


def test_disjoint_neurons_stand_side_by_side() -> None:
    """Two clients with nothing in common: twice the width, and the functions add up."""
    g = generator(4)
    one, two = (network(g, (5, 4, 3), std=2.0) for _ in range(2))
    prior = Prior(sigma=0.05, sigma_0=100.0)
    world = match_networks([one, two], prior, [20])
    assert [m.tolist() for m in world.counts] == [[1] * 8]
    x = g.normal(size=(10, 5))
    parts = [output(n, x) - n.biases[-1] for n in (one, two)]
    expected = parts[0] + parts[1] + (one.biases[-1] + two.biases[-1]) / 2
    np.testing.assert_allclose(output(world.network, x), expected, rtol=1e-5, atol=1e-5)  # sigma_0


def test_sigma_splits_and_merges() -> None:
    g = generator(5)
    centre = network(g, (5, 4, 3))
    near = [Network(*([x + 0.2 * g.normal(size=x.shape) for x in part] for part in centre))
            for _ in range(3)]  # fmt: skip
    widths = [
        hidden(match_networks(near, Prior(sigma=sigma), [12]).network)[0]
        for sigma in (0.01, 0.5, 10.0)
    ]
    assert widths == [12, 4, 4]
    apart = [network(g, (5, 4, 3)) for _ in range(3)]
    assert hidden(match_networks(apart, Prior(sigma=0.1), [12]).network) == [12]
    assert hidden(match_networks(apart, Prior(sigma=10.0), [12]).network) == [4]


@pytest.mark.parametrize("limit", [4, 5, 9])
def test_a_full_layer_takes_no_new_neurons(limit: int) -> None:
    g = generator(6)
    apart = [network(g, (5, 4, 3)) for _ in range(4)]
    world = match_networks(apart, Prior(sigma=0.01), [limit])
    assert hidden(world.network) == [limit]
    assert world.counts[0].sum() == 16
    for a in world.assigned[0]:
        assert len(set(a.tolist())) == 4  # one to one


def test_weights_that_no_client_has_are_zero_and_others_count_who_has_them() -> None:
    """Two hidden layers by hand: (2, 2, 2, 2) networks with one neuron of each layer in common.

    Weights between the first client's own neuron and the second's own one exist nowhere. Of those
    that one client has the factor is 1/2, of those that both have it is 2/3.
    """

    def client(bias: float, mine: float) -> Network:
        return Network(
            [np.array([[50.0, 0.0], [0.0, mine]]), np.array([[1.0, 2.0], [3.0, 4.0]]),
             np.array([[50.0, 0.0], [0.0, mine]])],
            [np.array([bias, 0.0]), np.zeros(2), np.zeros(2)],
        )  # fmt: skip

    world = match_networks([client(1.0, 60.0), client(4.0, -60.0)], Prior(), [10, 10])
    assert [m.tolist() for m in world.counts] == [[2, 1, 1], [2, 1, 1]]
    expected = [
        [1 * 2 / 3, 2 / 2, 2 / 2],  # into the shared neuron: from the shared, from either's own
        [3 / 2, 4 / 2, 0.0],  # into the first client's own
        [3 / 2, 0.0, 4 / 2],
    ]
    np.testing.assert_allclose(world.network.weights[1], expected, **CLOSE)
    np.testing.assert_allclose(world.network.biases[0], [5 / 3, 0, 0], **CLOSE)
    ends = [[100 / 3, 0], [0, 30], [0, -30]]
    np.testing.assert_allclose(world.network.weights[0], ends, **CLOSE)
    np.testing.assert_allclose(world.network.weights[2].T, ends, **CLOSE)


def test_the_order_of_a_clients_neurons_does_not_matter() -> None:
    g = generator(7)
    networks = [network(g, (5, 6, 4, 3)) for _ in range(3)]
    orders = [[g.permutation(6), g.permutation(4)] for _ in range(3)]
    shuffled = [permuted(n, o) for n, o in zip(networks, orders, strict=True)]
    prior = Prior(sigma=0.5)
    one, other = (match_networks(each, prior, [30, 20]) for each in (networks, shuffled))
    x = g.normal(size=(10, 5))
    np.testing.assert_allclose(output(one.network, x), output(other.network, x), **CLOSE)
    for layer, (first, second) in enumerate(zip(one.assigned, other.assigned, strict=True)):
        again = [a[o[layer]].tolist() for a, o in zip(first, orders, strict=True)]
        assert numbered(again) == numbered(second)


def test_ties_and_dead_neurons() -> None:
    """Equal and all-zero neurons: any choice gives the same network."""
    g = generator(8)
    one = network(g, (3, 4, 2))
    one.weights[0][1], one.biases[0][1], one.weights[1][:, 1] = 0, 0, 0
    one.weights[0][3], one.biases[0][3], one.weights[1][:, 3] = 0, 0, 0
    one.weights[0][2], one.biases[0][2] = one.weights[0][0], one.biases[0][0]
    one.weights[1][:, 2] = one.weights[1][:, 0]
    world = match_networks([one, permuted(one, [np.array([3, 2, 1, 0])])], Prior(sigma=0.1), [8])
    x = g.normal(size=(5, 3))
    f = 2 / (2 + 0.1**2)
    bias = one.biases[-1]
    expected = bias + f**2 * (output(one, x) - bias)
    np.testing.assert_allclose(output(world.network, x), expected, **CLOSE)


def test_sweeps_bound_the_work_and_end_early(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    best = pfnm.best
    monkeypatch.setattr(pfnm, "best", lambda *a: calls.append(1) or best(*a))
    g = generator(9)
    original = network(g, (4, 6, 3))
    match_networks([original] * 3, Prior(sigma=0.1, sweeps=10), [30])
    assert len(calls) == 6  # once in, once again without a change
    calls.clear()
    match_networks([network(g, (4, 6, 3)) for _ in range(3)], Prior(sweeps=1), [30])
    assert len(calls) == 3


# A client's own part


@pytest.mark.parametrize(
    ("widths", "sigma", "gamma", "limit"),
    [
        ((5, 6, 3), 1.0, 1.0, 5), ((5, 6, 3), 0.3, 1.0, 5), ((5, 6, 3), 0.3, 0.1, 2),
        ((5, 6, 4, 3), 0.5, 1.0, 5), ((5, 6, 4, 3), 2.0, 0.5, 1), ((2, 1, 1), 1.0, 1.0, 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("seed", range(4))
def test_clients_find_what_they_were_matched_to(
    widths: tuple[int, ...], sigma: float, gamma: float, limit: int, seed: int
) -> None:
    g = generator(seed)
    networks = [network(g, widths) for _ in range(4)]
    prior = Prior(sigma=sigma, gamma=gamma, sweeps=50)
    limits = [limit * n for n in widths[1:-1]]
    world = match_networks(networks, prior, limits)
    for j, own in enumerate(networks):
        found = find(own, world.network, world.counts, 4, prior)
        for a, layer in zip(found, world.assigned, strict=True):
            assert a.tolist() == layer[j].tolist()


@pytest.mark.parametrize("seed", range(12))
def test_find_against_enumeration(seed: int) -> None:
    """Normal densities given theta, and the odds of a client that is one of those counted."""
    g = generator(seed)
    prior = Prior(*np.exp(0.5 * g.normal(size=3)))
    world, own = network(g, (2, 6, 1)), network(g, (2, 3, 1))
    members = g.permutation([0, 1, 1, 2, 4, 5])
    theta, v = pfnm._atoms(world, 0), pfnm._atoms(own, 0)

    def density(a: Sequence[int]) -> float:
        total = 0.0
        for row, i in enumerate(a):
            others = members[i] - 1
            odds = others / (5 - others) if others else prior.gamma / 5
            total += stats.norm.logpdf(v[row], theta[i], prior.sigma).sum() + np.log(odds)
        return total

    best = max(permutations(np.flatnonzero(members), 3), key=density)
    (found,) = find(own, world, [members], 5, prior)
    assert found.tolist() == list(best)


def test_the_most_popular_neurons() -> None:
    counts = [np.array([1, 3, 0, 3, 2]), np.array([0, 1])]
    found = pfnm.popular(counts, [3, 1])
    assert [a.tolist() for a in found] == [[1, 3, 4], [1]]


def test_flat_vectors_and_padding() -> None:
    """A padded network computes the same, and `take` undoes the padding."""
    g = generator(10)
    widths, wider = (3, 4, 2, 2), (3, 9, 5, 2)
    original = network(g, widths)
    np.testing.assert_array_equal(join(split(np.arange(32.0), widths), widths), np.arange(32.0))
    padded = split(join(original, wider), wider)
    x = g.normal(size=(6, 3))
    np.testing.assert_allclose(output(padded, x), output(original, x), **CLOSE)
    back = take(padded, [np.arange(4), np.arange(2)])
    np.testing.assert_array_equal(join(back, widths), join(original, widths))


def test_enumeration_is_complete() -> None:
    """Of the reference itself: 3 neurons, 2 known: sum over s of C(3, s) 2! / (2 - s)!."""
    found = {tuple(a.tolist()) for a in choices(3, 2)}
    brute = set()
    for a in product(range(3), repeat=3):  # 2 stands for new
        shared = [i for i in a if i < 2]
        if len(set(shared)) == len(shared):
            brute.add(a)
    assert len(found) == len(brute) == 1 + 6 + 6
