"""Before the first round: who is there, and what their data have in common."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.federation import told as telling
from corefed.federation.events import Log
from corefed.federation.link import Link, mismatch, wait_for
from corefed.federation.protocol import Agreement, Task
from corefed.federation.reading import majority
from corefed.federation.reading.agreement import agree
from corefed.federation.reading.description import Description, check_description
from corefed.federation.rules import Rules
from corefed.federation.told import Told
from corefed.federation.waiting import Strikes
from corefed.settings import config
from corefed.settings.run import OWN_NOISE, Experiment, Noise, Run, Scaling, default_scale
from corefed.training.augmenting import work_of

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
) -> tuple[Agreement, Told]:
    """What is in the run's folder, or else follows from the clients that are connected."""
    file = path / AGREEMENT
    if file.exists():
        return read_agreement(file), telling.load(path)
    quorum = quorum_size(rules, len(names))
    described = _descriptions(path.name, names, rules, link, log, wanted)
    _require(quorum, described, names)
    counted = _count(described, rules, wanted)
    for name, reason in counted.left_out.items():
        log("refused", 0, name, f"left out of the agreement about the data: {reason}")
    kept = counted.descriptions
    _require(quorum, kept, names)
    first = next(iter(kept.values()))
    model = _model(wanted, first.get("shape", ()))
    scale = _scale(wanted, model, "columns" in first)
    agreement = agree(kept, wanted.run.classes, scale, medians=rules.join == "robust")
    if counted.classes_left_out:
        log("left-out", 0, "", majority.class_note(counted.classes_left_out, agreement.classes))
    found = Told(
        {name: each["train"] for name, each in kept.items()},
        {name: each["test"] for name, each in kept.items()},
        tuple(sorted(counted.classes_left_out)),
    )
    telling.save(path, found)  # before the agreement, whose presence says that both are there
    files.replace(file, encode_agreement(agreement))
    return agreement, found


def _descriptions(
    run: str, names: Sequence[str], rules: Rules, link: Link, log: Log, wanted: Experiment
) -> dict[str, Description]:
    """Those that can be read, by name."""
    settings = settings_as_toml(wanted)
    task = Task("join", run, -1, 0, settings, None, "float32", False, 0.0, 0.0, {})
    online = link.online()
    tasks = {n: task._replace(client=i) for i, n in enumerate(names) if n in online}
    waiting = Strikes(rules).waiting(quorum_size(rules, len(names)))
    described: dict[str, Description] = {}
    for name, reply in link.ask(tasks, waiting).items():
        if isinstance(reply, str):
            log("missing", 0, name, reply)
            continue
        problem = mismatch(tasks[name], reply) or _check_answer(reply.figures, rules)
        if problem:
            log("refused", 0, name, problem)
            continue
        described[name] = reply.figures
        log("joined", 0, name, f"{reply.figures['train']} training points")
    return described


def _require(quorum: int, described: Mapping[str, Description], names: Sequence[str]) -> None:
    if len(described) < quorum:
        raise UserError(
            f"{len(described)} of {len(names)} clients described their data in a way that can be "
            f"used, and the quorum is {quorum}; events.jsonl says why the others did not."
        )


def _count(
    described: Mapping[str, Description], rules: Rules, wanted: Experiment
) -> majority.Counted:
    """The descriptions that count, with the classes and categories that enough clients name."""
    alike, odd, _ = majority.keep_alike(described)
    named = wanted.run.classes
    if named:  # clients leave out other classes themselves, so these are made up
        foreign = {n for n, each in alike.items() if not set(each["classes"]) <= set(named)}
        odd |= dict.fromkeys(foreign, "It names classes that the experiment does not.")
        found = majority.Counted({n: e for n, e in alike.items() if n not in foreign}, {}, {})
    else:
        found = majority.keep_known_classes(alike, rules.class_quorum, rules.max_classes)
    thinned = majority.keep_known_categories(found.descriptions, rules.class_quorum)
    return found._replace(descriptions=thinned, left_out={**odd, **found.left_out})


def encode_agreement(agreement: Agreement) -> bytes:
    """The content of agreement.json."""
    return digests.to_json(json.loads(agreement.to_json()))


def read_agreement(file: Path) -> Agreement:
    """The agreement in a file; refused unless it is what was written."""
    try:
        return Agreement.from_json(json.dumps(digests.read_json(file)))
    except OSError as error:
        raise UserError(f"Cannot read {file}: {error.strerror}.") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{file} is damaged ({error}); put back a copy of it, or start a new run."
        ) from error


def _check_answer(figures: Mapping[str, Any], rules: Rules) -> str:
    """Why a client's description of its data cannot be used; empty where it can."""
    try:
        problem = check_description(figures)
        if problem:
            return f"The description of its data {problem}."
        count = figures["train"]
        if not 1 <= count <= rules.max_examples:
            return f"claims {count} training points, not 1 to {rules.max_examples}"
        if figures["test"] > rules.max_examples:
            return f"claims {figures['test']} test points, not at most {rules.max_examples}"
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        return f"describes its data in a way that cannot be read ({type(error).__name__})"
    return ""


def complete_experiment(
    wanted: Experiment, agreement: Agreement, told: Told | None = None
) -> Experiment:
    """The experiment with what depends on the data filled in, for the record and the clients.

    Where classes were left out, it names the others: a client then leaves out its points of them.
    """
    model = _model(wanted, agreement.shape)
    scale = _scale(wanted, model, bool(agreement.columns))
    run = dataclasses.replace(
        wanted.run, partition="natural", device="cpu", model=model, scale=scale
    )
    work_of(run, agreement.shape)  # refuses to augment what are no images
    if told is not None and told.classes_left_out:
        run = dataclasses.replace(run, classes=agreement.classes)
    asked = Noise(run.noise, run.learn_noise)
    if agreement.target_mean and asked == Noise(Run.noise, Run.learn_noise):
        # As in a simulation of a table with standardised targets.
        learnt = OWN_NOISE.learn_noise
        run = dataclasses.replace(run, noise=OWN_NOISE.noise, learn_noise=learnt)
    return config.fit_rates(dataclasses.replace(wanted, run=run))


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
