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
from corefed.base.shown import say_note
from corefed.base.types import Tree
from corefed.data.clients import FederatedData
from corefed.models import own
from corefed.settings import devices
from corefed.settings.config import differences, fingerprint, to_dict
from corefed.settings.run import Experiment
from corefed.training import (
    calibration,
    checkpoint,
    fitted,
    joining,
    measured,
    parts,
    record,
    resuming,
    saving,
)
from corefed.training.loop import Line, run_rounds
from corefed.training.rounds import Result, summarise
from corefed.training.setup import WHOLE, Setup, concrete, load, prepare
from corefed.training.sharded import Sharded, rows_of
from corefed.training.world import World


def train(
    world: World,
    experiment: Experiment,
    out: Path,
    *,
    named: str | None = None,
    resume: bool = False,
    on_begin: Callable[[dict[str, Any], list[Line]], None] = lambda values, lines: None,
    on_round: Callable[[Line], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run an experiment on all workers of `world`; arguments are those of `rounds.train`.

    `named` is the code of a network that the user named, which every worker imports. `on_begin`,
    `on_round` and `stop` are called at the first worker only.
    """
    began = time.perf_counter()
    folder = record.Folder(out)
    resume = bool(world.tell([resume])[0])
    world.agree(lambda: _check(world, experiment, folder, resume=resume))
    setup, everyone = world.agree(lambda: _prepare(world, experiment, out, named))
    run, servers, values = setup.experiment.run, setup.servers, to_dict(setup.experiment)
    _compare(world, values, everyone)
    shard = parts.Shard(setup.clients, rows_of(run, share(run.clients, world.size, world.rank)))
    lines: list[Line] = []
    if resume:
        world.agree(lambda: resuming.refuse_other_data(out, everyone) if world.first else None)
        lines, servers = _go_on(world, setup, shard, folder, values)
        began -= sum(line["seconds"] + line.get("evaluate_seconds", 0.0) for line in lines)
    else:
        world.agree(lambda: folder.create(setup.experiment) if world.first else None)
    if world.first and not (out / fitted.DATA).exists():
        world.trouble = _attempt(lambda: folder.keep(lambda path: saving.keep_data(path, everyone)))
    world.agree(lambda: on_begin(values, lines) if world.first else None)
    saves = world.agree(lambda: _checkpoints(world, setup, shard, out, values))
    due = [False]

    def stopped() -> bool:
        """The first worker says whether to stop and to save: once per round."""
        wanted, save = world.first and stop(), [False]

        def ask() -> None:  # raises what went wrong with the save before
            save[0] = saves is not None and saves.due(len(lines), wanted)

        world.trouble = world.trouble or _attempt(ask)
        wanted, due[0] = map(bool, world.tell([wanted, save[0]]))
        return wanted

    def keep(line: Line, servers: list[Tree], last: bool) -> None:
        """Record the round; the others hear of a mistake in the next one."""

        def write() -> None:
            if world.first:
                folder.append(line)
            if saves is not None and (due[0] or last):
                if world.first:
                    parts.remove_others(out, values, world.size)
                saves.save(line["round"], servers, shard.take)
            if world.first:
                on_round(line)

        world.trouble = world.trouble or _attempt(write)

    clients = Sharded(
        world, setup, everyone, saves.mark if saves is not None else lambda rows: None
    )
    with saves if saves is not None else nullcontext():
        servers = run_rounds(
            setup.method, clients, servers, run, lines, on_round=keep, stop=stopped
        )
        world.agree(lambda: saves.close() if saves is not None else None)
    if world.first and saves is not None:
        parts.remove_others(out, values, world.size)
    finished = len(lines) == run.rounds
    told = lines[-1].get("calibration") if finished else None
    temperature = calibration.stored(calibration.read(told)) if told else None
    if finished and run.checkpoint_every:
        _keep_models(world, clients, servers, temperature, folder)
    summary = summarise(setup, everyone, lines, began, saves, workers=world.size)
    for note in saves.pace.notes if world.first and saves is not None else ():
        say_note(note)
    if finished and world.first:
        summary |= measured.section(out, summary)
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
    devices.refuse(experiment.run, "A run of several workers")
    if experiment.run.patience:
        raise UserError(
            "Workers cannot stop early yet: leave out patience, or train in one process without "
            "--workers."
        )


def _prepare(
    world: World, experiment: Experiment, out: Path | None = None, named: str | None = None
) -> tuple[Setup, FederatedData]:
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
        setup = prepare(
            experiment,
            everyone,
            own.named(named),
            folder=out,
            share=lambda n: share(n, world.size, world.rank),
            beside=world.beside,
        )
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
    world: World, setup: Setup, shard: parts.Shard, folder: record.Folder, values: dict[str, Any]
) -> tuple[list[Line], list[Tree]]:
    """Load the newest round that all workers have; a run without one starts again."""
    found = world.agree(lambda: parts.find(folder.path, values))
    every = world.ask({str(size): each for size, each in found.items()})
    written = parts.newest([{int(size): each for size, each in one.items()} for one in every])
    servers, total = setup.servers, setup.experiment.run.clients
    if written[1]:
        servers = world.agree(
            lambda: parts.restore(folder.path, values, written, servers, shard, total)
        )
    # The first worker alone cuts the record; the others get the lines from it.
    lines = world.agree(
        lambda: folder.cut_back(setup.experiment, written[1]) if world.first else []
    )
    # Saves that the others do not have, or that belong to another course of the run
    last = written[1] if written[0] == world.size else 0
    part = parts.name(world.rank, world.size)
    world.agree(lambda: checkpoint.forget(folder.path, values, part, after=last))
    return world.ask(lines)[0], servers


def _checkpoints(
    world: World, setup: Setup, shard: parts.Shard, out: Path, values: dict[str, Any]
) -> checkpoint.Checkpoints | None:
    """Those of this worker's clients; the first save has all that were restored from others'."""
    run = setup.experiment.run
    if not run.checkpoint_every:
        return None
    saves = checkpoint.Checkpoints(
        out, values, run.checkpoint_every, run.checkpoint_share, run.checkpoint_minutes,
        part=parts.name(world.rank, world.size),
    )  # fmt: skip
    if not saves.begun:
        saves.mark(
            [shard.rows[i] for i in setup.clients.store.touched.nonzero().flatten().tolist()]
        )
    return saves


def _keep_models(
    world: World,
    clients: Sharded,
    servers: list[Tree],
    temperature: Tree | None,
    folder: record.Folder,
) -> None:
    """Each worker writes the models of its clients, and predictions; the first joins them."""
    setup, run, personal = (
        clients.setup,
        clients.setup.experiment.run,
        f"{calibration.PREFIX}personal",
    )
    own = dict(temperature or {})
    if personal in own:
        own[personal] = clients.of_mine(own[personal])
    store, every = setup.clients.store, run.clients * len(run.seeds)
    touched = world.gather(torch.tensor([bool(store.touched.all()), bool(store.touched.any())]))
    some = store.layout.content * every > WHOLE and not bool(touched[:, 0].all())
    trees = setup.trees(servers, own or None)._replace(touched=store.touched if some else None)
    part = parts.name(world.rank, world.size)
    world.agree(lambda: folder.keep(lambda path: joining.keep_part(path, part, trees)))
    owned = {
        parts.name(rank, world.size): rows_of(run, each)
        for rank, each in enumerate(clients.shares)
        if not some or bool(touched[rank, 1])
    }

    def join() -> None:
        if world.first:
            folder.keep(lambda path: joining.join(path, owned, run.clients, temperature))

    world.agree(join)


def _attempt(work: Callable[[], None]) -> UserError | None:
    try:
        work()
    except UserError as error:
        return error
    return None
