"""How good a newcomer's models are, and at which temperatures they predict."""

from __future__ import annotations

from corefed.base.types import ClientData, Method, Tree
from corefed.training import calibration, local
from corefed.training.calibration import Temperatures
from corefed.training.evaluate import Evaluation, evaluate
from corefed.training.loop import Line
from corefed.training.setup import Setup


def metrics(
    setup: Setup,
    method: Method,
    clients: local.LocalClients,
    server: Tree,
    temperature: Tree | None = None,
    points: ClientData | None = None,
) -> Evaluation:
    """On these points, by default the test points."""
    run, data = setup.experiment.run, setup.data
    return evaluate(
        clients, method, [server], data.test if points is None else points, run.rounds,
        run.evaluate_draws, data.classes, data.unit, temperature=temperature,
    )  # fmt: skip


def known_temperatures(calibrate: str, kept: Tree, g: int) -> dict[str, float]:
    """Of a newcomer's and of the shared model; empty of a run that was not calibrated."""
    names = {"personal": calibration.NEWCOMER, "global": f"{calibration.PREFIX}global"}
    wanted = {} if calibrate == "off" else names
    return {kind: float(kept[name][g]) for kind, name in wanted.items() if name in kept}


def temperatures(setup: Setup, server: Tree, around: Tree) -> Temperatures | None:
    """The newcomer's own, shrunk to those of the run; those of the run without validation points.

    `around` has those of the run; it is empty where the run was not calibrated.
    """
    run, data, clients = setup.experiment.run, setup.data, setup.clients
    if run.calibrate == "off":
        return None
    if data.validation is None:
        return Temperatures(around, around) if around else None
    slopes = calibration.slopes(
        clients, setup.method, [server], data.validation, run.rounds, run.evaluate_draws,
        data.classes, data.unit,
    )  # fmt: skip
    pooled = {kind: around.get(kind, calibration.pool(each)) for kind, each in slopes.items()}
    own = {kind: calibration.own(kind, each, pooled[kind]) for kind, each in slopes.items()}
    return Temperatures(pooled, own)


def calibrated(setup: Setup, server: Tree, found: Temperatures) -> Line:
    """What the newcomer's line has of its temperatures."""
    points, T = setup.data.validation, found.clients
    before, after = (metrics(setup, setup.method, setup.clients, server, t) for t in ({}, T))
    if points is None:
        about = calibration.describe(found, setup.experiment.run.seeds, before, after)
        return {"calibration": about}
    raw, validated = (
        metrics(setup, setup.method, setup.clients, server, t, points) for t in ({}, T)
    )
    about = calibration.describe(found, setup.experiment.run.seeds, before, after, validated)
    return {"validation": raw.line(setup.data.labels)["metrics"], "calibration": about}
