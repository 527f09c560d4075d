"""The updates of a round: ask the cohort, check every answer, and ask again without a quorum.

ask     the cohort, until all have answered that are waited for, the grace after the quorum is
        over, or the deadline (`waiting.py`)
check   every answer; an unacceptable one is logged with its client's name and left out
quorum  too few acceptable answers: the round is asked again, and waits until the deadline;
        after some attempts the run stops
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.federation import joining, wire
from corefed.federation.link import SILENT, mismatch, wait_for
from corefed.federation.protocol import Reply, Task
from corefed.federation.trust import checks
from corefed.training.loop import Line

if TYPE_CHECKING:
    from corefed.federation.server import ServerContext

HISTORY = 5
"""Rounds whose accepted updates tell how long an update usually is."""
PAUSED = "not asked: it did not answer the last questions"


class Collected(NamedTuple):
    """What a round's cohort sent, by name."""

    accepted: dict[str, Reply]  # trees in the server's precision
    lost: dict[str, str]  # why the others are left out
    lengths: dict[str, float]
    released: list[str]  # whose uploads were seen, acceptable or not
    bytes_up: int
    asked: int  # messages sent
    attempts: int


def collect(
    context: ServerContext, t: int, cohort: Sequence[str], sent: Tree, lines: Sequence[Line]
) -> Collected:
    """The cohort's acceptable updates, at least a quorum. Asks again as often as the rules say."""
    rules, log = context.rules, context.log
    wanted = joining.quorum_size(rules, len(cohort))
    released: dict[str, None] = {}
    bytes_up = asked = 0
    for attempt in range(rules.attempts):
        online = wait_for(cohort, wanted, rules.join_wait, context.link)
        present = [name for name in cohort if name in online]
        tasks = {name: context.task_for("train", t, name, sent) for name in present}
        accepted: dict[str, Reply] = {}
        lost = {name: "not connected" for name in cohort if name not in tasks}
        for name, reply in ask(context, tasks, wanted, whole=attempt > 0).items():
            asked += reply != PAUSED
            if isinstance(reply, str):
                lost[name] = reply
                continue
            bytes_up += wire.size(reply.tree)
            released |= {name: None} if reply.tree else {}
            whole = _check_update(context, name, tasks[name], reply)
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
        if len(accepted) >= wanted:
            return Collected(accepted, lost, lengths, list(released), bytes_up, asked, attempt + 1)
        log("no-quorum", t + 1, reason=f"{len(accepted)} acceptable updates, {wanted} needed")
    raise UserError(
        f"Round {t + 1} had no quorum of {wanted} acceptable updates in {rules.attempts} attempts; "
        "events.jsonl says who was missing or refused. What was trained is kept: mend it and "
        "resume the run."
    )


def ask(
    context: ServerContext, tasks: dict[str, Task], quorum: int, *, whole: bool = False
) -> dict[str, Reply | str]:
    """Answers by name. Who has been silent is asked from time to time only, and not waited for.

    `whole` asks everybody and waits until the deadline. So does a question to fewer than a quorum.
    """
    strikes = context.strikes
    due = strikes.due(tasks)
    whole = whole or len(due) < quorum
    now = tasks if whole else {name: tasks[name] for name in due}
    answers = context.link.ask(now, strikes.waiting(quorum, whole=whole))
    for name, reply in answers.items():
        if isinstance(reply, str) and reply.startswith(SILENT):
            strikes.missed(name)
        else:
            strikes.heard(name)
    for name, round_ in context.link.late():
        strikes.heard(name)
        words = f"its answer to round {round_ + 1} came and was left out"
        context.log("late", next(iter(tasks.values())).round + 1, name, words)
    return {name: answers.get(name, PAUSED) for name in tasks}


def examples(context: ServerContext, reply: Reply) -> int:
    """Points that an accepted update stands for: those that it claims, within `max_weight`."""
    claimed = int(reply.figures["examples"])
    return int(min(claimed, context.told.weight("train", context.rules)))


def _check_update(context: ServerContext, name: str, task: Task, reply: Reply) -> Tree | str:
    """The update in the server's own precision, or why it is not one."""
    rules, method = context.rules, context.method
    most, uploaded = rules.max_examples, wire.DTYPES[rules.upload]
    problem = mismatch(task, reply) or checks.refusal(
        reply.tree, context.template, (), reply.figures, max_examples=most, dtypes=(uploaded,)
    )
    if problem:
        return problem
    told = context.told.most(name, "train", rules)
    if reply.figures["examples"] > told:
        claimed = reply.figures["examples"]
        return f"The client claims {claimed:g} training examples; at the join it told {told}."
    whole = wire.restore(
        reply.tree, task.tree, differences=rules.difference and method.traits.aligned
    )
    again = checks.refusal(  # a posterior can only be checked as a whole
        whole, context.template, method.traits.posteriors, reply.figures, max_examples=most
    )
    return again or _check_widths(context, task, whole) or whole


def _check_widths(context: ServerContext, task: Task, whole: Tree) -> str | None:
    """Not under differential privacy, whose noise may make an honest sigma small or large."""
    traits, factor = context.method.traits, context.rules.sigma_factor
    if not traits.aligned or not factor or context.rules.dp_clip:
        return None
    return checks.widths(whole, task.tree, traits.posteriors, factor)
