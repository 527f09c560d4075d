"""One cell of `corefed bench attacks`: a federation in this process with a liar among its clients.

The server's and the client's half run as they are (`federation/server.py`, `federation/client.py`);
between them is a link that calls the clients and changes what the liars answer. What is measured is
the truth: the honest clients' own sums over their test points after the last round, which no lie
passes through.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from corefed.base.errors import UserError
from corefed.data import datasets, export, partition
from corefed.federation import client, server, task_context
from corefed.federation.link import SILENT
from corefed.federation.protocol import Reply, Task
from corefed.federation.rules import Rules
from corefed.federation.waiting import Waiting
from corefed.settings import config
from corefed.training import record, scoring
from corefed_studies.bench.attacks_liars import ATTACKS, Attack, Lie, Seen, honestly

DEFAULT = Rules(join_wait=0.0, attempts=1)
RULES: dict[str, Rules] = {
    "plain": replace(
        DEFAULT, aggregation="plain", join="pooled", class_quorum=1, max_weight=0.0
    ),
    "median": replace(DEFAULT, aggregation="median"),
    "krum": replace(DEFAULT, aggregation="krum"),
    "clip": replace(DEFAULT, aggregation="clip"),
    "default": DEFAULT,
}  # fmt: skip
"""`plain` has the other rules too that trust clients as a simulation does. The default takes the
trimmed mean here (`robust.AUTO`)."""


class Cell(NamedTuple):
    """What is run."""

    method: str
    rule: str
    attack: str
    clients: int = 5
    bad: int = 1
    seed: int = 0
    split: str = "iid"
    rounds: int = 6


def settings(cell: Cell) -> dict[str, Any]:
    """Digits, standardised by a scale that the clients agree on, and a small network."""
    return {
        "method": cell.method, "data": "digits", "partition": cell.split, "clients": cell.clients,
        "rounds": cell.rounds, "local_steps": 10, "hidden": "32", "scale": "standard",
        "evaluate_every": cell.rounds, "evaluate_draws": 5, "seeds": str(cell.seed),
    }  # fmt: skip


class LiarsLink:
    """Calls the clients, and changes what the liars answer."""

    def __init__(
        self,
        places: Mapping[str, task_context.ClientSettings],
        liars: Sequence[str],
        attack: Attack,
    ) -> None:
        self.places, self.liars, self.attack = places, liars, attack
        self.first: dict[str, Reply] = {}
        self.truth: dict[str, dict[str, Any]] = {}  # sums of the honest clients, by kind of model

    def online(self) -> set[str]:
        return set(self.places)

    def late(self) -> list[tuple[str, int]]:
        return []

    def ask(self, tasks: Mapping[str, Task], waiting: Waiting) -> dict[str, Reply | str]:
        own = {name: client.answer(task, self.places[name]) for name, task in tasks.items()}
        honest = {name: reply for name, reply in own.items() if name not in self.liars}
        for name, reply in honest.items():
            if reply.kind == "evaluate" and not reply.error:
                self.truth[name] = reply.figures["models"]
        answers: dict[str, Reply | str] = {}
        for name, reply in own.items():
            if name not in self.liars:
                answers[name] = reply
            elif self.attack.silent:
                answers[name] = f"{SILENT} the time that the others took"
            elif reply.error:
                answers[name] = reply
            else:
                seen = Seen(tasks[name], reply, honest, self.first.get(name))
                answers[name] = self._lie(reply.kind)(seen)
                if reply.kind == "train":
                    self.first.setdefault(name, reply)
        return answers

    def _lie(self, kind: str) -> Lie:
        lies = {"join": self.attack.join, "train": self.attack.train}
        return lies.get(kind, self.attack.evaluate) or honestly


def run(cell: Cell) -> dict[str, Any]:
    """What the honest clients have in the end, and what the server reports.

    {"accuracy": by kind of model or {}, "reported", "median", "rounds", "stopped": why or ""}
    """
    attack = ATTACKS[cell.attack]
    flags = settings(cell)
    with tempfile.TemporaryDirectory() as place, contextlib.redirect_stderr(io.StringIO()):
        folder = Path(place)
        names = [f"client-{i}" for i in range(cell.clients)]
        liars = names[cell.clients - cell.bad :]
        _deal(flags, folder / "data", liars, attack)
        places = {
            name: task_context.ClientSettings(
                name, folder / f"state-{name}", str(folder / "data" / f"{name}.npz")
            )
            for name in names
        }
        link = LiarsLink(places, liars, attack)
        path = folder / "run"
        record.Folder(path).create(config.resolve(flags={**flags, "data": "local"}))
        rules = RULES[cell.rule]
        if cell.rule == "krum":
            rules = replace(rules, byzantine=cell.bad)
        stopped, summary = "", dict[str, Any]()
        try:
            summary = server.federate(path, names, rules, link)
        except UserError as error:
            stopped = str(error)
        lines, _ = record.read_lines(path / record.ROUNDS)
    reported = {name: each["mean"] for name, each in summary.get("metrics", {}).items()}
    covered = summary.get("coverage", {}).get("median", {})
    return {
        "accuracy": {} if stopped else _truth(link.truth),
        "reported": _accuracies(reported),
        "median": _accuracies({name: each[0] for name, each in covered.items()}),
        "rounds": len(lines),
        "stopped": stopped,
    }


def _deal(flags: Mapping[str, Any], folder: Path, liars: Sequence[str], attack: Attack) -> None:
    """The files of all clients; a liar may train on other labels."""
    wanted = config.resolve(flags=flags).run
    (seed,) = wanted.seeds
    dataset = datasets.load(wanted.data, seed=seed, clients=wanted.clients)
    splits = partition.split(wanted.partition, dataset, wanted.clients, seed)
    export.write(dataset, splits, folder)
    for name in liars if attack.labels else ():
        path = folder / f"{name}.npz"
        with np.load(path) as found:
            arrays = dict(found)
        assert attack.labels is not None
        arrays["y_train"] = attack.labels(torch.from_numpy(arrays["y_train"])).numpy()
        np.savez(path, **arrays)


def _truth(found: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Accuracy by kind of model, over the honest clients' test points."""
    kinds = dict.fromkeys(kind for each in found.values() for kind in each)
    accuracy = {}
    for kind in kinds:
        rows = [
            {name: torch.tensor(value) for name, value in each[kind].items()}
            for each in found.values()
        ]
        accuracy[kind] = scoring.metrics_of(scoring.add(rows))["accuracy"]
    return accuracy


def _accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    return {
        name.removesuffix("_accuracy"): value
        for name, value in metrics.items()
        if name.endswith("_accuracy")
    }
