"""A simulated run: clients on this machine, the round loop, the folder of the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.base.shown import say_note
from corefed.base.types import ClientData, Tree
from corefed.data import streaming
from corefed.data.clients import FederatedData
from corefed.models.own import Factory
from corefed.settings.config import to_dict
from corefed.settings.run import Experiment
from corefed.training import (
    calibration,
    checkpoint,
    client_side,
    cost,
    divergence,
    early,
    measured,
    parts,
    record,
    resuming,
    sampling,
    saving,
    summaries,
)
from corefed.training.clock import Clock
from corefed.training.evaluate import Evaluation, evaluate
from corefed.training.loop import Answer, Line, run_rounds, size_of
from corefed.training.scoring import means_of
from corefed.training.setup import Setup, Trees, prepare
from corefed.training.stopping import Stopping


class Result(NamedTuple):
    """A run that reached its last round or was stopped."""

    summary: dict[str, Any]
    finished: bool
    setup: Setup  # with the clients as they are now
    servers: list[Tree]
    temperature: Tree | None = None  # of a finished run that was calibrated

    @property
    def trees(self) -> Trees:
        """The current state, to be saved."""
        return self.setup.trees(self.servers, self.temperature)


def train(
    experiment: Experiment,
    out: Path | None = None,
    *,
    data: FederatedData | None = None,
    factory: Factory | None = None,
    resume: bool = False,
    on_begin: Callable[[dict[str, Any], list[Line]], None] = lambda values, lines: None,
    on_round: Callable[[Line], None] = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Run an experiment and record it in the folder `out`, if given.

    Mistakes are refused before `out` is created. `stop` is called after each round; a run that it
    ends has a checkpoint, and `resume` continues it to a bit-identical result. `on_begin` gets all
    settings and the rounds that exist already. `data`, and a `factory` of networks, replace those
    that the experiment names.
    """
    began = time.perf_counter()
    folder = None if out is None else record.Folder(out)
    if folder is not None and not resume:
        folder.refuse_existing()
    if folder is not None and experiment.run.checkpoint_every:
        checkpoint.require_library()
    setup = prepare(experiment, data, factory, folder=out)
    run, local, servers = setup.experiment.run, setup.clients, setup.servers
    values = to_dict(setup.experiment)
    lines: list[Line] = []
    if folder is not None and resume:
        parts.refuse(folder.path)
        resuming.refuse_other_data(folder.path, setup.data)

        def restore(state: checkpoint.Loaded) -> None:
            nonlocal servers
            servers = checkpoint.restore(state, servers, local)

        lines, _ = folder.resume(setup.experiment, restore)
        began -= sum(line["seconds"] + line.get("evaluate_seconds", 0.0) for line in lines)
    elif folder is not None:
        folder.create(setup.experiment)
        folder.keep(lambda path: saving.keep_data(path, setup.data))

    def keep(line: Line, servers: list[Tree], last: bool) -> None:
        if folder is not None:
            folder.append(line, flush=saves is None)
        if folder is not None and saves is not None and saves.due(line["round"], last):
            folder.flush()  # a checkpoint must not outlive the lines of its rounds
            if ending is not None:
                saves.close()  # of two saves that are under way, the copies would be too new
                ending.save(saves.run, values, line["round"])
            saves.save(line["round"], servers, local.take)
        on_round(line)

    on_begin(values, lines)
    saves, ending = None, None
    if folder is not None and run.checkpoint_every:
        saves = checkpoint.Checkpoints(
            folder.path, values, run.checkpoint_every, run.checkpoint_share, run.checkpoint_minutes
        )
    simulation = Simulation(setup, saves.mark if saves is not None else lambda rows: None)
    if run.patience:
        ending = Stopping(setup, simulation, lines)
        if folder is not None and lines:
            ending.load(folder.path, values, len(lines))
    with saves if saves is not None else nullcontext():
        if not early.is_over(values, lines):
            servers = run_rounds(
                setup.method, ending or simulation, servers, run, lines,
                on_round=keep, stop=lambda: stop() or (ending is not None and ending.over),
            )  # fmt: skip
        finished = early.is_over(values, lines)
        if finished and ending is not None:
            if saves is not None:
                saves.close()  # it reads the clients' state
            servers = ending.restore()
        told = early.final(lines).get("calibration") if finished else None
        temperature = calibration.stored(calibration.read(told)) if told else None
        if folder is not None and finished and run.checkpoint_every:
            # Beside the last checkpoint, which is still being written.
            trees = setup.trees(servers, temperature)
            folder.keep(lambda path: saving.keep_models(path, trees))
    summary = summarise(setup, setup.data, lines, began, saves)
    if folder is not None and finished:
        summary |= measured.section(folder.path, summary)
    for note in saves.pace.notes if saves is not None else ():
        say_note(note)
    if folder is not None and finished:
        folder.finish(summary)
    return Result(summary, finished, setup, servers, temperature)


def summarise(
    setup: Setup,
    data: FederatedData,
    lines: list[Line],
    began: float,
    saves: checkpoint.Checkpoints | None,
    **about: object,
) -> dict[str, Any]:
    """The summary of a simulated run that `began` at this time of `time.perf_counter`.

    `data` are those of all clients; `about` is added to what the results may depend on.
    """
    notes = [*data.notes, *(saves.pace.notes if saves is not None else ())]
    environment = {**summaries.environment(setup.experiment.run.device), **about, "notes": notes}
    summary = summaries.summarise(to_dict(setup.experiment), lines, environment)
    if saves is not None:
        summary["checkpoints"] = saves.pace.summary()
    points = int(data.train.size.sum())
    if told := streaming.said(data.train.x):
        summary["streaming"] = told
    summary["cost"]["passes_over_data"] = summary["cost"]["passes"] / max(1, points)
    summary["cost"]["wall_seconds"] = time.perf_counter() - began
    return summary


class Simulation:
    """The simulated clients of a run, as the round loop sees them."""

    def __init__(
        self, setup: Setup, changed: Callable[[Sequence[int]], None] = lambda rows: None
    ) -> None:
        """`changed` is told the rows whose private state a round has changed."""
        self.setup, self.changed = setup, changed
        self.who = sampling.evaluated(setup.experiment.run, setup.clients.per_run)

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        run, method, clients = self.setup.experiment.run, self.setup.method, self.setup.clients
        clock = Clock(clients, method, cohorts)
        before, cohorts = self._selection_cost(), clock.cohorts
        updates, loss, examples = clients.train(t, servers, cohorts)
        divergence.refuse(self.setup, t, loss, updates)
        self.changed(clients.rows_of(cohorts))
        sizes = [size_of(client_side.sent(method, server)) for server in servers]
        numbers: Line = {
            "loss": loss.tolist(),
            "examples": examples.tolist(),
            "bytes_up": [size_of(update.message) for update in updates],
            "bytes_down": [size * len(who) for size, who in zip(sizes, cohorts, strict=True)],
            "coreset": means_of(clients.report(), len(run.seeds)),
        }
        if before:
            pairs = zip(self._selection_cost(), before, strict=True)
            numbers["selection_examples"] = [now - then for now, then in pairs]
        looked = numbers.get("selection_examples")
        numbers |= cost.of_round(method, numbers["examples"], looked)
        return Answer(updates, numbers | clock.line())

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        return self.assess(
            t, servers, calibrate=calibration.is_wanted(self.setup.experiment.run, t)
        )

    def assess(self, t: int, servers: Sequence[Tree], *, calibrate: bool) -> Line:
        """Metrics of the models as they are now; temperatures are fitted where there are points."""
        data = self.setup.data
        tested = self._evaluate(t, servers, data.test)
        refuse_no_numbers(self.setup.experiment, t, tested)
        line = tested.line(data.labels)
        if data.validation is not None:
            found = self._evaluate(t, servers, data.validation, elsewhere=False)
            line["validation"] = found.line(data.labels)["metrics"]
            if calibrate:
                line["calibration"] = self._calibrate(t, servers, data.validation, tested)
        return line

    def _evaluate(
        self,
        t: int,
        servers: Sequence[Tree],
        points: ClientData,
        temperature: Tree | None = None,
        *,
        elsewhere: bool = True,
    ) -> Evaluation:
        setup, data = self.setup, self.setup.data
        draws = setup.experiment.run.evaluate_draws
        return evaluate(
            setup.clients, setup.method, servers, points, t, draws, data.classes, data.unit,
            elsewhere=elsewhere, temperature=temperature, who=self.who,
        )  # fmt: skip

    def _calibrate(
        self, t: int, servers: Sequence[Tree], points: ClientData, before: Evaluation
    ) -> Line:
        """Fit temperatures on these points; `before` is of the test points."""
        setup, data, run = self.setup, self.setup.data, self.setup.experiment.run
        slopes = calibration.slopes(
            setup.clients, setup.method, servers, points, t, run.evaluate_draws, data.classes,
            data.unit, self.who,
        )  # fmt: skip
        found = calibration.fit(slopes, len(run.seeds))
        after = self._evaluate(t, servers, data.test, found.clients)
        validated = self._evaluate(t, servers, points, found.clients, elsewhere=False)
        return calibration.describe(found, run.seeds, before, after, validated)

    def _selection_cost(self) -> list[float]:
        """Forward passes spent on selection so far, per run; empty where they are not counted."""
        spent = self.setup.clients.selection_cost()
        if spent is None:
            return []
        runs = len(self.setup.experiment.run.seeds)
        sums: list[float] = spent.double().view(runs, -1).sum(-1).tolist()
        return sums


def refuse_no_numbers(experiment: Experiment, t: int, tested: Evaluation) -> None:
    """Metrics that are not finite, though there are points to test on."""
    run = experiment.run
    for seed, metrics, clients in zip(run.seeds, tested.metrics, tested.clients, strict=True):
        wrong = [name for name, value in metrics.items() if not isfinite(value)]
        if wrong and any(value is not None for value in clients):
            raise UserError(
                f"Predictions are no numbers: after round {t + 1} {wrong[0]} of seed {seed} is "
                f"{metrics[wrong[0]]}. Look for extreme values by corefed datasets --show, or "
                f"lower {divergence.rates(experiment)}; what was recorded up to the round before "
                "is kept."
            )
