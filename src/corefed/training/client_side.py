"""What a client does in a round, whatever the runtime: begin, select, train, end.

A client's private state is one flat tree. It holds the method's own tensors and, under `subset.`,
those of the subset that it trains on. A method never sees the subset's state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Augment, ClientData, Method, Tree, Work
from corefed.bayes.batches import Plan, changing, gather, noises, plan
from corefed.data import streaming

SUBSET = "subset."
"""Prefix of a subset's tensors in a client's private state."""


class Trained(NamedTuple):
    """The result of one round of C clients."""

    message: Tree
    private: Tree
    loss: Tensor  # [C] mean over steps of the weighted negative log-likelihood per point
    examples: Tensor  # [C] gradient passes


def start(method: Method, broadcast: Tree, data: ClientData) -> Tree:
    """Private state before the first round."""
    own = method.init_client(broadcast, data)
    if method.subset is None:
        return own
    return {**own, **_named(method.subset.init(own, data))}


class Points(NamedTuple):
    """What C clients train on until their subsets are next selected."""

    data: ClientData  # all points
    weight: Tensor  # [C, n]; 0 leaves a point out
    sizes: Sequence[int]  # how many points of each client have a weight


TakeSteps = Callable[[Method, Tree, Points, Streams, int], tuple[Tree, Tensor]]
"""(method, working, points, streams, steps) -> (working, summed losses [C])."""


def one_by_one(work: Work) -> TakeSteps:
    """Local steps as the method writes them, on minibatches as `work` has them."""

    def take(
        method: Method, working: Tree, points: Points, streams: Streams, steps: int
    ) -> tuple[Tree, Tensor]:
        data, weight, sizes = points
        chosen = plan(data, weight, streams, steps, work.batch, method.traits.batches, sizes)
        chosen = changing(chosen, work.augment, streams)
        return step_by_step(method, working, data, chosen, streams, work.augment)

    return take


def step_by_step(
    method: Method,
    working: Tree,
    data: ClientData,
    chosen: Plan,
    streams: Streams,
    augment: Augment | None = None,
) -> tuple[Tree, Tensor]:
    """The steps of a plan: the working state after them, and the summed losses [C]."""
    loss = torch.zeros(len(data.weight), device=data.weight.device)
    noise = noises(streams, method.noise, chosen.at.shape[1] // chosen.each)
    for minibatch in gather(data, chosen, augment):
        working, info = method.step(working, minibatch, next(noise))
        loss += info["loss"]
    return working, loss


def train(
    method: Method,
    broadcast: Tree,
    private: Tree,
    data: ClientData,
    streams: Streams,
    work: Work,
    take_steps: TakeSteps | None = None,
    sizes: Sequence[int] | None = None,
) -> Trained:
    """One round of C clients: begin, (select, steps) until R steps are done, end.

    `take_steps` is how steps are taken; one by one where it is not given. `sizes` are the clients'
    numbers of points, where they are known: reading them from a GPU takes time.
    """
    take_steps = take_steps or one_by_one(work)
    own, state = _own(private), {name: v.clone() for name, v in _state(private).items()}
    subset, weight = method.subset, data.weight
    working = method.begin(broadcast, own, data, streams)
    if method.traits.planned:
        working["planned"] = torch.full_like(data.weight[:, 0], work.steps)
    segment = work.steps if subset is None else subset.every or work.steps
    loss = torch.zeros(len(data.weight), device=data.weight.device)
    points = sizes = data.size.tolist() if sizes is None else sizes
    examples = torch.zeros(len(data.weight), dtype=torch.int64)
    done = 0
    while done < work.steps:
        steps = min(segment, work.steps - done)
        if subset is not None:
            state = subset.select(state, working, data, streams, work)
            weight = subset.weights(state)
            streaming.hold(data.x, weight)
            follow = subset.sizes
            sizes = (weight > 0).sum(-1).tolist() if follow is None else follow(points)
        working, summed = take_steps(method, working, Points(data, weight, sizes), streams, steps)
        loss += summed
        if subset is not None:
            state = subset.after(state, steps)
        examples += steps * method.traits.passes * torch.tensor(sizes).clamp_max(work.batch)
        done += steps
    message, changed = method.end(broadcast, working)
    private = {**own, **changed, **_named(state)}
    return Trained(message, private, loss / work.steps, examples)


def models(method: Method, broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
    """The models of these clients, by kind."""
    return method.models(broadcast, _own(private), data)


def report(method: Method, private: Tree) -> Tree:
    """Numbers to record, [C] each."""
    numbers = method.traits.report(_own(private))
    if method.subset is not None:
        numbers = {**numbers, **method.subset.report(_state(private))}
    return numbers


def weights(method: Method, private: Tree) -> Tensor | None:
    """[C, n] weights of the subset; None for a method that trains on all points."""
    return None if method.subset is None else method.subset.weights(_state(private))


def selection_cost(method: Method, private: Tree) -> Tensor | None:
    """[C] forward passes spent on selection so far; None where they are not counted."""
    if method.subset is None or method.subset.cost is None:
        return None
    return method.subset.cost(_state(private))


def broadcast(servers: Sequence[Tree], rows: Sequence[int], per_run: int) -> Tree:
    """Each run's server state, repeated over its clients in `rows`; one run is not copied."""
    if len(servers) == 1:
        return {k: v.expand(len(rows), *v.shape) for k, v in servers[0].items()}
    runs = [row // per_run for row in rows]
    return {k: torch.stack([s[k] for s in servers])[runs] for k in servers[0]}


def sent(method: Method, server: Tree) -> Tree:
    """The part of the server's state that goes to a client."""
    names = server if method.traits.sent is None else method.traits.sent
    return {name: server[name] for name in names}


def _own(private: Tree) -> Tree:
    return {name: v for name, v in private.items() if not name.startswith(SUBSET)}


def _state(private: Tree) -> Tree:
    return {k.removeprefix(SUBSET): v for k, v in private.items() if k.startswith(SUBSET)}


def _named(state: Tree) -> Tree:
    return {SUBSET + name: v for name, v in state.items()}
