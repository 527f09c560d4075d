"""The server's half of a federation: Algorithm 1's server with clients that need not be trusted.

    for each round:
        ask        the cohort to train, until all have answered or the deadline
        check      every answer; an unacceptable one is logged with its client's name and left out
        quorum     too few acceptable answers: the round is asked again, then the run stops
        aggregate  by the method's own rule, after a robust one if the operator wants it
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
from corefed.federation import answers, evaluating, joining, wire
from corefed.federation.events import Log
from corefed.federation.link import Link, mismatch, wait_for
from corefed.federation.protocol import Agreement, Kind, Reply, Task
from corefed.federation.rules import Rules
from corefed.federation.trust import checks, privacy, robust
from corefed.federation.trust.spent import privacy_spent
from corefed.methods import registry
from corefed.models import own
from corefed.settings import config
from corefed.settings.run import Experiment, Run
from corefed.training import checkpoint, client_side, record, summaries
from corefed.training.loop import Answer, Line, run_rounds
from corefed.training.setup import network

HISTORY = 5
"""Rounds whose accepted updates tell how long an update usually is."""


class ServerContext(NamedTuple):
    """What stays the same through a run."""

    names: Sequence[str]
    run: Run
    rules: Rules
    link: Link
    log: Log
    task: Task  # with everything that all tasks of the run have in common
    agreement: Agreement
    method: Method
    template: checks.Template
    weights: str | None  # by which the method's server averages, for the accountant

    def task_for(self, kind: Kind, t: int, name: str, sent: Tree) -> Task:
        """What a client is asked in round t (from 0)."""
        return self.task._replace(kind=kind, round=t, client=self.names.index(name), tree=sent)


class Collected(NamedTuple):
    """What a round's cohort sent, by name."""

    accepted: dict[str, Reply]  # trees in the server's precision
    lost: dict[str, str]  # why the others are left out
    lengths: dict[str, float]
    released: list[str]  # whose uploads were seen, acceptable or not
    bytes_up: int
    asked: int  # messages sent
    attempts: int


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
    _check_experiment(wanted, names)
    present = joining.connect(names, rules, link)
    agreement = joining.agree_on_data(path, names, rules, link, log, wanted)
    experiment = joining.complete_experiment(wanted, agreement)
    values = config.to_dict(experiment)
    method, server = _build(experiment, agreement)
    servers = [server]
    lines, _ = folder.resume(
        experiment, lambda state: servers.extend(checkpoint.restore(state, [servers.pop()]))
    )
    robust.check(rules, method, experiment.run.cohort or len(names))
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
        method,
        checks.template(method, server, agreement.shape, agreement.targets),
        privacy.averaging_weights(method, server) if rules.dp_clip else None,
    )
    log("resumed" if lines else "started", len(lines), reason=f"{len(present)} clients connected")

    def keep(line: Line, servers: list[Tree], last: bool) -> None:
        folder.append(line)
        folder.checkpoint(values, line["round"], servers)

    clients = RemoteClients(context, lines)
    run_rounds(method, clients, servers, experiment.run, lines, on_round=keep)
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
    if lines and "privacy" in lines[-1]:
        summary["privacy"] = lines[-1]["privacy"]
    return summary


def _check_experiment(wanted: Experiment, names: Sequence[str]) -> None:
    run = wanted.run
    if len(run.seeds) != 1:
        raise UserError("A federation trains one run at a time; give it one seed.")
    if run.clients != len(names):
        raise UserError(f"clients is {run.clients}, but the federation has {len(names)}.")


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
        got = _collect(context, t, cohort, sent, self.lines)
        order = [name for name in cohort if name in got.accepted]
        replies = [got.accepted[name] for name in order]
        update = Update(
            tuple(reply.client for reply in replies),
            {k: torch.stack([reply.tree[k] for reply in replies]) for k in replies[0].tree},
            torch.tensor([int(reply.figures["examples"]) for reply in replies]),
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
        """Metrics over the test points of all clients that answer, as in a simulation."""
        return evaluating.evaluate(self.context, t, servers[0])


def _collect(
    context: ServerContext, t: int, cohort: Sequence[str], sent: Tree, lines: Sequence[Line]
) -> Collected:
    """The cohort's acceptable updates, at least a quorum. Asks again as often as the rules say."""
    rules, log = context.rules, context.log
    wanted = joining.quorum_size(rules, len(cohort))
    released: dict[str, None] = {}
    bytes_up = asked = 0
    for attempt in range(rules.attempts):
        online = wait_for(cohort, wanted, rules.join_wait, context.link)
        tasks = {
            name: context.task_for("train", t, name, sent) for name in cohort if name in online
        }
        lost = {name: "not connected" for name in cohort if name not in tasks}
        accepted: dict[str, Reply] = {}
        asked += len(tasks)
        for name, reply in context.link.ask(tasks, rules.deadline).items():
            if isinstance(reply, str):
                lost[name] = reply
                continue
            bytes_up += wire.size(reply.tree)
            released |= {name: None} if reply.tree else {}
            whole = _check_update(context, tasks[name], reply)
            if isinstance(whole, str):
                log("refused", t + 1, name, whole)
                lost[name] = f"refused: {whole}"
            else:
                accepted[name] = reply._replace(tree=whole)
        outliers, lengths = checks.outliers(
            sent,
            {name: reply.tree for name, reply in accepted.items()},
            context.method.traits.posteriors,
            rules.outlier,
            [length for line in lines[-HISTORY:] for length in line["federation"]["lengths"]],
            aligned=context.method.traits.aligned,
        )
        for name, problem in outliers.items():
            log("refused", t + 1, name, problem)
            lost[name] = f"refused: {problem}"
            del accepted[name]
        for name, reason in lost.items():
            if not reason.startswith("refused"):
                log("missing", t + 1, name, reason)
        for name, round_ in context.link.late():
            log("late", t + 1, name, f"its answer to round {round_ + 1} came and was left out")
        if len(accepted) >= wanted:
            return Collected(accepted, lost, lengths, list(released), bytes_up, asked, attempt + 1)
        log("no-quorum", t + 1, reason=f"{len(accepted)} acceptable updates, {wanted} needed")
    raise UserError(
        f"Round {t + 1} had no quorum of {wanted} acceptable updates in {rules.attempts} attempts; "
        "events.jsonl says who was missing or refused. What was trained is kept: mend it and "
        "resume the run."
    )


def _check_update(context: ServerContext, task: Task, reply: Reply) -> Tree | str:
    """The update in the server's own precision, or why it is not one."""
    rules, method = context.rules, context.method
    most, uploaded = rules.max_examples, wire.DTYPES[rules.upload]
    problem = mismatch(task, reply) or checks.refusal(
        reply.tree, context.template, (), reply.figures, max_examples=most, dtypes=(uploaded,)
    )
    if problem:
        return problem
    whole = wire.restore(
        reply.tree, task.tree, differences=rules.difference and method.traits.aligned
    )
    again = checks.refusal(  # a posterior can only be checked as a whole
        whole, context.template, method.traits.posteriors, reply.figures, max_examples=most
    )
    return again or whole
