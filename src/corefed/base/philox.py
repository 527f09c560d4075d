"""Random numbers as a function of where they stand: Philox 4x64-10 (Salmon et al., SC 2011).

    four words = Philox(key (K, 0), counter (block, call, place, 0))        64 bits each

K stands for (seed, purpose) and `place` for (round, client): `rng.py` makes both. A call with the
same four gives the same numbers, whoever else draws beside it, in whatever order, and on whatever
device. Integers agree to the bit on all devices; normals up to the rounding of log, sin and cos.

Blocks are numbered from 1, as NumPy's generator numbers them, which makes the words on a CPU.
Elsewhere it is a Triton kernel (`philox_cuda.py`), and without Triton the same steps as operations
on tensors.
"""

from __future__ import annotations

import math
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
LOW = 0xFFFFFFFF
PER_BLOCK = 8
"""Numbers of 32 bits that a block has."""


class Places(NamedTuple):
    """Where C rows of numbers stand."""

    key: Tensor  # [C] int64, of (seed, purpose)
    place: Tensor  # [C] int64, of (round, client)
    call: Tensor  # [C] int64, the number of each row's first call


def half_length(size: int) -> int:
    """Pairs of 32-bit numbers for `size` normals, in whole blocks."""
    pairs = -(-size // 2)
    return -(-pairs // PER_BLOCK) * PER_BLOCK


def normals(at: Places, count: int, size: int, device: torch.device, first: int = 0) -> Tensor:
    """[C, count, size] standard normals, by Box and Muller, all of one call.

    They are the stretches first, .., first + count - 1 of the call, each of `size` normals. Of the
    2 H numbers of 32 bits of a stretch, the first H give radii and the others angles; cosines make
    the first H normals and sines the rest.
    """
    if size == 0:  # a point estimate draws nothing
        return torch.empty(len(at.key), count, 0, device=device)
    if device.type == "cuda" and has_triton():
        from corefed.base import philox_cuda  # needs Triton

        return philox_cuda.normals(at, count, size, device, first)
    blocks = stretch(size)
    found = words(at, 1, count * blocks, device, first * blocks)
    return _box_muller(found.view(len(at.key), count, -1), size)


def normals_at(at: Places, stretch_: Tensor, size: int) -> Tensor:
    """[C, 1, size]: as `normals`, of a stretch [1] that is known on the device alone."""
    blocks = stretch(size)
    return _box_muller(_by_tensors(at, 1, blocks, stretch_ * blocks), size)


def stretch(size: int) -> int:
    """Blocks of words for so many normals."""
    return 2 * half_length(size) // PER_BLOCK


def _box_muller(found: Tensor, size: int) -> Tensor:
    """From words [C, count, W] to normals [C, count, size]."""
    halves, half = found.view(torch.int32), half_length(size)
    radius = halves[..., :half].bitwise_and(0x7FFFFFFF).float().add_(1.0).mul_(2.0**-31)
    radius = radius.log_().mul_(-2.0).sqrt_()
    angle = halves[..., half:].float().mul_(math.pi * 2.0**-31)
    out = torch.empty(*found.shape[:-1], size, device=found.device)
    first = min(half, size)
    torch.mul(radius[..., :first], angle[..., :first].cos(), out=out[..., :first])
    rest = size - first
    torch.mul(radius[..., :rest], angle[..., :rest].sin_(), out=out[..., first:])
    return out


def words(at: Places, calls: int, blocks: int, device: torch.device, skip: int = 0) -> Tensor:
    """[C, calls, 4 blocks] int64 of random bits, after the first `skip` blocks of each call."""
    if device.type == "cpu":
        return _by_numpy(at, calls, blocks, skip)
    if device.type == "cuda" and has_triton():
        from corefed.base import philox_cuda  # needs Triton

        return philox_cuda.words(at, calls, blocks, device, skip)
    return _by_tensors(Places(*(value.to(device) for value in at)), calls, blocks, skip)


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def _by_numpy(at: Places, calls: int, blocks: int, skip: int) -> Tensor:
    """One generator, set to each row in turn: a call in C per row."""
    out = np.empty((len(at.key), calls, 4 * blocks), dtype=np.uint64)
    generator = np.random.Philox(key=0)
    state = generator.state
    counter, key = np.zeros(4, dtype=np.uint64), np.zeros(2, dtype=np.uint64)
    state["state"] = {"counter": counter, "key": key}
    state["buffer_pos"] = 4  # nothing left from before
    counter[0] = skip
    keys, places = (value.cpu().numpy().view(np.uint64) for value in at[:2])
    for row, seed, place, first in zip(out, keys, places, at.call.tolist(), strict=True):
        key[0], counter[2] = seed, place
        for call, into in enumerate(row):
            counter[1] = first + call
            generator.state = state
            into[:] = generator.random_raw(4 * blocks)
    return torch.from_numpy(out.view(np.int64))


def _by_tensors(at: Places, calls: int, blocks: int, skip: int | Tensor) -> Tensor:
    device = at.key.device
    shape = (len(at.key), calls, blocks)
    zero = torch.zeros(shape, dtype=torch.int64, device=device)
    numbers = torch.arange(1, blocks + 1, device=device) + skip
    each = at.call.view(-1, 1, 1) + torch.arange(calls, device=device).view(1, -1, 1)
    c = [zero + numbers, zero + each, zero + at.place.view(-1, 1, 1), zero]
    first, second = at.key.view(-1, 1, 1), torch.zeros_like(at.key).view(-1, 1, 1)
    for round_ in range(ROUNDS):
        if round_:
            first, second = first + _signed(WEYL[0]), second + _signed(WEYL[1])
        high_0, low_0 = _product(MULTIPLIERS[0], c[0])
        high_1, low_1 = _product(MULTIPLIERS[1], c[2])
        c = [high_1 ^ c[1] ^ first, low_1, high_0 ^ c[3] ^ second, low_0]
    return torch.stack(c, -1).flatten(-2)


def _product(constant: int, value: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and the lower 64 bits of a product of 64-bit numbers, from 32-bit halves."""
    c_high, c_low = constant >> 32, constant & LOW
    v_high, v_low = _upper(value), value & LOW
    low, cross, other = v_low * c_low, v_high * c_low, v_low * c_high
    middle = _upper(low) + (cross & LOW) + (other & LOW)
    high = v_high * c_high + _upper(cross) + _upper(other) + (middle >> 32)
    return high, value * _signed(constant)


def _upper(value: Tensor) -> Tensor:
    """The upper 32 bits; `>>` alone would repeat the sign."""
    return (value >> 32) & LOW


def _signed(word: int) -> int:
    """64 bits as the integer of int64 that has them."""
    return word - (1 << 64) if word >> 63 else word
