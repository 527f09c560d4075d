"""From a TOML file and a command line to one frozen, checked `Experiment`.

Each layer overrides the one before: defaults (some depend on the kind of data), the method's
preset, the file, flags, `--set key=value`. The keys of `Run` and of the method's Config share one
flat namespace. A key of a group can be written with the group (`selection.draws`, or a table
[selection]) or without it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.errors import UserError, did_you_mean
from corefed.base.settings import Usual
from corefed.methods import registry
from corefed.settings import class_weights, devices, fields, toml
from corefed.settings.fields import Setting, from_flat, list_settings, to_flat
from corefed.settings.run import (
    CONVOLUTIONAL,
    MEMORY,
    MODELS,
    OWN,
    OWN_NOISE,
    Experiment,
    Noise,
    Run,
)
from corefed.settings.values import parse, to_toml_value

CORESET = "coreset"
"""A prefix for the method's own settings, in place of their group: coreset.solver."""

TUNED_BATCH = 100
"""Points of a step that default learning rates were chosen for."""

RESULTS_UNCHANGED_BY = frozenset(
    {
        "rounds", "evaluate_every", "checkpoint_every", "checkpoint_share", "checkpoint_minutes",
        "data_dir", "client_state",
    }
)  # fmt: skip
"""Keys a resumed run may change: training to any given round does not depend on them."""


_RATES = ("learning_rate", "eta_1", "alpha")
OTHER_NAMES = {
    "lr": _RATES, "learningrate": _RATES, "learning_rate": _RATES, "step_size": _RATES,
    "epochs": ("rounds", "local_steps", "local_epochs"), "num_rounds": ("rounds",),
    "n_rounds": ("rounds",),
    "steps": ("local_steps",), "batch": ("batch_size",), "bs": ("batch_size",),
    "n_clients": ("clients",), "num_clients": ("clients",), "label": ("target",),
    "site": ("client_column",), "client": ("client_column",), "random_state": ("seeds",),
    "seed": ("seeds",), "layers": ("hidden",), "test_size": ("validation",),
}  # fmt: skip
"""What other libraries call our settings; of several, those that the method has."""


class _Given(NamedTuple):
    key: str
    value: object
    where: str  # for messages: the file, the flag, or --set


def resolve(
    file: Path | None = None,
    flags: Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    *,
    where: str = "",
) -> Experiment:
    """The experiment that defaults, preset, `file`, `flags` and `assignments` define, checked.

    `where` is what messages call the source of `flags` that are not from a command line.
    """
    given = [*_from_file(file), *_from_flags(flags or {}, where), *_from_assignments(assignments)]
    method = str(next((g.value for g in reversed(given) if g.key == "method"), Run.method))
    own = registry.config_class(method)
    known = _by_name(own)
    given = [each._replace(key=_name(each, own, known, method)) for each in given]
    values = {g.key: parse(g.key, g.value, known[g.key].kind, g.where) for g in given}
    if "preset" in known:
        _refuse_two_presets(given)
        values = {**_preset(method, str(values.get("preset", own.preset)), known), **values}
    if str(values.get("data", Run.data)).startswith(OWN) and not values.keys() & set(Noise._fields):
        values |= OWN_NOISE._asdict()
    shared = {each.name for each in list_settings(Run)}
    run = from_flat(Run, {k: v for k, v in values.items() if k in shared})
    if run.planned_rounds == 0:
        run = dataclasses.replace(run, planned_rounds=run.rounds)
    experiment = Experiment(
        run,
        from_flat(own, {k: v for k, v in values.items() if k not in shared}),
    )
    check(experiment)
    return experiment


def fit_rates(experiment: Experiment) -> Experiment:
    """Default learning rates that suit the network and the batch.

    0.07 was chosen for steps on 100 points. Convolutions diverged with it on 10 points (MNIST,
    20 clients); sqrt(batch_size / 100) of it trains them, and was the best of five rates there. A
    fully connected network is better with 0.07 on 10 points too.
    """
    run, settings = experiment.run, experiment.settings
    if run.model not in CONVOLUTIONAL or run.batch_size >= TUNED_BATCH:
        return experiment
    idle = getattr(registry.module(run.method), "idle", lambda settings: ())(settings)
    factor = math.sqrt(run.batch_size / TUNED_BATCH)
    rates = {each.name: getattr(settings, each.name) for each in dataclasses.fields(settings)}
    fitted = {
        name: factor * value
        for name, value in rates.items()
        if isinstance(value, Usual) and name not in idle
    }
    return dataclasses.replace(experiment, settings=dataclasses.replace(settings, **fitted))


def check(experiment: Experiment) -> None:
    """Refuse values out of range, once, before anything is loaded or written."""
    run = experiment.run
    fields.check(run)
    fields.check(experiment.settings)
    if not run.client_column:  # otherwise their number is known once they are read
        check_cohort(run.cohort, run.clients)
    if run.patience and not run.validation:
        raise UserError(
            f"patience is {run.patience}: stopping early takes validation points to judge by; give "
            "a share of the training points, validation=0.2 for example."
        )
    devices.check(run)
    check_model(run.model)
    class_weights.check(run.class_weights)
    own = getattr(registry.module(run.method), "check", None)
    if own is not None:
        own(experiment.settings)


def check_cohort(cohort: int, clients: int) -> None:
    if cohort > clients:
        raise UserError(f"cohort is {cohort}; it must be at most the {clients} clients.")


def check_model(model: str) -> None:
    """Refuse a text that names no network; nothing is imported."""
    known = MODELS
    if model in (*known, MEMORY) or re.fullmatch(rf"{_DOTTED}:{_DOTTED}", model):
        return
    hint = did_you_mean(model, known)
    raise UserError(
        f"model is {model!r}; it must be {', '.join(known)}, or package.module:factory for a "
        f"network of your own.{hint}"
    )


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """Every key and value, flat and ready for JSON (tuples become lists)."""
    flat = {**to_flat(experiment.run), **to_flat(experiment.settings)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in flat.items()}


def to_toml(experiment: Experiment) -> str:
    """The experiment as a file `resolve` reads back to an equal one."""
    return "".join(
        f"{key} = {to_toml_value(value)}\n" for key, value in to_dict(experiment).items()
    )


def look_up(key: str, method: str, where: str) -> Setting:
    """The setting that a key means in a run of this method; `where` is for the message."""
    own = registry.config_class(method)
    known = _by_name(own)
    return known[_name(_Given(key.replace("-", "_"), None, where), own, known, method)]


def fingerprint(values: Mapping[str, object]) -> str:
    """A hash of everything in `to_dict` that changes results, bit for bit."""
    kept = {k: v for k, v in values.items() if k not in RESULTS_UNCHANGED_BY}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:32]


def differences(there: Mapping[str, object], here: Mapping[str, object]) -> list[str]:
    """'zeta (10.0 there, 1.0 here)' for every key of the fingerprint that differs."""
    keys = sorted((there.keys() | here.keys()) - RESULTS_UNCHANGED_BY)
    return [
        f"{key} ({there.get(key, 'absent')} there, {here.get(key, 'absent')} here)"
        for key in keys
        if there.get(key) != here.get(key)
    ]


def _by_name(own: type[Any]) -> dict[str, Setting]:
    """The settings of Run, then those of the method."""
    known = {each.name: each for each in list_settings(Run)}
    for each in list_settings(own):
        if each.name in known:
            raise TypeError(f"{own.__module__}.Config: Run has a field {each.name!r} already")
        known[each.name] = each
    return known


def _name(given: _Given, own: type[Any], known: Mapping[str, Setting], method: str) -> str:
    """The setting that a key means: `draws`, `selection.draws` and `coreset.draws` are one."""
    prefix, _, name = given.key.rpartition(".")
    setting = known.get(name)
    if setting is not None and prefix in ("", setting.group):
        return name
    if setting is not None and prefix == CORESET:  # of what the method itself declares
        field = setting.group or name
        if field in own.__annotations__:
            return name
    raise UserError(_unknown(given.key, given.where, method, known))


def _from_file(file: Path | None) -> Iterator[_Given]:
    if file is None:
        return
    for key, value in toml.read(file).items():
        table = isinstance(value, dict)  # [selection] is the keys selection.x
        for name, one in value.items() if table else [(key, value)]:
            written = f"{key}.{name}" if table else name
            yield _Given(written.replace("-", "_"), one, str(file))


def _from_flags(flags: Mapping[str, object], where: str) -> Iterator[_Given]:
    for key, value in flags.items():
        yield _Given(key, value, where or f"--{key.replace('_', '-')}")


def _from_assignments(assignments: Sequence[str]) -> Iterator[_Given]:
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            hint = f"; write --set {key.strip()}=VALUE" if key.strip() else ""
            raise UserError(f"--set {text!r} is not written key=value{hint}.")
        yield _Given(key.strip().replace("-", "_"), value.strip(), "--set")


def _refuse_two_presets(given: Sequence[_Given]) -> None:
    """A file with a preset also has its values, so a second preset would have no effect."""
    named = [g for g in given if g.key == "preset"]
    if len({g.value for g in named}) > 1:
        raise UserError(
            f"{named[0].where} asks for preset {named[0].value!r}, {named[-1].where} for "
            f"{named[-1].value!r}; choose one, and take the first one's values out of the file."
        )


def _preset(method: str, name: str, known: Mapping[str, Setting]) -> dict[str, object]:
    presets = registry.presets(method)
    if name not in presets:
        raise UserError(f"{method} has no preset {name!r}, only {', '.join(presets)}.")
    return {k: parse(k, v, known[k].kind, f"preset {name}") for k, v in presets[name].items()}


def _unknown(key: str, where: str, method: str, known: Mapping[str, Setting]) -> str:
    """One sentence for a key that is misspelt, a group, or belongs to another method."""
    members = [each.name for each in known.values() if each.group == key]
    if members:
        return (
            f"{key!r} ({where}) is a group of settings; write {key}.NAME=VALUE, where NAME is "
            f"{', '.join(members)}."
        )
    owners = [name for name in registry.METHODS if key in _by_name(registry.config_class(name))]
    if key == "fraction" and owners:
        return f"{method} trains on all data and takes no fraction; {_list(owners)} do."
    if owners:
        return f"{key!r} ({where}) is a setting of {_list(owners)}, not of {method}."
    name = key.rpartition(".")[2]
    meant = [each for each in OTHER_NAMES.get(name.lower(), ()) if each in known]
    if meant:
        return (
            f"There is no setting {key!r} ({where}) in a {method} run; did you mean "
            f"{' or '.join(map(repr, meant))}?"
        )
    hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
    return f"There is no setting {key!r} ({where}) in a {method} run{hint}"


def _list(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_DOTTED = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
