"""Networks for series, as ordinary modules: lstm, gru, cnn1d and transformer.

A point is a series of steps: [steps], one number per step, or [channels, steps]. The columns of a
table are its steps, in their order, one number each.

    lstm, gru     one recurrent layer per width of `hidden`; a linear layer on the last state
    cnn1d         convolutions of five steps, each with ReLU and pooling; an MLP on all that is left
    transformer   one block per width of `hidden`: attention, then an MLP, each on its normalised
                  input and added to it; a linear layer on the mean over steps

They are called as the user's own networks are (`own.py`), on a GPU by `torch.func.vmap`. torch's
recurrent layers have no rule for that, so the cells are written in plain operations; tests compare
them with those of torch. There is no dropout: a posterior over the weights takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from corefed.base.errors import UserError

SERIES = ("lstm", "gru", "cnn1d", "transformer")

KERNEL = 5
"""Steps that a convolution sees."""

SHORTEST = 2
"""Steps that a series has at least."""

FORGET = 1.0
"""Initial bias of an LSTM's forget gate, so that it remembers at first (Jozefowicz et al. 2015)."""


@dataclass(frozen=True)
class Series:
    """What a network for series is made from: a factory as `own.build` takes it."""

    model: str
    channels: tuple[int, ...]
    hidden: tuple[int, ...]

    def __call__(self, shape: Sequence[int], outputs: int) -> nn.Module:
        inputs, steps = series_shape(shape, self.model)
        fold = Steps(one_channel=len(shape) == 1)
        if self.model == "cnn1d":
            return nn.Sequential(fold, *_convolutional(inputs, steps, self, outputs))
        if not self.hidden:
            raise UserError(f"The model {self.model} needs at least one width in hidden.")
        if self.model == "transformer":
            return Transformer(fold, inputs, steps, self.hidden, outputs)
        return Recurrent(fold, inputs, self.hidden, outputs, CELLS[self.model])


def series_shape(point: Sequence[int], model: str) -> tuple[int, int]:
    """Channels and steps of a point."""
    if len(point) in (1, 2) and point[-1] >= SHORTEST:
        return (1, point[0]) if len(point) == 1 else (point[0], point[1])
    raise UserError(
        f"The model {model} needs series: points of shape [steps] or [channels, steps] with at "
        f"least {SHORTEST} steps, not {list(point)}. Use model=mlp, or cnn for images."
    )


class Steps(nn.Module):
    """[n, steps] to one channel [n, 1, steps]; other series stay as they are."""

    def __init__(self, *, one_channel: bool) -> None:
        super().__init__()
        self.one_channel = one_channel

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) if self.one_channel else x


# --- recurrent ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Layers of cells, each over all steps, and a linear layer on the last state.

    A layer has nn.LSTM's or nn.GRU's weights in their order of gates, without the second bias.
    """

    def __init__(
        self, fold: Steps, inputs: int, hidden: Sequence[int], outputs: int, cell: type[Cell]
    ) -> None:
        super().__init__()
        self.fold = fold
        self.cells = nn.ModuleList(cell(*ends) for ends in pairwise((inputs, *hidden)))
        self.out = nn.Linear(hidden[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.fold(x).movedim(-1, -2)  # [n, steps, channels]
        for cell in self.cells:
            steps = cell(steps)
        output: Tensor = self.out(steps[:, -1])
        return output


class Cell(nn.Module):
    """[n, steps, inputs] to the states [n, steps, width]; a state may have several parts."""

    GATES = 0
    PARTS = 1

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(inputs, self.GATES * width)
        self.state = nn.Linear(width, self.GATES * width, bias=False)
        nn.init.xavier_normal_(self.input.weight)
        nn.init.zeros_(self.input.bias)
        for gate in self.state.weight.data.split(width):
            nn.init.orthogonal_(gate)

    def forward(self, x: Tensor) -> Tensor:
        given = self.input(x)  # of all steps at once
        # Made from x, not by new_zeros: within vmap it then has the draws' axis from the start.
        zero = given[:, 0, : self.state.in_features] * 0
        state = (zero,) * self.PARTS
        seen = []
        for step in given.unbind(1):
            state = self.advance(step, self.state(state[0]), *state)
            seen.append(state[0])
        return torch.stack(seen, 1)

    def advance(self, given: Tensor, kept: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        raise NotImplementedError


class LongShortTerm(Cell):
    """Hochreiter and Schmidhuber (1997), with a forget gate."""

    GATES = 4
    PARTS = 2

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width)
        with torch.no_grad():
            self.input.bias[width : 2 * width] += FORGET

    def advance(self, given: Tensor, kept: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        i, f, g, o = (given + kept).chunk(4, -1)
        c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class Gated(Cell):
    """Cho et al. (2014), with the reset gate after the product, as in torch."""

    GATES = 3

    def advance(self, given: Tensor, kept: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        width = state[0].shape[-1]
        r, z = (given[..., : 2 * width] + kept[..., : 2 * width]).sigmoid().chunk(2, -1)
        n = (given[..., 2 * width :] + r * kept[..., 2 * width :]).tanh()
        return (n + z * (state[0] - n),)


CELLS: dict[str, type[Cell]] = {"lstm": LongShortTerm, "gru": Gated}


# --- convolutional --------------------------------------------------------------------------------


def _convolutional(inputs: int, steps: int, sizes: Series, outputs: int) -> list[nn.Module]:
    channels, hidden = sizes.channels, sizes.hidden
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise((inputs, *channels)):
        layers.append(nn.Conv1d(fan_in, fan_out, KERNEL, padding=KERNEL // 2))
        if steps > 1:
            layers.append(nn.MaxPool1d(2))
            steps //= 2
        layers.append(nn.ReLU())
    layers.append(nn.Flatten())
    for ends in pairwise((channels[-1] * steps, *hidden)):
        layers += [nn.Linear(*ends), nn.ReLU()]
    return [*layers, nn.Linear(hidden[-1] if hidden else channels[-1] * steps, outputs)]


# --- transformer ----------------------------------------------------------------------------------


class Transformer(nn.Module):
    """Blocks with their norms first (Xiong et al. 2020), positions as sines and cosines."""

    def __init__(
        self, fold: Steps, inputs: int, steps: int, hidden: Sequence[int], outputs: int
    ) -> None:
        super().__init__()
        width = hidden[0]
        if len(set(hidden)) > 1 or width % 2:
            raise UserError(
                "The model transformer needs one even width in hidden, repeated for every block, "
                f"as in hidden=64,64; it is {','.join(map(str, hidden))}."
            )
        self.fold = fold
        self.embed = nn.Linear(inputs, width)
        self.register_buffer("positions", _positions(steps, width))
        self.blocks = nn.ModuleList(Block(width) for _ in hidden)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(self.fold(x).movedim(-1, -2)) + self.positions  # [n, steps, width]
        for block in self.blocks:
            h = block(h)
        output: Tensor = self.out(self.norm(h).mean(1))
        return output


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = next(heads for heads in (4, 2, 1) if width % heads == 0)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        # Keys' biases change nothing: their gradient is rounding, which Adam would make steps of.
        self.mix = nn.Linear(width, 3 * width, bias=False)
        nn.init.xavier_uniform_(self.mix.weight)
        self.join = nn.Linear(width, width)
        nn.init.xavier_uniform_(self.join.weight)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        # [n, heads, steps, width / heads] each
        q, k, v = self.mix(self.first(h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        h = h + self.join((attention @ v).transpose(1, 2).flatten(-2))
        changed: Tensor = h + self.down(self.up(self.second(h)).relu())
        return changed


def _positions(steps: int, width: int) -> Tensor:
    """[steps, width] of Vaswani et al. (2017)."""
    rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10_000.0) / width))
    angles = torch.arange(steps).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
