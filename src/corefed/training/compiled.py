"""The local steps of stacked clients as one program: traced once, fused, replayed on a GPU.

A method's `step` is ordinary PyTorch: some sixty small operations, each launched from Python. Here
it is traced into a graph of operations (`make_fx`, which goes through the backward pass as well),
compiled (`torch.compile`), and on a GPU captured as a CUDA graph together with the draw of its
noise and the gathering of its minibatch. A step is then one launch, whatever the method.

What changes from round to round is in tensors that stay where they are: the clients' working state,
their minibatches, the keys of their random numbers, and every setting that may follow a schedule
or differ between runs (`PER_RUN`). The program is traced again only if a shape or another
setting changes.

Results are those of the plain steps up to rounding: a row of the contract tests.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import pad

from corefed.base import philox
from corefed.base.rng import Streams
from corefed.base.shown import say
from corefed.base.types import Batch, ClientData, Method, Tree, Work
from corefed.bayes import augment as augmenting
from corefed.bayes.batches import changing, noises, plan, tally
from corefed.selectors.gain import MULTIPLE
from corefed.training.client_side import SEEN, Points, TakeSteps, step_by_step
from corefed.training.replayed import Replays

Build = Callable[[Mapping[str, Tensor]], Method]
"""From a tensor [C] for each setting that may differ between clients to their method."""

WIDTH = MULTIPLE
"""Minibatches are padded to a multiple of it, so that coresets of similar sizes share a program."""

MOST = 4
"""Programs that are kept; each holds the state of its clients."""


class Settings(NamedTuple):
    """The settings of C clients in one round."""

    build: Build
    values: dict[str, float | list[float]]  # by name: of all clients, or of each
    fixed: object  # all others; hashable


class Steps:
    """Runs local steps as compiled programs, one per shape of work."""

    def __init__(self, work: Work, *, fuse: bool, replays: Replays | None = None) -> None:
        """`replays` are the programs of what clients do beside their steps, where there are any."""
        self.work, self.fuse, self.replays = work, fuse, replays
        self.given_up = False  # the compiler failed: steps are taken one by one
        self._programs: dict[object, _Program] = {}
        self._calls: dict[object, Callable[..., Any]] = {}
        self._lock = threading.Lock()  # one thread compiles, the others wait for it

    def of(self, settings: Settings, rows: Sequence[int], *, everyone: bool) -> TakeSteps:
        """How to take the steps of the clients in these rows; `everyone` is all there are.

        The state after the steps is that of the program: copy what has to outlive the next call.
        """

        def take(
            method: Method, working: Tree, points: Points, streams: Streams, steps: int
        ) -> tuple[Tree, Tensor]:
            data, weight, sizes, _, batch = points  # all take the same number of steps here
            each, size = method.traits.batches, self.work.batch if batch is None else batch
            chosen = plan(data, weight, streams, steps, size, each, sizes)
            augment = self.work.augment
            chosen = changing(chosen, augment, streams)
            if self.given_up:
                return step_by_step(method, working, data, chosen, streams, augment)
            width = min(self.work.batch, -(-chosen.at.shape[-1] // WIDTH) * WIDTH)
            padding = (0, max(0, width - chosen.at.shape[-1]))
            at, scale = pad(chosen.at, padding), pad(chosen.scale, padding)
            words = None if chosen.words is None else pad(chosen.words, padding)
            example = Example(working, data, at.shape[-1] * each, method.noise, everyone)
            try:
                program = self._program(settings, example)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # of the compiler, which meets any user's network here
                self._give_up(error)
                return step_by_step(method, working, data, chosen, streams, augment)
            program.load(settings, working, data, tuple(rows))
            program.run(at, scale, words, streams, steps)
            return dict(program.working), program.loss

        return take

    def _give_up(self, error: Exception) -> None:
        reason = str(error).strip().splitlines()
        say(
            "note: local steps could not be compiled and are taken one by one: "
            f"{type(error).__name__}{f' ({reason[0]})' if reason else ''}",
            file=sys.stderr,         )  # fmt: skip
        self.given_up = True

    def _program(self, settings: Settings, example: Example) -> _Program:
        shapes = tuple((name, value.shape, value.dtype) for name, value in example.working.items())
        data = example.data
        key = (settings.fixed, shapes, data.x.shape, data.y.shape, *example[2:])
        own = (threading.get_ident(), key)  # threads share what is compiled, but no state
        with self._lock:
            if own in self._programs:
                return self._programs[own]
            while len(self._programs) >= MOST * max(1, threading.active_count()):
                self._programs.pop(next(iter(self._programs)))
            program = _Program(settings, example, self.work)
            if key not in self._calls:
                self._calls[key] = program.traced(settings.build, fuse=self.fuse)
            program.prepare(self._calls[key])
            self._programs[own] = program
            return program


class Example(NamedTuple):
    """What a program is traced with."""

    working: Tree
    data: ClientData
    width: int  # points of a client in a step
    noise: tuple[int, ...]
    everyone: bool  # whether the data are those of all clients, which stay where they are


class _Program:
    """The step of clients of one shape, and the tensors that it reads and writes."""

    def __init__(self, settings: Settings, example: Example, work: Work) -> None:
        working, data, width, noise, everyone = example
        clients, device, most = len(data.weight), data.weight.device, work.steps
        self.augment = work.augment
        self.noise_shape = noise
        self.working = {name: value.clone() for name, value in working.items()}
        self.settings = {
            name: torch.zeros(clients, dtype=torch.float64, device=device)
            for name in settings.values
        }
        self.loaded: dict[str, float | list[float]] = {}
        self._load_settings(settings)
        self.index = torch.zeros(most, clients * width, dtype=torch.int64, device=device)
        self.scale = torch.zeros(most, clients, width, dtype=data.weight.dtype, device=device)
        self.words = [torch.zeros_like(self.index)] if work.augment is not None else []
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.noise = torch.zeros(clients, *noise, device=device)
        self.loss = torch.zeros(clients, dtype=data.weight.dtype, device=device)
        self.at = philox.Places(*torch.zeros(3, clients, dtype=torch.int64, device=device))
        self.rows: tuple[int, ...] | None = None  # whose points these are
        self.x, self.y = data.x.flatten(0, 1), data.y.flatten(0, 1)
        self.fixed = everyone
        if device.type == "cuda" and not everyone:  # a graph reads from where these are
            self.x, self.y = self.x.clone(), self.y.clone()
        self.offsets = torch.arange(clients, device=device).view(-1, 1) * data.weight.shape[1]
        self.graph: torch.cuda.CUDAGraph | None = None

    def prepare(self, call: Callable[..., Any]) -> None:
        """Use this compiled step, on a GPU as a graph."""
        self._call = call
        if self.loss.device.type == "cuda":
            self.graph = self._captured()

    def load(
        self, settings: Settings, working: Tree, data: ClientData, rows: tuple[int, ...]
    ) -> None:
        """The state, the settings and the points of the clients of this call."""
        for name, value in working.items():
            if value is not self.working[name]:
                self.working[name].copy_(value)
        self._load_settings(settings)
        if self.fixed or rows == self.rows:
            return
        self.rows = rows
        if self.graph is None:
            self.x, self.y = data.x.flatten(0, 1), data.y.flatten(0, 1)
        else:
            self.x.copy_(data.x.flatten(0, 1))
            self.y.copy_(data.y.flatten(0, 1))

    def _load_settings(self, settings: Settings) -> None:
        for name, value in settings.values.items():
            if self.loaded.get(name) == value:
                continue
            self.loaded[name] = value
            if isinstance(value, list):
                self.settings[name].copy_(torch.tensor(value, dtype=torch.float64))
            else:
                self.settings[name].fill_(value)

    def run(
        self, index: Tensor, scale: Tensor, words: Tensor | None, streams: Streams, steps: int
    ) -> None:
        """Take the steps whose minibatches these are, [C, steps each, b]; `words` change images."""
        rows = (index.flatten(1) + self.offsets).view(len(index), steps, -1).movedim(1, 0)
        self.index[:steps].copy_(rows.flatten(1))
        self.scale[:steps].copy_(scale.view(len(index), steps, -1).movedim(1, 0))
        for own in self.words:
            assert words is not None
            own[:steps].copy_(words.view(len(index), steps, -1).movedim(1, 0).flatten(1))
        self.step.zero_()
        self.loss.zero_()
        if self.graph is None:
            noise = noises(streams, self.noise_shape, steps)
            for _ in range(steps):
                self.noise = next(noise).contiguous()
                self._advance()
            return
        for own, value in zip(self.at, streams.places("theta", 1), strict=True):
            own.copy_(value, non_blocking=True)
        for _ in range(steps):
            self.graph.replay()

    def _advance(self) -> None:
        """One step, and on to the next."""
        with torch.no_grad():
            self._call(*self.arguments())

    def arguments(self) -> list[Tensor]:
        """What the step reads and writes."""
        return [
            *self.settings.values(), *self.working.values(), self.x, self.y, self.index,
            self.scale, self.step, self.noise, self.loss, *self.words,
        ]  # fmt: skip

    def traced(self, build: Build, *, fuse: bool) -> Callable[..., Any]:
        """The step as a graph of operations, compiled if `fuse`."""
        names, clients = list(self.working), len(self.loss)

        def body(*arguments: Tensor) -> tuple[Tensor]:
            many = len(self.settings)
            settings, working = arguments[:many], arguments[many : many + len(names)]
            x, y, index, scale, step, noise, loss, *words = arguments[many + len(names) :]
            method = build(dict(zip(self.settings, settings, strict=True)))
            rows = index.index_select(0, step).flatten()
            points = x.index_select(0, rows).unflatten(0, (clients, -1))
            if self.augment is not None:
                points = augmenting.apply(self.augment, points, words[0].index_select(0, step))
            batch = Batch(
                points,
                y.index_select(0, rows).unflatten(0, (clients, -1)),
                scale.index_select(0, step).squeeze(0),
            )
            now = dict(zip(names, working, strict=True))
            seen = now.pop(SEEN, None)  # a method never sees it
            after, info = method.step(dict(now), batch, noise)
            for name, value in now.items():
                if after[name] is not value:
                    value.copy_(after[name])
            if seen is not None:  # [C, 2, n + 1]
                at = (rows % (seen.shape[-1] - 1)).unflatten(0, (clients, -1))
                tally(seen, at, batch.scale, info["squares"])
            loss.add_(info["loss"])
            step.add_(1)
            return (info["loss"],)

        def copies() -> list[Tensor]:
            return [
                value if any(value is fixed for fixed in (self.x, self.y)) else value.clone()
                for value in self.arguments()
            ]

        body(*copies())  # fills caches (a network's scale on this device) that are constants then
        traced = make_fx(body, tracing_mode="real")(*copies())
        if not fuse:
            return traced
        from torch import _inductor  # the compiler behind torch.compile, which takes such a graph

        for node in traced.graph.nodes:
            node.meta.pop("val", None)  # of the trace; the compiler makes its own

        # Called from C++ on a CPU, without Python's lock: threads have their own clients.
        options = {"cpp_wrapper": self.loss.device.type == "cpu"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its own: of TF32, of what it uses inside
            compiled: Callable[..., Any] = _inductor.compile(traced, [*copies()], options=options)
        return compiled

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The draw of the noise and a step, as one CUDA graph."""

        def body() -> None:
            size = self.noise[0].numel()
            if size and philox.has_triton():
                from corefed.base import philox_cuda

                philox_cuda.fill(self.noise.view(len(self.noise), 1, size), *self.at, self.step)
            elif size:
                drawn = philox.normals_at(self.at, self.step, size)
                self.noise.copy_(drawn.view_as(self.noise))
            self._advance()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and warms up what must not be captured
                self.step.zero_()
                body()
        torch.cuda.current_stream().wait_stream(side)
        self.step.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            body()
        return graph
