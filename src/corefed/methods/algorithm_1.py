"""Algorithm 1 of the paper in the plainest code: what a test compares `coreset_pfedbayes` with."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Work
from corefed.bayes import elbo, gaussian
from corefed.bayes.batches import batches, noises
from corefed.methods.coreset_pfedbayes import SETTLED, Config
from corefed.models.network import Model
from corefed.selectors.kl_rows import kl_term
from corefed.selectors.matching import groups, matched_potentials, solve
from corefed.selectors.subset import subset_size


def algorithm_1(
    config: Config,
    model: Model,
    clients: Sequence[ClientData],
    *,
    rounds: int,
    work: Work,
    seed: int = 0,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """One client after the other, with autograd and torch.optim.

    Takes each client's data with C = 1 and returns (v, [q_w per client], [w per client]). It has
    nothing of what makes the method fast. Both share the random draws, Eq. 9, the potentials and
    A-IHT.
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
            own = config.selection
            ((_, draws),) = groups(torch.ones(1), data, k, own.draws, own.selection_mb)
            g = matched_potentials(model, qs[i].detach(), data, own, draws, streams)
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
                    a, b = kl_term(
                        model, q_w, q_full, v.unsqueeze(0), data, w, streams, zeta=config.zeta,
                        weight=config.kl_weight, rows=config.kl_rows, draws=config.monte_carlo,
                        diagonal=config.kl_curvature == "diagonal",
                    )  # fmt: skip
                    rows, target = torch.cat([g, a.mT], 2), torch.cat([y, b], 1)
                w = solve(own, rows, target, k, mask, streams)  # Accelerated-IHT(f(w))
            q, z, memory = client_update(i, w, streams.restart())
            uploads.append(z[0])
            weights.append(w[0])
            fresh.append((q, memory))
        qs = [q for q, _ in fresh]
        memories = [memory for _, memory in fresh]
        v = (1 - config.beta) * v + config.beta * torch.stack(uploads).mean(0)
    return v, [q[0] for q in qs], weights
