"""`corefed run`: train a federation."""

from __future__ import annotations

import json as jsonlib
import os
import shlex
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from corefed.base.errors import INTERRUPTED, LOST, UserError
from corefed.base.place import Place, find_place
from corefed.base.progress import loading
from corefed.base.shown import say
from corefed.commands import workers as launcher
from corefed.commands.options import (
    Channels,
    ClientColumn,
    Clients,
    ConfigFile,
    DataDir,
    DataName,
    Device,
    Fraction,
    Hidden,
    Json,
    LocalSteps,
    MethodName,
    ModelName,
    PartitionName,
    Quiet,
    Rounds,
    Seeds,
    SettingOptions,
    Target,
    named_code,
    run_flags,
)

if TYPE_CHECKING:
    from corefed.settings.run import Experiment
    from corefed.training.rounds import Result

EXAMPLES = """Examples:

corefed run — ten clients learn the built-in digits on coresets.

corefed run --data mnist --partition shards-medium --fraction 0.1 --rounds 100 --seed 0,1,2

corefed run --method random-subset --fraction 0.1 --set redraw_every=100 --out runs/random

corefed run --data table:patients.csv --target outcome --client site --set ignore=patient

corefed run --config experiment.toml --hidden 200,100 --set zeta=10

corefed run --model nets:make — nets.py in this folder has def make(inputs, outputs).

corefed run --final runs/chosen — once settings are chosen: the same on all points.

corefed run --resume runs/random — after a crash or Ctrl-C; ends as if it had never stopped.

Settings without a flag are given by --set; `corefed methods NAME --all` lists them."""


def run(
    config: ConfigFile = None,
    method: MethodName = None,
    data: DataName = None,
    target: Target = None,
    client: ClientColumn = None,
    partition: PartitionName = None,
    clients: Clients = None,
    rounds: Rounds = None,
    local_steps: LocalSteps = None,
    fraction: Fraction = None,
    model: ModelName = None,
    hidden: Hidden = None,
    channels: Channels = None,
    seed: Seeds = None,
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; runs/<data>-<method>-<time> by default.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this folder.", metavar="DIR")
    ] = None,
    final: Annotated[
        Path | None,
        typer.Option(
            help="Fit on all points, with the settings of the run or search in this folder.",
            metavar="DIR",
        ),
    ] = None,
    assignments: SettingOptions = None,
    data_dir: DataDir = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Log to mlflow or tensorboard too. May be repeated.", metavar="TOOL"),
    ] = None,
    workers: Annotated[
        int,
        typer.Option(help="Processes that share the clients; one per GPU, or per few CPU cores."),
    ] = 1,
    worker_timeout: Annotated[
        float, typer.Option(help="Seconds that a worker waits for the others to start.")
    ] = 60.0,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a federation and evaluate it. With no option: coreset-pfedbayes on the digits."""
    place = _place(workers, worker_timeout, out or resume)
    if resume is not None and out is not None:
        raise UserError("--resume goes on in its own folder; leave out --out.")
    if final is not None and (resume is not None or config is not None):
        raise UserError(
            "--final takes all settings from its folder; leave out --resume and --config."
        )
    with loading("PyTorch", silent=quiet or json):  # seconds, the first time
        from corefed.settings.config import resolve
        from corefed.show import report, tracking
        from corefed.training import final as last
        from corefed.training import record

    given = run_flags(
        method=method,
        data=data,
        target=target,
        client=client,
        partition=partition,
        clients=clients,
        rounds=rounds,
        local_steps=local_steps,
        fraction=fraction,
        model=model,
        hidden=hidden,
        channels=channels,
        seed=seed,
        device=device,
        data_dir=data_dir,
    )
    followers = tracking.names(track or [])
    if resume is not None:
        record.Folder(resume).refuse_missing()
        config = config or record.settings_file(resume)
    if final is not None:
        config = record.settings_file(final)
        changed, said = last.settings(final)
        given = changed | given
        if said and not (quiet or json):
            say(f"final fit: {said}", file=sys.stderr)
    experiment = resolve(config, given, assignments or [])
    folder = resume or out or record.default_folder(experiment.run.data, experiment.run.method)
    if place is None and workers > 1:
        here = click.get_current_context()
        named = [] if out or resume else [f"--out={folder}"]
        raise typer.Exit(launcher.launch(workers, here, *named))
    resuming, silent = resume is not None, quiet or json
    code = named_code(experiment.run.model, given, assignments or [])
    if place is not None:
        timeout = worker_timeout
        trained = _work(place, timeout, experiment, folder, followers, resuming, silent, code)
    else:
        trained = _train(experiment, folder, followers, resume=resuming, silent=silent, named=code)
    if trained is None:
        raise typer.Exit(INTERRUPTED)
    if place is not None and place.rank > 0:
        return
    if json:
        say(jsonlib.dumps(trained.summary, indent=1))
    elif quiet:
        say(folder)
    else:
        report.console().print(report.metrics_table(trained.summary))
        if said := _said_of_checkpoints(trained.summary):
            say(said)
        say(f"written to {folder}")


def _said_of_checkpoints(summary: dict[str, Any]) -> str:
    """How much a crash could have cost; empty where nothing was written."""
    about = summary.get("checkpoints", {"written": 0})
    if not about["written"]:
        return ""
    count = "1 checkpoint" if about["written"] == 1 else f"{about['written']} checkpoints"
    return (
        f"{count} in {about['seconds']:.1f} s; a crash would have lost at most "
        f"{about['longest_gap_seconds']:.1f} s"
    )


def _place(workers: int, timeout: float, folder: Path | None) -> Place | None:
    """Where this process stands among others that train together; None: it is alone."""
    if workers < 1:
        raise UserError(f"--workers is {workers}; it must be at least 1.")
    if not timeout > 0:
        raise UserError(f"--worker-timeout is {timeout:g}; it must be above 0 seconds.")
    place = find_place(os.environ)
    if place is None:
        return None
    if workers > 1:
        raise UserError(
            f"This is worker {place.rank} of {place.size} already, as the environment says; leave "
            "out --workers."
        )
    if folder is None:
        raise UserError(
            "Workers that torchrun or Slurm starts need the name of the run's folder; give --out."
        )
    # Torch's own lines about sockets would be in front of our sentence; read when it is loaded.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    return place


def _work(
    place: Place,
    timeout: float,
    experiment: Experiment,
    folder: Path,
    followers: list[str],
    resume: bool,
    silent: bool,
    named: str | None,
) -> Result | None:
    """Train as one of several workers. Only the first prints, writes and hears Ctrl-C."""
    from corefed.training import distributed, record  # torch takes a second
    from corefed.training.world import CommonError, WorkerLostError, joined

    launcher.follow_parent()
    first = place.rank == 0
    if not first:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    resume = resume or (place.restarted and record.begun(folder))
    try:
        with joined(place, experiment.run.device, timeout) as world:
            run = partial(distributed.train, world, named=named)
            if first:
                return _train(
                    experiment,
                    folder,
                    followers,
                    resume=resume,
                    silent=silent,
                    named=named,
                    run=run,
                )
            try:
                trained = run(experiment, folder, resume=resume)
            except UserError as error:
                raise CommonError(str(error)) from error
            return trained if trained.finished else None
    except CommonError:
        if first:
            raise
        raise typer.Exit(2) from None  # the first one says why
    except WorkerLostError:
        if first and launcher.PARENT not in os.environ:
            say(
                "error: another worker has ended; started again or resumed, the run goes on from "
                "its last checkpoint.",
                file=sys.stderr,
            )
        raise typer.Exit(LOST) from None


def _train(
    experiment: Experiment,
    folder: Path,
    followers: list[str],
    *,
    resume: bool,
    silent: bool,
    named: str | None,
    run: Callable[..., Result] | None = None,
) -> Result | None:
    """Train, showing and following every round; None after Ctrl-C, which is explained.

    `named` is the network if the command line names it. `run` takes the place of `rounds.train`.
    """
    from corefed.base.locks import made_exclusively
    from corefed.models import own
    from corefed.show import tracking
    from corefed.training import record, rounds  # torch takes a second
    from corefed.training.interrupt import stop_on_interrupt
    from corefed.training.progress import progress

    if experiment.run.checkpoint_every:
        code = f" --model {named}" if named is not None and own.is_own(named) else ""
        hint = f"go on with: corefed run --resume {shlex.quote(str(folder))}{code}"
    else:
        hint = "it has no checkpoint (checkpoint_every = 0) to go on from"
    if not resume:
        record.Folder(folder).refuse_existing()
    # torchrun passes a terminal's Ctrl-C on, which reaches the worker already.
    apart = 1.0 if run is not None and launcher.PARENT not in os.environ else 0.0
    try:
        with (
            made_exclusively(folder, "choose another --out"),
            tracking.following(followers, folder) as trackers,
            stop_on_interrupt(folder, apart=apart) as stop,
            progress(experiment.run.rounds, silent=silent) as show,
        ):
            for name in tracking.forgotten(followers, folder) if resume else []:
                say(f"note: {name} followed this run; --track {name} goes on", file=sys.stderr)

            def on_round(line: dict[str, Any]) -> None:
                show(line)
                trackers.round(line)

            trained = (run or partial(rounds.train, factory=own.named(named)))(
                experiment,
                folder,
                resume=resume,
                on_begin=trackers.start,
                on_round=on_round,
                stop=lambda: bool(stop),
            )
            trackers.finish(trained.summary, "finished" if trained.finished else "stopped")
    except KeyboardInterrupt:
        begun = record.begun(folder)
        say(f"stopped inside a round; {hint}" if begun else "nothing written", file=sys.stderr)
        return None
    if not trained.finished:
        say(f"stopped after round {trained.summary['rounds']}; {hint}", file=sys.stderr)
        return None
    return trained
