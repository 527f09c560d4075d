"""Safetensors files with a digest, whole or written piece by piece.

The format: 8 bytes with the length of a header, the header in JSON, one tensor after the other. The
digest (`digests.py`) is the first of the header's metadata. A file that is written in pieces need
not fit into memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from corefed.base import digests
from corefed.base.digests import KEY, ZEROS, DamagedError, Stream

TYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
"""How safetensors names the types of numbers."""

_LENGTH = 8
_START = b'{"__metadata__": {"sha256": "'
_ALIGNED = 64
"""Tensors begin at a multiple of so many bytes, as memory that torch allocates."""

Shapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def encode(
    shapes: Shapes, content: Callable[[str], Iterable[Tensor]], metadata: Mapping[str, str]
) -> Stream:
    """The file in pieces: `content` gives the rows of a tensor, some after the other."""
    # Tensors with wide numbers first, so that each starts at a multiple of its numbers' width.
    names = sorted(shapes, key=lambda name: (-shapes[name][0].itemsize, name))
    header: dict[str, object] = {"__metadata__": {KEY: ZEROS.decode(), **metadata}}
    end = 0
    for name in names:
        dtype, shape = shapes[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGNED)

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(_LENGTH, "little") + text
        for name in names:
            yield from (_bytes(name, piece, shapes[name]) for piece in content(name))

    return Stream(_LENGTH + len(_START), parts())


def stream(tree: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Stream:
    """The file, one tensor after the other."""
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in tree.items()}
    return encode(shapes, lambda name: [tree[name]], metadata)


def save(tree: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The whole file."""
    return digests.joined(stream(tree, metadata))


def load(content: bytes, where: Path | str) -> dict[str, Tensor]:
    """The tensors of a file, in its memory; a `DamagedError` if it is not what was written."""
    from safetensors import SafetensorError  # optional
    from safetensors.torch import load as decode

    if not digests.check(content, _START, _LENGTH):
        digests.note_unsealed(where)
    try:
        return decode(content)
    except SafetensorError as error:
        raise DamagedError(str(error)) from error


def check(path: Path) -> None:
    """A `DamagedError` if a file is not what was written; an OSError if it cannot be read."""
    if not digests.check_file(path, _START, _LENGTH):
        digests.note_unsealed(path)


def metadata_of(content: bytes) -> dict[str, str]:
    """The metadata in a header; a ValueError or KeyError if there is none."""
    length = int.from_bytes(content[:_LENGTH], "little")
    found: dict[str, str] = json.loads(content[_LENGTH : _LENGTH + length])["__metadata__"]
    return found


def _bytes(name: str, piece: Tensor, shape: tuple[torch.dtype, tuple[int, ...]]) -> memoryview:
    """Its memory, not copied where it is on the host and contiguous."""
    if piece.dtype != shape[0] or tuple(piece.shape[1:]) != shape[1][1:]:
        raise ValueError(f"{name} has a piece of {piece.dtype} {tuple(piece.shape)}, not {shape}")
    flat = piece.detach().cpu().contiguous().flatten()
    if flat.stride() != (1,):  # a single number may have any stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    found: memoryview = flat.view(torch.uint8).numpy().data
    return found
