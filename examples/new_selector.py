"""A selector of your own, outside the package: the hardest points of each class.

    python examples/new_selector.py

Every class of a client keeps its k_c points of largest loss at the posterior mean, each with the
weight n_c / k_c, so that a class counts as much as it does in all data. CONTRIBUTING.md says how
the same file becomes a selector of the package.
"""

from __future__ import annotations

import torch

from corefed import resolve, train
from corefed.selectors import Entry, classes, gradients, register
from corefed.selectors.frame import Choice, Look


def select(look: Look) -> Choice:
    loss = gradients.losses(look, 0, "hardest")  # [C, n] at the posterior mean, without draws
    weight = torch.zeros_like(look.data.weight)
    for part in classes.parts(look):  # a class of a client; a regression has one part per client
        at = part.at.to(loss.device)
        order = loss[part.client, at].argsort(descending=True, stable=True)
        weight[part.client, at[order[: part.k]]] = len(at) / part.k
    return Choice(weight, look.memory)


register("hardest", Entry(__name__, "select", "each class's points of largest loss"))

if __name__ == "__main__":
    for selector in ("hardest", "random"):
        flags = {"data": "digits", "clients": 5, "rounds": 5, "selector": selector}
        trained = train(resolve(flags=flags))
        accuracy = trained.summary["metrics"]["personal_accuracy"]["mean"]
        print(f"{selector} on digits, 5 clients, 5 rounds: personal accuracy {accuracy:.1%}")
