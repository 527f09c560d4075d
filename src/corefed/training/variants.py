"""The method of a round: learning rates follow a schedule, and runs side by side may differ.

A method binds its settings when it is built, which costs next to nothing. So a schedule is another
`Config` per round, and runs with different settings are one `Config` with a tensor [C] where they
differ. Methods know nothing of either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from corefed.base.types import Method
from corefed.methods import registry
from corefed.models.network import Model
from corefed.settings.fields import from_flat, list_settings, to_flat
from corefed.settings.run import Run
from corefed.training.compiled import Settings

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MethodAt = Callable[[int, Sequence[int]], Method]
"""(round, the run that each of C clients belongs to) -> the method these clients train with."""


def factor(run: Run, t: int) -> float:
    """What learning rates are multiplied by in round t (from 0): warm-up, then decay to 0.

    The last planned round still learns: the decay would reach 0 one round later. Rounds beyond the
    plan are like the last one.
    """
    if t < run.warmup:
        return (t + 1) / (run.warmup + 1)
    planned = _planned(run)
    done = (min(t, planned - 1) - run.warmup) / max(1, planned - run.warmup)
    if run.schedule == "linear":
        return 1 - done
    if run.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0


def at_round(settings: DataclassInstance, run: Run, t: int) -> DataclassInstance:
    """The settings of round t (from 0): every learning rate times `factor`.

    A Config with a method `at(done)` has settings of its own that change over the planned rounds.
    """
    own = getattr(settings, "at", None)
    if own is not None:
        settings = own((t + 1) / _planned(run))
    scale = factor(run, t)
    if scale == 1.0:
        return settings
    values = to_flat(settings)
    rates = [each.name for each in list_settings(type(settings)) if each.rate]
    return from_flat(type(settings), {**values, **{name: scale * values[name] for name in rates}})


def _planned(run: Run) -> int:
    return run.planned_rounds or run.rounds


def stacked(many: Sequence[DataclassInstance], runs: Sequence[int], device: torch.device) -> Any:
    """One Config for clients of several runs: a tensor [C] for each number that differs."""
    present = sorted(set(runs))
    first = many[present[0]]
    flat = {run: to_flat(many[run]) for run in present}
    values: dict[str, Any] = dict(flat[present[0]])
    for each in list_settings(type(first)):
        different = {flat[run][each.name] for run in present}
        if len(different) == 1:
            continue
        if not each.per_run:
            raise ValueError(f"runs with different {each.name} cannot be trained together")
        column = [flat[run][each.name] for run in runs]
        values[each.name] = torch.tensor(column, device=device)
    return from_flat(type(first), values)


def _settings_of(run: Run, runs: Sequence[int]) -> list[int]:
    return [number // len(run.seeds) for number in runs]


SettingsAt = Callable[[int, Sequence[int]], Settings]
"""(round, the run that each of C clients belongs to) -> the settings of a compiled step."""


def step_settings(
    run: Run, many: Sequence[DataclassInstance], model: Model, *, scheduled: bool = True
) -> SettingsAt:
    """The settings of any round, those that may differ or change as numbers per client.

    Not `scheduled`: the same in every round. Whose they are, `methods` says.
    """
    kind = type(many[0])
    names = [each.name for each in list_settings(kind) if each.per_run]

    def at(t: int, runs: Sequence[int]) -> Settings:
        which = _settings_of(run, runs)
        present = sorted(set(which))
        now = {k: at_round(many[k], run, t) if scheduled else many[k] for k in present}
        flat = {number: to_flat(settings) for number, settings in now.items()}
        first = flat[present[0]]
        values: dict[str, float | list[float]] = {}
        for name in names:
            alike = len({flat[number][name] for number in present}) == 1
            values[name] = first[name] if alike else [flat[number][name] for number in which]
        others = {name: value for name, value in first.items() if name not in names}

        def build(tensors: Mapping[str, Tensor]) -> Method:
            return registry.build(run.method, from_flat(kind, {**others, **tensors}), model)

        return Settings(build, values, repr(sorted(others.items())))

    return at


def methods(
    run: Run, many: Sequence[DataclassInstance], model: Model, device: torch.device
) -> MethodAt:
    """The method of any round, for clients of runs with these settings.

    The first settings are those of the first G runs, one per seed, and so on.
    """
    built: dict[tuple[int, tuple[int, ...]], Method] = {}
    alike = all(each == many[0] for each in many)
    constant = run.schedule == "constant" and run.warmup == 0 and not hasattr(many[0], "at")

    def at(t: int, runs: Sequence[int]) -> Method:
        which = _settings_of(run, runs)
        key = (0 if constant else t, (0,) if alike else tuple(which))
        if key not in built:
            if not constant and len(built) > len(many):
                built.clear()  # of rounds before
            now = [at_round(each, run, t) for each in (many[:1] if alike else many)]
            config = now[0] if alike else stacked(now, which, device)
            built[key] = registry.build(run.method, config, model)
        return built[key]

    return at
