"""shared-start on linear-Gaussian clients: what it descends, and where it ends, in closed form.

Draws are replaced by a quadrature that is exact for quadratics, so that nothing is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from quadratics import FEATURES, SIZES, Quadratics, after, quadratics, settled, times
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Tree, Update
from corefed.bayes import elbo, gaussian, ivon
from corefed.methods import shared_start
from corefed.settings.config import resolve
from corefed.training import newcomers

P = FEATURES + 1
ZETA, PRIOR_STD, RATE = 2.0, 0.5, 0.1
HALF = math.sqrt(P) * torch.eye(P, dtype=torch.float64)
QUADRATURE = torch.cat([HALF, -HALF])
"""[2P, P] with mean 0 and covariance 1."""


@pytest.fixture(scope="module")
def task() -> Quadratics:
    return quadratics()


def configured(**settings: Any) -> shared_start.Config:
    """With a personal posterior only where there are control variates, and without momentum."""
    values = {"zeta": ZETA, "prior_std": PRIOR_STD, "learning_rate": RATE, "initial_rho": -1.0,
              "server_momentum": 0.0,
              "personal": "own" if settings.get("control") else "steps"}  # fmt: skip
    return shared_start.Config(**{**values, "monte_carlo": 2 * P, **settings})


def run(
    config: shared_start.Config,
    task: Quadratics,
    rounds: int,
    steps: int,
    cohorts: Sequence[Sequence[int]] = (),
) -> tuple[Tree, Tree]:
    """Rounds on full batches without chance: the server, and the clients' private state."""
    method = shared_start.build(config, task.model)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    server = {name: value.double() for name, value in server.items()}
    clients = len(SIZES)
    everyone = {k: v.expand(clients, *v.shape) for k, v in server.items()}
    private = method.init_client(everyone, task.data)
    for t in range(rounds):
        rows = list(cohorts[t]) if cohorts else list(range(clients))
        broadcast = {k: v.expand(len(rows), *v.shape) for k, v in server.items()}
        data = ClientData(*(field[rows] for field in task.data))
        batch = task.whole._replace(**{k: v[rows] for k, v in task.whole._asdict().items()})
        mine = {k: v[rows] for k, v in private.items()}
        working = method.begin(broadcast, mine, data, Streams([], 0))
        each = method.noise[0] // len(QUADRATURE)  # posteriors that a client draws from
        noise = QUADRATURE.repeat(each, 1).expand(len(rows), -1, -1)
        for _ in range(steps):
            working, _ = method.step(working, batch, noise)
        message, changed = method.end(broadcast, working)
        for name, value in changed.items():
            private[name] = private[name].index_copy(0, torch.tensor(rows), value)
        server = method.aggregate(server, Update(tuple(rows), message, data.size))
    return server, private


def prior_pull(task: Quadratics) -> Tensor:
    """zeta / (n_i prior_std^2), [C]."""
    return ZETA / (task.data.size.double() * PRIOR_STD**2)


def hessians(task: Quadratics) -> Tensor:
    """Of f_i in the mean, prior included: [C, P, P]."""
    return task.hessian + prior_pull(task).view(-1, 1, 1) * torch.eye(P, dtype=torch.float64)


def own_minima(task: Quadratics) -> Tensor:
    """a_i, the minima of f_i: [C, P]."""
    return torch.linalg.solve(hessians(task), times(task.hessian, task.optimum))


def minimum(task: Quadratics) -> tuple[Tensor, Tensor]:
    """Mean and precision of the minimum of F: all points, and T = N zeta times the prior."""
    weights = task.shares.view(-1, 1, 1) * hessians(task)
    mean = settled(weights, own_minima(task))
    points = task.data.size.double().view(-1, 1, 1)
    whole = (points * task.hessian).sum(0)  # of the likelihood of all points
    return mean, whole.diagonal() / (len(SIZES) * ZETA) + PRIOR_STD**-2


def test_a_step_descends_the_clients_share_of_the_free_energy(task: Quadratics) -> None:
    """f_i = (1/n_i) [sum_j E_q nll_j + zeta KL(q || p_0)] and its gradients, by autograd."""
    method = shared_start.build(configured(), task.model)
    broadcast = {
        k: v.double().expand(3, *v.shape)
        for k, v in method.init_server(Streams([Who(0, SERVER)], 0)).items()
    }
    working = method.begin(broadcast, {}, task.data, Streams([], 0))
    noise = QUADRATURE.expand(3, -1, -1)
    q = broadcast["v"].clone().requires_grad_()
    prior = torch.tensor([0.0, float(gaussian.rho_of(torch.tensor(PRIOR_STD).double()))])
    z = prior.double().view(1, 2, 1).expand(3, 2, P)
    f = elbo.objective(task.model, q, z, ZETA / task.data.size, task.whole, noise)
    (slope,) = torch.autograd.grad(f.sum(), q)
    working, _ = method.step(working, task.whole, noise)
    torch.testing.assert_close(working["mu"], broadcast["v"][:, 0] - RATE * slope[:, 0])
    torch.testing.assert_close(working["state.m"], 0.1 * slope[:, 1])  # Adam's first moment


def test_the_personal_posterior_has_its_prior_around_the_shared_means(task: Quadratics) -> None:
    """It settles at the mean-field posterior of Eq. 1 with a prior around the shared means."""
    pull = 3.0
    config = configured(personal="own", personal_zeta=pull, personal_std=0.4, personal_rate=0.01,
                        learning_rate=1e-9)  # fmt: skip
    server, private = run(config, task, 2, 250)
    v = server["v"]
    precision = torch.full((P,), 0.4**-2, dtype=torch.float64)
    k = pull / task.data.size.double().unsqueeze(-1)
    H = task.hessian + torch.diag_embed(k * precision)
    mean = torch.linalg.solve(H, times(task.hessian, task.optimum) + k * precision * v[0])
    torch.testing.assert_close(private["q"][:, 0], mean, rtol=0, atol=0.01)  # Adam's last steps
    width = (k / H.diagonal(dim1=1, dim2=2)).sqrt()
    torch.testing.assert_close(gaussian.sigma(private["q"][:, 1]), width, rtol=0.02, atol=0)


@pytest.mark.parametrize("control", [0.0, 1.0])
def test_one_step_a_round_ends_at_the_minimum(task: Quadratics, control: float) -> None:
    server, _ = run(configured(control=control), task, 250, 1)
    torch.testing.assert_close(server["v"][0], minimum(task)[0], rtol=0, atol=1e-5)


def test_several_steps_end_where_fedavg_does(task: Quadratics) -> None:
    steps = 5
    server, _ = run(configured(), task, 80, steps)
    weights = task.shares.view(-1, 1, 1) * after(hessians(task), RATE, steps)
    expected = settled(weights, own_minima(task))
    torch.testing.assert_close(server["v"][0], expected, rtol=0, atol=1e-6)
    assert (expected - minimum(task)[0]).norm() > 1e-3  # the clients' drift


def test_control_variates_end_at_the_minimum_after_any_number_of_steps(task: Quadratics) -> None:
    server, private = run(configured(control=1.0), task, 120, 5)
    mean, _ = minimum(task)
    torch.testing.assert_close(server["v"][0], mean, rtol=0, atol=1e-6)
    slope = times(hessians(task), mean - own_minima(task))  # of each client, there
    torch.testing.assert_close(private["slope"], slope, rtol=0, atol=1e-5)
    torch.testing.assert_close(private["pace"], torch.full((3,), 5 * RATE).double())


@pytest.mark.parametrize("control", [0.0, 1.0])
def test_momentum_leaves_where_it_ends(task: Quadratics, control: float) -> None:
    config = configured(control=control, server_momentum=0.5)
    plain = configured(control=control)
    ended, expected = (run(each, task, 200, 5)[0]["v"][0] for each in (config, plain))
    torch.testing.assert_close(ended, expected, rtol=0, atol=1e-6)


def test_the_servers_control_variate_is_scaffolds(task: Quadratics) -> None:
    """Two of three clients take part; a literal SCAFFOLD, whose clients upload changes of c_i.

    A client's first c_i is c, not 0: without a last round it has no correction.
    """
    cohorts, steps = [(0, 1), (1, 2), (0, 2), (0, 1), (1, 2), (0, 2)], 3
    config = configured(control=2 / 3)
    server, _ = run(config, task, len(cohorts), steps, cohorts)
    v = run(config, task, 0, steps)[0]["v"][0]
    H, a = hessians(task), own_minima(task)
    c, own = torch.zeros(P, dtype=torch.float64), dict[int, Tensor]()
    for cohort in cohorts:
        n = task.data.size[list(cohort)].double()
        share = n / n.sum()
        uploads, changes = [], []
        for i in cohort:
            c_i = own.get(i, c)
            theta, total = v, torch.zeros_like(v)
            for _ in range(steps):
                gradient = H[i] @ (theta - a[i])
                theta, total = theta - RATE * (gradient - c_i + c), total + gradient
            own[i] = total / steps
            uploads.append(theta)
            changes.append(own[i] - c_i)
        v = share @ torch.stack(uploads)
        c = c + 2 / 3 * (share @ torch.stack(changes))
    torch.testing.assert_close(server["v"][0], v, rtol=0, atol=1e-12)
    torch.testing.assert_close(server["drift"] / (steps * RATE), c, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 5])
def test_natural_gradients_find_the_widths_after_any_number_of_steps(
    task: Quadratics, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the quadratic term adds in r steps is left: (r G)^2 / 2S, and G is not 0 at a client."""
    r = 0.01
    monkeypatch.setattr(ivon, "BETA_2", 1 - r)
    config = configured(optimizer="ivon", fusion="precision", learning_rate=0.02)
    server, _ = run(config, task, 500 // steps, steps)
    precision = gaussian.sigma(server["v"][1]).pow(-2)
    expected = minimum(task)[1]
    own = task.data.size.double().unsqueeze(-1) * task.hessian.diagonal(dim1=1, dim2=2) / ZETA
    off = (own + PRIOR_STD**-2 - expected) / expected  # of the clients' own, relative
    allowed = r * off.square().mean(0) + math.exp(-5)
    assert ((precision / expected - 1).abs() < allowed).all()
    assert off.abs().max() > 0.5  # clients whose own widths are quite different


def test_widths_of_the_average_are_between_those_of_the_clients(task: Quadratics) -> None:
    v = torch.tensor([[[0.0], [-1.0]], [[3.0], [-2.0]]]).double()
    update = Update((0, 1), {"v": v}, torch.tensor([1, 2]))
    average = shared_start.aggregate(configured(), {}, update)["v"]
    torch.testing.assert_close(average, torch.tensor([[2.0], [-5 / 3]]).double())
    joined = shared_start.aggregate(configured(fusion="precision"), {}, update)["v"]
    assert joined[0] == average[0]
    precisions = gaussian.sigma(v[:, 1]).pow(-2)
    torch.testing.assert_close(gaussian.sigma(joined[1]).pow(-2), precisions.mean(0))


def test_a_newcomer_takes_its_steps_in_one_round(task: Quadratics) -> None:
    method = shared_start.build(configured(), task.model)
    server = method.init_server(Streams([Who(0, SERVER)], 0))
    assert newcomers.rounds_of(method, server, task.data, 200, 20) == [200]


def test_control_variates_are_for_sgd() -> None:
    wrong = ["control=1", "personal=own", "optimizer=ivon"]
    with pytest.raises(UserError, match=r"control is 1 with optimizer=ivon; .* control=0"):
        resolve(flags={"method": "shared-start"}, assignments=wrong)
    with pytest.raises(UserError, match=r"control is 0.5 with personal=steps; .* personal=own"):
        resolve(flags={"method": "shared-start"}, assignments=["control=0.5", "personal=steps"])
    with pytest.raises(UserError, match="zeta is 0 with optimizer=ivon"):
        resolve(flags={"method": "pfedbayes"}, assignments=["zeta=0", "optimizer=ivon"])
