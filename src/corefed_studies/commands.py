"""`corefed bench`, `reproduce` and `theory`: the studies, as commands.

`corefed.commands.cli` adds them to the command line where this package is found: in a checkout.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from corefed.base.errors import UserError
from corefed.commands.options import Json
from corefed_studies import bench as benchmarks
from corefed_studies import reproduce as experiments
from corefed_studies.bench import Benchmark
from corefed_studies.reproduce import Study

Options = Mapping[str, Benchmark] | Mapping[str, Study]


def _list(entries: Options) -> str:
    """Names with what they do; typer and click do not always show the help of an argument."""
    return "Names:\n\n" + "\n\n".join(f"{name}: {e.description}." for name, e in entries.items())


def bench(
    name: Annotated[str, typer.Argument(help="One of the names below.")],
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for the numbers.")] = None,
    scale: Annotated[
        str, typer.Option(help="`quick` or `paper`; ignored by runtime and coreset.")
    ] = "paper",
    page: Annotated[
        Path | None,
        typer.Option(
            help="engine, pfl, neighbours, solvers, selectors, defaults: a Markdown page for "
            "tables."
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="selectors, defaults: runs at the same time; chosen by the machine if not given."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="pfl: rounds to train; by default those of the setting.")
    ] = None,
    sources: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="engine, pfl, selectors, defaults: show this result file, train nothing. engine "
            "and pfl take several, each with its own --from. tables: another checkout to measure.",
        ),
    ] = None,
    parts: Annotated[
        str, typer.Option(help="pays: only these parts, with commas, such as nuts,passes.")
    ] = "",
) -> None:
    """Measure speed, memory and quality on this machine."""
    _check_scale(scale)
    _check_jobs(jobs)
    if rounds is not None and rounds < 1:
        raise UserError(f"--rounds is {rounds}; it must be at least 1.")
    benchmarks.main(
        name, device=device, out=out, scale=scale, page=page, jobs=jobs, rounds=rounds,
        sources=tuple(sources or ()), parts=tuple(part for part in parts.split(",") if part),
    )  # fmt: skip


def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="table1, table2, table3, figure2 to figure5; shards-medium, shards-large, grid, "
            "solvers, glm, newcomer, rates; pfllib, niid-bench, own-problems, cifar10."
        ),
    ],
    scale: Annotated[
        str, typer.Option(help="quick: minutes on two cores; paper: what the documentation shows.")
    ] = "quick",
    out: Annotated[Path | None, typer.Option(help="Folder for the runs.")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Tables: runs at the same time; chosen by the machine if not given."),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--from", help="Tables: make them from this result file, train nothing."),
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Tables: a Markdown page with marks to put them into.")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="pfllib, niid-bench, own-problems, cifar10: no new part starts after that; the "
            "next call goes on."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="figure2: a CSV or array of latitude, longitude and price; table2: a folder of "
            "images."
        ),
    ] = None,
    postcodes: Annotated[
        Path | None,
        typer.Option(help="figure2: where postcodes are, for a Land Registry price-paid CSV."),
    ] = None,
) -> None:
    """Run the experiments behind a table or figure, with the paper's numbers beside ours.

    A command that was stopped continues where it was.
    """
    _check_scale(scale)
    _check_jobs(jobs)
    experiments.main(
        name, scale, out, jobs=jobs, results=source, page=page, minutes=minutes, data=data,
        postcodes=postcodes,
    )  # fmt: skip


def _check_scale(scale: str) -> None:
    if scale not in ("quick", "paper"):
        raise UserError(f"scale is {scale!r}; it must be 'quick' or 'paper'.")


def _check_jobs(jobs: int | None) -> None:
    if jobs is not None and jobs < 1:
        raise UserError(f"--jobs is {jobs}; it must be at least 1.")


THEORY_EXAMPLES = """Examples:

corefed theory — a network of one hidden layer of 20, 5000 points and a coreset of 500.

corefed theory --n 5000 --k 20 — where Im of Theorem 1 is negative as printed.

corefed theory --n 100000 --k 1000 --inputs 784 --width 100 --dimension 14

corefed theory --parameters proof --beta 2 --dimension 4 — T as in the proof of Theorem 2.

corefed theory --set C_prime=0.5 --set C_2=30 --json

The pages on the theory say which statements survive, and why."""


def theory(
    n: Annotated[int, typer.Option(help="Points per client.")] = 5000,
    k: Annotated[int, typer.Option(help="Points of its coreset (n_k).")] = 500,
    inputs: Annotated[int, typer.Option(help="Inputs of the network (s_0).")] = 20,
    layers: Annotated[int, typer.Option(help="Hidden layers (L).")] = 1,
    width: Annotated[int, typer.Option(help="Their width (M).")] = 20,
    parameters: Annotated[
        str,
        typer.Option(
            help="T: network counts them, proof takes C_1 n^(Lambda / (2 beta + Lambda)), or a "
            "number."
        ),
    ] = "network",
    beta: Annotated[float, typer.Option(help="Smoothness of the true functions.")] = 1.0,
    dimension: Annotated[
        float, typer.Option(help="Intrinsic dimension of the inputs (Lambda).")
    ] = 2.0,
    zeta: Annotated[float, typer.Option(help="Weight of the KL.")] = 1.0,
    delta: Annotated[
        float, typer.Option(help="Power of the logarithm in epsilon_n, above 1.")
    ] = 1.1,
    bound: Annotated[float, typer.Option(help="Of functions and networks (F).")] = 1.0,
    noise: Annotated[float, typer.Option(help="Standard deviation of the noise.")] = 0.1,
    weight_bound: Annotated[float, typer.Option(help="Of the network's weights (Omega).")] = 1.0,
    clients: Annotated[int, typer.Option(help="Clients (N).")] = 10,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="A constant of the proofs: C, C_prime, C_second, C_0, C_1, C_2 or C_3. Nobody "
            "knows them; each is 1 if not given.",
            metavar="NAME=VALUE",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for theory.png and theory.json.")] = Path(
        "runs/theory"
    ),
    json: Json = False,
) -> None:
    """Compute the paper's bounds and rates, say which of its statements hold, draw error against k.

    Bounds have constants that nobody knows: read shapes and signs, not levels.
    """
    from corefed_studies.theory.showing import execute

    values = {
        "n": n,
        "n_k": k,
        "s_0": inputs,
        "L": layers,
        "M": width,
        "beta": beta,
        "Lambda": dimension,
        "zeta": zeta,
        "delta": delta,
        "F": bound,
        "sigma": noise,
        "Omega": weight_bound,
        "N": clients,
    }
    execute(values, parameters=parameters, assignments=assignments or [], out=out, json=json)


def add_to(app: typer.Typer) -> None:
    """Add the commands of the studies to the command line."""
    app.command(epilog=_list(benchmarks.NAMES))(bench)
    app.command(epilog=_list(experiments.NAMES))(reproduce)
    app.command(epilog=THEORY_EXAMPLES)(theory)
