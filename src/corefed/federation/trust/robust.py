"""Robust aggregation, which limits the influence of a few bad updates.

Each rule changes the cohort's `Update` before the method's own server rule sees it, so that mixing
by beta or fusing precisions stays as it is:

    plain         nothing is changed
    median        one row: the median of each coordinate (of an even number, the middle two's mean)
    trimmed-mean  one row: each coordinate's mean without its floor(trim S) smallest and largest
    krum          one row: that of the client with the smallest sum of squared distances to its
                  S - f - 2 nearest others (Blanchard et al., NeurIPS 2017; Krum, not multi-Krum)
    auto          plain for one or two clients and for methods whose uploads are not aligned;
                  trimmed-mean from three on
    clip          all rows, their differences from the broadcast v shortened to at most clip times
                  the cohort's median length: v + s (message - v), s <= 1

The one row of median and trimmed-mean stands for all examples of the cohort; the number of examples
that a client claims then has no influence. Under clip it has: bad clients with a share a of the
average's weights (f / S where clients count alike) move it by at most a clip times the median
length.

**Posteriors.** Rows are (mu, rho), and rho is what is ordered and averaged. sigma = softplus(rho)
grows with rho, so the median's sigma is the median sigma (of an odd number), the trimmed values are
those of the smallest and largest sigma, and sigma is always above 0. The widest posterior would
dominate an average of variances, the narrowest one of precisions; none dominates an order
statistic. Under clip rho moves on the straight line from v's to the client's, so that sigma lies
between the two. Lengths and distances are those of `metric.py`.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import SERVER
from corefed.base.types import Method, Tree, Update
from corefed.federation.rules import Rules
from corefed.federation.trust import metric


class Combined(NamedTuple):
    """What the method's server rule receives."""

    update: Update
    kept: tuple[int, ...]  # clients whose updates had a part in it
    note: str = ""  # for the operator; usually empty


AUTO: Literal["trimmed-mean"] = "trimmed-mean"
"""What auto takes from three clients on; `docs/attacks.md` compares the rules."""
FEWEST = 3
"""Clients from which on a rule can withstand somebody."""


def resolve(rules: Rules, method: Method, clients: int) -> tuple[Rules, str]:
    """The rules with what auto means for a cohort of `clients`, and a note for the operator."""
    if rules.aggregation != "auto":
        return rules, ""
    if method.traits.sent == () or clients < FEWEST:
        return replace(rules, aggregation="plain"), ""
    if not method.traits.aligned:
        note = (
            f"aggregation is plain: uploads of {method.name} are not compared coordinate by "
            "coordinate, so nothing bounds what one client does to the model."
        )
        return replace(rules, aggregation="plain"), note
    return replace(rules, aggregation=AUTO), ""


def check(rules: Rules, method: Method, clients: int) -> None:
    """Refuse, before a run, a rule that cannot do its work with a cohort of `clients`.

    A method that sends nothing to clients has nothing to aggregate; every rule leaves it alone.
    """
    rule = rules.aggregation
    if rule == "plain" or method.traits.sent == ():
        return
    _refuse_unaligned(rule, method)
    if rule == "median" and clients < 3:
        raise UserError(
            f"aggregation is median, which withstands nobody with {clients} in a round; it needs "
            "at least 3 clients."
        )
    if rule == "trimmed-mean" and rules.trim > 0 and _trimmed(rules.trim, clients) == 0:
        enough = f"use at least {math.ceil(100 / clients) / 100:g}" if clients > 2 else "it needs 3"
        raise UserError(
            f"trim is {rules.trim:g}, which leaves out nobody of {clients} in a round; {enough}, "
            "or use another aggregation."
        )
    if rule == "krum" and clients < 2 * rules.byzantine + 3:
        raise UserError(
            f"aggregation is krum with byzantine {rules.byzantine}, which needs at least "
            f"{2 * rules.byzantine + 3} clients in a round, and there are {clients}; lower "
            "byzantine or use another aggregation."
        )


def combine(rules: Rules, method: Method, server: Tree, update: Update) -> Combined:
    """The cohort's update, made robust by the rule `rules.aggregation`.

    If too few answered for the rule, the median is taken instead and the note says so.
    """
    S, rule = len(update.clients), rules.aggregation
    if rule == "plain" or not update.message:
        return Combined(update, update.clients)
    _refuse_unaligned(rule, method)
    if rule == "clip":
        return Combined(_clip(rules.clip, method, server, update), update.clients)
    if rule == "krum" and 2 * rules.byzantine + 3 <= S:
        return _krum(rules.byzantine, method, server, update)
    trimmed = _trimmed(rules.trim, S)
    if rule == "trimmed-mean" and (trimmed > 0 or rules.trim == 0):
        return Combined(_one_row(update, trimmed), update.clients)
    lacking = "" if rule == "median" else f"too few for {rule}, so the median was taken"
    harmless = "the median of fewer than 3 withstands nobody" if S < 3 else ""
    why = "; ".join(filter(None, (lacking, harmless)))
    note = f"{S} acceptable update{'s' if S > 1 else ''}: {why}." if why else ""
    return Combined(_one_row(update, (S - 1) // 2), update.clients, note)


def _one_row(update: Update, trimmed: int) -> Update:
    """The mean of each coordinate without its `trimmed` smallest and largest values.

    With (S - 1) // 2 of them left out it is the median: one value is left, or the middle two.
    """
    rows = slice(trimmed, len(update.clients) - trimmed)
    message = {
        name: value.sort(0).values[rows].mean(0, keepdim=True)
        for name, value in update.message.items()
    }
    return Update((SERVER,), message, update.examples.sum(0, keepdim=True))


def _krum(byzantine: int, method: Method, server: Tree, update: Update) -> Combined:
    S = len(update.clients)
    unit = metric.scale(server, method.traits.posteriors)
    squares = torch.zeros(S, S, dtype=torch.float64)
    for name, value in update.message.items():
        rows = (value.double() / unit[name]).reshape(S, -1)
        # Not by inner products, whose cancellation would hide small distances of long vectors.
        plain = "donot_use_mm_for_euclid_dist"
        squares += torch.cdist(rows, rows, compute_mode=plain).square().cpu()
    nearest = squares.sort(1).values[:, 1 : S - byzantine - 1]  # the first is the row itself
    scores = nearest.sum(1).tolist()
    best = min(range(S), key=lambda i: (scores[i], update.clients[i]))  # ties: whatever the order
    row = slice(best, best + 1)
    message = {name: value[row] for name, value in update.message.items()}
    clients = update.clients[row]
    return Combined(Update(clients, message, update.examples[row]), clients)


def _clip(clip: float, method: Method, server: Tree, update: Update) -> Update:
    moved = {name: value.double() - server[name] for name, value in update.message.items()}
    lengths = metric.length(moved, metric.scale(server, method.traits.posteriors))
    bound = clip * statistics.median_low(lengths.tolist())
    # 0 / 0 is a client that did not move, which s = 1 leaves as it is.
    s = (bound / lengths).nan_to_num(nan=1.0).clamp_max(1.0)

    def shortened(name: str, value: Tensor) -> Tensor:
        weight = s.reshape(-1, *[1] * (value.ndim - 1))
        start = server[name].double().expand_as(value)
        return torch.lerp(start, value.double(), weight).to(value.dtype)

    message = {name: shortened(name, value) for name, value in update.message.items()}
    return update._replace(message=message)


def _trimmed(trim: float, clients: int) -> int:
    """floor(trim S); 0.29 of 100 are 29, whatever their product rounds to."""
    return math.floor(trim * clients + 1e-9)


def _refuse_unaligned(rule: str, method: Method) -> None:
    if not method.traits.aligned:
        raise UserError(
            f"aggregation is {rule}, which compares clients coordinate by coordinate, and a "
            f"coordinate of {method.name} means something else at each client; use plain."
        )
