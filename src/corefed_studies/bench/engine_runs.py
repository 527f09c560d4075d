"""The whole runs of `corefed bench engine`, each recorded in a folder as `corefed run` does it.

runs    10 clients of MNIST (shards-medium), evaluated now and then; random data without MNIST
saved   many clients, all in every round, with checkpoints
many    10,000 clients of which few train in a round, and 100,000 small ones, each in a
        subprocess, so that its peak memory is its own

start           until the first round begins: data, split, network, folder
first round     what the first round takes longer than the median of the others: compiling
training        the other seconds of rounds
after start     the wall time without start and first round
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from corefed.base.errors import UserError
from corefed.data import datasets
from corefed.data.clients import FederatedData
from corefed.settings.config import resolve
from corefed.settings.run import MEMORY
from corefed.training import rounds
from corefed.training.loop import Line, peak_memory_mb
from corefed_studies.bench import isolated
from corefed_studies.bench.engine_settings import EngineSetting, setting_for
from corefed_studies.bench.timed import compiled_as, random_data

CLIENTS = 10
TESTED = 20
"""Test points of a client whose evaluation is not what is measured."""


def run(device: torch.device, setting: EngineSetting, method: str, scratch: Path) -> dict[str, Any]:
    """A usual run of ten clients."""
    flags: dict[str, object] = {
        "method": method, "clients": CLIENTS, "rounds": setting.run_rounds,
        "evaluate_every": setting.run_evaluate_every, "device": str(device),
    }  # fmt: skip
    data = None
    if has_mnist():
        flags |= {"data": "mnist", "partition": "shards-medium"}
    else:
        data = random_data(CLIENTS, setting.points, setting.widths, tested=setting.points)
        flags |= in_memory(setting)
    return {"method": method, "data": flags["data"], **recorded(flags, data, scratch)}


def has_mnist() -> bool:
    try:
        datasets.load("mnist", download=False)
    except UserError:
        return False
    return True


def in_memory(setting: EngineSetting) -> dict[str, object]:
    return {"data": MEMORY, "hidden": tuple(setting.widths[1:-1])}


def saved(device: torch.device, setting: EngineSetting, scratch: Path) -> dict[str, Any]:
    """Every client trains in every round, so that every checkpoint has all of them."""
    clients, number = setting.saved_clients, setting.saved_rounds
    flags: dict[str, object] = {
        "method": "pfedbayes", "clients": clients, "rounds": number, "evaluate_every": number,
        "device": str(device), **in_memory(setting),
    }  # fmt: skip
    data = random_data(clients, setting.points_of_many, setting.widths, tested=TESTED)
    found = recorded(flags, data, scratch)
    rest = found["wall"] - found["start"] - found["first"]
    return {
        "clients": clients,
        **found,
        "after_start": rest,
        "ratio": rest / found["training"],
    }


def recorded(flags: dict[str, object], data: FederatedData | None, scratch: Path) -> dict[str, Any]:
    """Train into a folder that is removed afterwards; where the time went."""
    lines: list[Line] = []
    began = time.perf_counter()
    marks: list[float] = []  # when the first round began, and when each ended

    def mark(*_: object) -> None:
        marks.append(time.perf_counter() - began)

    def on_round(line: Line) -> None:
        mark()
        lines.append(line)

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        out = Path(folder) / "run"
        result = rounds.train(
            resolve(None, flags), out, data=data, on_begin=mark, on_round=on_round
        )
        wall = time.perf_counter() - began
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    seconds = [line["seconds"] for line in lines]
    median = statistics.median(seconds[1:] or seconds)
    first = max(0.0, seconds[0] - median)
    run, checkpoints = result.setup.experiment.run, result.summary["checkpoints"]
    return {
        "rounds": len(lines),
        "compile": compiled_as(result.setup),
        "evaluate_every": run.evaluate_every,
        "start": marks[0],
        "first": first,
        "training": sum(seconds) - first,
        "evaluation": sum(line.get("evaluate_seconds", 0.0) for line in lines),
        "checkpoints": checkpoints["written"],
        "checkpoint_seconds": checkpoints["seconds"],
        "wall": wall,
        "round": median,
        "first_round_ended": marks[1],
        "folder_mb": size / 2**20,
        "client_state": type(result.setup.clients.store).__name__,
    }


def many(device: torch.device, scale: str, what: str, scratch: Path) -> dict[str, Any]:
    """`cohort` or `linear`, in a subprocess."""
    return isolated.measure(__name__, what, str(device), scale, str(scratch))


def one(what: str, device: str, scale: str, scratch: str) -> dict[str, Any]:
    """In the subprocess: the run, and the peak memory of this process."""
    setting = setting_for(scale, torch.device(device).type)
    cohort = setting.many_cohort
    flags: dict[str, object] = {
        "method": "pfedbayes", "cohort": cohort, "evaluate_clients": cohort, "device": device,
    }  # fmt: skip
    if what == "cohort":
        flags |= {"clients": setting.many_clients, "rounds": setting.many_rounds}
        flags |= in_memory(setting)
        data = random_data(setting.many_clients, setting.many_points, setting.widths, tested=2)
    else:
        flags |= {"clients": setting.linear_clients, "rounds": 1, "data": "synthetic-linear"}
        data = None
    found = recorded(flags, data, Path(scratch))
    memory = {"host_mb": isolated.peak_mb()}
    if torch.device(device).type == "cuda":
        memory["device_mb"] = peak_memory_mb(device)
    network = "-".join(map(str, setting.widths))
    return {
        "what": network if what == "cohort" else flags["data"],
        "clients": flags["clients"],
        "cohort": cohort,
        **found,
        **memory,
    }


if __name__ == "__main__":
    print(json.dumps(one(*sys.argv[1:])))
