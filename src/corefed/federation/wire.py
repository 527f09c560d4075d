"""Trees as bytes and back: what crosses the wire between the machines of a federation.

A tensor is its dtype's name, its shape and its bytes in C order (little-endian), nothing else: no
pickle, no archive, no header that could name code. The size of what comes in is checked before
memory is taken for it. unpack(pack(tree)) == tree, bit for bit.

Uploads may be made smaller by half precision (`narrow`) and by sending the difference from what the
client received (`difference`). Together they keep about three digits of every step that a client
made; half precision alone keeps three digits of the weights themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from corefed.base.types import Tree

DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class WireError(ValueError):
    """What came in is no tree, and why."""


class Packed(NamedTuple):
    """One tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(tree: Tree) -> dict[str, Packed]:
    """Every tensor as bytes."""
    return {
        name: Packed(NAMES[value.dtype], tuple(value.shape), raw(value))
        for name, value in tree.items()
    }


def unpack(packed: Mapping[str, Packed], most: int) -> Tree:
    """The tensors, if they are what they say and have no more than `most` bytes together."""
    total = sum(len(one.data) for one in packed.values())
    if total > most:
        raise WireError(f"{total} bytes of tensors, more than the {most} allowed")
    return {name: _tensor(name, one) for name, one in packed.items()}


def size(tree: Tree) -> int:
    """Bytes of a tree's tensors."""
    return sum(value.numel() * value.element_size() for value in tree.values())


def narrow(tree: Tree, precision: str) -> Tree:
    """Floating-point tensors in the precision of that name, others as they are."""
    to = DTYPES[precision]
    return {k: v.to(to) if v.is_floating_point() else v for k, v in tree.items()}


def difference(tree: Tree, received: Tree) -> Tree:
    """What a client adds to the tree it received; entries it did not receive stay as they are."""
    return {k: v - received[k] if k in received else v for k, v in tree.items()}


def restore(tree: Tree, sent: Tree, *, differences: bool) -> Tree:
    """The upload in the server's own precision, after `narrow` and `difference`."""
    whole = {k: v.to(sent[k].dtype) if k in sent else v for k, v in tree.items()}
    return {k: v + sent[k] if differences and k in sent else v for k, v in whole.items()}


def raw(value: torch.Tensor) -> bytes:
    """A tensor's bytes in C order."""
    # A single number can have any stride and count as contiguous; a clone of this format has 1.
    flat = value.detach().cpu().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()  # numpy has no bfloat16


def _tensor(name: str, packed: Packed) -> torch.Tensor:
    dtype = DTYPES.get(packed.dtype)
    if dtype is None:
        raise WireError(f"{name!r} has dtype {packed.dtype!r}, which is not known")
    if any(extent < 0 for extent in packed.shape):
        raise WireError(f"{name!r} has shape {packed.shape}")
    expected = math.prod(packed.shape) * dtype.itemsize
    if expected != len(packed.data):
        raise WireError(
            f"{name!r} has {len(packed.data)} bytes, not the {expected} of its shape {packed.shape}"
        )
    if not expected:
        return torch.empty(packed.shape, dtype=dtype)
    if dtype is torch.bool and max(packed.data) > 1:
        raise WireError(f"{name!r} has truth values other than 0 and 1")
    # A copy: torch must not write into the message, and alignment can change a sum's last bit.
    return torch.frombuffer(bytearray(packed.data), dtype=dtype).clone().view(packed.shape)
