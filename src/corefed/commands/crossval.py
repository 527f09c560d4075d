"""`corefed crossval`: test every row once, by folds or by sites that are left out."""

from __future__ import annotations

import json as jsonlib
import statistics
import sys
from typing import Annotated

import typer

from corefed.base.errors import UserError
from corefed.base.shown import say
from corefed.commands.options import (
    ClientColumn,
    Clients,
    ConfigFile,
    DataDir,
    DataName,
    Device,
    Json,
    MethodName,
    ModelName,
    PartitionName,
    Rounds,
    Seeds,
    SettingOptions,
    Target,
    run_flags,
)

EXAMPLES = """Examples:

corefed crossval --data table:patients.csv --target outcome --client site — five folds of rows.

corefed crossval --data table:patients.csv --target outcome --client site --repeats 5

corefed crossval --data table:patients.csv --target outcome --client site --sites

`corefed run --help` explains the options that both commands have."""

HEADINGS = {"accuracy": "accuracy %", "nll": "NLL", "ece": "ECE", "brier": "Brier", "rmse": "RMSE"}


def crossval(
    config: ConfigFile = None,
    method: MethodName = None,
    data: DataName = None,
    target: Target = None,
    client: ClientColumn = None,
    partition: PartitionName = None,
    clients: Clients = None,
    rounds: Rounds = None,
    model: ModelName = None,
    seed: Seeds = None,
    device: Device = None,
    folds: Annotated[int, typer.Option(help="Parts of each client's rows.", min=2, max=100)] = 5,
    sites: Annotated[
        bool,
        typer.Option("--sites", help="Leave one client out at a time, in place of folds of rows."),
    ] = False,
    repeats: Annotated[
        int, typer.Option(help="Do it so many times, with other folds.", min=1, max=100)
    ] = 1,
    assignments: SettingOptions = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Test every row once: by folds of each client's rows, or each site by the others' model.

    Nothing is written. With --sites the scores are those of the shared model on a site that took no
    part; without, those of personal models.
    """
    from corefed.settings.config import resolve  # torch takes a second
    from corefed.training import crossval as validating

    if seed and len(",".join(seed).split(",")) > 1:
        raise UserError(
            "crossval begins with one seed; give one --seed, and --repeats for other splits."
        )
    flags = run_flags(
        method=method, data=data, target=target, client=client, partition=partition,
        clients=clients, rounds=rounds, model=model, seed=seed, device=device, data_dir=data_dir,
    )  # fmt: skip
    experiment = resolve(config, flags, assignments or [])
    found: list[validating.Fold] = []
    way = (
        validating.over_sites(experiment, repeats)
        if sites
        else validating.over_rows(experiment, folds, repeats)
    )
    for fold in way:
        found.append(fold)
        scores = "  ".join(f"{HEADINGS[k]} {_shown(k, v)}" for k, v in fold.metrics.items())
        say(f"{fold.name}: {fold.points} rows  {scores}", file=sys.stderr)
    names = list(found[0].metrics)
    means = {name: validating.interval(found, name, sites=sites) for name in names}
    best = [each.best_round for each in found if each.best_round]
    if json:
        told = {name: each._asdict() for name, each in means.items()}
        each_fold = [each._asdict() for each in found]
        print(jsonlib.dumps({"folds": each_fold, "mean": told, **_rounds(best)}, indent=1))
        return
    from rich.table import Table

    from corefed.show.report import console

    what = "sites that took no part" if sites else f"{len(found) // repeats} folds"
    what += f", {repeats} times" if repeats > 1 else ""
    run = experiment.run
    table = Table("", "rows", title=f"{run.method} on {run.data}, {what}")
    for name in names:
        table.add_column(HEADINGS[name], justify="right")
    for each in found:
        cells = (_shown(name, each.metrics[name]) for name in names)
        table.add_row(each.name, str(each.points), *cells)
    table.add_section()
    cells = (_shown(name, *means[name]) for name in names)
    table.add_row("mean", str(sum(each.points for each in found) // repeats), *cells)
    table.caption = (
        "mean ± half of the 95 % interval over sites"
        if sites
        else "mean ± half of the 95 % interval, corrected for what trainings have in common"
    )
    console().print(table)
    if best:
        say(
            f"Best after {min(best)} to {max(best)} rounds, {_rounds(best)['best_round']} in the "
            "median: so many for a final fit on all points."
        )


def _rounds(best: list[int]) -> dict[str, int]:
    """The median of the best rounds, where trainings stop early."""
    return {"best_round": round(statistics.median(best))} if best else {}


def _shown(name: str, value: float, half: float | None = None) -> str:
    factor, digits = (100, 2) if name == "accuracy" else (1, 3)
    text = f"{factor * value:.{digits}f}"
    if half is None or half != half:  # no interval
        return text
    return f"{text} ± {factor * half:.{digits}f}"
