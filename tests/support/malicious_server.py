"""A server that asks a client whatever it likes: tasks made by hand, and a client to ask.

The client has 40 points of three features in [-1, 1] and two classes, and perhaps one record more,
far away from them, which the server wants to know about.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Tree
from corefed.federation import joining
from corefed.federation.protocol import Agreement, Kind, Task
from corefed.federation.task_context import ClientSettings
from corefed.methods import registry
from corefed.settings import config
from corefed.training import client_side, setup

RECORD = np.array([[50.0, 50.0, 50.0]])
"""The point that the server asks about; its class is the first."""
CLASSES = ("a", "b")
AGREEMENT = Agreement((3,), CLASSES, 0)
FLAGS: dict[str, Any] = {
    "method": "fedavg", "data": "local", "hidden": "", "rounds": 2, "local_steps": 1, "clients": 1,
}  # fmt: skip
NOISE: dict[str, Any] = {"min_noise": 2.0, "clip": 1.0, "classes": CLASSES}
"""A client that configures noise."""


def points(member: bool, rows: int = 40) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (rows, 3))
    y = np.where(x.sum(1) > 0, "b", "a")
    test = {"X_test": x[:20] * 0.9, "y_test": y[:20]}
    if member:
        x, y = np.concatenate([x, RECORD]), np.append(y, "a")
    return {"X_train": x, "y_train": y, **test}


def client(folder: Path, member: bool, **settings: Any) -> ClientSettings:
    """A client with or without the record, in folders of its own."""
    here = folder / ("with" if member else "without")
    here.mkdir(exist_ok=True)
    np.savez(here / "data.npz", **points(member))
    return ClientSettings("north", here / "state", str(here / "data.npz"), **settings)


def settings_text(**flags: Any) -> str:
    return joining.settings_as_toml(config.resolve(flags={**FLAGS, **flags}))


def broadcast(agreement: Agreement = AGREEMENT, **flags: Any) -> Tree:
    """The first state of a server with these settings."""
    wanted = config.resolve(flags={**FLAGS, **flags})
    model = setup.network(wanted.run, agreement.shape, len(agreement.classes), agreement.targets)
    method = registry.build(wanted.run.method, wanted.settings, model)
    seed = wanted.run.seeds[0]
    return client_side.sent(method, method.init_server(Streams([Who(seed, SERVER)], 0)))


def linear(size: float) -> Tree:
    """A network that gives the record's class the less, the farther away a point is."""
    weights = torch.tensor([[-size] * 3, [size] * 3])
    return {"theta": torch.cat([weights.flatten(), torch.zeros(2)])}


def ask(
    kind: Kind,
    tree: Tree | None = None,
    *,
    run: str = "first",
    round_: int = 0,
    clip: float = 0.0,
    noise: float = 0.0,
    agreement: Agreement | None = AGREEMENT,
    temperature: str = "",
    **flags: Any,
) -> Task:
    """A task of the server."""
    told = settings_text(**flags)
    if kind == "join":
        return Task("join", run, -1, 0, told, None, "float32", False, clip, noise, {})
    sent = broadcast(**flags) if tree is None else tree
    return Task(
        kind, run, round_, 0, told, agreement, "float32", False, clip, noise, sent, temperature
    )
