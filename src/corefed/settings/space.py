"""What a search of settings tries: an axis per setting, and candidates spread over all axes.

Without a space of the user's, the settings that a method marks as searched (`base/settings.py`)
vary around the values that the experiment has. A user's space names settings, and only these are
searched then:

    eta_1=0.0003..0.03      a range; evenly on a log scale where it is above 0, else evenly
    zeta=0.01,0.1,1         a list of values
    eta_1                   the method's own range

A setting that follows another one (eta_2 follows eta_1) changes with it in the same proportion,
unless the space names it too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from corefed.base.errors import UserError, did_you_mean
from corefed.base.settings import Factors, Follows, Plus, Times
from corefed.methods import registry
from corefed.settings import config
from corefed.settings.fields import Setting, from_flat, list_settings, to_flat
from corefed.settings.run import Experiment, Run
from corefed.settings.values import parse

OF_THE_RUN = ("local_steps", "batch_size", "schedule", "warmup")
"""Settings of `Run` that can be searched. The others change the data, the network, or the cost."""

DIGITS = 3
"""Significant digits of the numbers that are tried."""

ATTEMPTS = 64
"""Points drawn per candidate that is asked for: some are refused or repeat another."""

Space = Mapping[str, Any]
"""Setting -> what to try: text as on the command line, (low, high), or a list of values."""


class Axis(NamedTuple):
    """What is tried for one setting: a range, or values."""

    name: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    whole: bool = False  # whole numbers only
    values: tuple[Any, ...] = ()  # in place of the range
    followers: tuple[str, ...] = ()  # settings that change in the same proportion

    def at(self, share: float) -> Any:
        """The value at a share of the way, in [0, 1)."""
        if self.values:
            return self.values[int(share * len(self.values))]
        if self.log:
            found = self.low * (self.high / self.low) ** share
        else:
            found = self.low + share * (self.high - self.low)
        found = min(max(_rounded(found), self.low), self.high)
        return round(found) if self.whole else found

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in self._asdict().items()}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Axis:
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in found.items()
        }
        return cls(**values)


def axes(experiment: Experiment, space: Space | Sequence[str] | None = None) -> list[Axis]:
    """The axes of a user's space, or of the method's own; a mistake is a UserError.

    On the command line a space is texts (`--space`), in Python a mapping.
    """
    method = experiment.run.method
    given = _read(space or ())
    if not given:
        found = _own(experiment)
        if not found:
            raise UserError(f"{method} does not say what to search; name settings in a space.")
        return found
    known: dict[str, Axis] = {}
    for key, what, written in given:
        setting = _searchable(key, method, written)
        if setting.name in known:
            raise UserError(f"{written} names {setting.name} for a second time; name it once.")
        known[setting.name] = _axis(setting, what, written, experiment)
    return [
        axis._replace(followers=tuple(f for f in _followers(method, axis.name) if f not in known))
        for axis in known.values()
    ]


def candidates(experiment: Experiment, space: Sequence[Axis], number: int) -> list[Experiment]:
    """At most `number` different experiments: the given one, then a Sobol sequence over the space.

    All combinations where the space has only lists and no more combinations than that. What the
    method refuses is left out.
    """
    found = {_key(experiment, space): experiment}
    refusal: UserError | None = None
    for point in _points(space, number, experiment.run.seeds[0]):
        one = changed(experiment, _with_followers(experiment, space, point))
        try:
            config.check(one)
        except UserError as error:
            refusal = error
            continue
        found.setdefault(_key(one, space), one)
        if len(found) == number:
            break
    if len(found) == 1:
        if refusal is not None:
            raise UserError(f"No settings of the space are allowed: {refusal}")
        raise UserError("The space has no settings but those that the run has already.")
    return list(found.values())


def changed(experiment: Experiment, values: Mapping[str, Any]) -> Experiment:
    """The experiment with other values of some settings."""
    of_run = {each.name for each in list_settings(Run)}
    run = {name: value for name, value in values.items() if name in of_run}
    own = {name: value for name, value in values.items() if name not in of_run}
    settings = from_flat(type(experiment.settings), {**to_flat(experiment.settings), **own})
    return Experiment(dataclasses.replace(experiment.run, **run), settings)


def searched(experiment: Experiment, space: Sequence[Axis]) -> dict[str, Any]:
    """The values of the searched settings and of those that follow them."""
    flat = {**to_flat(experiment.run), **to_flat(experiment.settings)}
    return {name: flat[name] for axis in space for name in (axis.name, *axis.followers)}


def are_defaults(experiment: Experiment, space: Sequence[Axis]) -> bool:
    """Whether the searched settings have their default values."""
    known = (*list_settings(Run), *list_settings(type(experiment.settings)))
    defaults = {each.name: each.default for each in known}
    return all(defaults[k] == v for k, v in searched(experiment, space).items())


# From texts to axes


def _read(space: Space | Sequence[str]) -> list[tuple[str, Any, str]]:
    """(setting, what to try or None, how it is written) of each entry."""
    if isinstance(space, Mapping):
        return [(key, what, f"space[{key!r}]") for key, what in space.items()]
    found: list[tuple[str, Any, str]] = []
    for text in space:
        key, equals, what = text.partition("=")
        found.append((key.strip(), what.strip() if equals else None, f"--space {text}"))
    return found


def _searchable(key: str, method: str, written: str) -> Setting:
    setting = config.look_up(key, method, written)
    if setting.owner is Run and setting.name not in OF_THE_RUN:
        *most, last = OF_THE_RUN
        raise UserError(
            f"{setting.name} ({written}) cannot be searched: a search changes settings of the "
            f"method, and {', '.join(most)} and {last} of the run."
        )
    if setting.name == "preset":
        raise UserError(f"preset ({written}) stands for several settings; search those.")
    if setting.kind not in (int, float, bool, str) and not setting.choices:
        raise UserError(f"{setting.name} ({written}) is a list of numbers; it cannot be searched.")
    return setting


def _axis(setting: Setting, what: Any, written: str, experiment: Experiment) -> Axis:
    if what is None:
        value = searched(experiment, [Axis(setting.name)])[setting.name]
        axis = _around(setting, value)
        if axis is None:
            raise UserError(
                f"{written} has no range of its own; write {setting.name}=LOW..HIGH or "
                f"{setting.name}=A,B,C."
            )
        return axis
    if isinstance(what, str):
        low, dots, high = what.partition("..")
        if dots and setting.kind not in (int, float):
            raise UserError(
                f"{written} is a range, but {setting.name} is no number; write "
                f"{setting.name}=A,B,C."
            )
        what = (low, high) if dots else [part.strip() for part in what.split(",") if part.strip()]
    if isinstance(what, tuple) and len(what) == 2 and setting.kind in (int, float):
        low, high = (_allowed(setting, end, written) for end in what)
        if not low < high:
            raise UserError(f"{written} is an empty range; the lower end comes first.")
        return Axis(setting.name, low, high, log=low > 0, whole=setting.kind is int)
    if not isinstance(what, list | tuple) or not what:
        raise UserError(
            f"{written} has no values; write {setting.name}=LOW..HIGH or {setting.name}=A,B,C."
        )
    return Axis(setting.name, values=tuple(_allowed(setting, each, written) for each in what))


def _allowed(setting: Setting, value: object, written: str) -> Any:
    """A value in the setting's type, refused where it is out of range."""
    text = value.strip() if isinstance(value, str) else value
    found: Any = parse(setting.name, text, setting.kind, written)
    if isinstance(found, float) and not math.isfinite(found):
        raise UserError(f"{setting.name} ({written}) is {found}; it must be a finite number.")
    if setting.choices and found not in setting.choices:
        hint = did_you_mean(str(found), setting.choices, otherwise=f"it is {setting.type_words}")
        raise UserError(f"{setting.name} ({written}) cannot be {found!r}{hint}")
    if setting.range is not None and not setting.range.holds(found):
        raise UserError(f"{setting.name} ({written}) is {found}; it must be {setting.range.words}.")
    return found


# What a method searches unasked


def _own(experiment: Experiment) -> list[Axis]:
    method, values = experiment.run.method, to_flat(experiment.settings)
    idle = registry.idle(method, experiment.settings)
    found = []
    for setting in list_settings(type(experiment.settings)):
        axis = None if setting.name in idle else _around(setting, values[setting.name])
        if axis is not None:
            found.append(axis._replace(followers=_followers(method, setting.name)))
    return found


def _around(setting: Setting, value: Any) -> Axis | None:
    """What a setting's mark says, around its value; None without a mark, or around 0."""
    match setting.search:
        case Times(low, high) if value > 0:
            return Axis(setting.name, _rounded(low * value), _rounded(high * value), log=True)
        case Plus(low, high):
            return Axis(setting.name, value + low, value + high)
        case Factors(values) if value > 0:
            return Axis(setting.name, values=tuple(_rounded(each * value) for each in values))
    return None


def _followers(method: str, name: str) -> tuple[str, ...]:
    known = list_settings(registry.config_class(method))
    return tuple(each.name for each in known if each.search == Follows(name))


# Points of the space


def _points(space: Sequence[Axis], number: int, seed: int) -> Iterator[dict[str, Any]]:
    combinations = math.prod(len(axis.values) for axis in space)
    if 0 < combinations < number:  # lists alone, and few: all of them
        for values in itertools.product(*(axis.values for axis in space)):
            yield dict(zip((axis.name for axis in space), values, strict=True))
        return
    from torch.quasirandom import SobolEngine  # torch takes a second

    engine = SobolEngine(len(space), scramble=True, seed=seed)
    for _ in range(number * ATTEMPTS):
        shares = engine.draw(1)[0].tolist()
        yield {axis.name: axis.at(u) for axis, u in zip(space, shares, strict=True)}


def _with_followers(
    experiment: Experiment, space: Sequence[Axis], point: Mapping[str, Any]
) -> dict[str, Any]:
    given, found = searched(experiment, space), dict(point)
    for axis in space:
        for name in axis.followers:
            found[name] = _rounded(given[name] * point[axis.name] / given[axis.name])
    return found


def _key(experiment: Experiment, space: Sequence[Axis]) -> tuple[Any, ...]:
    return tuple(searched(experiment, space).values())


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
