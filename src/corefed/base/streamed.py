"""Points that stay in their files: tensors without memory, read where they are computed with.

A `Streamed` tensor has a shape and a type like any other. Taking some of its points along its first
axes (slices, indices, the axes of clients and points joined) reads nothing. Any other operation
reads the points that it is given, and returns an ordinary tensor. So code that goes through points
block by block never holds more than a block, and is the same code for points in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

aten: Any = torch.ops.aten


class Rows(Protocol):
    """Points of one shape, each with a number from 0 on."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # of a point
    @property
    def dtype(self) -> torch.dtype: ...
    def read(self, index: Tensor) -> Tensor: ...  # [m] numbers -> [m, *shape], in their order


class Streamed(Tensor):
    """Points [n, ...] or [C, n, ...] of `rows`; `at` has their numbers, None: all in order."""

    rows: Rows
    at: Tensor | None
    lead: tuple[int, ...]  # the axes before those of a point

    @staticmethod
    def __new__(cls, rows: Rows, lead: Sequence[int], at: Tensor | None = None) -> Streamed:
        make: Any = torch.Tensor._make_wrapper_subclass
        found: Streamed = make(cls, (*lead, *rows.shape), dtype=rows.dtype)
        found.rows, found.lead, found.at = rows, tuple(lead), at
        return found

    def of(self, index: Tensor) -> Streamed:
        """The points with these numbers."""
        return Streamed(self.rows, tuple(index.shape), index)

    def numbers(self) -> Tensor:
        """[*lead] the number of every point."""
        if self.at is not None:
            return self.at
        return torch.arange(math.prod(self.lead)).view(self.lead)

    def values(self) -> Tensor:
        """The points themselves."""
        return self.rows.read(self.numbers().reshape(-1)).view(self.shape)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"Streamed({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        take = _TAKE.get(func)
        if take is not None and isinstance(args[0], Streamed):
            found = take(*args, **(kwargs or {}))
            if found is not None:
                return found
        return func(*tree_map(read, args), **tree_map(read, dict(kwargs or {})))


def read(x: Any) -> Any:
    """The values of streamed points; anything else as it is."""
    return x.values() if isinstance(x, Streamed) else x


def values(x: Tensor) -> Tensor:
    """The points as an ordinary tensor: once, where they are used more than once."""
    return x.values() if isinstance(x, Streamed) else x


# --- some of the points, without reading them -----------------------------------------------------


def _slice(
    x: Streamed, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Streamed | None:
    if dim >= len(x.lead):
        return _same(x) if not start and step == 1 and _reaches(x, dim, end) else None
    if _reaches(x, dim, end) and not start and step == 1:
        return _same(x)
    if x.at is None and dim == 0:
        first, last, by = slice(start, end, step).indices(x.lead[0])
        return x.of(_clients(x, torch.arange(first, last, by)))
    return x.of(aten.slice.Tensor(x.numbers(), dim, start, end, step))


def _same(x: Streamed) -> Streamed:
    """A view must be another tensor than the one it is of."""
    return Streamed(x.rows, x.lead, x.at)


def _reaches(x: Streamed, dim: int, end: int | None) -> bool:
    return end is None or end >= x.shape[dim]


def _select(x: Streamed, dim: int, index: int) -> Tensor | None:
    if dim >= len(x.lead):
        return None
    if len(x.lead) == 1:  # a single point
        number = range(x.lead[0])[index] if x.at is None else int(x.at[index])
        return x.rows.read(torch.tensor([number]))[0]
    if x.at is None and dim == 0:
        here = range(x.lead[0])[index]
        return x.of(_clients(x, torch.tensor([here]))[0])
    return x.of(aten.select.int(x.numbers(), dim, index))


def _index(x: Streamed, indices: Sequence[Tensor | None]) -> Streamed | None:
    if len(indices) > len(x.lead):
        return None
    if x.at is None and len(indices) == 1 and indices[0] is not None:
        at = indices[0]
        at = at.nonzero().squeeze(-1) if at.dtype == torch.bool else at % x.lead[0]
        return x.of(_clients(x, at)) if at.dim() == 1 else None
    if x.at is None and len(indices) == 2 and all(each is not None for each in indices):
        client, point = (each for each in indices if each is not None)
        return x.of(client * x.lead[1] + point)
    return x.of(aten.index.Tensor(x.numbers(), indices))


def _index_select(x: Streamed, dim: int, index: Tensor) -> Streamed | None:
    if dim >= len(x.lead):
        return None
    if x.at is None and len(x.lead) == 1:
        return x.of(index)
    return x.of(aten.index_select.default(x.numbers(), dim, index))


def _clients(x: Streamed, at: Tensor) -> Tensor:
    """The numbers of all points in these places of the first axis."""
    if len(x.lead) == 1:
        return at
    n = math.prod(x.lead[1:])
    return (at.unsqueeze(-1) * n + torch.arange(n)).view(len(at), *x.lead[1:])


def _view(x: Streamed, shape: Sequence[int]) -> Streamed | None:
    """Where the axes of a point stay as they are."""
    rest = math.prod(each for each in shape if each >= 0)
    whole = [each if each >= 0 else x.numel() // max(1, rest) for each in shape]
    ends = len(whole) - len(x.rows.shape)
    if ends < 1 or tuple(whole[ends:]) != tuple(x.rows.shape):
        return None
    if x.at is None:
        return Streamed(x.rows, whole[:ends])
    return x.of(x.at.reshape(whole[:ends]))


def _split(x: Streamed, size: int, dim: int = 0) -> list[Streamed] | None:
    if dim >= len(x.lead):
        return None
    parts = [_slice(x, dim, at, at + size) for at in range(0, x.shape[dim], size)]
    return [part for part in parts if part is not None]


_TAKE: dict[Any, Callable[..., Any]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    aten.index_select.default: _index_select,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.split.Tensor: _split,
    aten.detach.default: _same,
    aten.alias.default: _same,
}
"""Operations that take some of the points."""
