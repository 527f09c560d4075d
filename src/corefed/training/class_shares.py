"""Where a newcomer starts: at the shared model, with the class shares that its own points show.

If points of a class look alike everywhere and only the shares pi of the classes differ (Saerens,
Latinne and Decaestecker 2002),

    p_new(y | x)  is in proportion to  p(y | x) pi_new(y) / pi(y),

which is log(pi_new / pi) added to the biases of the shared model's outputs, times its temperature
if the run was calibrated. pi are the shares of the run's training points. How the shares of clients
differ is what the members show. Either

    around all    they are drawn from Dirichlet(a C pi); clients are alike where a is large
    around one    they are drawn from Dirichlet(a C pi_i), member i being one by chance: there are
                  kinds of clients, and another of each kind

for a in CONCENTRATIONS. What is likely of these is what makes the counts of every member likely,
given the others. VAGUE of the prior is spread over `around all`, for a newcomer like no member.
So a newcomer's prior is a mixture of Dirichlets, and with its counts n_c, over components k,

    E[pi_new(c)] = sum_k p(k | n) (n_c + alpha_kc) / (n + sum_c alpha_kc).

Biases are moved before any training, which then starts there. docs/newcomers-study.md has the
measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base.types import ClientData, Method, Tree
from corefed.models.network import Model

CONCENTRATIONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e6)
"""Pseudo-points per class, where all classes have the same share."""
VAGUE = 0.1
"""Part of a newcomer's prior that does not come from the members."""
MEMBERS = 200
"""Of a larger run so many clients are looked at, evenly spaced."""

WEIGHTS = ("v", "theta", "w")
"""Parts of a server's state that are all parameters of the shared model."""
START = "start"
"""The shared model with the newcomer's class shares, beside a newcomer's other models."""


class ClassShares(NamedTuple):
    """What a run says of the classes of its clients: a mixture of K Dirichlets."""

    shares: Tensor  # pi: [classes] of the shared model's training points
    alpha: Tensor  # [K, classes]
    prior: Tensor  # [K]


def of_run(clients: Sequence[dict[str, Any]], classes: int, method: Method) -> ClassShares | None:
    """None where the run's folder does not tell how many points of each class its clients had.

    The server of a federation is not told.
    """
    found = [each.get("classes") for each in clients]
    if not classes or not all(isinstance(each, list) and len(each) == classes for each in found):
        return None
    counts = torch.tensor(found, dtype=torch.float64)
    counts = counts[counts.sum(-1) > 0]
    if not len(counts):
        return None
    each = counts + 0.5 / len(counts)  # a class that nobody has counts as half a point
    if method.traits.mean == "equal":  # clients count alike in the shared model
        each = each / each.sum(-1, keepdim=True)
    shares = each.sum(0) / each.sum()
    return mixture(counts[:: -(-len(counts) // MEMBERS)], shares)


def mixture(counts: Tensor, shares: Tensor) -> ClassShares:
    """The prior of one more client, from those of the members' counts [N, classes]."""
    number, classes = counts.shape
    around = torch.tensor(CONCENTRATIONS, dtype=torch.float64).view(-1, 1, 1) * classes
    own = counts + 0.5 * classes * shares
    own = own / own.sum(-1, keepdim=True)
    everyone, each = around * shares, around * own  # [A, 1, classes], [A, N, classes]
    likely = [evidence(counts, everyone)[:, :, 0].sum(-1)]  # [A]
    if number > 1:
        others = evidence(counts, each)  # [A, N, N]: member j around member i
        others.diagonal(dim1=1, dim2=2).fill_(-torch.inf)
        likely.append((others.logsumexp(-1) - torch.log(torch.tensor(number - 1.0))).sum(-1))
    weight = torch.softmax(torch.cat(likely), 0) * (1 - VAGUE)
    weight[: len(CONCENTRATIONS)] += VAGUE / len(CONCENTRATIONS)
    parts, kinds = [everyone.flatten(0, 1)], weight[len(CONCENTRATIONS) :]
    if number > 1:
        parts.append(each.flatten(0, 1))
        kinds = (kinds.unsqueeze(-1) / number).expand(-1, number).flatten()
    return ClassShares(shares, torch.cat(parts), torch.cat([weight[: len(CONCENTRATIONS)], kinds]))


def evidence(counts: Tensor, alpha: Tensor) -> Tensor:
    """log p(labels with these counts | Dirichlet(alpha)): [..., C, K] from [C, c] and [..., K, c].

    Of labels in their order: without the multinomial coefficient, which is the same for all alpha.
    """
    n, alpha = counts.unsqueeze(-2), alpha.unsqueeze(-3)
    whole = torch.lgamma(alpha.sum(-1)) - torch.lgamma((alpha + n).sum(-1))
    return whole + (torch.lgamma(alpha + n) - torch.lgamma(alpha)).sum(-1)


def log_ratio(counts: Tensor, known: ClassShares) -> Tensor:
    """log(E[pi_new] / pi), [C, classes], from the numbers of points [C, classes]."""
    counts = counts.double()
    weight = torch.softmax(evidence(counts, known.alpha) + known.prior.log(), -1)  # [C, K]
    whole = counts.unsqueeze(1) + known.alpha
    own = whole / whole.sum(-1, keepdim=True)  # [C, K, classes]
    return (torch.einsum("ck,ckj->cj", weight, own) / known.shares).log()


def moved(
    broadcast: Tree, data: ClientData, model: Model, known: ClassShares, temperature: float = 1.0
) -> Tree:
    """What each client is sent, with the biases of the outputs moved by its own class shares.

    The shared model predicts with its outputs divided by the temperature.
    """
    classes = len(known.shares)
    hot = torch.nn.functional.one_hot(data.y.long(), classes) * (data.weight > 0).unsqueeze(-1)
    ratio = temperature * log_ratio(hot.sum(1).cpu(), known)
    assert model.head is not None
    found = dict(broadcast)
    for name in WEIGHTS:
        if name in found:
            value = found[name].clone()
            mean = value[:, 0] if value.dim() == 3 else value  # of a posterior [C, 2, P], or [C, P]
            mean[:, model.head.bias] += ratio.to(value)
            found[name] = value
    return found


def starting(method: Method, start: Callable[[Tree, ClientData], Tree]) -> Method:
    """The method, for clients that start at `moved`: with START beside its models.

    `global` stays the shared model as it is.
    """

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        found = method.models(start(broadcast, data), private, data)
        if "global" not in found:
            return found
        as_it_is = method.models(broadcast, private, data)["global"]
        return {**found, "global": as_it_is, START: found["global"]}

    return method._replace(models=models)


def able(server: Tree, model: Model) -> bool:
    """Whether the shared model has a bias for each output at a known place.

    Not where each client has a last layer of its own (fedrep), or all have the initial one.
    """
    if model.head is None or model.head.bias.stop - model.head.bias.start != model.outputs:
        return False
    sizes = {server[name].shape[-1] for name in WEIGHTS if name in server}
    return sizes == {model.size}
