"""A digest of tensors, equal only if every name, type, shape and byte is equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from corefed.federation import wire

SIZE = 16  # bytes: two different trees share a digest with probability 2^-128


def hash_tree(tree: Mapping[str, Tensor], *more: str) -> str:
    """BLAKE2 of a tree, in any order of its names, and of some texts."""
    whole = hashlib.blake2b(digest_size=SIZE)
    for text in more:
        _add(whole, text.encode())
    for name, value in sorted(tree.items()):
        _add(whole, f"{name} {value.dtype} {list(value.shape)}".encode())
        whole.update(wire.raw(value))
    return whole.hexdigest()


def _add(whole: hashlib.blake2b, part: bytes) -> None:
    """Add the length too, so that different lists of parts give different bytes."""
    whole.update(len(part).to_bytes(8, "little") + part)
