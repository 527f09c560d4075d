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
from corefed.base.types import ClientData, Method, Subset, Tree, Work

Choose = Callable[[ClientData, Streams, Tensor | None], Tensor]
"""(data, streams, points) of the clients that are due -> weights [C, n]; 0 on what is left out.

`points` [C] is how many to choose; None: as many as the method's settings say."""


def on_subset(
    base: Method, name: str, choose: Choose, redraw_every: int = 0, *, free: bool = False
) -> Method:
    """`base` on the points that `choose` gives a weight, under the name `name`.

    With `redraw_every` = 0 a client keeps its first subset for the whole run. `free` says that
    choosing takes no work worth counting; otherwise the cost of a run is a lower bound.
    """

    def init(private: Tree, data: ClientData) -> Tree:
        age = torch.full((data.weight.shape[0],), -1.0, device=data.weight.device)
        return {"weight": torch.zeros_like(data.weight), "age": age}  # -1: none chosen yet

    def select(state: Tree, working: Tree, data: ClientData, streams: Streams, work: Work) -> Tree:
        age, weight = state["age"], state["weight"]
        due = age < 0 if redraw_every == 0 else (age < 0) | (age >= redraw_every)
        rows = due.nonzero().squeeze(-1)
        if len(rows) == 0:
            return state
        part = ClientData(*(field[rows] for field in data))
        points = None if work.points is None else work.points[rows]
        chosen = choose(part, streams.subset(rows.tolist()), points)
        return {"weight": weight.index_copy(0, rows, chosen), "age": age.masked_fill(due, 0.0)}

    subset = Subset(
        init,
        select,
        weights=lambda state: state["weight"],
        after=lambda state, steps: {**state, "age": state["age"] + steps},
        every=redraw_every,
        free=free,
    )
    return base._replace(name=name, subset=subset)
