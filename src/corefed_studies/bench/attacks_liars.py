"""Clients that lie: what each attack of `corefed bench attacks` sends instead of the truth.

A liar is asked as any client, and its answer is changed on the way back. It knows the broadcast v,
and may know what the honest clients send in the same round (`Seen.honest`), which is more than a
real client knows. Factors of 19 stay below the bound of 20 times the usual length (`outlier`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from corefed.base.types import Tree
from corefed.federation.protocol import Reply, Task

JUST_ACCEPTED = 19.0
VAST = 10_000_000
"""Points that a liar claims: the default of `max_examples`."""
INVENTED = 5000
"""Classes that a liar makes up."""


class Seen(NamedTuple):
    """What a liar knows in a round."""

    task: Task
    own: Reply  # what it would send if it were honest
    honest: Mapping[str, Reply]  # what the others send
    first: Reply | None  # what it sent in the first round

    def mean_move(self) -> Tree:
        """The honest clients' mean difference from the broadcast."""
        return {
            name: torch.stack([each.tree[name] - v for each in self.honest.values()]).mean(0)
            for name, v in self.task.tree.items()
        }


Lie = Callable[[Seen], Reply]


class Attack(NamedTuple):
    """One kind of bad client."""

    words: str
    train: Lie | None = None
    join: Lie | None = None
    evaluate: Lie | None = None
    labels: Callable[[torch.Tensor], torch.Tensor] | None = None  # of its training points
    silent: bool = False


def honestly(seen: Seen) -> Reply:
    return seen.own


def moved(factor: float) -> Lie:
    """Its own difference from the broadcast, so many times."""

    def lie(seen: Seen) -> Reply:
        sent = seen.task.tree
        tree = {name: sent[name] + factor * (v - sent[name]) for name, v in seen.own.tree.items()}
        return seen.own._replace(tree=tree)

    return lie


def noise(seen: Seen) -> Reply:
    """Random directions, 19 times as long as its own difference."""
    generator = torch.Generator().manual_seed(1000 * seen.task.round + seen.task.client)
    tree = {}
    for name, v in seen.own.tree.items():
        random = torch.randn(v.shape, generator=generator)
        length = (v - seen.task.tree[name]).norm()
        tree[name] = seen.task.tree[name] + JUST_ACCEPTED * length * random / random.norm()
    return seen.own._replace(tree=tree)


def constant(value: float) -> Lie:
    def lie(seen: Seen) -> Reply:
        return seen.own._replace(
            tree={name: torch.full_like(v, value) for name, v in seen.own.tree.items()}
        )

    return lie


def shifted_widths(by: float) -> Lie:
    """Its own posterior with every rho, and so about every log sigma, moved by so much."""

    def lie(seen: Seen) -> Reply:
        tree = {name: v.clone() for name, v in seen.own.tree.items()}
        for name, v in tree.items():
            v[1] = seen.task.tree[name][1] + by
        return seen.own._replace(tree=tree)

    return lie


def little(seen: Seen) -> Reply:
    """The honest mean less one and a half standard deviations, coordinate by coordinate.

    "A little is enough" (Baruch, Baruch, Goldberg, NeurIPS 2019).
    """
    tree = {}
    for name in seen.task.tree:
        rows = torch.stack([each.tree[name] for each in seen.honest.values()])
        tree[name] = rows.mean(0) - 1.5 * rows.std(0)
    return seen.own._replace(tree=tree)


def inner_product(factor: float) -> Lie:
    """Against the honest mean (Xie, Koyejo, Gupta, UAI 2019)."""

    def lie(seen: Seen) -> Reply:
        move = seen.mean_move()
        tree = {name: v - factor * move[name] for name, v in seen.task.tree.items()}
        return seen.own._replace(tree=tree)

    return lie


def copied(seen: Seen) -> Reply:
    """Another client's update: a free rider."""
    return seen.own._replace(tree=next(iter(seen.honest.values())).tree)


def stale(seen: Seen) -> Reply:
    """What it sent in the first round, again and again."""
    return seen.own._replace(tree=(seen.first or seen.own).tree)


def claims(lie: Lie) -> Lie:
    """The same with a vast number of training examples."""

    def changed(seen: Seen) -> Reply:
        reply = lie(seen)
        return reply._replace(figures={**reply.figures, "examples": VAST})

    return changed


def vast_join(mean: float | None = None) -> Lie:
    """A description of a vast number of points; with their mean, where one is given."""

    def lie(seen: Seen) -> Reply:
        figures = dict(seen.own.figures)
        values = figures["count"] // figures["train"]
        variance = figures["m2"] / figures["count"]
        figures |= {"train": VAST, "test": VAST, "count": VAST * values}
        figures["m2"] = variance * figures["count"]
        if mean is not None:
            figures |= {"mean": mean, "m2": mean**2 * figures["count"]}
        return seen.own._replace(figures=figures)

    return lie


def wrong_shape(seen: Seen) -> Reply:
    figures = seen.own.figures
    return seen.own._replace(figures={**figures, "shape": [1, *figures["shape"]]})


def invented_classes(seen: Seen) -> Reply:
    names = [*seen.own.figures["classes"], *(f"invented {i}" for i in range(INVENTED))]
    return seen.own._replace(figures={**seen.own.figures, "classes": names})


def perfect(seen: Seen) -> Reply:
    """All test points are right, and there are as many as it told at the join."""
    models = {}
    for model, sums in seen.own.figures["models"].items():
        width = len(sums["class_points"])
        models[model] = {
            "points": float(VAST), "correct": float(VAST), "nll": 0.0, "brier": 0.0,
            "gap": [0.0] * len(sums["gap"]),
            "class_points": [VAST / width] * width, "class_correct": [VAST / width] * width,
        }  # fmt: skip
    return seen.own._replace(figures={**seen.own.figures, "models": models})


def flipped(y: torch.Tensor) -> torch.Tensor:
    return 9 - y


def one_class(y: torch.Tensor) -> torch.Tensor:
    """Sevens are ones."""
    return torch.where(y == 7, 1, y)


FACTOR = JUST_ACCEPTED
ATTACKS: dict[str, Attack] = {
    "none": Attack("nobody lies"),
    "silent": Attack("never answers", silent=True),
    "label flip x19": Attack(
        "trains on y -> 9 - y, its difference times 19", moved(FACTOR), labels=flipped
    ),
    "targeted x19": Attack(
        "trains on sevens as ones, its difference times 19", moved(FACTOR), labels=one_class
    ),
    "sign flip": Attack("its difference times -1", moved(-1.0)),
    "sign flip x19": Attack("its difference times -19", moved(-FACTOR)),
    "noise x19": Attack("random, 19 times as long as its difference", noise),
    "constant": Attack("2 in every place", constant(2.0)),
    "not a number": Attack("NaN in every place", constant(float("nan"))),
    "tiny sigmas": Attack("rho less 100", shifted_widths(-100.0)),
    "small sigmas": Attack("rho less 3, within bounds", shifted_widths(-3.0)),
    "huge sigmas": Attack("rho plus 3, within bounds", shifted_widths(3.0)),
    "a little": Attack("honest mean - 1.5 standard deviations", little),
    "inner product": Attack("minus 10 times the honest mean difference", inner_product(10.0)),
    "free rider": Attack("copies another client", copied),
    "stale": Attack("repeats its first upload", stale),
    "claimed examples": Attack(
        "claims 10^7 examples, at the join too; sign flip", claims(moved(-1.0)), vast_join()
    ),
    "claimed later": Attack(
        "claims 10^7 examples in training only; sign flip", claims(moved(-1.0))
    ),
    "wild mean": Attack("at the join: 10^7 points with mean 1000", join=vast_join(1000.0)),
    "wrong shape": Attack("at the join: another shape of a point", join=wrong_shape),
    "invented classes": Attack("at the join: 5000 more classes", join=invented_classes),
    "perfect score": Attack(
        "in the evaluation: all of 10^7 test points are right",
        join=vast_join(),
        evaluate=perfect,
    ),
}
MAIN_ATTACKS = (
    "none", "label flip x19", "sign flip x19", "noise x19", "a little", "inner product",
)  # fmt: skip
"""Those on the aggregation that every rule is run against."""
TWO = ("none", "label flip x19", "sign flip x19", "a little")
"""Attacks of two sybils, who do the same."""
FEDAVG = ("none", "label flip x19", "sign flip x19", "claimed examples", "a little")
"""Attacks on weights without posteriors, which FedAvg averages by claimed examples."""
