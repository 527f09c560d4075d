"""`corefed bench pfl`: client trainings per second in the CIFAR-10 setting of pfl-research.

The setting (Granqvist et al. 2024): 1000 users of 50 points, IID, 50 of them in each of 1500
rounds, one local epoch of minibatches of 10, which is 5 steps. The shared model is tested on all
10,000 test points, every 100 rounds. Our network is a small convolutional one, and learning rates
are corefed's defaults: speed is to be compared, not accuracy.

    client trainings per second = cohort x rounds / seconds of training

Seconds of training are without the first round, in which steps may be compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from corefed.base.device import device_for
from corefed.base.progress import bars
from corefed.base.types import ClientData, Tree
from corefed.data import datasets
from corefed.data.clients import FederatedData, federate
from corefed.data.dataset import Dataset
from corefed.data.partition import Split
from corefed.settings.config import resolve
from corefed.training import client_side
from corefed.training.loop import Line, peak_memory_mb, run_rounds
from corefed.training.predicting import posterior_noise
from corefed.training.rounds import Simulation
from corefed.training.scoring import score_classes
from corefed.training.setup import Setup, prepare
from corefed_studies import pages
from corefed_studies.bench import study
from corefed_studies.bench.engine_tables import number
from corefed_studies.bench.timed import MEMORY_MB, compiled_as

NAME = "pfl"
METHODS = ("fedavg", "pfedbayes", "coreset-pfedbayes")


class PflSetting(NamedTuple):
    """The setting, and the network."""

    clients: int = 1000
    points: int = 50
    cohort: int = 50
    rounds: int = 1500
    local_steps: int = 5
    batch_size: int = 10
    evaluate_every: int = 100
    channels: tuple[int, ...] = (32, 64)
    hidden: tuple[int, ...] = (128,)


SETTINGS = {"paper": PflSetting(), "quick": PflSetting(rounds=20, evaluate_every=20)}


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    rounds: int | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Train with each method, or take the results of files; show them, also in a page."""
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    studies = [study.read(path, NAME, ["setting", "rows"]) for path in sources]
    if not sources:
        where, setting = device_for(device), SETTINGS[scale]
        setting = setting._replace(rounds=rounds or setting.rounds)
        data = split(read_points(), setting)
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    if not sources:
        found = study.about(NAME, scale, where)
        found["setting"] = setting._asdict()
        found["rows"] = [measure(method, data, setting, where, console) for method in METHODS]
        studies = [study.write(folder / f"{NAME}.json", found)]
    tables = [table(each) for each in studies]
    pages.put(folder, NAME, tables, marked)
    console.print(pages.markdown(tables), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def read_points() -> Dataset:
    return datasets.load("cifar10", download=False)


def split(points: Dataset, setting: PflSetting) -> FederatedData:
    """Training points dealt at random; each client has some of the test points, which are all."""
    assert points.held_out is not None
    g = torch.Generator().manual_seed(0)

    def deal(rows: torch.Tensor, each: int) -> Sequence[torch.Tensor]:
        mixed = rows[torch.randperm(len(rows), generator=g)]
        return list(mixed[: setting.clients * each].view(-1, each))

    tested = points.held_out.nonzero().flatten()
    train = deal((~points.held_out).nonzero().flatten(), setting.points)
    test = deal(tested, len(tested) // setting.clients)
    pairs = zip(train, test, strict=True)
    splits = [Split(a.sort().values, b.sort().values) for a, b in pairs]
    return federate(points, splits, scale="standard")


def measure(
    method: str, data: FederatedData, setting: PflSetting, device: torch.device, console: Console
) -> dict[str, Any]:
    """One run without a folder: its speed, and the accuracy of its shared model."""
    flags = {
        "method": method, "data": "cifar10", "partition": "iid", "model": "cnn",
        "scale": "standard", "clients": setting.clients, "cohort": setting.cohort,
        "rounds": setting.rounds, "local_steps": setting.local_steps,
        "batch_size": setting.batch_size, "evaluate_every": setting.evaluate_every,
        "channels": setting.channels, "hidden": setting.hidden, "device": str(device),
        "memory_mb": MEMORY_MB * (10 if device.type == "cuda" else 1),  # so that no file is needed
    }  # fmt: skip
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    setup = prepare(resolve(None, flags), data)
    lines: list[Line] = []
    with bars(console=console) as shown:

        def on_round(line: Line, servers: list[Tree], last: bool) -> None:
            now = line["round"]
            text = f"{method}: round {now} of {setting.rounds}" if "metrics" in line else ""
            shown.show(method, now, setting.rounds, line=text)

        run = setup.experiment.run
        run_rounds(setup.method, Central(setup), setup.servers, run, lines, on_round=on_round)
    wall = time.perf_counter() - began
    seconds = [line["seconds"] for line in lines]
    usual = sum(seconds[1:]) or seconds[0]
    return {
        "method": method,
        "weights": setup.model.size,
        "rounds": len(lines),
        "compile": compiled_as(setup),
        "trainings_per_second": setting.cohort * max(1, len(lines) - 1) / usual,
        "round": statistics.median(seconds),
        "first_round": seconds[0],
        "training": sum(seconds),
        "evaluation": sum(line.get("evaluate_seconds", 0.0) for line in lines),
        "wall": wall,
        "accuracy": lines[-1]["metrics"]["global_accuracy"][0],
        "peak_mb": peak_memory_mb(str(device)),
    }


class Central(Simulation):
    """Simulated clients whose shared model alone is tested, on the test points of all."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        test = setup.data.test
        real = test.weight > 0
        self.points = ClientData(*(field[real].unsqueeze(0) for field in test))

    def evaluate(self, t: int, servers: Sequence[Tree]) -> Line:
        setup, clients = self.setup, self.setup.clients
        method, draws = setup.method, setup.experiment.run.evaluate_draws
        noise = posterior_noise(method, clients.streams([0], t), draws)
        sent, private = clients.broadcast(servers, [0]), clients.take([0])
        shared = client_side.models(method, sent, private, clients.data.of([0]))["global"]
        with torch.no_grad():
            scores = score_classes(method.predict(shared, self.points.x, noise), self.points.y)
        return {"metrics": {"global_accuracy": [float(scores["correct"].mean())]}}


def table(found: Mapping[str, Any]) -> pages.Table:
    setting, rows = found["setting"], found["rows"]
    columns = [
        "method", "compile", "client trainings per second", "ms per round", "training, s",
        "first round, s", "evaluation, s", "wall, s", "accuracy, %", "memory, MB",
    ]  # fmt: skip
    cells = [
        [
            row["method"], row["compile"], number(row["trainings_per_second"]),
            number(1000 * row["round"]), number(row["training"]), number(row["first_round"]),
            number(row["evaluation"]), number(row["wall"]), f"{100 * row['accuracy']:.1f}",
            number(row["peak_mb"]),
        ]
        for row in rows
    ]  # fmt: skip
    memory = "the GPU." if found["device"] == "cuda" else "the machine, of all rows up to this one."
    return pages.Table(
        f"{found['machine']}: CIFAR-10, {setting['clients']} clients, cohort {setting['cohort']}, "
        f"{setting['rounds']} rounds",
        columns,
        cells,
        f"{setting['points']} points per client, {setting['local_steps']} steps of "
        f"{setting['batch_size']} points. A convolutional network of {rows[0]['weights']:,} "
        f"weights (channels {'-'.join(map(str, setting['channels']))}, hidden "
        f"{'-'.join(map(str, setting['hidden']))}); a Bayesian method has a mean and a width for "
        "each. Client trainings per second leave out the first round. Accuracy is that of the "
        f"shared model on all test points. Memory is the peak on {memory}",
    )
