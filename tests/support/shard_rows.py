"""Every method on workers of their own: `python shard_rows.py FOLDER` is one of them.

A worker trains its share of the small federation of `method_rows.py`, once for each row, and tests
its models. The first writes what came out; `whole` computes the same in one process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from method_rows import (
    CLASSES,
    ROWS,
    SIZES,
    WORK,
    Row,
    build,
    compile_steps,
    federation,
    network,
)
from safetensors.torch import save_file

from corefed.base.errors import UserError
from corefed.base.place import find_place, share
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import Tree
from corefed.data.clients import FederatedData, stack
from corefed.data.preparation import Preparation
from corefed.methods import registry
from corefed.settings.fields import from_flat
from corefed.settings.run import Experiment, Run
from corefed.training import others, storing
from corefed.training.local import Compiled, LocalClients
from corefed.training.loop import Clients, run_rounds
from corefed.training.rounds import Simulation
from corefed.training.setup import Setup
from corefed.training.sharded import Sharded
from corefed.training.store import InHost, Start, Store
from corefed.training.world import World, joined

SEEDS = (0, 1)
COHORT = 2  # of five clients: in some rounds a worker of two or three has none


class Case(NamedTuple):
    """A method, and how its clients are kept, trained and tested."""

    row: Row
    sampled: int = 0  # evaluated clients per seed; of one, the first worker has none
    large: bool = False  # state outside the device, traced steps, tests on few others


ALL: list[Row] = [parameter.values[0] for parameter in ROWS]
METHODS = list({(row.name, build(row).traits.mean): row for row in reversed(ALL)}.values())[::-1]
"""One row for each method and what its server needs of the messages."""
CASES = [
    *map(Case, METHODS),
    Case(Row("independent"), sampled=1, large=True),
    Case(Row("fedavg"), sampled=3),
    Case(next(row for row in METHODS if row.name == "coreset-pfedbayes"), sampled=1, large=True),
]


def in_host(start: Start, clients: int) -> Store:
    return InHost(start, clients, torch.device("cpu"))


def traced(row: Row) -> Compiled:
    """Compiled steps, with the same settings for every seed."""
    steps, at = compile_steps(row)
    return Compiled(steps, lambda t, runs: at(t, [0] * len(runs)))


@contextmanager
def neighbours(case: Case) -> Iterator[None]:
    """Fewer others than there are, where the case is large."""
    before = others.NEIGHBOURS
    others.NEIGHBOURS = 2 if case.large else before
    try:
        yield
    finally:
        others.NEIGHBOURS = before


def setup(case: Case, rank: int = 0, size: int = 1) -> tuple[Setup, FederatedData]:
    """The clients of a worker, in float64, and the data of all."""
    row = case.row
    method = build(row)
    label = tuple(map(str, range(CLASSES)))
    everyone = stack(
        [
            FederatedData(
                train=federation(),
                test=federation(seed=seed + 1),
                classes=CLASSES,
                targets=0,
                names=[f"client {i}" for i in range(len(SIZES))],
                labels=label,
                preparations=(Preparation((6,), label),),
                validation=federation(seed=3),
            )
            for seed in SEEDS
        ]
    )
    run = Run(
        method=row.name, clients=len(SIZES), rounds=row.rounds, cohort=COHORT, seeds=SEEDS,
        evaluate_every=row.rounds, evaluate_draws=3, device="cpu", evaluate_clients=case.sampled,
    )  # fmt: skip
    settings = from_flat(registry.config_class(row.name), dict(row.settings))
    servers = [
        {k: v.double() for k, v in method.init_server(Streams([Who(s, SERVER)], 0)).items()}
        for s in SEEDS
    ]
    mine = share(len(SIZES), size, rank)
    data = everyone.part(mine)
    clients = LocalClients(
        method, data.train, SEEDS, servers, WORK, 100, first=mine.start,
        choose=in_host if case.large else storing.on_device,
        compiled=traced(row) if case.large else None,
    )  # fmt: skip
    whole = Setup(Experiment(run, settings), data, network(), method, clients, servers, mine.start)
    return whole, everyone


def outcome(now: Setup, clients: Clients) -> tuple[list[dict[str, Any]], Tree]:
    """Lines of the rounds without times, and the servers' state."""
    lines: list[dict[str, Any]] = []
    run = now.experiment.run
    servers = run_rounds(now.method, clients, now.servers, run, lines)
    untimed = [
        {k: v for k, v in line.items() if "seconds" not in k and "memory" not in k}
        for line in lines
    ]
    tree = {f"{g}.{k}": v.contiguous() for g, one in enumerate(servers) for k, v in one.items()}
    return untimed, tree


def whole(case: Case) -> tuple[list[dict[str, Any]], Tree, Tree]:
    """Lines, servers and private state of all clients, in one process."""
    now, _ = setup(case)
    with neighbours(case):
        return *outcome(now, Simulation(now)), now.clients.private


def sharded(world: World, case: Case) -> tuple[list[dict[str, Any]], Tree, Tree]:
    now, everyone = setup(case, world.rank, world.size)
    clients = Sharded(world, now, everyone)
    with neighbours(case):
        lines, servers = outcome(now, clients)
    private = {k: clients.of_all(v).contiguous() for k, v in now.clients.private.items()}
    return lines, servers, private


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    place = find_place(os.environ)
    assert place is not None
    with joined(place, "cpu", 60.0) as world:
        for number, case in enumerate(CASES):
            lines, servers, private = sharded(world, case)
            if world.first:
                (folder / f"{number}.json").write_text(json.dumps(lines))
                save_file(servers, folder / f"{number}.servers")
                save_file(private, folder / f"{number}.private")
        said = [heard(lambda: world.agree(lambda: _refuse(world)))]
        world.trouble = None
        wild = Case(Row("fedavg", (("learning_rate", 1e300),)))
        said.append(heard(lambda: sharded(world, wild)))
        (folder / f"said-{world.rank}.json").write_text(json.dumps(said))
        world.done = True


def heard(work: Callable[[], object]) -> str:
    """The sentence of the mistake that `work` makes."""
    try:
        work()
    except UserError as error:
        return str(error)
    return "no mistake"


def _refuse(world: World) -> None:
    if world.rank == 1:
        raise UserError("There is no disk.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
