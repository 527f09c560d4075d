"""A safetensors file that is written piece by piece, so that it need not fit into memory.

The format: 8 bytes with the length of a header, the header in JSON, one tensor after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def encode(
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    content: Callable[[str], Iterable[Tensor]],
    metadata: Mapping[str, str],
) -> Iterator[bytes]:
    """The pieces of the file: `content` gives the rows of a tensor, some after the other."""
    # Tensors with wide numbers first, so that each starts at a multiple of its numbers' width.
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        dtype, shape = shapes[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield from (_bytes(name, piece, shapes[name]) for piece in content(name))


def _bytes(name: str, piece: Tensor, shape: tuple[torch.dtype, tuple[int, ...]]) -> bytes:
    if piece.dtype != shape[0] or tuple(piece.shape[1:]) != shape[1][1:]:
        raise ValueError(f"{name} has a piece of {piece.dtype} {tuple(piece.shape)}, not {shape}")
    return piece.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
