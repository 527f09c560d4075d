"""The server's half of a federation: Algorithm 1's server with clients that need not be trusted.

    for each round:
        collect    ask the cohort to train, and check every answer (`collecting.py`)
        aggregate  by the method's own rule, after a robust one unless the operator wants none
        evaluate   sums over test points, asked of every client that is connected; twice at the
                   end of a run that is calibrated (`evaluating.py`)
        record     the line of rounds.jsonl and the checkpoint, as in a simulation

A run has the files of a simulation (`record.py`), and events.jsonl and agreement.json. A resumed
run gives the same result as an uninterrupted one: every random draw is a function of (seed, round,
client), and a client keeps the state before a round that may be asked again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Method, Tree, Update
from corefed.federation import answers, collecting, evaluating, joining, wire
from corefed.federation.events import Log
from corefed.federation.link import Link
from corefed.federation.protocol import Agreement, Kind, Task
from corefed.federation.rules import Rules
from corefed.federation.told import Told
from corefed.federation.trust import checks, privacy, robust
from corefed.federation.trust.spent import privacy_spent
from corefed.federation.waiting import Strikes, waiting_rules
from corefed.methods import registry
from corefed.models import own
from corefed.settings import config, devices
from corefed.settings.run import Experiment, Run
from corefed.training import checkpoint, client_side, interrupt, record, summaries, tasks
from corefed.training.loop import Answer, Line, run_rounds
from corefed.training.setup import network


class ServerContext(NamedTuple):
    """What stays the same through a run, and who was silent in it."""

    names: Sequence[str]
    run: Run
    rules: Rules
    link: Link
    log: Log
    task: Task  # with everything that all tasks of the run have in common
    agreement: Agreement
    told: Told
    strikes: Strikes
    method: Method
    template: checks.Template
    weights: str | None  # by which the method's server averages, for the accountant

    def task_for(self, kind: Kind, t: int, name: str, sent: Tree) -> Task:
        """What a client is asked in round t (from 0)."""
        return self.task._replace(kind=kind, round=t, client=self.names.index(name), tree=sent)


def federate(path: Path, names: Sequence[str], rules: Rules, link: Link) -> dict[str, Any]:
    """Train the run in the folder `path` to its last round; its summary."""
    log = Log(path / record.EVENTS)
    try:
        return _federate(record.Folder(path), names, rules, link, log)
    except UserError as error:
        done = 0
        with suppress(UserError):  # where its lines are damaged, which is the error then
            done = len(record.read_lines(path / record.ROUNDS)[0])
        log("stopped", done, reason=str(error))
        raise


def _federate(
    folder: record.Folder, names: Sequence[str], rules: Rules, link: Link, log: Log
) -> dict[str, Any]:
    path = folder.path
    wanted = config.resolve(record.settings_file(path))
    _check_experiment(wanted, names, rules)
    present = joining.connect(names, rules, link)
    agreement, told = joining.agree_on_data(path, names, rules, link, log, wanted)
    experiment = joining.complete_experiment(wanted, agreement, told)
    values = config.to_dict(experiment)
    method, server = _build(experiment, agreement)
    tasks.refuse_uncounted(experiment.run, method)
    servers = [server]
    lines, _ = folder.resume(
        experiment, lambda state: servers.extend(checkpoint.restore(state, [servers.pop()]))
    )
    cohort = experiment.run.cohort or len(names)
    rules, note = robust.resolve(rules, method, cohort)
    robust.check(rules, method, cohort)
    if rules.dp_clip:
        privacy.check(method)
    settings = joining.settings_as_toml(experiment)
    ruled = (rules.upload, rules.difference, rules.dp_clip, rules.dp_noise)
    context = ServerContext(
        names,
        experiment.run,
        rules,
        link,
        log,
        Task("train", path.name, 0, 0, settings, agreement, *ruled, {}),
        agreement,
        told,
        Strikes(waiting_rules(rules, experiment.run.deadline)),
        method,
        checks.template(method, server, agreement.shape, agreement.targets),
        privacy.averaging_weights(method, server) if rules.dp_clip else None,
    )
    log("resumed" if lines else "started", len(lines), reason=f"{len(present)} clients connected")
    if note:
        log("robust", len(lines), reason=note)

    def keep(line: Line, servers: list[Tree], last: bool) -> None:
        folder.append(line)
        folder.checkpoint(values, line["round"], servers)

    clients = RemoteClients(context, lines)
    interrupt.forget(path)  # of an earlier attempt
    run_rounds(
        method, clients, servers, experiment.run, lines,
        on_round=keep, stop=lambda: interrupt.is_asked(path),
    )  # fmt: skip
    if len(lines) < experiment.run.rounds:
        interrupt.forget(path)
        raise UserError(f"The run was stopped after round {len(lines)}, as its operator asked.")
    summary = _summary(values, lines)
    folder.finish(summary)
    log("finished", len(lines))
    return summary


def _summary(values: Mapping[str, Any], lines: Sequence[Line]) -> dict[str, Any]:
    """That of a simulation, with the time outside training and the privacy that was spent."""
    summary = summaries.summarise(values, lines, summaries.environment("cpu"))
    overhead = sum(line["federation"]["overhead_seconds"] for line in lines)
    summary["cost"]["overhead_seconds"] = overhead
    summary["cost"]["overhead_seconds_per_round"] = overhead / max(1, len(lines))
    evaluated = [line for line in lines if "coverage" in line]
    if evaluated:
        summary["coverage"] = evaluated[-1]["coverage"]
    if lines and "privacy" in lines[-1]:
        summary["privacy"] = lines[-1]["privacy"]
    return summary


def _check_experiment(wanted: Experiment, names: Sequence[str], rules: Rules) -> None:
    run = wanted.run
    if len(run.seeds) != 1:
        raise UserError("A federation trains one run at a time; give it one seed.")
    if run.clients != len(names):
        raise UserError(f"clients is {run.clients}, but the federation has {len(names)}.")
    if run.patience:
        raise UserError("A federation cannot stop early yet; leave out patience.")
    devices.refuse_on_machines(run)
    if run.deadline >= rules.deadline:
        raise UserError(
            f"deadline is {run.deadline:g} s in experiment.toml, and a round waits for answers for "
            f"{rules.deadline:g} s only (deadline in federation.toml); make that one longer."
        )


def _build(experiment: Experiment, agreement: Agreement) -> tuple[Method, Tree]:
    run = experiment.run
    sizes = len(agreement.classes), agreement.targets
    # The server's folder is its operator's own, so the code that it names is theirs too.
    model = network(run, agreement.shape, *sizes, own.named(run.model))
    method = registry.build(run.method, experiment.settings, model)
    return method, method.init_server(Streams([Who(run.seeds[0], SERVER)], 0))


class RemoteClients:
    """Clients on other machines, as the round loop sees them.

    `lines` are the rounds so far. They tell how long updates were, and what privacy was spent.
    """

    def __init__(self, context: ServerContext, lines: Sequence[Line]) -> None:
        self.context, self.lines = context, lines

    def train(self, t: int, servers: Sequence[Tree], cohorts: Sequence[Sequence[int]]) -> Answer:
        """Ask the cohort, check its updates and combine the acceptable ones."""
        began = time.perf_counter()
        context, (server,), method = self.context, servers, self.context.method
        cohort = [context.names[i] for i in cohorts[0]]
        sent = client_side.sent(method, server)
        got = collecting.collect(context, t, cohort, sent, self.lines)
        order = [name for name in cohort if name in got.accepted]
        replies = [got.accepted[name] for name in order]
        update = Update(
            tuple(reply.client for reply in replies),
            {k: torch.stack([reply.tree[k] for reply in replies]) for k in replies[0].tree},
            torch.tensor([collecting.examples(context, reply) for reply in replies]),
        )
        combined = robust.combine(context.rules, method, server, update)
        if combined.note:
            context.log("robust", t + 1, reason=combined.note)
        times = {name: answers.read_seconds(got.accepted[name]) for name in order}
        numbers: Line = {
            **answers.training_numbers(method, replies),
            "bytes_up": [got.bytes_up],
            "bytes_down": [wire.size(sent) * got.asked],
            "federation": {
                "accepted": order,
                "lost": got.lost,
                "attempts": got.attempts,
                "aggregation": context.rules.aggregation,
                "used": [context.names[i] for i in combined.kept],
                "released": got.released,
                "examples": update.examples.tolist(),
                "lengths": [got.lengths[name] for name in order],
                "train_seconds": times,
                "overhead_seconds": time.perf_counter() - began - max(times.values()),
            },
        }
        if context.rules.dp_clip and update.message:
            now = {"round": t + 1, **numbers}
            numbers["privacy"] = privacy_spent([*self.lines, now], context.rules, context.weights)
        return Answer([combined.update], numbers)

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        """Metrics over the test points of all clients that answer, and how many these are."""
        return evaluating.evaluate(self.context, t, servers[0])
