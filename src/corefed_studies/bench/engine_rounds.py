"""The rounds of `corefed bench engine`: by runtime, on coresets, and stacked.

rounds      PFedBayes by runtime: one client after the other, stacked, replayed as a CUDA graph,
            compiled; with the seconds of the first round, in which a runtime compiles
coreset     CoreSet-PFedBayes beside PFedBayes in the fastest of them
stacking    several seeds, and several settings, beside as many clients of one run
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from corefed.training import compiling
from corefed.training.together import Together
from corefed_studies.bench import runtime, timed
from corefed_studies.bench.engine_settings import EngineSetting
from corefed_studies.bench.neighbours import ratio
from corefed_studies.bench.timed import TimedClients, make_clients, random_data

COMPILE = {"stacked": "off", "graph": "graph", "compiled": "on"}
"""Runtime -> its value of `compile`."""

ONE_BY_ONE = "one by one"
ENOUGH = 20.0
"""Seconds after which a row is not measured again."""

FRACTION = 0.1
COPIES = 5
ZETAS = (0.2, 0.5, 1.0, 2.0, 5.0)
"""What the settings differ in that are trained together."""


def ways(device: torch.device, setting: EngineSetting) -> list[str]:
    """The runtimes that this machine has, without the one that takes clients one by one."""
    found = ["stacked"]
    if device.type == "cuda":
        found.append("graph")
    if (device.type == "cuda" or setting.compiled) and not compiling.missing_for(device):
        found.append("compiled")
    return found


def rounds(device: torch.device, setting: EngineSetting, clients: int) -> dict[str, Any]:
    """PFedBayes by runtime, in turn. One by one is timed on ten clients and scaled."""
    points = setting.points if clients <= setting.few else setting.points_of_many
    data = random_data(clients, points, setting.widths).to(device)
    groups: dict[str, TimedClients] = {}
    first: dict[str, float] = {}
    missing: dict[str, str] = {}  # runtime -> why it was not measured
    for way in ways(device, setting):
        some = min(clients, runtime.LOOP_SAMPLE) if way == "stacked" else None
        try:
            group = make_clients(
                data, device, setting.widths, method="pfedbayes", compile=COMPILE[way]
            )
            first[way] = timed.seconds_of(partial(group.train, some), device)
            timed.refuse_given_up(group.clients)
            groups[way] = group
        except (RuntimeError, MemoryError) as error:
            missing[way] = timed.reason(error)
    if not groups:
        raise RuntimeError("; ".join(f"{way}: {why}" for way, why in missing.items()))
    loop = make_clients(data, device, setting.widths, method="pfedbayes", runtime="loop")
    sample = min(clients, runtime.LOOP_SAMPLE)
    works: dict[str, timed.Timed] = {ONE_BY_ONE: partial(loop.train, sample)}
    works |= {way: group.train for way, group in groups.items()}
    found = timed.in_turn(works, device, setting.repeats, ENOUGH)
    found[ONE_BY_ONE] = [clients / sample * seconds for seconds in found[ONE_BY_ONE]]
    medians = {way: statistics.median(each) for way, each in found.items()}
    best = min(groups, key=lambda way: medians[way])
    return {
        "clients": clients,
        "points": points,
        "repeats": len(found[best]),
        "seconds": medians,
        "first": {way: first[way] for way in groups if way != "stacked"},
        "missing": missing,
        "best": best,
        "times_best": {way: ratio(each, found[best]) for way, each in found.items()},
    }


def coreset(
    device: torch.device, setting: EngineSetting, clients: int, best: str
) -> dict[str, Any]:
    """Ten rounds of each, so that selections are in them."""
    data = random_data(clients, setting.points, setting.widths).to(device)
    found = runtime.beside_full(
        data, device, FRACTION, setting.coreset_rounds, setting.repeats, setting.widths,
        compile=COMPILE[best],
    )  # fmt: skip
    return {"clients": clients, "fraction": FRACTION, "runtime": best, **found}


def stacking(device: torch.device, setting: EngineSetting, best: str) -> Iterator[dict[str, Any]]:
    """A round of as many clients: of one run, of several seeds, and with several settings."""
    clients, how = setting.stacked_clients, COMPILE[best]
    many, points = COPIES * clients, setting.points
    data = random_data(many, points, setting.widths).to(device)
    one = make_clients(data, device, setting.widths, method="pfedbayes", compile=how)
    seeds = make_clients(
        random_data(many, points, setting.widths, runs=COPIES).to(device),
        device, setting.widths, method="pfedbayes", compile=how, seeds=tuple(range(COPIES)),
        clients=clients,
    )  # fmt: skip
    setup = timed.make_setup(
        random_data(clients, points, setting.widths).to(device),
        device, setting.widths, method="pfedbayes", compile=how,
    )  # fmt: skip
    settings = [dataclasses.replace(setup.experiment.settings, zeta=zeta) for zeta in ZETAS]
    together = Together(setup, settings)
    works: dict[str, timed.Timed] = {
        f"{many} clients of one run": one.train,
        f"{COPIES} seeds of {clients} clients": seeds.train,
        f"{COPIES} settings of {clients} clients": partial(together.train, 0),
    }
    timed.in_turn(works, device, 1)  # warm up
    found = timed.in_turn(works, device, setting.repeats, ENOUGH)
    for group in (one.clients, seeds.clients, together.clients):
        timed.refuse_given_up(group)
    base = found[next(iter(found))]
    for name, each in found.items():
        yield {
            "what": name,
            "runtime": best,
            "seconds": statistics.median(each),
            "ratio": ratio(each, base),
        }
