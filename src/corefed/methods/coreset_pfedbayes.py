"""CoreSet-PFedBayes (Chanda, Modi, Ramakrishnan, ICLR 2024): Algorithm 1.

PFedBayes in which each client trains on its Bayesian coreset: at most k = ceil(fraction n) points
with weights w, chosen by a solver (Algorithm 2 is `coreset/aiht.py`) so that the weighted
log-likelihood stands in for that of all its data under its own posterior (Eqs. 3, 4 and 8).

Preset `fast` (default): no full-data branch. A client chooses its coreset anew when it has gone
stale, and keeps it otherwise. The rule, at every check (each `check_every` local steps):

    refresh  every `refresh_every` local steps, so that no coreset gets older than that, and
             if its error on fresh draws exceeds `stale` times what a uniform subset of the same
             size would have on them in expectation.

Preset `paper`: Algorithm 1 to the letter. In each round both branches, q on all data and q_w on the
coreset, are trained from the same start with the same draws, w from 0, and A-IHT solves Eq. 8
again, until its objective settles. It costs more than training on all data.

`algorithm_1` at the end is the paper's loop in the plainest code; a test holds this method to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from corefed.batches import batches, noises
from corefed.bayes import elbo, gaussian
from corefed.coreset import selection
from corefed.coreset.kl_rows import kl_rows
from corefed.methods import pfedbayes
from corefed.methods.random_subset import uniform
from corefed.methods.subset import subset_size
from corefed.models import Model
from corefed.rng import SERVER, Streams, Who
from corefed.types import Batch, ClientData, Method, Tree, Work


@dataclass(frozen=True)
class Config(pfedbayes.Config):
    """Settings of CoreSet-PFedBayes, beside those of PFedBayes."""

    preset: Literal["fast", "paper"] = "fast"
    """`fast`: refresh by need, train on the coreset alone. `paper`: Algorithm 1 to the letter."""
    fraction: float = 0.1
    """Size of a client's coreset: k = ceil(fraction n)."""
    draws: int = 0
    """Draws from pi-hat in a selection (S of Eq. 4); 0 takes 2k, and at least 200."""
    feature_draws: int = 16
    """Draws of the layers below the last that the S draws share; 0 draws every layer S times."""
    widths: tuple[float, ...] = (1.0, 4.0)
    """pi-hat is the posterior with its sigma times these; potentials of all are stacked."""
    solver: Literal[
        "exchange", "omp", "omp-block", "aiht-2", "aiht", "iht", "giga", "frank-wolfe",
        "uniform", "uniform-refit",
    ] = "aiht-2"  # fmt: skip
    """How the coreset is solved for; `docs/coresets.md` compares them."""
    max_iterations: int = 0
    """Iterations of the solver, at most; 0 takes 100 of hard thresholding, else its own bound."""
    shrink: float = 0.01
    """Ridge of the refit that pulls weights towards n/k, relative to the potentials; 0: none."""
    refresh_every: int = 100
    """Local steps after which a coreset is chosen anew in any case (preset fast)."""
    check_every: int = 50
    """Local steps between checks of the coreset on fresh draws (preset fast)."""
    check_draws: int = 64
    """Fresh draws of a check."""
    stale: float = 0.5
    """A coreset is stale when its error exceeds this part of a uniform subset's (preset fast)."""
    kl_weight: float = 0.0
    """Weight of KL(q_w || q) in the coreset objective, Eq. 8 (preset paper)."""
    kl_rows: int = 16
    """Rows that the KL term is sketched to."""
    kl_curvature: Literal["exact", "diagonal"] = "exact"
    """H of the KL term: Gauss-Newton with conjugate gradients, or its diagonal."""
    outer: int = 3
    """Times the coreset is solved for in a round, at most (preset paper)."""
    selection_mb: int = 2048
    """Memory bound of a selection; draws are reduced to fit it."""


THRESHOLDING = {"aiht-2": 100, "aiht": 100, "iht": 100}
"""Iterations in a federation; 300, their own bound, trained no better (docs/coresets.md)."""
SETTLED = 1e-3
"""Relative change of Eq. 8's objective at which preset paper stops solving anew."""

PRESETS: dict[str, dict[str, object]] = {
    "fast": {},
    "paper": {
        "zeta": 10.0,
        "widths": (1.0,),
        "solver": "aiht",
        "max_iterations": 300,
        "shrink": 0.0,
        "kl_weight": 1.0,
    },
}


check = pfedbayes.check


def build(config: Config, model: Model) -> Method:
    base = pfedbayes.build(config, model)

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        never = torch.full_like(data.weight[:, 0], -1.0)
        return {
            **base.init_client(broadcast, data),
            "weight": torch.zeros_like(data.weight),
            "age": never,  # local steps since the last refresh by age; -1: there is no coreset
            "checked": never.clone(),  # local steps since it was last judged
            "held_out_error": torch.full_like(never, torch.nan),
            "over_uniform": torch.full_like(never, torch.nan),
            "refreshes": torch.zeros_like(never),
        }

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        working["age"] = working["age"] + 1
        working["checked"] = working["checked"] + 1
        return base.step(working, batch, noise)

    def select(working: Tree, data: ClientData, streams: Streams, work: Work) -> Tree:
        """Refresh by need: judge the coresets that are due, choose anew for the stale ones."""
        whole = subset_size(data.size, config.fraction) >= data.size  # the coreset is the data
        young = (working["age"] >= 0) & (working["age"] < config.refresh_every)
        to_check = young & (working["checked"] >= config.check_every) & ~whole
        stale = ~young & ~whole
        for rows, _ in _groups(config, to_check, data):
            part, q = _rows(data, rows), working["q"][rows]
            w = working["weight"][rows, : part.weight.shape[1]]
            quality = quality_of(config, model, q, w, part, streams.subset(rows))
            stale[rows] |= quality.over_uniform > config.stale
            _store(working, rows, quality, quality.over_uniform)
        for rows, draws in _groups(config, stale, data):
            part, q = _rows(data, rows), working["q"][rows]
            mine = streams.subset(rows)
            w = choose(config, model, q, part, mine, draws)
            quality = quality_of(config, model, q, w, part, mine)
            worse = quality.error > quality.uniform
            plain = uniform(part, config.fraction, mine)
            _put(working, rows, torch.where(worse.unsqueeze(-1), plain, w))
            _store(working, rows, quality, quality.over_uniform.masked_fill(worse, 1.0))
            working["refreshes"][rows] += 1
        working["weight"] = torch.where(whole.unsqueeze(-1), data.weight, working["weight"])
        for figure in ("held_out_error", "over_uniform"):
            working[figure] = working[figure].masked_fill(whole, 0.0)
        # An early refresh leaves the schedule as it is, so that clients stay in step and a GPU
        # solves for all of them at once; no coreset gets older than the bound.
        working["age"] = working["age"].masked_fill(~young, 0.0)
        return working

    def select_as_printed(
        working: Tree, data: ClientData, streams: Streams, work: Work
    ) -> Tree:  # CoresetOptUpdate of Algorithm 1
        everyone = torch.ones_like(working["age"], dtype=torch.bool)
        for rows, draws in _groups(config, everyone, data):
            part, mine = _rows(data, rows), streams.subset(rows)
            own = {name: value[rows] for name, value in working.items()}
            w = coreset_opt_update(config, model, base, own, part, mine, work, draws)
            quality = quality_of(config, model, own["q"], w, part, mine)
            _put(working, rows, w)
            _store(working, rows, quality, quality.over_uniform)
        working["refreshes"] += 1
        return working

    fast = config.preset == "fast"
    return base._replace(
        name="coreset-pfedbayes",
        init_client=init_client,
        select=select if fast else select_as_printed,
        weights=lambda working, data: working["weight"],
        step=step,
        report=lambda private: {
            "held_out_error": private["held_out_error"],
            "over_uniform": private["over_uniform"],
            "size": (private["weight"] > 0).sum(-1),
            "refreshes": private["refreshes"],
        },
        select_every=min(config.check_every, config.refresh_every) if fast else 0,
    )


def choose(
    config: Config, model: Model, q: Tensor, data: ClientData, streams: Streams, draws: int
) -> Tensor:
    """A coreset for each client from draws around its posterior q: weights [C, n] (Eqs. 3, 4)."""
    mask = data.weight > 0
    k = subset_size(data.size, config.fraction)
    g = selection.stacked_potentials(model, q, data, _sketch(config, draws), streams, "coreset")
    return _solve(config, g, g.sum(1), k, mask, streams)


def quality_of(
    config: Config, model: Model, q: Tensor, w: Tensor, data: ClientData, streams: Streams
) -> selection.Quality:
    """How well w stands in for all data on fresh draws around q."""
    sketch = selection.Sketch(config.widths, config.check_draws, -(-config.feature_draws // 2))
    g = selection.stacked_potentials(model, q, data, sketch, streams, "check")
    return selection.judge(g, w, subset_size(data.size, config.fraction), data.weight > 0)


def coreset_opt_update(
    config: Config,
    model: Model,
    base: Method,
    working: Tree,
    data: ClientData,
    streams: Streams,
    work: Work,
    draws: int,
) -> Tensor:
    """CoresetOptUpdate of Algorithm 1: w minimising KL(q_w || q) + ||y - Phi w||^2 (Eq. 8)."""
    mask = data.weight > 0
    k = subset_size(data.size, config.fraction)
    g = selection.stacked_potentials(
        model, working["q"], data, _sketch(config, draws), streams, "coreset"
    )
    y = g.sum(1)

    def client_update(weight: Tensor) -> Tree:
        """R steps from the round's start, on fresh copies and with the same draws each time."""
        branch = {name: value.clone() for name, value in working.items()}
        own = streams.restart()
        noise = noises(own, base.noise, work.steps)
        for batch in batches(data, weight, own, work.steps, work.batch):
            branch, _ = base.step(branch, batch, next(noise))
        return branch

    full = client_update(data.weight)  # does not depend on w: trained once
    w = torch.zeros_like(data.weight)  # w_0 = 0
    previous = torch.full_like(y[:, 0], torch.inf)
    settled = torch.zeros_like(previous, dtype=torch.bool)
    for _ in range(config.outer):  # repeat
        coreset = client_update(w)
        misfit = (y - torch.bmm(w.unsqueeze(1), g).squeeze(1)).square().sum(-1)
        f = config.kl_weight * gaussian.kl(coreset["q"], full["q"]) + misfit
        settled |= previous.isfinite() & ((previous - f).abs() <= SETTLED * previous)
        if bool(settled.all()):  # until stop criteria met
            break
        previous = f
        rows, target = g, y
        if config.kl_weight > 0:
            a, b = _kl_term(config, model, coreset["q"], full["q"], working["z"], data, w, streams)
            rows, target = torch.cat([g, a.mT], 2), torch.cat([y, b], 1)
        w = torch.where(settled.unsqueeze(-1), w, _solve(config, rows, target, k, mask, streams))
    return w


def _kl_term(
    config: Config,
    model: Model,
    q_w: Tensor,
    q: Tensor,
    z: Tensor,
    data: ClientData,
    w: Tensor,
    streams: Streams,
) -> tuple[Tensor, Tensor]:
    """The rows of `coreset/kl_rows.py`, weighted by kl_weight."""
    scale = config.kl_rows**-0.5
    sketch = streams.normal("kl-sketch", config.kl_rows, 2, model.size) * scale
    noise = streams.normal("kl-noise", max(4, config.monte_carlo), model.size)
    a, b = kl_rows(
        model, q_w, q, z, data, w, config.zeta, noise, sketch,
        diagonal=config.kl_curvature == "diagonal",
    )  # fmt: skip
    root = config.kl_weight**0.5
    return root * a, root * b


def _solve(
    config: Config, g: Tensor, y: Tensor, k: Tensor, mask: Tensor, streams: Streams
) -> Tensor:
    return selection.solve(
        g, y, k, mask,
        solver=config.solver,
        iterations=config.max_iterations or THRESHOLDING.get(config.solver, 0),
        shrink=config.shrink,
        generators=streams.generators("solver", host=True),
    )  # fmt: skip


def _sketch(config: Config, draws: int) -> selection.Sketch:
    return selection.Sketch(config.widths, draws, config.feature_draws)


def _groups(config: Config, due: Tensor, data: ClientData) -> list[tuple[list[int], int]]:
    """Clients to select for together, with their S."""
    k = subset_size(data.size, config.fraction)
    return selection.groups(due, data, k, config.draws, config.selection_mb)


def _rows(data: ClientData, rows: list[int]) -> ClientData:
    """Some clients, padded to the largest of them only.

    So a client on its own is solved for in the same shapes wherever it is, and to the same bit:
    A-IHT can turn a rounding into another coreset.
    """
    n = int((data.weight[rows] > 0).any(0).nonzero().max()) + 1  # padding comes last
    return ClientData(*(field[rows][:, :n] for field in data))


def _put(working: Tree, rows: list[int], w: Tensor) -> None:
    working["weight"][rows] = F.pad(w, (0, working["weight"].shape[1] - w.shape[1]))


def _store(working: Tree, rows: list[int], quality: selection.Quality, ratio: Tensor) -> None:
    working["held_out_error"][rows] = quality.error
    working["over_uniform"][rows] = ratio
    working["checked"][rows] = 0.0


def algorithm_1(
    config: Config,
    model: Model,
    clients: Sequence[ClientData],
    *,
    rounds: int,
    work: Work,
    seed: int = 0,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Algorithm 1 in the plainest code: one client after the other, autograd, torch.optim.

    Takes each client's data with C = 1 and gives (v, [q_w of each client], [w of each client]).
    Slow, and free of everything that makes the method fast; it shares with it the random draws,
    Eq. 9, the potentials and A-IHT.
    """
    mu = model.init(Streams([Who(seed, SERVER)], 0).generators("init")[0], config.initial_std)
    v = torch.stack([mu, torch.full_like(mu, config.initial_rho)])  # v^0
    optimizers = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
    make = optimizers[config.optimizer]
    qs = [v.clone().unsqueeze(0).requires_grad_() for _ in clients]
    memories = [make([q], lr=config.eta_1).state_dict() for q in qs]

    def client_update(
        i: int, w: Tensor, streams: Streams
    ) -> tuple[Tensor, Tensor, dict[str, object]]:  # ClientUpdate(i, w_i, v^t)
        data, n = clients[i], clients[i].size.to(v.dtype)
        q = qs[i].detach().clone().requires_grad_()
        z = v.clone().unsqueeze(0).requires_grad_()  # v_{z,0} = v^t
        optimizer_q, optimizer_z = make([q], lr=config.eta_1), make([z], lr=config.eta_2)
        optimizer_q.load_state_dict(deepcopy(memories[i]))
        noise = noises(streams, (config.monte_carlo, model.size), work.steps)
        for batch in batches(data, w, streams, work.steps, work.batch):
            optimizer_q.zero_grad()
            prior = config.zeta / n
            elbo.objective(model, q, z.detach(), prior, batch, next(noise)).sum().backward()
            optimizer_q.step()
            optimizer_z.zero_grad()
            (prior * gaussian.kl(q.detach(), z)).sum().backward()
            optimizer_z.step()
        return q.detach(), z.detach(), optimizer_q.state_dict()

    weights: list[Tensor] = []
    for t in range(rounds):
        uploads, weights, fresh = [], [], []
        for i, data in enumerate(clients):  # in parallel do
            streams = Streams([Who(seed, i)], t)
            k, mask = subset_size(data.size, config.fraction), data.weight > 0
            draws = _groups(config, torch.ones(1), data)[0][1]
            g = selection.stacked_potentials(
                model, qs[i].detach(), data, _sketch(config, draws), streams, "coreset"
            )
            y = g.sum(1)
            w, previous = torch.zeros_like(data.weight), None
            q_full, _, _ = client_update(i, data.weight, streams.restart())
            for _ in range(config.outer):  # repeat
                q_w, _, _ = client_update(i, w, streams.restart())
                f = float(config.kl_weight * gaussian.kl(q_w, q_full))
                f += float((y - w[0] @ g[0]).square().sum())
                if previous is not None and abs(previous - f) <= SETTLED * previous:
                    break
                previous = f
                rows, target = g, y
                if config.kl_weight > 0:
                    a, b = _kl_term(config, model, q_w, q_full, v.unsqueeze(0), data, w, streams)
                    rows, target = torch.cat([g, a.mT], 2), torch.cat([y, b], 1)
                w = _solve(config, rows, target, k, mask, streams)  # Accelerated-IHT(f(w))
            q, z, memory = client_update(i, w, streams.restart())
            uploads.append(z[0])
            weights.append(w[0])
            fresh.append((q, memory))
        qs = [q for q, _ in fresh]
        memories = [memory for _, memory in fresh]
        v = (1 - config.beta) * v + config.beta * torch.stack(uploads).mean(0)
    return v, [q[0] for q in qs], weights
