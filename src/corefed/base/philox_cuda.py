"""Philox 4x64-10 as Triton kernels: `philox.normals` and `philox.words` on a GPU.

A program of the first makes `BLOCKS` blocks of radii and as many of angles, and writes their
cosines and sines. Everything that a draw depends on is read from device memory, so that a CUDA
graph can be replayed with other keys and calls.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corefed.base.philox import PER_BLOCK, Places, half_length

BLOCKS = 128


def normals(at: Places, count: int, size: int, device: torch.device, first: int) -> Tensor:
    out = torch.empty(len(at.key), count, size, device=device)
    key, place, call = (value.to(device, non_blocking=True) for value in at)
    fill(out, key, place, call, torch.full((1,), first, device=device))
    return out


def fill(out: Tensor, key: Tensor, place: Tensor, call: Tensor, first: Tensor) -> None:
    """Fill `out` [C, count, size], contiguous, from [C] each, and the first stretch [1]."""
    clients, count, size = out.shape
    if out.numel() == 0:
        return
    half_blocks = half_length(size) // PER_BLOCK
    grid = (clients * count, triton.cdiv(half_blocks, BLOCKS))
    _fill[grid](out, key, place, call, first, count, size, half_blocks, blocks=BLOCKS)


def words(at: Places, calls: int, blocks: int, device: torch.device, skip: int) -> Tensor:
    out = torch.empty(len(at.key), calls, 4 * blocks, dtype=torch.int64, device=device)
    if out.numel():
        key, place, call = (value.to(device, non_blocking=True) for value in at)
        grid = (len(at.key) * calls, triton.cdiv(blocks, BLOCKS))
        _words[grid](out, key, place, call, calls, blocks, skip, width=BLOCKS)
    return out


@triton.jit
def _words(out, key, place, call, calls, blocks, skip, width: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    client = row // calls
    k = tl.load(key + client).to(tl.uint64)
    where = tl.load(place + client).to(tl.uint64)
    number = (tl.load(call + client) + row % calls).to(tl.uint64)
    column = tl.program_id(1).to(tl.int64) * width + tl.arange(0, width)
    block = (column + skip + 1).to(tl.uint64)
    zero = block * 0
    a, b, c, d = tl.philox(k, block, zero + number, zero + where, zero)
    start = out + row * 4 * blocks + 4 * column
    inside = column < blocks
    tl.store(start, a.to(tl.int64, bitcast=True), mask=inside)
    tl.store(start + 1, b.to(tl.int64, bitcast=True), mask=inside)
    tl.store(start + 2, c.to(tl.int64, bitcast=True), mask=inside)
    tl.store(start + 3, d.to(tl.int64, bitcast=True), mask=inside)


@triton.jit
def _radii(a):
    """From int32 with 31 random bits to sqrt(-2 log u), u in (0, 1]."""
    u = ((a & 0x7FFFFFFF).to(tl.float32) + 1.0) * 4.656612873077393e-10
    return tl.sqrt(-2.0 * tl.log(u))


@triton.jit
def _halves(a, b, c, d):
    """[8 n] int32: the lower and the upper half of each word, block after block."""
    low = tl.interleave(
        tl.interleave(a.to(tl.uint32), c.to(tl.uint32)),
        tl.interleave(b.to(tl.uint32), d.to(tl.uint32)),
    )
    high = tl.interleave(
        tl.interleave((a >> 32).to(tl.uint32), (c >> 32).to(tl.uint32)),
        tl.interleave((b >> 32).to(tl.uint32), (d >> 32).to(tl.uint32)),
    )
    return tl.interleave(low, high).to(tl.int32, bitcast=True)


@triton.jit
def _fill(out, key, place, call, first, count, size, half_blocks, blocks: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    client = row // count
    k = tl.load(key + client).to(tl.uint64)
    where = tl.load(place + client).to(tl.uint64)
    number = tl.load(call + client).to(tl.uint64)
    skip = (tl.load(first) + row % count) * (2 * half_blocks)
    begin = tl.program_id(1) * blocks
    block = skip + begin + 1 + tl.arange(0, blocks)
    zero = block.to(tl.uint64) * 0
    a, b, c, d = tl.philox(k, block.to(tl.uint64), zero + number, zero + where, zero)
    radius = _radii(_halves(a, b, c, d))
    block += half_blocks
    a, b, c, d = tl.philox(k, block.to(tl.uint64), zero + number, zero + where, zero)
    angle = _halves(a, b, c, d).to(tl.float32) * 1.4629180792671596e-09  # pi / 2^31
    column = begin * 8 + tl.arange(0, 8 * blocks)
    half = half_blocks * 8
    start = out + row * size
    tl.store(start + column, radius * tl.cos(angle), mask=(column < half) & (column < size))
    there = column + half
    tl.store(start + there, radius * tl.sin(angle), mask=(column < half) & (there < size))
