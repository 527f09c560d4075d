"""Training on a part of the data: any method, with the weights of a subset in place of all points.

The wrapped method stays as it is; only the weights w of its likelihood change, and with them which
points go into a minibatch. They are chosen in a client's first round, and again after every
`redraw_every` local steps. The weights and their age are private state beside the method's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Batch, ClientData, Method, Tree, Work

Choose = Callable[[ClientData, Streams], Tensor]
"""(data, streams) of the clients that are due -> weights [C, n]; 0 on what is left out."""


def on_subset(base: Method, name: str, choose: Choose, redraw_every: int = 0) -> Method:
    """`base` on the points that `choose` gives a weight, under the name `name`.

    With `redraw_every` = 0 a client keeps its first subset for the whole run. `base` must hand
    private state whose names it does not know through `begin`, `step` and `end`.
    """

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        age = torch.full((data.weight.shape[0],), -1.0, device=data.weight.device)
        chosen = {"weight": torch.zeros_like(data.weight), "age": age}  # -1: none chosen yet
        return {**base.init_client(broadcast, data), **chosen}

    def select(working: Tree, data: ClientData, streams: Streams, work: Work) -> Tree:
        if base.select is not None:
            working = base.select(working, data, streams, work)
        age = working["age"]
        due = age < 0 if redraw_every == 0 else (age < 0) | (age >= redraw_every)
        rows = due.nonzero().squeeze(-1)
        if len(rows) > 0:
            part = ClientData(*(field[rows] for field in data))
            chosen = choose(part, streams.subset(rows.tolist()))
            working["weight"] = working["weight"].index_copy(0, rows, chosen)
            working["age"] = age.masked_fill(due, 0.0)
        return working

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        working["age"] = working["age"] + 1
        return base.step(working, batch, noise)

    return base._replace(
        name=name,
        init_client=init_client,
        select=select,
        weights=lambda working, data: working["weight"],
        step=step,
        select_every=redraw_every,
    )
