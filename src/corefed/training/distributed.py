"""A simulated run on several workers: what `rounds.train` does in one process, at each of them.

The first worker decides, prints and writes the folder of the run. Each worker writes checkpoints of
its own clients. A mistake at one worker is raised by all, as one sentence.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.types import Tree
from corefed.data.clients import FederatedData
from corefed.settings.config import differences, fingerprint, to_dict
from corefed.settings.run import Experiment
from corefed.training import calibration, checkpoint, fitted, parts, record
from corefed.training.loop import Line, run_rounds
from corefed.training.rounds import Result, summarise
from corefed.training.setup import Setup, concrete, load, prepare
from corefed.training.sharded import Sharded
from corefed.training.world import World


def train(
    world: World,
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    on_begin: Callable[[dict[str, Any], list[Line]], None] = lambda values, lines: None,
    on_round: Callable[[Line], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run an experiment on all workers of `world`; arguments are those of `rounds.train`.

    `on_begin`, `on_round` and `stop` are called at the first worker only.
    """
    began = time.perf_counter()
    folder = record.Folder(out)
    resume = bool(world.tell([resume])[0])
    world.agree(lambda: _check(world, experiment, folder, resume=resume))
    setup, everyone = world.agree(lambda: _prepare(world, experiment))
    run, servers, values = setup.experiment.run, setup.servers, to_dict(setup.experiment)
    _compare(world, values, everyone)
    lines: list[Line] = []
    if resume:
        lines, servers = _go_on(world, setup, folder, values)
        began -= sum(line["seconds"] + line.get("evaluate_seconds", 0.0) for line in lines)
    else:
        world.agree(lambda: folder.create(setup.experiment) if world.first else None)
    if world.first and not (out / fitted.DATA).exists():
        world.trouble = _attempt(lambda: folder.keep(lambda path: fitted.keep_data(path, everyone)))
    world.agree(lambda: on_begin(values, lines) if world.first else None)
    keeping = parts.Parts(out, values, run.checkpoint_every, world.rank, world.size)
    due = [False]

    def stopped() -> bool:
        """The first worker says whether to stop and to save: once per round."""
        wanted = world.first and stop()
        save = keeping.due(len(lines), wanted)
        wanted, due[0] = map(bool, world.tell([wanted, save]))
        return wanted

    def keep(line: Line, servers: list[Tree], last: bool) -> None:
        """Record the round; the others hear of a mistake in the next one."""

        def write() -> None:
            if world.first:
                folder.append(line)
            if due[0] or (last and run.checkpoint_every):
                keeping.save(line["round"], servers, setup.clients.private)
            if world.first:
                on_round(line)

        world.trouble = world.trouble or _attempt(write)

    clients = Sharded(world, setup, everyone)
    servers = run_rounds(setup.method, clients, servers, run, lines, on_round=keep, stop=stopped)
    world.agree(lambda: None)
    finished = len(lines) == run.rounds
    told = lines[-1].get("calibration") if finished else None
    temperature = calibration.stored(calibration.read(told)) if told else None
    if finished and run.checkpoint_every:
        _keep_models(world, clients, servers, temperature, folder)
    summary = summarise(setup, everyone, lines, began, workers=world.size)
    world.agree(lambda: folder.finish(summary) if finished and world.first else None)
    world.done = True
    return Result(summary, finished, setup, servers, temperature)


def _check(world: World, experiment: Experiment, folder: record.Folder, *, resume: bool) -> None:
    """Refuse mistakes that need no data."""
    if world.first and not resume:
        folder.refuse_existing()
    if world.first and resume:
        folder.refuse_missing()
    if experiment.run.checkpoint_every:
        checkpoint.require_library()


def _prepare(world: World, experiment: Experiment) -> tuple[Setup, FederatedData]:
    """This worker's part of the run, and the data of all clients on the host.

    Data are read by every worker; notes about them are printed by the first.
    """
    quiet = nullcontext() if world.first else redirect_stderr(StringIO())
    with quiet:
        experiment = concrete(experiment)
        everyone = load(experiment.run)
        clients = len(everyone.names) // len(experiment.run.seeds)
        if world.size > clients:
            raise UserError(
                f"There are {world.size} workers and {clients} clients; each worker needs a client "
                f"of its own, so use at most {clients} workers."
            )
        setup = prepare(experiment, everyone, share=lambda n: share(n, world.size, world.rank))
    return setup, everyone._replace(notes=setup.data.notes)


def _compare(world: World, values: dict[str, Any], everyone: FederatedData) -> None:
    """Refuse a worker with other settings or other data than the first."""
    said = world.ask({"settings": fingerprint(values), "data": _digest(everyone)})
    for rank, one in enumerate(said):
        if one["settings"] != said[0]["settings"]:
            both = world.ask(values)
            changed = ", ".join(differences(both[rank], both[0])).replace(" here", " at worker 0")
            raise UserError(
                f"Worker {rank} was started with other settings than worker 0: {changed}; start "
                "all with the same command."
            )
        if one["data"] != said[0]["data"]:
            raise UserError(
                f"Worker {rank} has other data than worker 0; give all workers the same files, "
                "as on a shared disk."
            )


def _digest(data: FederatedData) -> str:
    """A hash of all points of all clients."""
    found = hashlib.blake2b(digest_size=16)
    for points in (data.train, data.test, data.validation):
        for field in points or ():
            found.update(field.contiguous().numpy().reshape(-1).data)
    return found.hexdigest()


def _go_on(
    world: World, setup: Setup, folder: record.Folder, values: dict[str, Any]
) -> tuple[list[Line], list[Tree]]:
    """Load the newest round that all workers have; a run without one starts again."""
    every = world.ask({str(size): each for size, each in parts.find(folder.path).items()})
    views = [{int(size): each for size, each in found.items()} for found in every]
    written = parts.newest(views)
    clients, servers = setup.clients, setup.servers
    if written[1]:
        total = setup.experiment.run.clients
        mine = share(total, world.size, world.rank)
        servers, clients.private = world.agree(
            lambda: parts.load(folder.path, values, written, servers, clients.private, mine, total)
        )
    # The first worker alone cuts the record; all have the folder, or get the lines from it.
    lines = world.agree(
        lambda: folder.cut_back(setup.experiment, written[1]) if world.first else []
    )
    return world.ask(lines)[0], servers


def _keep_models(
    world: World,
    clients: Sharded,
    servers: list[Tree],
    temperature: Tree | None,
    folder: record.Folder,
) -> None:
    """Each worker makes the models of its clients and predicts; the first writes all of them."""
    personal = f"{calibration.PREFIX}personal"
    own = dict(temperature or {})
    if personal in own:
        own[personal] = clients.of_mine(own[personal])
    trees = clients.setup.trees(servers, own or None)
    mine = fitted.models_of(trees)
    held_out = fitted.held_out_of(trees, mine)
    held_out["row"] = torch.tensor(clients.rows(world.rank))[held_out["row"]]
    models, tested = world.collect(mine), world.collect(held_out)
    if not world.first:
        world.agree(lambda: None)
        return
    rows = torch.tensor([row for rank in range(world.size) for row in clients.rows(rank)])
    joined = dict(models[0])
    for name in joined:
        if name.startswith("personal.") or name in ("weight", personal):
            joined[name] = torch.cat([each[name] for each in models])[rows.argsort()]
    order = torch.cat([each["row"] for each in tested]).argsort(stable=True)
    whole = {k: torch.cat([each[k] for each in tested if k in each])[order] for k in tested[0]}
    world.agree(lambda: folder.keep(lambda path: fitted.keep_trees(path, joined, whole)))


def _attempt(work: Callable[[], None]) -> UserError | None:
    try:
        work()
    except UserError as error:
        return error
    return None
