"""Every method of the registry as rows of a test, a small federation, and three runtimes on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Method, Tree, Update, Work
from corefed.methods import registry
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import Model, mlp
from corefed.settings.fields import from_flat, list_settings
from corefed.settings.run import Run
from corefed.training import variants
from corefed.training.compiled import Steps
from corefed.training.local import Compiled, LocalClients

SIZES = (7, 23, 30, 15, 1)  # a batch is 8; the clients of 7 and 1 have less
SINGLE_CLASS = 3  # the client of 15 points has one label
EVERYONE = tuple(range(len(SIZES)))
FEATURES, CLASSES = 6, 3
WORK = Work(steps=4, batch=8)

TIGHT = {"rtol": 1e-8, "atol": 1e-8}
SINGLE = {"rtol": 1e-4, "atol": 1e-5}
SINGLE_CUDA = {"rtol": 1e-4, "atol": 1e-4}  # kernels for other shapes add in other orders
PAPER_CUDA = {"rtol": 1e-2, "atol": 1e-2, "losses": 1e-4}
"""Of preset paper: its KL rows are solves, and momentum amplifies. On an H200 the largest
difference was 1.3e-3, and 3e-5 in a loss; in float64 it was below 1e-8."""


# The table


class Row(NamedTuple):
    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    rounds: int = 3
    rounds_float32: int = 3

    @classmethod
    def of(cls, name: str, settings: dict[str, Any]) -> Row:
        """Fewer rounds where selections compare likelihoods (`test_runtimes.py` explains why)."""
        rounds = (3, 3)
        if name.startswith("coreset"):
            rounds = (1, 1) if settings.get("preset") == "paper" else (2, 1)
        return cls(name, tuple(settings.items()), *rounds)


SMALL = {
    "fraction": 0.4, "draws": 40, "feature_draws": 4, "check_draws": 8, "max_iterations": 10,
    "kl_rows": 1, "kl_curvature": "diagonal", "outer": 2,
}  # fmt: skip
"""Values that make a method quick, and its selections few in steps, where it has the field."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "pfedbayes": [
        {"monte_carlo": 3, "eta_1": 0.02, "zeta": 5.0},
        {
            "optimizer": "sgd",
            "fusion": "precision",
            "beta": 0.5,
            "eta_1": 0.001,
            "eta_2": 0.001,
            "initial_rho": -3.0,
        },
    ],
    "shared-start": [{"personal": "own", "control": 1.0, "bayesian": "last"}],
    "bnfed": [
        {"sigma": 0.3, "initial": "shared"},
    ],
    "random-subset": [{"redraw_every": 2}, {"base": "fedavg", "redraw_every": 3}],
    "fedavg": [{"optimizer": "momentum", "learning_rate": 0.01, "server_momentum": 0.5}],
    "independent": [{"optimizer": "adam", "learning_rate": 0.005}],
    "pfedme": [
        {"inner_steps": 2, "beta": 0.5, "penalty": 5.0},
        {"optimizer": "adam", "personal_rate": 0.005},
    ],
    "per-fedavg": [
        {"variant": "hf", "beta": 0.1, "adapt_steps": 3},
        {"optimizer": "adam", "beta": 0.005},
    ],
    "coreset-pfedbayes": [
        {"check_every": 2, "refresh_every": 3},
        {"pool": 0.7, "around": "path", "moved": 0.01, "refresh_every": 2},
        {"selector": "seen", "refresh_every": 2},
    ],
}
"""More rows of a method than its defaults and its presets."""

STEPS: dict[str, list[dict[str, Any]]] = {
    "pfedbayes": [{"optimizer": "ivon", "bayesian": "layer-1", "eta_1": 0.05}],
    "shared-start": [{"optimizer": "ivon", "fusion": "precision", "zeta": 1.0}],
    "coreset-shared-start": [{"selector": "seen", "refresh_every": 2}],
    "bnfed": [{"sigma": 0.1, "growth": 1, "optimizer": "sgd", "learning_rate": 0.05}],
    "per-fedavg": [{"variant": "exact", "alpha": 0.1, "clip": 0.5}],
    "fedprox": [{"optimizer": "momentum", "learning_rate": 0.01, "proximal": 2.0}],
    # Not adam: where an input is always 0, the pull to w is all rounding, and a whole step of Adam.
    "ditto": [{"optimizer": "momentum", "learning_rate": 0.007, "personal_rate": 0.01}],
    "fedrep": [{"optimizer": "adam", "learning_rate": 0.005, "head_part": 0.3}],
    "fedbabu": [{"optimizer": "adam", "learning_rate": 0.005, "adapt_points": 4}],
    "feddbe": [{"optimizer": "adam", "learning_rate": 0.005, "regularisation": 50.0}],
}
"""Rows that differ from others only in how a step is taken: for tests that compare runtimes."""


def rows(variants: dict[str, list[dict[str, Any]]]) -> Iterator[Any]:
    for name, entry in registry.METHODS.items():
        if find_spec(entry.module) is None:
            continue  # in the registry, not yet written
        fields = {each.name for each in list_settings(registry.config_class(name))}
        small = {key: value for key, value in SMALL.items() if key in fields}
        for preset, values in (registry.presets(name) or {"": {}}).items():
            own = {key: value for key, value in values.items() if key in fields}  # not of every run
            chosen = {**own, "preset": preset} if preset else own
            yield pytest.param(Row.of(name, {**chosen, **small}), id=f"{name} {preset}".strip())
        for values in variants.get(name, []):
            label = ",".join(f"{key}={value}" for key, value in values.items())
            yield pytest.param(Row.of(name, {**small, **values}), id=f"{name} {label}")


ROWS = list(rows(VARIANTS))
every_method = pytest.mark.parametrize("row", ROWS)
every_row = pytest.mark.parametrize(
    "row",
    list(rows({name: VARIANTS.get(name, []) + STEPS.get(name, []) for name in registry.METHODS})),
)


# A small federation


def federation(
    kind: str = "classes",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> ClientData:
    """Unequal clients, with one feature that is always 0 and one that is nearly so.

    Another seed has other sizes too, and so another padding.
    """
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(SIZES) + seed * torch.tensor([0, 1, 2, 0, 1])
    clients, n = len(SIZES), int(sizes.max())
    weight = (torch.arange(n) < sizes.unsqueeze(-1)).to(dtype)
    x = torch.randn(clients, n, FEATURES, generator=g).to(dtype)
    x *= weight.unsqueeze(-1)
    x[..., 0] = 0
    x[..., 1] *= 1e-4
    if kind == "targets":
        y = torch.randn(clients, n, 1, generator=g).to(dtype) * weight.unsqueeze(-1)
        return ClientData(x, y, weight)
    y = torch.randint(CLASSES, (clients, n), generator=g)
    y[SINGLE_CLASS] = 1
    return ClientData(x, y * weight.long(), weight)


def network(kind: str = "classes") -> Model:
    if kind == "targets":
        return mlp((FEATURES, 5, 1), Gaussian(1, 0.5, learn_noise=True))
    return mlp((FEATURES, 5, CLASSES), Categorical(CLASSES))


def build(row: Row, kind: str = "classes") -> Method:
    config = from_flat(registry.config_class(row.name), dict(row.settings))
    return registry.build(row.name, config, network(kind))


def compile_steps(row: Row, kind: str = "classes", *, fuse: bool = False) -> Compiled:
    """Steps that are traced, and `fuse`d if asked; on a GPU they are a CUDA graph."""
    config = from_flat(registry.config_class(row.name), dict(row.settings))
    held = Run(method=row.name, schedule="constant", warmup=0)
    at = variants.step_settings(held, [config], network(kind), scheduled=False)
    return Compiled(Steps(WORK, fuse=fuse), at)


class Outcome(NamedTuple):
    private: Tree  # of all clients, after the last round
    messages: list[Tree]  # of each round, in the order of the cohort
    losses: list[Tensor]
    servers: list[Tree]
    updates: list[Update]


def run(
    method: Method,
    data: ClientData,
    *,
    chunk: int = 100,
    rounds: int = 3,
    seeds: Sequence[int] = (0,),
    cohorts: Sequence[Sequence[int]] | None = None,
    compiled: Compiled | None = None,
) -> Outcome:
    """The rounds of `runtime.rounds` without evaluation and record, in the data's precision."""
    like = data.x
    servers = [
        {k: v.to(like) for k, v in method.init_server(Streams([Who(s, SERVER)], 0)).items()}
        for s in seeds
    ]
    clients = LocalClients(method, data, seeds, servers, WORK, chunk, compiled=compiled)
    everyone = [range(len(data.weight) // len(seeds))] * len(seeds)
    messages, losses, last = [], [], []
    for t in range(rounds):
        last, loss, _ = clients.train(t, servers, cohorts or everyone)
        messages.append({k: torch.cat([u.message[k] for u in last]) for k in last[0].message})
        losses.append(loss)
        servers = [method.aggregate(s, u) for s, u in zip(servers, last, strict=True)]
    return Outcome(clients.private, messages, losses, servers, last)


@cache
def loop(row: Row, rounds: int, kind: str = "classes", seed: int = 0) -> Outcome:
    """What every other runtime is compared with, in float64; computed once."""
    return run(build(row, kind), federation(kind, seed), chunk=1, rounds=rounds, seeds=(seed,))


def assert_same(
    found: Outcome, expected: Outcome, *, losses: float = 1e-5, **tolerance: Any
) -> None:
    pairs = [(found.private, expected.private)]
    pairs += list(zip(found.messages, expected.messages, strict=True))
    pairs += list(zip(found.servers, expected.servers, strict=True))
    for first, second in pairs:
        assert_same_tree(first, second, **tolerance)
    loss = {"rtol": losses, "atol": 1e-6}  # kept in float32
    torch.testing.assert_close(found.losses, expected.losses, check_device=False, **loss)


def assert_same_tree(found: Tree, expected: Tree, **tolerance: Any) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            equal_nan=True,  # a number that a client does not have yet
            check_device=False,
            msg=lambda text, name=name: f"{name}: {text}",
            **tolerance,
        )


def equal(first: Tree, second: Tree) -> bool:
    """Bit for bit; nan is nan."""
    return set(first) == set(second) and all(
        torch.equal(first[k].nan_to_num(nan=-7.0), second[k].nan_to_num(nan=-7.0)) for k in first
    )


# CUDA

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA")


@contextmanager
def proper_float32() -> Iterator[None]:
    """No TF32, which has three digits: cuDNN convolves in it unless told not to, and some GPU
    environments multiply matrices in it. Not by monkeypatch, which deletes what it cannot find in
    an object's __dict__, and these are kept by torch."""
    switches = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = False
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def on(device: str, data: ClientData) -> ClientData:
    return ClientData(*(field.to(device) for field in data))
