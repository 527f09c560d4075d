"""Regression functions that are exactly beta-Hoelder-smooth, on a curved surface of dimension d.

The setting of the paper's rates: inputs x lie on a d-dimensional surface in R^ambient, and
y = f_i(u) + noise, where u in [0, 1]^d is the position on the surface. A function is a sum over
scales,

    f(u) = a sum_j ratio^(-beta j) g_j(ratio^j u),     |g_j| <= 1,

where each g_j interpolates independent signs on a lattice with a random offset. Minimax lower
bounds are proved with such functions: no estimator has a better rate than n^(-2 beta / (2 beta +
d)). Below the finest scale f is smoother than beta.

    f_i = sqrt(1 - own) shared + sqrt(own) own_i,   each of variance 1 over draws of the function.

The first n points of a client, its test points and its function do not depend on the number of
points.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError

Array = npt.NDArray[np.float64]

NAME = "synthetic-hoelder"
RATIO = 1.5
"""From one scale to the next. At 2 the error falls in visible steps, 2^(2 beta + d) apart in n."""
FINEST, CELLS = 1024, 1 << 17
"""Largest numbers of cells at the finest scale: along one side, and in all."""
SMOOTHEST = 3.0
"""The interpolation has a Lipschitz second derivative: g_j is 3-smooth."""
MEAN_SQUARE = 181 / 231
"""int_0^1 s(t)^2 + (1 - s(t))^2 dt of the step s: E g^2 along one coordinate."""
LARGEST = 1 << 28
"""Numbers in all clients' inputs together: 1 GiB."""
_PURPOSE = 0x40E1
_FUNCTION, _POINTS, _TEST, _SURFACE = 0, 1, 3, 4
_POINTS_NOISE, _TEST_NOISE = 33, 35
"""Keep the draws of one client apart."""


class HoelderSetting(NamedTuple):
    """The settings in a name such as synthetic-hoelder:beta=1,dimension=2,points=1000."""

    beta: float = 1.0
    """Smoothness (beta)."""
    dimension: int = 2
    """Of the surface (Lambda)."""
    ambient: int = 10
    """Of the inputs (s_0)."""
    points: int = 1000
    """Training points per client (n)."""
    test: int = 1000
    """Test points per client."""
    noise: float = 0.3
    """Standard deviation of y around f_i (sigma_epsilon); f_i has about 1."""
    own: float = 0.5
    """Share of a function's variance that is the client's own."""


class HoelderRegression(NamedTuple):
    """C clients of m = points + test points each."""

    x: Tensor  # [C m, ambient]
    y: Tensor  # [C m, 1]
    groups: Tensor  # [C m] int64 client of each point
    held_out: Tensor  # [C m] bool
    signal: Tensor  # [C m, 1] f_i without noise
    bound: float  # F: no f_i is larger in absolute value


def parse(name: str) -> HoelderSetting:
    """The settings in a data set's name; the others have their defaults."""
    kind, _, written = name.partition(":")
    given: dict[str, Any] = {}
    for part in filter(None, written.split(",")):
        key, _, text = part.partition("=")
        if key not in HoelderSetting._fields:
            known = ", ".join(HoelderSetting._fields)
            raise UserError(f"{kind} has no setting {key!r}, in {name!r}; it has {known}.")
        whole = isinstance(HoelderSetting._field_defaults[key], int)
        try:
            given[key] = int(text) if whole else float(text)
        except ValueError as error:
            what = "a whole number" if whole else "a number"
            raise UserError(f"{key} is {text!r} in {name!r}; it must be {what}.") from error
    setting = HoelderSetting(**given)
    _check(setting)
    return setting


def name_of(setting: HoelderSetting) -> str:
    """The name that `parse` reads, with what differs from the defaults."""
    changed = [
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in setting._asdict().items()
        if value != HoelderSetting._field_defaults[key]
    ]
    return ":".join((NAME, ",".join(changed))) if changed else NAME


def draw(setting: HoelderSetting, clients: int, seed: int) -> HoelderRegression:
    """All clients of one seed."""
    _check(setting)
    beta, dimension, ambient = setting.beta, setting.dimension, setting.ambient
    count = setting.points + setting.test
    if clients < 1 or seed < 0:
        raise UserError("Synthetic data need at least 1 client, and a seed from 0 up.")
    if clients * count * ambient > LARGEST:
        raise UserError(
            f"{clients} clients with {count} points of {ambient} features are too many to draw; "
            "use fewer."
        )
    surface = Surface.draw(dimension, ambient, _generator(seed, 0, _SURFACE))
    shared = Scales.draw(beta, dimension, _generator(seed, 0, _FUNCTION))
    weights = math.sqrt(1 - setting.own), math.sqrt(setting.own)
    xs, signals, ys = [], [], []
    for client in range(clients):
        own = Scales.draw(beta, dimension, _generator(seed, client + 1, _FUNCTION))
        us, noises = [], []
        for size, points, noise in (
            (setting.points, _POINTS, _POINTS_NOISE),
            (setting.test, _TEST, _TEST_NOISE),
        ):
            us.append(_generator(seed, client + 1, points).uniform(0, 1, (size, dimension)))
            noises.append(_generator(seed, client + 1, noise).standard_normal(size))
        u = np.concatenate(us)
        signal = weights[0] * shared.at(u) + weights[1] * own.at(u)
        xs.append(surface.at(u))
        signals.append(signal)
        ys.append(signal + setting.noise * np.concatenate(noises))
    held_out = torch.arange(count) >= setting.points
    return HoelderRegression(
        x=_single(np.concatenate(xs)),
        y=_single(np.concatenate(ys)[:, None]),
        groups=torch.arange(clients).repeat_interleave(count),
        held_out=held_out.repeat(clients),
        signal=_single(np.concatenate(signals)[:, None]),
        bound=sum(weights) * shared.bound,
    )


class Scales(NamedTuple):
    """One function: signs [cells + 2, ...] and an offset [d] for each scale."""

    beta: float
    signs: list[Array]
    offsets: list[Array]

    @classmethod
    def draw(cls, beta: float, dimension: int, rng: np.random.Generator) -> Scales:
        signs, offsets = [], []
        for cells in sides(dimension):
            many = math.floor(cells) + 3
            signs.append(rng.choice([-1.0, 1.0], (many,) * dimension))
            offsets.append(rng.uniform(0, 1, dimension))
        return cls(beta, signs, offsets)

    @property
    def amplitudes(self) -> Array:
        """a ratio^(-beta j), so that the variance of f(u) over the signs is 1 on average over u."""
        sizes: Array = np.power(RATIO, -self.beta * np.arange(len(self.signs)), dtype=np.float64)
        each = MEAN_SQUARE ** self.signs[0].ndim  # E g_j(u)^2
        amplitudes: Array = sizes / math.sqrt(each * float((sizes**2).sum()))
        return amplitudes

    @property
    def bound(self) -> float:
        return float(self.amplitudes.sum())

    def at(self, u: Array) -> Array:
        """f(u) [n] of u [n, d] in [0, 1]^d."""
        total = np.zeros(len(u))
        sizes = zip(self.amplitudes, sides(u.shape[1]), strict=True)
        for (size, cells), signs, offset in zip(sizes, self.signs, self.offsets, strict=True):
            total += size * _interpolate(signs, u * cells + offset)
        return total


class Surface(NamedTuple):
    """u -> Q (c (2 u - 1), h(u)): a graph over [-1, 1]^d, rotated; it has dimension d."""

    turn: Array  # [ambient, ambient] orthogonal
    frequencies: Array  # [d, ambient - d]
    phases: Array  # [ambient - d]

    @classmethod
    def draw(cls, dimension: int, ambient: int, rng: np.random.Generator) -> Surface:
        turn = np.linalg.qr(rng.standard_normal((ambient, ambient)))[0]
        rest = ambient - dimension
        frequencies = rng.standard_normal((dimension, rest)) * math.pi / math.sqrt(dimension)
        return cls(turn, frequencies, rng.uniform(0, 2 * math.pi, rest))

    def at(self, u: Array) -> Array:
        flat = math.sqrt(3) * (2 * u - 1)  # variance 1 per coordinate
        bent = math.sqrt(2) * np.sin(u @ self.frequencies + self.phases)
        points: Array = np.concatenate([flat, bent], 1) @ self.turn.T
        return points


def sides(dimension: int) -> list[float]:
    """Cells along a side, per scale."""
    finest = min(FINEST, CELLS ** (1 / dimension))
    return [RATIO**j for j in range(1 + math.floor(math.log(finest) / math.log(RATIO)))]


def _interpolate(values: Array, at: Array) -> Array:
    """[n] values at points [n, d], interpolated between those on the integer lattice."""
    low = np.floor(at).astype(np.int64)
    share = _step(at - low)
    total = np.zeros(len(at))
    for corner in np.ndindex(*(2,) * at.shape[1]):
        weight = np.prod(np.where(corner, share, 1 - share), 1)
        total += weight * values[tuple((low + corner).T)]
    return total


def _step(t: Array) -> Array:
    """From 0 to 1; its first two derivatives vanish at both ends."""
    step: Array = t**3 * (10 + t * (6 * t - 15))
    return step


def _generator(seed: int, stream: int, purpose: int) -> np.random.Generator:
    """Stream 0 is shared, client i has stream i + 1."""
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence([_PURPOSE, seed, stream, purpose]))
    )


def _single(values: Array) -> Tensor:
    return torch.from_numpy(values).to(torch.float32)


def _check(setting: HoelderSetting) -> None:
    if not 0 < setting.beta <= SMOOTHEST:
        raise UserError(f"beta is {setting.beta:g}; it must be above 0 and at most {SMOOTHEST:g}.")
    if not 1 <= setting.dimension <= setting.ambient:
        raise UserError(
            f"dimension is {setting.dimension}; it must be from 1 to ambient, {setting.ambient}."
        )
    if setting.dimension > 8:
        raise UserError(f"dimension is {setting.dimension}; it must be at most 8.")
    for key in ("points", "test"):
        if getattr(setting, key) < 2:
            raise UserError(f"{key} is {getattr(setting, key)}; it must be at least 2.")
    if not (setting.noise > 0 and math.isfinite(setting.noise)):
        raise UserError(f"noise is {setting.noise:g}; it must be a positive number.")
    if not 0 <= setting.own <= 1:
        raise UserError(f"own is {setting.own:g}; it must be from 0 to 1.")
