"""CoreSet-PFedBayes (Chanda, Modi, Ramakrishnan, ICLR 2024): Algorithm 1.

PFedBayes in which each client trains on its Bayesian coreset: at most k = ceil(fraction n) points
with weights w, so that the weighted log-likelihood stands in for that of all its data.

Preset `fast` (default): no full-data branch; a `selector` chooses the coreset (`selectors/`, by
default `calibrated.py`), and `renewal.py` says when it is chosen anew.

Preset `matching`: the same with the paper's selector, Eq. 4 solved by A-IHT, on widened posteriors,
and with a check of the coreset on fresh draws.

Preset `paper`: Algorithm 1 to the letter (Eqs. 3, 4 and 8). In each round both branches, q on all
data and q_w on the coreset, are trained from the same start with the same draws, w from 0, and
A-IHT (Algorithm 2, `coreset/aiht.py`) solves Eq. 8 again, until its objective settles. It costs
more than training on all data.

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

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Batch, ClientData, Method, Tree, Work
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches, noises
from corefed.methods import pfedbayes
from corefed.models.network import Model
from corefed.selectors import frame, renewal, selection, upkeep
from corefed.selectors.kl_rows import kl_rows
from corefed.selectors.matching import THRESHOLDING
from corefed.selectors.subset import subset_size
from corefed.selectors.upkeep import Upkeep


@dataclass(frozen=True)
class Config(pfedbayes.Config):
    """Settings of CoreSet-PFedBayes, beside those of PFedBayes. `docs/selectors.md` has the
    measurements behind the defaults of the selector."""

    preset: Literal["fast", "matching", "paper"] = "fast"
    """`fast`: train on the coreset alone, chosen by `selector`. `matching`: the same with the
    paper's selector. `paper`: Algorithm 1 to the letter."""
    fraction: float = 0.1
    """Size of a client's coreset: k = ceil(fraction n)."""
    selector: str = "calibrated"
    """How the coreset is chosen (not of preset paper), by name; `docs/selectors.md` compares the
    selectors, and an unknown name is answered with a list of them."""
    around: frame.Around = "posterior"
    """Where pi-hat is drawn: around the client's posterior, also ahead on its path since the last
    choice, or around the global model."""
    widths: tuple[float, ...] = (1.0,)
    """pi-hat has sigma times these; a block of draws each, stacked."""
    match: frame.Match = "potentials"
    """What is matched: potentials (Eq. 4), or gradients of the last layer."""
    draws: int = 0
    """Draws from pi-hat in a selection (S of Eq. 4); 0 takes 64 to calibrate on, and of a solver,
    which fits them freely, 2k and at least 200."""
    feature_draws: int = 2
    """Draws of the layers below the last that the S draws share; 0 draws every layer S times."""
    score: frame.Score = "gradient"
    """What a point's chance to be taken follows (selector calibrated): the norm of its last-layer
    gradient, of its potentials, its loss, or nothing."""
    floor: float = 0.3
    """Part of the chances that is even; no weight is drawn above n / (k floor)."""
    in_turn: bool = True
    """Points that were not taken are owed their turn; else each choice is drawn independently."""
    balance: bool = True
    """Turns are kept by class as well, so that each class has its share of every choice."""
    shrink: float = 0.1
    """Ridge that pulls weights towards those of the drawing, of a solver towards n/k; 0: none."""
    bound: float = 4.0
    """Factor by which calibration may change a weight, at most."""
    solver: Literal[
        "exchange", "omp", "omp-block", "aiht-2", "aiht", "iht", "giga", "frank-wolfe",
        "uniform", "uniform-refit",
    ] = "aiht-2"  # fmt: skip
    """How Eq. 4 is solved (selector matching); `docs/coresets.md` compares them."""
    max_iterations: int = 0
    """Iterations of the solver, at most; 0 takes 100 of hard thresholding, else its own bound."""
    pool: float = 1.0
    """Part of the points, taken in turn, that are looked at (selector calibrated), or that a solver
    may choose among (selector matching)."""
    refresh_every: int = 0
    """Local steps after which a coreset is chosen anew; 0 lets `budget` decide."""
    budget: float = 0.5
    """What choosing may cost, as a part of training on all data; the coreset is renewed as often as
    that allows, after a multiple of 20 steps."""
    moved: float = 0.0
    """Choose anew when the posterior's mean has moved by this many of its standard deviations since
    the last choice, on average; 0: whatever it does."""
    stale: float = 0.0
    """Choose anew when the coreset's error on fresh draws exceeds this part of a uniform subset's,
    and give up weights that are worse than uniform ones; 0: whatever it is."""
    check_every: int = 200
    """Local steps between looks at that error."""
    check_draws: int = 64
    """Fresh draws of such a look."""
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


SETTLED = 1e-3
"""Relative change of Eq. 8's objective at which preset paper stops solving anew."""

PRESETS: dict[str, dict[str, object]] = {
    "fast": {},
    "matching": {
        "selector": "matching",
        "widths": (1.0, 4.0),
        "feature_draws": 16,
        "shrink": 0.01,
        "refresh_every": 100,
        "stale": 0.5,
        "check_every": 50,
    },
    "paper": {
        "zeta": 10.0,
        "selector": "matching",
        "widths": (1.0,),
        "feature_draws": 16,
        "solver": "aiht",
        "max_iterations": 300,
        "shrink": 0.0,
        "kl_weight": 1.0,
    },
}


OWN = {
    "calibrated": ("score", "floor", "in_turn", "balance", "bound"),
    "matching": ("solver", "max_iterations"),
}
"""Settings that mean something to one selector only."""


def check(config: Config) -> None:
    """Beside the values of PFedBayes: a setting of a selector that was not chosen does nothing."""
    pfedbayes.check(config)
    selectors.named(config.selector)
    if config.refresh_every == 0 and config.budget == 0:
        raise UserError("refresh_every and budget are both 0: give one of them a value.")
    for selector, names in OWN.items():
        for name in names:
            value = getattr(config, name)
            if selector != config.selector and value != getattr(Config, name):
                raise UserError(
                    f"{name} is {value}, but selector {config.selector} does not use it; leave it "
                    f"out, or take {'preset' if selector == 'matching' else 'selector'}={selector}."
                )


def build(config: Config, model: Model) -> Method:
    base = pfedbayes.build(config, model)
    coresets = upkeep_of(config, model)
    printed = config.preset == "paper"

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        own = base.init_client(broadcast, data)
        state = coresets.state(own["q"], data)
        if printed:  # whose selections train both branches: more than passes forward
            del state["looked"]
        return {**own, **state}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        upkeep.aged(working)
        return base.step(working, batch, noise)

    def select_as_printed(
        working: Tree, data: ClientData, streams: Streams, work: Work
    ) -> Tree:  # CoresetOptUpdate of Algorithm 1
        everyone = torch.ones_like(working["age"], dtype=torch.bool)
        for rows, draws in _groups(config, everyone, data):
            part, mine = frame.trimmed(data, rows), streams.subset(rows)
            own = {name: value[rows] for name, value in working.items()}
            w = coreset_opt_update(config, model, base, own, part, mine, work, draws)
            quality = coresets.quality(own["q"], w, part, mine)
            working["weight"][rows] = F.pad(w, (0, working["weight"].shape[1] - w.shape[1]))
            working["held_out_error"][rows] = quality.error
            working["over_uniform"][rows] = quality.over_uniform
        working["refreshes"] += 1
        return working

    return base._replace(
        name="coreset-pfedbayes",
        init_client=init_client,
        select=select_as_printed if printed else coresets.select,
        weights=lambda working, data: working["weight"],
        step=step,
        report=upkeep.report,
        select_every=0 if printed else coresets.rule.every,
    )


def upkeep_of(config: Config, model: Model) -> Upkeep:
    """How coresets are chosen and renewed under these settings."""
    settings = frame.Settings(
        around=config.around,
        widths=config.widths,
        match=config.match,
        draws=config.draws,
        feature_draws=config.feature_draws,
        score=config.score,
        floor=config.floor,
        in_turn=config.in_turn,
        balance=config.balance,
        shrink=config.shrink,
        bound=config.bound,
        solver=config.solver,
        iterations=config.max_iterations,
        pool=config.pool,
        memory_mb=config.selection_mb,
    )
    rule = renewal.Rule(
        refresh_every=config.refresh_every,
        budget=config.budget,
        moved=config.moved,
        stale=config.stale,
        check_every=config.check_every,
        passes=renewal.cost("calibrated", model, settings),
    )
    return Upkeep(
        model, config.selector, settings, rule, config.fraction, config.check_draws,
        config.monte_carlo,
    )  # fmt: skip


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
    """The rows of `selectors/kl_rows.py`, weighted by kl_weight."""
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
