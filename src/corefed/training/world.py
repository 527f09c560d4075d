"""Several processes that train together, each on its share of the clients: who they are, and talk.

A process is a worker, and its number is its rank. Workers are started by torchrun, by Slurm or by
`corefed run --workers`, and find each other by the usual environment variables. What they say is
tensors, or JSON as bytes. Nothing is pickled. Tensors on a GPU go by NCCL, all others by gloo.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Its functions have the group of the moment as a default. Imported later, as tracing a step does,
# it would hold the group beyond its end, and the process would abort when it exits.
import torch.distributed.nn.functional
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from corefed import __version__
from corefed.base.errors import UserError
from corefed.base.place import Place
from corefed.base.types import Tree

PATIENCE = timedelta(minutes=30)
"""How long a worker waits for the others in a round: as torch's own default, for slow ones."""
PORT = "29500"
"""Where MASTER_PORT is not set: torchrun's default."""

Result = TypeVar("Result")

Shapes = dict[str, tuple[list[int], str]]
"""Shape and type of every tensor of a tree."""


class CommonError(UserError):
    """A mistake that every worker raises, so that the first alone need say it."""


class WorkerLostError(Exception):
    """Another worker has ended or does not answer."""


class World:
    """The workers of a run, as one of them sees them."""

    def __init__(self, rank: int, size: int, beside: int = 1) -> None:
        self.rank, self.size = rank, size
        self.beside = beside  # workers on this machine
        self.trouble: UserError | None = None  # of this worker; the others are still to hear of it
        self.done = False  # all workers are at the end of the run

    @property
    def first(self) -> bool:
        """Whether this is the one that prints and writes."""
        return self.rank == 0

    def gather(self, mine: Tensor) -> Tensor:
        """[size, ...]: every worker's tensor of this shape, in the order of ranks."""
        mine = mine.contiguous()
        every = [torch.empty_like(mine) for _ in range(self.size)]
        with _talking():
            dist.all_gather(every, mine)
        return torch.stack(every)

    def gather_rows(self, mine: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every worker's tensor [counts[rank], ...], in the order of ranks."""
        padded = mine.new_zeros(max(counts), *mine.shape[1:])
        padded[: len(mine)] = mine
        every = self.gather(padded)
        return [each[:count] for each, count in zip(every, counts, strict=True)]

    def ask(self, mine: Any) -> list[Any]:
        """What every worker says, in the order of ranks: anything that JSON has."""
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        lengths = self.gather(torch.tensor([len(text)])).flatten().tolist()
        return [json.loads(bytes(each.tolist())) for each in self.gather_rows(text, lengths)]

    def tell(self, mine: Sequence[int]) -> list[int]:
        """What the first worker says, to all."""
        said = torch.tensor(mine, dtype=torch.int64)
        with _talking():
            dist.broadcast(said, 0)
        found: list[int] = said.tolist()
        return found

    def agree(self, work: Callable[[], Result]) -> Result:
        """The result of this worker's `work`; a UserError of any worker is raised by all."""
        found: list[Result] = []
        try:
            found.append(work())
        except UserError as error:
            self.trouble = self.trouble or error
        self.settle(bool(self.gather(torch.tensor([int(self.trouble is not None)])).any()))
        return found[0]

    def settle(self, trouble: bool) -> None:
        """Raise the first worker's trouble at all of them, if there is trouble anywhere."""
        if not trouble:
            return
        said = self.ask(str(self.trouble) if self.trouble is not None else "")
        rank, sentence = next((rank, text) for rank, text in enumerate(said) if text)
        alone = sum(map(bool, said)) < self.size and rank > 0
        raise UserError(f"Worker {rank} of {self.size}: {sentence}" if alone else sentence)


@contextmanager
def joined(place: Place, device: str, timeout: float) -> Iterator[World]:
    """Meet the other workers; `device` is the setting. Waits at most `timeout` seconds for them."""
    facts = {"host": socket.gethostname(), "corefed": __version__, "torch": torch.__version__}
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda and torch.device(device if device != "auto" else "cuda").index is not None:
        raise UserError(f"device is {device!r}, but each worker has a GPU of its own; use cuda.")
    if cuda:
        torch.cuda.set_device(place.local % torch.cuda.device_count())
        facts["gpu"] = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    store, said = _meet(place, facts, timeout)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    with _talking():
        dist.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.size, timeout=PATIENCE
        )
    try:
        beside = sum(one["host"] == facts["host"] for one in said)
        world = World(place.rank, place.size, beside)
        yield world
        if world.done:
            world.ask(None)  # the first worker has the store: nobody may still need it
    finally:
        dist.destroy_process_group()


def _meet(place: Place, facts: dict[str, str], timeout: float) -> tuple[Any, list[dict[str, str]]]:
    """The common store, and what every worker has said of itself there."""
    os.environ.setdefault("MASTER_PORT", PORT)
    where = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ['MASTER_PORT']}"
    seconds = timedelta(seconds=timeout)
    try:
        found = rendezvous("env://", place.rank, place.size, timeout=seconds)
        store = _fresh(next(found)[0], place, timeout)
        store.set(f"corefed/{place.rank}", json.dumps(facts))
        names = [f"corefed/{rank}" for rank in range(place.size)]
        store.wait(names, seconds)
        said = [json.loads(store.get(name)) for name in names]
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"Not all {place.size} workers met at {where} within {timeout:g} s; check that all "
            "were started, that MASTER_ADDR and MASTER_PORT are the first one's and can be "
            "reached, or wait longer by --worker-timeout."
        ) from error
    _refuse_strangers(said)
    return store, said


def _fresh(store: Any, place: Place, timeout: float) -> Any:
    """A part of the store that no earlier group of workers has used.

    torchrun keeps its store when it starts a group again, with the addresses of dead workers in it.
    So every worker says a random word, and the first answers each word with the number of its
    group; only those who live can read the answer and count themselves in.
    """
    if place.rank > 0:
        word = secrets.token_hex(8)
        store.set(f"corefed/word/{place.rank}", word)
        store.wait([f"corefed/group/{word}"], timedelta(seconds=timeout))
        group = store.get(f"corefed/group/{word}").decode()
        store.add(f"corefed/here/{group}", 1)
        return PrefixStore(f"corefed/{group}", store)
    group = str(store.add("corefed/groups", 1))
    deadline = time.monotonic() + timeout
    while store.add(f"corefed/here/{group}", 0) < place.size - 1:
        if time.monotonic() > deadline:
            raise RuntimeError("not all workers came")
        for rank in range(1, place.size):
            if store.check([f"corefed/word/{rank}"]):
                word = store.get(f"corefed/word/{rank}").decode()
                store.set(f"corefed/group/{word}", group)
        time.sleep(0.02)
    return PrefixStore(f"corefed/{group}", store)


def _refuse_strangers(said: list[dict[str, str]]) -> None:
    """Refuse other versions, GPUs on some machines only, and a GPU for two workers."""
    for rank, one in enumerate(said):
        for name in ("corefed", "torch"):
            if one[name] != said[0][name]:
                raise CommonError(
                    f"Worker {rank} on {one['host']} has {name} {one[name]} and worker 0 on "
                    f"{said[0]['host']} has {said[0][name]}; install the same version everywhere."
                )
        if ("gpu" in one) != ("gpu" in said[0]):
            raise CommonError(
                f"Only one of worker 0 on {said[0]['host']} and worker {rank} on {one['host']} has "
                "a GPU; use machines of one kind, or --device cpu."
            )
        twins = [n for n in range(rank) if "gpu" in one and _seat(said[n]) == _seat(one)]
        if twins:
            raise CommonError(
                f"Workers {twins[0]} and {rank} on {one['host']} would share one GPU; start at "
                "most one worker per GPU, or use --device cpu."
            )


def _seat(one: dict[str, str]) -> tuple[str, str]:
    return one["host"], one["gpu"]


def shapes_of(tree: Tree) -> Shapes:
    """Shape and type of every tensor, as JSON has it."""
    return {k: (list(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in tree.items()}


def blank(shapes: Shapes, device: torch.device | str = "cpu") -> Tree:
    """A tree of zeros that looks like this."""
    return {
        name: torch.zeros(shape, dtype=getattr(torch, kind), device=device)
        for name, (shape, kind) in shapes.items()
    }


@contextmanager
def _talking() -> Iterator[None]:
    """Torch's errors of a broken or silent connection mean that a worker is lost."""
    try:
        yield
    except RuntimeError as error:  # DistError too
        raise WorkerLostError(str(error)) from error
