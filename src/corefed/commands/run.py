"""`corefed run`: train a federation."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corefed.base.errors import INTERRUPTED, UserError
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
    assignments: SettingOptions = None,
    data_dir: DataDir = None,
    track: Annotated[
        list[str] | None,
        typer.Option(help="Log to mlflow or tensorboard too. May be repeated.", metavar="TOOL"),
    ] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a federation and evaluate it. With no option: coreset-pfedbayes on the digits."""
    from corefed.settings.config import resolve
    from corefed.show import report, tracking  # torch takes a second
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
        if out is not None:
            raise UserError("--resume goes on in its own folder; leave out --out.")
        record.Folder(resume).refuse_missing()
        config = config or resume / record.EXPERIMENT
    experiment = resolve(config, given, assignments or [])
    folder = resume or out or record.default_folder(experiment.run.data, experiment.run.method)
    trained = _train(experiment, folder, followers, resume=resume is not None, silent=quiet or json)
    if trained is None:
        raise typer.Exit(INTERRUPTED)
    if json:
        print(jsonlib.dumps(trained.summary, indent=1))
    elif quiet:
        print(folder)
    else:
        report.console().print(report.metrics_table(trained.summary))
        if said := _said_of_checkpoints(trained.summary):
            print(said)
        print(f"written to {folder}")


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


def _train(
    experiment: Experiment, folder: Path, followers: list[str], *, resume: bool, silent: bool
) -> Result | None:
    """Train, showing and following every round; None after Ctrl-C, which is explained."""
    from corefed.show import tracking
    from corefed.training import record, rounds  # torch takes a second
    from corefed.training.interrupt import stop_on_interrupt
    from corefed.training.progress import progress

    if experiment.run.checkpoint_every:
        hint = f"go on with: corefed run --resume {shlex.quote(str(folder))}"
    else:
        hint = "it has no checkpoint (checkpoint_every = 0) to go on from"
    try:
        with (
            tracking.following(followers, folder) as trackers,
            stop_on_interrupt(folder) as stop,
            progress(experiment.run.rounds, silent=silent) as show,
        ):
            for name in tracking.forgotten(followers, folder) if resume else []:
                print(f"note: {name} followed this run; --track {name} goes on", file=sys.stderr)

            def on_round(line: dict[str, Any]) -> None:
                show(line)
                trackers.round(line)

            trained = rounds.train(
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
        print(f"stopped inside a round; {hint}" if begun else "nothing written", file=sys.stderr)
        return None
    if not trained.finished:
        print(f"stopped after round {trained.summary['rounds']}; {hint}", file=sys.stderr)
        return None
    return trained
