"""What a client does in a round, whatever the runtime: begin, select, train, end.

A client's private state is one flat tree. It holds the method's own tensors and, under `subset.`,
those of the subset that it trains on. A method never sees the subset's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Augment, ClientData, Method, Subset, Tree, Work
from corefed.bayes.batches import Plan, changing, gather, noises, plan, tally
from corefed.data import streaming
from corefed.training.allowance import Allowance

SUBSET = "subset."
"""Prefix of a subset's tensors in a client's private state."""
SEEN = "seen"
"""In a working state, between two selections: what a subset learns from the steps (`tally`)."""


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
    own: Tensor | None = None  # [C] steps to take of each; None: all
    batch: Sequence[int] | None = None  # points of a step of each; None: as the work has it


TakeSteps = Callable[[Method, Tree, Points, Streams, int], tuple[Tree, Tensor]]
"""(method, working, points, streams, steps) -> (working, summed losses [C])."""


def one_by_one(work: Work) -> TakeSteps:
    """Local steps as the method writes them, on minibatches as `work` has them."""

    def take(
        method: Method, working: Tree, points: Points, streams: Streams, steps: int
    ) -> tuple[Tree, Tensor]:
        data, weight, sizes, own, batch = points
        size = work.batch if batch is None else batch
        chosen = plan(data, weight, streams, steps, size, method.traits.batches, sizes)
        chosen = changing(chosen, work.augment, streams)
        return step_by_step(method, working, data, chosen, streams, work.augment, own)

    return take


def step_by_step(
    method: Method,
    working: Tree,
    data: ClientData,
    chosen: Plan,
    streams: Streams,
    augment: Augment | None = None,
    own: Tensor | None = None,
) -> tuple[Tree, Tensor]:
    """The steps of a plan: the working state after them, and the summed losses [C].

    Of a client that takes fewer, `own` [C], the state stays as it is after them.
    """
    loss = torch.zeros(len(data.weight), device=data.weight.device)
    noise = noises(streams, method.noise, chosen.at.shape[1] // chosen.each)
    seen = working.pop(SEEN, None)  # a method never sees it
    fewest = math.inf if own is None else int(own.min())
    for step, minibatch in enumerate(gather(data, chosen, augment)):
        before = None
        if own is not None and step >= fewest:
            before = {name: value.clone() for name, value in working.items()}  # changed in place
        working, info = method.step(working, minibatch, next(noise))
        scale, summed = minibatch.scale, info["loss"]
        if own is not None and before is not None:
            goes_on = own > step
            working, summed = _where(goes_on, working, before), summed * goes_on
            scale = scale * goes_on.unsqueeze(-1)
        loss += summed
        if seen is not None:
            at = chosen.at[:, step * chosen.each : (step + 1) * chosen.each].flatten(1)
            tally(seen, at, scale, info["squares"])
    return working if seen is None else {**working, SEEN: seen}, loss


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
    numbers of points, where they are known: reading them from a GPU takes time. A client whose
    passes are bounded ends when no further step fits, but takes one.
    """
    take_steps = take_steps or one_by_one(work)
    own, state = _own(private), {name: v.clone() for name, v in _state(private).items()}
    subset, weight, counts = method.subset, data.weight, work.counts
    working = method.begin(broadcast, own, data, streams)
    if method.traits.planned:
        many = torch.full_like(data.weight[:, 0], work.steps)
        working["planned"] = many if counts is None else counts.to(many)
    segment = work.steps if subset is None else subset.every or work.steps
    loss = torch.zeros(len(data.weight), device=data.weight.device)
    points = sizes = used = data.size.tolist() if sizes is None else sizes
    examples = torch.zeros(len(data.weight), dtype=torch.int64)
    allowance = Allowance(method, state, data, work) if work.passes is not None else None
    batch: Sequence[int] | None = None
    done, most = 0, work.steps
    while done < most:
        steps = min(segment, most - done)
        if subset is not None:
            asked = None if counts is None else counts > done
            if asked is not None and allowance is not None and done:
                asked &= allowance.has_room(used)  # otherwise it is reselected in the next round
            before = state if asked is None else {name: v.clone() for name, v in state.items()}
            state = subset.select(state, working, data, streams, work)
            state = state if asked is None else _where(asked, state, before)
            weight = subset.weights(state)
            streaming.hold(data.x, weight)
            sizes = _sizes(subset, weight, points, work)
            batch = None if subset.batch is None else subset.batch(state, work.batch)
            if subset.learn is not None:
                working[SEEN] = data.weight.new_zeros(len(weight), 2, weight.shape[1] + 1)
        used = sizes if batch is None else [*map(min, sizes, batch)]
        if allowance is not None and counts is not None:
            fits = allowance.fitting(state, used).clamp_min(0 if done else 1)
            counts = torch.minimum(counts, done + fits)
            most = int(counts.max())
            steps = min(steps, most - done)
            if steps <= 0:
                working.pop(SEEN, None)
                break
        taken = None if counts is None else (counts - done).clamp(0, steps)
        now = Points(data, weight, sizes, taken, batch)
        working, summed = take_steps(method, working, now, streams, steps)
        loss += summed
        each: int | Tensor = steps if taken is None else taken
        if subset is not None:
            state = subset.after(state, each)
            if subset.learn is not None:
                state = subset.learn(state, working.pop(SEEN))
        if allowance is not None:
            allowance.spend(each, used)
        passes = method.traits.passes * torch.tensor(used).clamp_max(work.batch)
        examples += passes * (steps if taken is None else taken.cpu())
        done += steps
    message, changed = method.end(broadcast, working)
    private = {**own, **changed, **_named(state)}
    return Trained(message, private, loss / (work.steps if counts is None else counts), examples)


def _sizes(subset: Subset, weight: Tensor, points: Sequence[int], work: Work) -> Sequence[int]:
    """How many points of each client have a weight."""
    if subset.sizes is not None and work.points is None:
        return subset.sizes(points)
    counted: list[int] = (weight > 0).sum(-1).tolist()
    return counted


def _where(mask: Tensor, new: Tree, old: Tree) -> Tree:
    """The new state of the clients in the mask [C], and the old one of the others."""
    rows = {name: mask.view(-1, *[1] * (value.dim() - 1)) for name, value in new.items()}
    return {name: torch.where(rows[name], value, old[name]) for name, value in new.items()}


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
