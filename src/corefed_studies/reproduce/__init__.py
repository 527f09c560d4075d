"""Experiments behind the tables and figures of the paper and of `docs/`, one command each.

Every run is an ordinary run folder. So a command that was stopped continues where it was, and
`corefed compare` reads the parts. `--scale paper` is what the documentation shows; `quick` is the
same code on less data and fewer rounds.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from corefed.base.errors import UserError
from corefed_studies import pages


class Study(NamedTuple):
    """Where an experiment is, and which options of the command line it takes."""

    module: str  # in this package, or with the name of its own
    function: str
    description: str
    folder: str = ""  # whose runs it uses; empty: its own
    options: tuple[str, ...] = ()  # of `main`, beside name, scale and out


TABLE = ("jobs", "results", "page")
LEADERS = (*TABLE, "minutes")

NAMES = {
    "table1": Study("table1", "reproduce", "every method on MNIST, Fashion-MNIST, CIFAR-10",
                    options=TABLE),
    "table2": Study("table2", "reproduce", "chest X-rays at two hospitals, by class",
                    options=(*TABLE, "data")),
    "table3": Study("table3", "reproduce", "rounds and bytes to a target accuracy, by coreset size",
                    folder="table1", options=TABLE),
    "figure2": Study("figure2", "reproduce", "coresets of a spatial regression",
                     options=("data", "postcodes")),
    "figure3": Study("figure3", "reproduce", "KL between posteriors over rounds"),
    "figure4": Study("figure4", "reproduce", "training loss with and without the KL term"),
    "figure5": Study("table3", "reproduce_figure5", "accuracy over rounds, by coreset size",
                     folder="table1", options=("jobs", "results")),
    "shards-medium": Study("shards", "reproduce", "full data, coresets, random subsets",
                           options=TABLE),
    "shards-large": Study("shards", "reproduce", "the same with 4500 points per client",
                          options=TABLE),
    "solvers": Study("subsets", "reproduce_solvers", "what the solver does to accuracy"),
    "grid": Study("subsets", "reproduce_grid", "fractions by local steps: no collapse"),
    "glm": Study("glm", "reproduce", "coresets of generalised linear models against MCMC"),
    "newcomer": Study("newcomer", "reproduce", "a client that joins after training, by its points",
                      options=("results", "page")),
    "rates": Study("rates.study", "reproduce", "error against points, beside the rate of Theorem 2",
                   options=TABLE),
    "pfllib": Study("corefed_studies.leaders.study", "reproduce",
                    "the field's leaders on PFLlib's setting", folder="leaders", options=LEADERS),
    "niid-bench": Study("corefed_studies.leaders.study", "reproduce",
                        "shared models on NIID-Bench's settings", folder="leaders",
                        options=LEADERS),
    "own-problems": Study("corefed_studies.leaders.study", "reproduce",
                          "the leaders on shards-medium and the chest X-rays", folder="leaders",
                          options=LEADERS),
    "cifar10": Study("corefed_studies.leaders.study", "reproduce",
                     "CIFAR-10, a residual network with crops and flips, 300 rounds",
                     folder="leaders", options=LEADERS),
}  # fmt: skip


def main(name: str, scale: str, out: Path | None = None, **options: object) -> None:
    """Run what `name` needs, then write `NAME.md`, and pictures where it has them."""
    if name not in NAMES:
        raise UserError(f"There is no table or figure {name!r}; there are {', '.join(NAMES)}.")
    entry = NAMES[name]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in entry.options:
            able = [n for n, e in NAMES.items() if key in e.options]
            flag = "from" if key == "results" else key
            raise UserError(f"--{flag} is for {', '.join(able)}; {name} does not take it.")
    folder = out or Path("runs") / f"reproduce-{entry.folder or name}-{scale}"
    new = not folder.exists()
    pages.make(folder)
    console = Console(stderr=True)
    place = entry.module if entry.module.startswith("corefed_studies.") else None
    module = import_module(place or f"corefed_studies.reproduce.{entry.module}")
    function = getattr(module, entry.function)
    try:
        function(name, scale, folder, console, **given)
    except UserError:
        if new:  # and empty still: what was asked for could not be done
            with suppress(OSError):
                folder.rmdir()
        raise
    console.print(f"written to {folder / f'{name}.md'}")
