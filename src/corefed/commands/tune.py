"""`corefed tune`: find settings by validation points."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corefed.base.errors import INTERRUPTED, UserError
from corefed.base.progress import loading
from corefed.base.shown import say
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
    from corefed.training.candidates import Plan
    from corefed.training.search import Found

EXAMPLES = """Examples:

corefed tune --method pfedbayes — 16 candidates of its learning rate, zeta and initial width.

corefed tune --data table:patients.csv --target outcome --client site --candidates 32

corefed tune --space eta_1=0.0003..0.03 --space zeta=0.01,0.1,1 — these two settings only.

corefed tune --method fedavg --space learning_rate --space local_steps=5,20,50

corefed tune --resume runs/tune-digits-pfedbayes-20250101-120000 — after Ctrl-C or a crash.

corefed run --config runs/tune-.../experiment.toml — train with what was found.

`corefed run --help` explains the options that both commands have."""


def tune(
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
    candidates: Annotated[
        int | None,
        typer.Option(help="Settings to try, the given ones included; 16 by default."),
    ] = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            help="A setting to search: KEY=LOW..HIGH, KEY=A,B,C, or KEY for the method's own "
            "range. May be repeated; without it the method's own settings are searched.",
            metavar="KEY=RANGE",
        ),
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(help="Share of each client's training points to choose by; 0.2 by default."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write; runs/tune-<data>-<method>-<time> by default."),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the search in this folder.", metavar="DIR")
    ] = None,
    assignments: SettingOptions = None,
    data_dir: DataDir = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Find good settings for your data: candidates compete by validation NLL, half drop out early.

    Test points are not used. It ends with a table, a picture, and a file for `corefed run`.
    """
    with loading("PyTorch", silent=quiet or json):  # seconds, the first time
        from corefed.settings.config import resolve
        from corefed.training import candidates as planning
        from corefed.training import record
        from corefed.training.search_folder import SearchFolder

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
        validation=validation,
    )
    if resume is None:
        experiment = resolve(config, given, assignments or [])
        if not experiment.run.validation and not _names_validation(given, assignments or []):
            given["validation"] = planning.VALIDATION
            experiment = resolve(config, given, assignments or [])
        number = planning.CANDIDATES if candidates is None else candidates
        plan = planning.plan(experiment, space, number)
        run = experiment.run
        folder = out or record.default_folder(f"tune-{run.data}", run.method)
    else:
        if out is not None or space or candidates is not None:
            raise UserError(
                "--resume goes on in its own folder, with its own space and candidates; leave out "
                "--out, --space and --candidates."
            )
        folder = resume
        searched = SearchFolder(folder)
        there = searched.read()
        experiment = resolve(config or searched.settings_file(), given, assignments or [])
        plan = planning.resumed(experiment, there["config"])
    named = named_code(experiment.run.model, given, assignments or [])
    found = _search(plan, folder, named, resume=resume is not None, silent=quiet or json)
    if found is None:
        raise typer.Exit(INTERRUPTED)
    _show(found.report, folder, quiet=quiet, json=json)


def _names_validation(given: Mapping[str, object], assignments: Sequence[str]) -> bool:
    keys = [each.partition("=")[0].strip() for each in assignments]
    return "validation" in {*given, *keys}


def _search(
    plan: Plan, folder: Path, named: str | None, *, resume: bool, silent: bool
) -> Found | None:
    """Search, showing every round; None after Ctrl-C, which is explained.

    `named` is the network if the command line names it.
    """
    from corefed.models import own
    from corefed.training.interrupt import stop_on_interrupt
    from corefed.training.search import search
    from corefed.training.search_folder import SETTINGS
    from corefed.training.search_progress import search_progress

    code = f" --model {named}" if named is not None and own.is_own(named) else ""
    hint = f"go on with: corefed tune --resume {shlex.quote(str(folder))}{code}"
    factory = own.named(named)
    try:
        with (
            stop_on_interrupt(folder, SETTINGS) as stop,
            search_progress(silent=silent) as show,
        ):
            found = search(
                plan,
                folder,
                factory=factory,
                resume=resume,
                on_round=show,
                stop=lambda: bool(stop),
            )
    except KeyboardInterrupt:
        begun = (folder / SETTINGS).exists()
        say(f"stopped inside a round; {hint}" if begun else "nothing written", file=sys.stderr)
        return None
    if not found.finished:
        most = max(each["round"] for each in found.report["candidates"])
        say(f"stopped after round {most}; {hint}", file=sys.stderr)
        return None
    return found


def _show(found: dict[str, Any], folder: Path, *, quiet: bool, json: bool) -> None:
    from corefed.show import report, tuning

    tuning.picture(found, folder / tuning.PICTURE)
    if json:
        say(jsonlib.dumps(found, indent=1))
    elif quiet:
        say(folder)
    else:
        report.console().print(tuning.table(found))
        for sentence in tuning.sentences(found, folder):
            say(sentence)
        say(f"written to {folder}")
