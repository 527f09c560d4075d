"""Neurons of several networks matched by a Beta-Bernoulli process (PFNM, Yurochkin et al. 2019).

The model, for one layer. There are infinitely many global neurons theta_i ~ N(0, sigma_0^2 I), with
popularities from a Beta process of mass gamma; client j of J has neuron i with the probability of
its popularity, and its own copy of it is v_jl ~ N(theta_i, sigma^2 I), i = a_j(l), where a_j is one
to one. Sought are the a_j and theta that maximise the joint density of all of this.

Given all a_j, collect in theta_i: -|theta|^2 / 2 sigma_0^2 - sum |v - theta|^2 / 2 sigma^2 is
s_i theta - p_i theta^2 / 2 - sum |v|^2 / 2 sigma^2 with

    s_i = sum v / sigma^2,    p_i = 1 / sigma_0^2 + m_i / sigma^2,    m_i clients having i,

so the best theta_i is the posterior mean s_i / p_i and leaves sum_i |s_i|^2 / 2 p_i, up to a
constant. (Neurons that nobody has sit at 0 and add nothing.) This is the maximum over theta, as in
the paper, not the integral. It does not reward few neurons, so sigma must be well above the scatter
of copies for them to be recognised.

The popularities integrated out, clients are the customers of an Indian buffet, and since they are
exchangeable client j may be taken as the last: it has neuron i of the others with the odds
m_i : J - m_i, and Poisson(gamma / J) neurons that nobody else has. So, given the others, the log
density of a_j is a constant plus one term for each of its neurons l,

    |s_i + v / sigma^2|^2 / 2 (p_i + 1 / sigma^2) - |s_i|^2 / 2 p_i + log m_i / (J - m_i)    i known
    |v / sigma^2|^2 / 2 (1 / sigma_0^2 + 1 / sigma^2) + log gamma / J - log k     the k-th new one

(s, p, m without client j; the logarithms of k make up the Poisson's factorial): a linear assignment
problem, solved exactly. `match` adds the clients one after the other, the t-th with J = t. Then it
removes each and matches it again, until nothing changes or for `sweeps` rounds: each a_j is then
the best given the others. For two clients of equal width this is the global optimum.

Several hidden layers are matched from the last one down (the paper's Algorithm 2). The outputs are
known, so a neuron of the last hidden layer is its bias and its outgoing weights; once a layer is
matched, the outgoing weights of the one below it are known by their target. In the first hidden
layer the incoming weights, whose sources are the inputs, belong to the neuron too. A client knows
nothing about weights to neurons that it does not have: there its precision is 0, not 1 / sigma^2.

The authors' program differs from this in details: it halves the term of popularity, cuts m_i off at
10, takes weights to neurons that a client does not have for observed zeros, and scales the
precision of the last layer's weights by how many points a client has of that class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from corefed.methods.layers import Array, Index, Network


class Prior(NamedTuple):
    """The constants of the model, and how long to look for its maximum."""

    sigma: float = 1.0
    sigma_0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 10


class Local(NamedTuple):
    """One client's neurons of a layer, in the coordinates of the global layer.

    Precisions are 1 / sigma^2, or 0 for a weight that the client does not have. Coordinates that
    every client has come first and share one entry; only the last G - 1 can differ.
    """

    shift: Array  # [L_j, D] v / sigma^2; 0 where the precision is
    precision: Array  # [G], 1 <= G <= D


class Matched(NamedTuple):
    """A layer's global neurons, numbered as clients and their neurons first need them."""

    assigned: list[Index]  # a_j, [L_j] each
    mean: Array  # [L, D] posterior means
    members: Index  # [L] clients having each


class World(NamedTuple):
    """The global network, by hidden layer where it is a list of lists."""

    network: Network
    counts: list[Index]
    assigned: list[list[Index]]  # [layer][client]


# One layer


class Sums(NamedTuple):
    """s_i, p_i and m_i of every slot for a global neuron; a slot is free where m_i = 0."""

    shift: Array  # [slots, D]
    precision: Array  # [slots, G]
    members: Index  # [slots]


def match(clients: Sequence[Local], prior: Prior, limit: int) -> Matched:
    """The a_j of all clients, with at most `limit` global neurons, and their posterior means."""
    slots = min(limit, sum(len(local.shift) for local in clients))
    sums = _nobody(slots, clients[0], prior)
    assigned: list[Index] = []
    for j, local in enumerate(clients):
        assigned.append(best(sums, local, j + 1, prior))
        _count(sums, local, assigned[j], +1, prior)
    for _ in range(prior.sweeps - 1):
        before = _numbered(assigned)
        for j, local in enumerate(clients):
            _count(sums, local, assigned[j], -1, prior)
            assigned[j] = best(sums, local, len(clients), prior)
            _count(sums, local, assigned[j], +1, prior)
        if all(map(np.array_equal, _numbered(assigned), before)):
            break
    assigned = _numbered(assigned)
    sums = _nobody(1 + max(int(a.max()) for a in assigned), clients[0], prior)
    for local, a in zip(clients, assigned, strict=True):
        _count(sums, local, a, +1, prior)
    mean = sums.shift / _spread(sums.precision, sums.shift.shape[1])
    return Matched(assigned, mean, sums.members)


def best(sums: Sums, local: Local, clients: int, prior: Prior) -> Index:
    """The slot of each of the client's neurons that maximises the density, given the others."""
    known = np.flatnonzero(sums.members > 0)
    free = np.flatnonzero(sums.members == 0)[: len(local.shift)]
    column = _assign(scores(sums, local, clients, prior))
    new = column >= len(known)
    # The assignment does not tell new neurons apart; their own order makes it deterministic.
    slot = np.empty(len(column), dtype=np.int64)
    slot[new], slot[~new] = free[: new.sum()], known[column[~new]]
    return slot


def scores(sums: Sums, local: Local, clients: int, prior: Prior) -> Array:
    """[L_j, known + new] terms of the log density: neurons that others have, then free slots."""
    known = np.flatnonzero(sums.members > 0)
    new = min(len(local.shift), len(sums.members) - len(known))
    return np.concatenate(
        [_known(sums, known, local, clients), _new(local, new, clients, prior)], 1
    )


def _assign(table: Array) -> Index:
    """A column for each row, all different, with the largest sum."""
    from scipy.optimize import linear_sum_assignment  # settings are read without scipy

    column: Index = linear_sum_assignment(table, maximize=True)[1]
    return column


def _known(sums: Sums, known: Index, local: Local, clients: int) -> Array:
    """[L_j, known] terms for joining a neuron that others have, the square multiplied out."""
    s, p, m = sums.shift[known], sums.precision[known], sums.members[known]
    t, groups = local.shift, len(local.precision)
    after = 1 / (p + local.precision)
    common = s.shape[1] - groups + 1
    product = (t[:, :common] @ s[:, :common].T) * after[:, 0]
    product += t[:, common:] @ (s[:, common:] * after[:, 1:]).T
    alone = np.einsum("ig,ig->i", _squares(s, groups), after - 1 / p)
    gain: Array = alone + 2 * product + _squares(t, groups) @ after.T
    return 0.5 * gain + np.log(m / (clients - m))


def _new(local: Local, columns: int, clients: int, prior: Prior) -> Array:
    """[L_j, columns] terms for being the 1st, 2nd, ... new neuron."""
    squares = _squares(local.shift, len(local.precision))
    gain = squares @ (1 / (prior.sigma_0**-2 + local.precision))
    rank = np.arange(1, columns + 1)
    return 0.5 * gain[:, None] + np.log(prior.gamma / clients / rank)


def _squares(x: Array, groups: int) -> Array:
    """[rows, G] squared lengths by group of coordinates."""
    common = x.shape[1] - groups + 1
    first = np.einsum("id,id->i", x[:, :common], x[:, :common])
    return np.concatenate([first[:, None], np.square(x[:, common:])], 1)


def _spread(by_group: Array, width: int) -> Array:
    """[..., D] from [..., G]."""
    first = np.repeat(by_group[..., :1], width - by_group.shape[-1] + 1, -1)
    return np.concatenate([first, by_group[..., 1:]], -1)


def _nobody(slots: int, like: Local, prior: Prior) -> Sums:
    return Sums(
        np.zeros((slots, like.shift.shape[1])),
        np.full((slots, len(like.precision)), prior.sigma_0**-2),
        np.zeros(slots, dtype=np.int64),
    )


def _count(sums: Sums, local: Local, a: Index, sign: int, prior: Prior) -> None:
    """Add a client (+1) or remove it (-1), in place."""
    sums.shift[a] += sign * local.shift
    sums.precision[a] += sign * local.precision
    sums.members[a] += sign
    left = a[sums.members[a] == 0]
    sums.shift[left], sums.precision[left] = 0.0, prior.sigma_0**-2  # without rounding


def _numbered(assigned: Sequence[Index]) -> list[Index]:
    """The same matching with global neurons numbered by first appearance."""
    _, first, which = np.unique(np.concatenate(assigned), return_index=True, return_inverse=True)
    rank = first.argsort().argsort()
    return np.split(rank[which], np.cumsum([len(a) for a in assigned])[:-1])


# All layers, from the last one down


def match_networks(networks: Sequence[Network], prior: Prior, limits: Sequence[int]) -> World:
    """The global network of clients' networks; hidden layer h has at most `limits[h]` neurons."""
    width = len(networks[0].biases[-1])
    targets = [np.arange(width)] * len(networks)  # outputs are known
    out_bias = np.mean([network.biases[-1] for network in networks], 0)
    weights: list[Array] = []
    biases: list[Array] = [out_bias]
    counts: list[Index] = []
    assigned: list[list[Index]] = []
    for h in reversed(range(len(limits))):
        locals_ = [_local(n, h, t, width, prior) for n, t in zip(networks, targets, strict=True)]
        matched = match(locals_, prior, limits[h])
        incoming, bias, outgoing = np.split(matched.mean, [-1 - width, -width], axis=1)
        weights.insert(0, outgoing.T)
        biases.insert(0, bias[:, 0])
        counts.insert(0, matched.members)
        assigned.insert(0, matched.assigned)
        targets, width = matched.assigned, len(matched.members)
    return World(Network([incoming, *weights], biases), counts, assigned)


def find(
    network: Network, world: Network, counts: Sequence[Index], clients: int, prior: Prior
) -> list[Index]:
    """Which global neurons a client has, from the global network and how many clients have each.

    The most probable a_j given theta, for a client that is one of the `clients` matched: neuron i
    is had by m_i - 1 others, or by none if m_i = 1. If the server's matching ended because nothing
    changed, and gamma is at most 1, this is what it matched this very network to: a better a_j
    would have been better for it too. (Others' neurons can only look less likely than they are.)
    """
    targets = np.arange(len(network.biases[-1]))
    assigned: list[Index] = []
    for h in reversed(range(len(counts))):
        known = np.flatnonzero(counts[h] > 0)
        m = counts[h][known]
        others = np.maximum(m - 1, 1) / (clients - m + 1)
        odds = np.log(np.where(m > 1, others, prior.gamma / clients))
        v, theta = _atoms(network, h), _atoms(world, h)[known]
        lead = theta.shape[1] - len(world.biases[h + 1])
        theta = np.concatenate([theta[:, :lead], theta[:, lead + targets]], 1)
        fit = (v @ theta.T - 0.5 * np.square(theta).sum(1)) / prior.sigma**2
        targets = known[_assign(fit + odds)]
        assigned.insert(0, targets)
    return assigned


def popular(counts: Sequence[Index], widths: Sequence[int]) -> list[Index]:
    """The neurons of each hidden layer that the most clients have; of equals, the first."""
    return [np.argsort(-m, kind="stable")[:n] for m, n in zip(counts, widths, strict=True)]


def _atoms(network: Network, h: int) -> Array:
    """[L_j, D] neurons of hidden layer h: incoming weights if it is the first, bias, outgoing."""
    parts = [network.biases[h][:, None], network.weights[h + 1].T]
    return np.concatenate([network.weights[0], *parts] if h == 0 else parts, 1)


def _local(network: Network, h: int, targets: Index, width: int, prior: Prior) -> Local:
    """The same, with outgoing weights where the `width` neurons of the layer above have them."""
    known = prior.sigma**-2
    own = _atoms(network, h) * known
    if h == len(network.weights) - 2:  # the outputs, which every client has
        return Local(own, np.array([known]))
    lead = own.shape[1] - len(targets)
    shift, precision = np.zeros((len(own), lead + width)), np.zeros(1 + width)
    shift[:, :lead], shift[:, lead + targets] = own[:, :lead], own[:, lead:]
    precision[0], precision[1 + targets] = known, known
    return Local(shift, precision)
