"""Before the first round: who is there, and what their data have in common."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corefed.base import files
from corefed.base.errors import UserError
from corefed.federation.events import Log
from corefed.federation.link import Link, mismatch, wait_for
from corefed.federation.protocol import Agreement, Task
from corefed.federation.reading.agreement import agree
from corefed.federation.reading.description import check_description
from corefed.federation.rules import Rules
from corefed.settings import config
from corefed.settings.run import OWN_NOISE, Experiment, Noise, Run, Scaling, default_scale

AGREEMENT = "agreement.json"


def quorum_size(rules: Rules, clients: int) -> int:
    """How many clients are a quorum."""
    return max(1, math.ceil(rules.quorum * clients - 1e-9))  # 0.1 * 30 is 3, not a little more


def connect(names: Sequence[str], rules: Rules, link: Link) -> set[str]:
    """Wait for all clients, as long as the rules say; those that are connected, at least a quorum.

    A resumed run waits too. Clients take some seconds to find a restarted server, and a round
    without one of them would differ from that of the uninterrupted run.
    """
    present = wait_for(names, len(names), rules.join_wait, link)
    quorum = quorum_size(rules, len(names))
    if len(present) < quorum:
        missing = ", ".join(name for name in names if name not in present)
        raise UserError(
            f"{len(present)} of {len(names)} clients are connected after {rules.join_wait:g} s, "
            f"and the quorum is {quorum}. Missing: {missing}. Start them and resume the run, or "
            "lower quorum in federation.toml."
        )
    return present


def agree_on_data(
    path: Path, names: Sequence[str], rules: Rules, link: Link, log: Log, wanted: Experiment
) -> Agreement:
    """The agreement in the run's folder, or else that of the clients that are connected."""
    file = path / AGREEMENT
    if file.exists():
        return Agreement.from_json(file.read_text(encoding="utf-8"))
    settings = settings_as_toml(wanted)
    task = Task("join", path.name, -1, 0, settings, None, "float32", False, 0.0, 0.0, {})
    online = link.online()
    tasks = {n: task._replace(client=i) for i, n in enumerate(names) if n in online}
    described: dict[str, dict[str, Any]] = {}
    for name, reply in link.ask(tasks, rules.deadline).items():
        if isinstance(reply, str):
            log("missing", 0, name, reply)
            continue
        problem = mismatch(tasks[name], reply) or _check_answer(reply.figures, rules)
        if problem:
            log("refused", 0, name, problem)
            continue
        described[name] = reply.figures
        log("joined", 0, name, f"{reply.figures['train']} training points")
    quorum = quorum_size(rules, len(names))
    if len(described) < quorum:
        raise UserError(
            f"{len(described)} of {len(names)} clients described their data, and the quorum is "
            f"{quorum}; events.jsonl says why the others did not."
        )
    first = next(iter(described.values()))
    model = _model(wanted, first.get("shape", ()))
    scale = _scale(wanted, model, "columns" in first)
    agreement = agree(described, wanted.run.classes, scale)
    files.replace(file, (agreement.to_json() + "\n").encode())
    return agreement


def _check_answer(figures: Mapping[str, Any], rules: Rules) -> str:
    """Why a client's description of its data cannot be used; empty where it can."""
    try:
        problem = check_description(figures)
        if problem:
            return f"The description of its data {problem}."
        count = figures["train"]
        if not 1 <= count <= rules.max_examples:
            return f"claims {count} training points, not 1 to {rules.max_examples}"
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        return f"describes its data in a way that cannot be read ({type(error).__name__})"
    return ""


def complete_experiment(wanted: Experiment, agreement: Agreement) -> Experiment:
    """The experiment with what depends on the data filled in, for the record."""
    model = _model(wanted, agreement.shape)
    scale = _scale(wanted, model, bool(agreement.columns))
    run = dataclasses.replace(
        wanted.run, partition="natural", device="cpu", model=model, scale=scale
    )
    asked = Noise(run.noise, run.learn_noise)
    if agreement.target_mean and asked == Noise(Run.noise, Run.learn_noise):
        # As in a simulation of a table with standardised targets.
        learnt = OWN_NOISE.learn_noise
        run = dataclasses.replace(run, noise=OWN_NOISE.noise, learn_noise=learnt)
    return dataclasses.replace(wanted, run=run)


def settings_as_toml(experiment: Experiment) -> str:
    """What a client needs to know about the experiment, as TOML: what is not a default."""
    values = config.to_dict(experiment)
    named = {key: value for key, value in values.items() if key in ("method", "preset")}
    defaults = config.to_dict(config.resolve(flags=named))
    kept = {k for k, v in values.items() if k == "method" or v != defaults[k]}
    lines = config.to_toml(experiment).splitlines(keepends=True)
    return "".join(line for line in lines if tomllib.loads(line).keys() <= kept)


def _model(wanted: Experiment, shape: Sequence[int]) -> str:
    """What auto means for points of this shape."""
    if wanted.run.model == "auto":
        return "cnn" if len(shape) == 3 else "mlp"
    return wanted.run.model


def _scale(wanted: Experiment, model: str, tables: bool) -> Scaling:
    if wanted.run.scale == "auto":
        return "features" if tables else default_scale(model)
    return wanted.run.scale
