"""`corefed theory`: the paper's bounds and rates for given numbers, and which statements hold."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from corefed.commands.options import Json

THEORY_EXAMPLES = """Examples:

corefed theory — a network of one hidden layer of 20, 5000 points and a coreset of 500.

corefed theory --n 5000 --k 20 — where Im of Theorem 1 is negative as printed.

corefed theory --n 100000 --k 1000 --inputs 784 --width 100 --dimension 14

corefed theory --parameters proof --beta 2 --dimension 4 — T as in the proof of Theorem 2.

corefed theory --set C_prime=0.5 --set C_2=30 --json

The pages on the theory say which statements survive, and why."""


def theory(
    n: Annotated[int, typer.Option(help="Points of a client.")] = 5000,
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
    from corefed.theory.showing import execute

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
