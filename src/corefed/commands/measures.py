"""`corefed measures`: how well a run's models tell classes apart, in all and per client."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from corefed.base.errors import UserError
from corefed.base.shown import say
from corefed.commands.options import Json, RunFolder, Seed

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = """Examples:

corefed measures runs/site-model

corefed measures runs/site-model --client north --json"""

SHOWN = ("auroc", "auprc", "sensitivity", "specificity", "f1")
NAMES = {"auroc": "AUROC", "auprc": "AUPRC", "f1": "F1"}


def measures(
    folder: RunFolder,
    client: Annotated[str | None, typer.Option(help="One client; all if not given.")] = None,
    model: Annotated[
        str | None, typer.Option(help="personal or global; personal where there is one.")
    ] = None,
    seed: Seed = None,
    json: Json = False,
) -> None:
    """AUROC, AUPRC, sensitivity, specificity, F1 and confusion matrix on the held-out points."""
    from corefed.show import report
    from corefed.training import classification, fitted
    from corefed.use import review  # torch takes a second

    if model not in (None, "personal", "global"):
        raise UserError(f"--model is {model!r}; it must be personal or global.")
    run = fitted.load(folder, client=client or "")
    g, _ = run.place(run.names[0] if client is None else client, seed)
    kind = review.kind_of(run, model or "")
    labels = run.preparations[g].labels
    if not labels:
        raise UserError(
            f"The run in {folder} predicts numbers, which have RMSE and NLL (corefed compare); "
            "these measures are of classes."
        )
    found = classification.of_run(run, kind, g, client)
    if found is None:
        raise UserError(f"The run in {folder} has no held-out points of a {kind} model.")
    if json:
        about = {"folder": str(folder), "client": client, "model": kind}
        print(jsonlib.dumps({**about, **found}, indent=1))
        return
    screen = report.console()
    whose = "all clients" if client is None else client
    screen.print(_by_class(found, f"{kind} model of {whose}: {found['points']} held-out points"))
    if found.get("by_client") and len(found["by_client"]) > 1:
        screen.print(_by_client(found["by_client"], labels))
    screen.print(_confusion(found["confusion"], labels))
    say(classification.how(found, len(labels)))


def cell(value: dict[str, Any]) -> str:
    """`0.912 (0.88 to 0.94)`."""
    if value["value"] is None:
        return "-"
    ends = value["interval"]
    return f"{value['value']:.3f}" + (f" ({ends[0]:.2f}-{ends[1]:.2f})" if ends else "")


def _by_class(found: dict[str, Any], title: str) -> Table:
    from rich.table import Table

    shown = Table(title=title, caption="95 % intervals")
    for name in ("class", "points", *(NAMES.get(each, each) for each in SHOWN)):
        shown.add_column(name, justify="left" if name == "class" else "right")
    for label, each in found["classes"].items():
        shown.add_row(label, str(each["points"]), *(cell(each[name]) for name in SHOWN))
    return shown


def _by_client(each: dict[str, Any], labels: tuple[str, ...]) -> Table:
    """Of two classes those of the second one; of more, means over classes."""
    from rich.table import Table

    shown = Table(title=f"by client, class {labels[1]}" if len(labels) == 2 else "by client")
    names = SHOWN if len(labels) == 2 else ("AUROC, mean over classes",)
    for name in ("client", "points", "accuracy", *(NAMES.get(name, name) for name in names)):
        shown.add_column(name, justify="left" if name == "client" else "right")
    for client, found in each.items():
        if len(labels) == 2:
            cells = [cell(found["classes"][labels[1]][name]) for name in SHOWN]
        else:
            cells = ["-" if found["auroc"] is None else f"{found['auroc']:.3f}"]
        shown.add_row(client, str(found["points"]), cell(found["accuracy"]), *cells)
    return shown


def _confusion(counts: list[list[int]], labels: tuple[str, ...]) -> Table:
    from rich.table import Table

    shown = Table(title="confusion matrix")
    shown.add_column("true, predicted")
    for label in labels:
        shown.add_column(label, justify="right")
    for label, row in zip(labels, counts, strict=True):
        shown.add_row(label, *map(str, row))
    return shown
