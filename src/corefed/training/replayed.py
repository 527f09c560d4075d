"""Functions of tensors that are the same in every round: recorded once, replayed on a GPU.

A selection is some 270 small operations, each launched from Python. Here they are captured as one
CUDA graph together with the random numbers that they draw. A call is then a few copies and one
launch. Capturing takes about as long as four plain calls, so nothing is compiled. On a CPU, where
nothing is saved, tests trace the same functions (`make_fx`, which refuses what looks at a number).

What changes from call to call lies in tensors that stay where they are: what is given, and where in
the clients' streams each draw stands. A program is made again only for other shapes, for `fixed`
tensors that lie elsewhere, or for another key. Results are those of the plain function up to
rounding; numbers that are drawn are the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from corefed.base import philox
from corefed.base.philox import Places
from corefed.base.rng import Streams
from corefed.base.shown import say
from corefed.base.types import Body, Tree

MOST = 8
"""Programs that are kept."""


class Replays:
    """Programs by key and shapes: a `Replay` of `base/types.py`."""

    def __init__(self) -> None:
        self.given_up = False  # one could not be recorded: functions are called as they are
        self._programs: dict[object, _Program] = {}

    def __call__(self, key: object, body: Body, given: Tree, fixed: Tree, streams: Streams) -> Tree:
        if self.given_up:
            return body({**given, **fixed}, streams)
        shapes = tuple((name, v.shape, v.dtype) for name, v in {**given, **fixed}.items())
        own = (key, shapes, tuple((v.data_ptr(), v.stride()) for v in fixed.values()))
        program = self._programs.get(own)
        if program is None:
            while len(self._programs) >= MOST:
                self._programs.pop(next(iter(self._programs)))
            try:
                program = _Program(body, given, fixed, streams)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of a user's network, or of a version of PyTorch
                self._give_up(error)
                return body({**given, **fixed}, streams)
            self._programs[own] = program
        return program(given, streams)

    def _give_up(self, error: Exception) -> None:
        reason = str(error).strip().splitlines()
        say(
            "note: selections could not be recorded and are made one operation after the other: "
            f"{type(error).__name__}{f' ({reason[0]})' if reason else ''}",
            file=sys.stderr,
        )
        self.given_up = True
        self._programs.clear()


class _Draw(NamedTuple):
    """Numbers that a function draws."""

    purpose: str
    words: int  # calls of so many words; 0: one call of normals
    shape: tuple[int, ...]  # of the numbers


class _Buffers(Streams):
    """Streams whose numbers are in buffers that are filled before each call.

    The first time through they are noted down and are all 0.
    """

    def __init__(self, like: Streams) -> None:
        super().__init__(like.who, like.round, like.device)
        self.draws: list[_Draw] = []
        self.ready: list[Tensor] | None = None
        self._next = 0

    def begin(self, ready: Sequence[Tensor]) -> None:
        self.ready, self._next = list(ready), 0

    def _take(self, draw: _Draw, empty: Tensor) -> Tensor:
        if self.ready is None:
            self.draws.append(draw)
            return empty
        if self.draws[self._next] != draw:
            raise RuntimeError(f"{draw.purpose} was not drawn the first time")
        self._next += 1
        return self.ready[self._next - 1]

    def normal(self, purpose: str, *shape: int) -> Tensor:
        draw = _Draw(purpose, 0, (len(self.who), *shape))
        return self._take(draw, torch.zeros(draw.shape, device=self.device))

    def words(self, purpose: str, size: int, calls: int = 1, counted: int | None = None) -> Tensor:
        if counted is not None and counted != calls:
            raise RuntimeError("calls that do not count cannot be recorded")
        draw = _Draw(purpose, calls, (len(self.who), calls, size))
        return self._take(draw, torch.zeros(draw.shape, dtype=torch.int64, device=self.device))

    def places(self, purpose: str, calls: int) -> Places:
        raise RuntimeError(f"{purpose}: only normals and words can be recorded")

    def generators(self, purpose: str, *, host: bool = False) -> list[torch.Generator]:
        raise RuntimeError(f"{purpose}: generators cannot be recorded")

    def subset(self, rows: Sequence[int]) -> Streams:
        raise RuntimeError("streams of some clients cannot be recorded")


class _Program:
    """One function for tensors of these shapes, and the tensors that it reads and writes."""

    def __init__(self, body: Body, given: Tree, fixed: Tree, streams: Streams) -> None:
        self.given = {name: value.clone() for name, value in given.items()}
        self.fixed = fixed  # held, so that nothing else comes to lie there
        device, clients = streams.device, len(streams.who)
        buffers = _Buffers(streams)
        with torch.no_grad():
            self.names = list(
                body({**self.given, **fixed}, buffers)
            )  # notes the draws, fills caches
        self.draws = buffers.draws
        self.numbers = [self._empty(draw, device) for draw in self.draws]
        self.at = torch.zeros(len(self.draws), 3, clients, dtype=torch.int64, device=device)
        self.start = torch.zeros(1, dtype=torch.int64, device=device)
        names = [*self.given, *fixed]

        def flat(*arguments: Tensor) -> tuple[Tensor, ...]:
            buffers.begin(arguments[len(names) :])
            found = body(dict(zip(names, arguments[: len(names)], strict=True)), buffers)
            return tuple(found[name] for name in self.names)

        self.arguments = [*self.given.values(), *fixed.values(), *self.numbers]
        self.call: Callable[..., tuple[Tensor, ...]] = flat
        self.found: tuple[Tensor, ...] = ()
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()
        else:
            with torch.no_grad():
                self.call = make_fx(flat, tracing_mode="real")(*self.arguments)

    def __call__(self, given: Tree, streams: Streams) -> Tree:
        for name, value in given.items():
            self.given[name].copy_(value)
        if self.draws:
            at = [torch.stack(list(streams.places(d.purpose, d.words or 1))) for d in self.draws]
            self.at.copy_(torch.stack(at), non_blocking=True)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        return dict(zip(self.names, self.found, strict=True))

    def _run(self) -> None:
        """Draw, and call the function."""
        for draw, numbers, at in zip(self.draws, self.numbers, self.at, strict=True):
            _fill(draw, numbers, Places(*at), self.start)
        with torch.no_grad():
            self.found = self.call(*self.arguments)

    def _capture(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # warms up what must not be captured
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        self.graph = graph

    @staticmethod
    def _empty(draw: _Draw, device: torch.device) -> Tensor:
        kind = torch.int64 if draw.words else torch.get_default_dtype()
        return torch.zeros(draw.shape, dtype=kind, device=device)


def _fill(draw: _Draw, numbers: Tensor, at: Places, start: Tensor) -> None:
    """The numbers that stand at these places, into their tensor."""
    clients, size = len(numbers), numbers[0].numel()
    if not size:
        return
    if draw.words:
        blocks = -(-draw.shape[-1] // 4)
        numbers.copy_(philox.words(at, draw.words, blocks, numbers.device)[..., : draw.shape[-1]])
    elif numbers.is_cuda and philox.has_triton():
        from corefed.base import philox_cuda  # needs Triton

        philox_cuda.fill(numbers.view(clients, 1, size), *at, start)
    elif numbers.is_cuda:
        numbers.copy_(philox.normals_at(at, start, size).view_as(numbers))
    else:
        numbers.copy_(philox.normals(at, 1, size, numbers.device).view_as(numbers))
