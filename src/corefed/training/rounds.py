"""The loop: cohort, local training, aggregation, evaluation, record, checkpoint."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from math import isfinite, isnan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corefed.base import rng
from corefed.base.errors import UserError
from corefed.base.types import Method, Tree
from corefed.data.clients import FederatedData
from corefed.models.own import Factory
from corefed.settings.config import Experiment, Run, to_dict
from corefed.training import checkpoint, fitted, record
from corefed.training.evaluate import evaluate
from corefed.training.setup import Setup, prepare

Line = dict[str, Any]
"""One round as `rounds.jsonl` has it."""


class Trained(NamedTuple):
    """A run that ended: its summary, and whether it reached its last round or was stopped."""

    summary: dict[str, Any]
    finished: bool
    setup: Setup  # clients and servers as they are now, to predict with
    servers: list[Tree]


def train(
    experiment: Experiment,
    out: Path | None = None,
    *,
    data: FederatedData | None = None,
    factory: Factory | None = None,
    resume: bool = False,
    on_begin: Callable[[dict[str, Any], list[Line]], None] = lambda values, lines: None,
    on_round: Callable[[Line], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Run an experiment, recording it in the folder `out` if there is one.

    Whatever can be refused is refused before `out` is made. `stop` is asked after each round; a run
    that it ends has its checkpoint, and `resume` goes on from there to the same result. `on_begin`
    is told every setting and the rounds that are there already. `data`, and a `factory` of
    networks, are taken instead of those that the experiment names.
    """
    folder = None if out is None else record.Folder(out)
    if folder is not None and not resume:
        folder.refuse_existing()
    if folder is not None and experiment.run.checkpoint_every:
        checkpoint.require_library()
    setup = prepare(experiment, data, factory)
    run, clients, servers = setup.experiment.run, setup.clients, setup.servers
    values = to_dict(setup.experiment)
    lines: list[Line] = []
    if folder is not None and resume:
        lines, state = folder.resume(setup.experiment)
        if state is not None:
            servers, clients.private = checkpoint.unpack(state, servers, clients.private)
    elif folder is not None:
        folder.create(setup.experiment)
        folder.keep(lambda path: fitted.keep_data(path, setup.data))

    on_begin(values, lines)
    for t in range(len(lines), run.rounds):
        line, servers = _round(setup, servers, t)
        lines.append(line)
        ending = t + 1 == run.rounds or stop()
        if folder is not None:
            folder.append(line)
            if run.checkpoint_every and (ending or (t + 1) % run.checkpoint_every == 0):
                folder.checkpoint(values, t + 1, servers, clients.private)
        on_round(line)
        if ending:
            break

    finished = len(lines) == run.rounds
    about = {**record.environment(run.device), "notes": list(setup.data.notes)}
    summary = record.summarise(values, lines, about)
    if folder is not None and finished:
        if run.checkpoint_every:
            folder.keep(lambda path: fitted.keep_models(path, setup, servers))
        folder.finish(summary)
    return Trained(summary, finished, setup, servers)


def _round(setup: Setup, servers: list[Tree], t: int) -> tuple[Line, list[Tree]]:
    """Round t of all seeds (t counts from 0, `line["round"]` from 1)."""
    run, method, clients = setup.experiment.run, setup.method, setup.clients
    began = time.perf_counter()
    cohorts = [rng.choose(seed, t, run.clients, run.cohort or run.clients) for seed in run.seeds]
    looked = _looked(clients.private, len(run.seeds))
    updates, loss, examples = clients.train(t, servers, cohorts)
    sent = [sent_of(method, server) for server in servers]
    down = [_bytes(tree) * len(cohort) for tree, cohort in zip(sent, cohorts, strict=True)]
    servers = [method.aggregate(s, update) for s, update in zip(servers, updates, strict=True)]
    _refuse_divergence(run, t, loss)
    line: Line = {
        "round": t + 1,
        "loss": loss.tolist(),
        "examples": examples.tolist(),
        "bytes_up": [_bytes(update.message) for update in updates],
        "bytes_down": down,
        "seconds": _since(began, run.device),
        "coreset": figures_of(method.report(clients.private), len(run.seeds)),
    }
    if looked:
        line["selection_examples"] = [
            now - before
            for now, before in zip(_looked(clients.private, len(run.seeds)), looked, strict=True)
        ]
    if due(run, t):
        began = time.perf_counter()
        data = setup.data
        evaluation = evaluate(
            clients, method, servers, data.test, t, run.evaluate_draws, data.classes, data.unit
        )
        line["metrics"] = {
            name: [each[name] for each in evaluation.metrics] for name in evaluation.metrics[0]
        }
        line["clients"] = evaluation.clients
        line["classes"] = by_label(evaluation.classes, setup.data.labels)
        line["evaluate_seconds"] = _since(began, run.device)
    line["peak_memory_mb"] = peak_memory_mb(run.device)
    return line, servers


def due(run: Run, t: int) -> bool:
    """Whether round t (from 0) is evaluated: at the end, and every so often on the way."""
    every = run.evaluate_every or max(1, run.rounds // 10)
    return t + 1 == run.rounds or (t + 1) % every == 0


def peak_memory_mb(device: str) -> float:
    """The most this process held so far: of the GPU's memory, or of the machine's."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # not on Windows

    kilo = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo / 2**20


def figures_of(report: Tree, runs: int) -> dict[str, list[float | None]]:
    """Means over the clients that have a figure, by run; None where no client has one."""
    means = {k: v.double().view(runs, -1).nanmean(-1).tolist() for k, v in report.items()}
    return {k: [None if isnan(mean) else mean for mean in v] for k, v in means.items()}


def by_label(
    classes: list[dict[str, list[float | None]]], labels: tuple[str, ...]
) -> dict[str, dict[str, list[float | None]]]:
    """model -> class -> accuracy by seed, of the classes that some seed tests."""
    names = classes[0] if classes else {}
    table = {
        name: {label: [run[name][c] for run in classes] for c, label in enumerate(labels)}
        for name in names
    }
    return {
        name: {label: each for label, each in row.items() if set(each) != {None}}
        for name, row in table.items()
    }


def sent_of(method: Method, server: Tree) -> Tree:
    """What of the server's state goes to a client."""
    names = server if method.downlink is None else method.downlink
    return {name: server[name] for name in names}


def _looked(private: Tree, runs: int) -> list[float]:
    """By run, points that went forward in choosing subsets so far; empty where none are counted."""
    total = private.get("looked")
    return [] if total is None else total.double().view(runs, -1).sum(-1).tolist()


def _bytes(tree: Tree) -> int:
    return sum(value.numel() * value.element_size() for value in tree.values())


def _since(began: float, device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _refuse_divergence(run: Run, t: int, loss: Tensor) -> None:
    for seed, value in zip(run.seeds, loss.tolist(), strict=True):
        if not isfinite(value):
            raise UserError(
                f"Training diverged: in round {t + 1} the loss of seed {seed} is {value}. Use "
                "smaller learning rates; what was recorded up to the round before is kept."
            )
