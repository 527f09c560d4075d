"""Data of any kind, as chunks of points in a fixed order, or a few points by index.

| what the user has            | the index of a point                                             |
|------------------------------|------------------------------------------------------------------|
| (x, y), tensors or arrays    | its row                                                          |
| a map-style Dataset          | its index there                                                  |
| a DataLoader                 | its index in the loader's dataset: read in order, not shuffled   |
| an IterableDataset           | its position; read from the start as often as needed             |

x and y may be tensors, or tuples, lists or dicts of tensors that share their first axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from corefed.base.errors import UserError

Batch = tuple[Any, Any]
"""(x, y) of some points."""


class PointSource(NamedTuple):
    n: int
    batches: Callable[[int], Iterator[Batch]]  # in order, at least this many points but the last
    take: Callable[[Tensor], Batch]  # the points of ascending indices


def adapt(data: object, dtype: torch.dtype) -> PointSource:
    """The source behind `data`; floating numpy arrays become `dtype`, that of the draws."""
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        data = data.tensors
    if isinstance(data, tuple | list) and len(data) == 2 and not isinstance(data, Dataset):
        return _in_memory(*(_tensors(part, dtype) for part in data))
    if isinstance(data, DataLoader):
        return _loader(data)
    if isinstance(data, IterableDataset):
        return _stream(lambda: DataLoader(data, batch_size=_READ))
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return _indexed(data, _READ, default_collate, 0)
    raise UserError(
        f"data is a {type(data).__name__}; give (x, y), a Dataset of (x, y) or a DataLoader of it."
    )


_READ = 256
"""Points that are read at once from a Dataset without a loader."""


def count(x: Any) -> int:
    """Length of the first axis of every tensor in x."""
    lengths = {len(t) if t.dim() else -1 for t in flat(tree(lambda t: t, x))}
    if len(lengths) != 1 or -1 in lengths:
        raise UserError(f"The parts of a batch have lengths {sorted(lengths)}; they must agree.")
    return lengths.pop()


def flat(x: Any) -> list[Tensor]:
    """Every tensor in x."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, Mapping) else x
    return [t for part in parts for t in flat(part)]


def tree(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """`function` of every tensor in a tensor, tuple, list or dict."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, Mapping):
        return {name: tree(function, part) for name, part in x.items()}
    if isinstance(x, tuple | list):
        return tuple(tree(function, part) for part in x)
    raise UserError(f"A batch holds a {type(x).__name__} where a tensor is needed.")


def rows(x: Any, which: slice | Tensor) -> Any:
    """Some points, by a slice or an index."""
    if isinstance(which, slice):
        return tree(lambda t: t[which], x)
    return tree(lambda t: t.index_select(0, which.to(t.device)), x)


def join(parts: Sequence[Any]) -> Any:
    """Points one after the other."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    if isinstance(parts[0], Mapping):
        return {name: join([part[name] for part in parts]) for name in parts[0]}
    return tuple(join([part[i] for part in parts]) for i in range(len(parts[0])))


def _in_memory(x: Any, y: Any) -> PointSource:
    if count(x) != count(y):
        raise UserError(f"x has {count(x)} points but y has {count(y)}.")
    n = count(x)
    _refuse_empty(n)

    def batches(size: int) -> Iterator[Batch]:
        for start in range(0, n, size):
            yield rows(x, slice(start, start + size)), rows(y, slice(start, start + size))

    def take(index: Tensor) -> Batch:
        return rows(x, index), rows(y, index)

    return PointSource(n, batches, take)


def _loader(loader: DataLoader[Any]) -> PointSource:
    """The loader's dataset in order, with its own batches, collate function and workers."""
    if loader.batch_size is None and loader.batch_sampler is None:
        raise UserError("A DataLoader with batch_size=None has no points to count; set it.")
    if isinstance(loader.dataset, IterableDataset):
        # Workers split the items of an iterable dataset among themselves: no order, no index.
        return _stream(
            lambda: DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
        )
    sampler = getattr(loader.batch_sampler, "sampler", None)
    once = isinstance(sampler, SequentialSampler) or (
        isinstance(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not once:
        raise UserError(
            f"The DataLoader picks points by a {type(sampler or loader.batch_sampler).__name__} "
            "that may leave some out; give a loader of a torch.utils.data.Subset instead."
        )
    size = loader.batch_size or _READ
    return _indexed(loader.dataset, size, loader.collate_fn, loader.num_workers)


def _indexed(
    data: Any, read: int, collate: Callable[[list[Any]], Any], workers: int
) -> PointSource:
    n = len(data)
    _refuse_empty(n)

    def batches(size: int) -> Iterator[Batch]:
        loader = DataLoader(data, batch_size=read, collate_fn=collate, num_workers=workers)
        return _merged(loader, size)

    def take(index: Tensor) -> Batch:
        chosen = index.tolist()
        parts = [
            _pair(collate([data[j] for j in chosen[start : start + read]]))
            for start in range(0, len(chosen), read)
        ]
        return join([x for x, _ in parts]), join([y for _, y in parts])

    return PointSource(n, batches, take)


def _stream(loader: Callable[[], DataLoader[Any]]) -> PointSource:
    """Items of a stream: one pass counts them, another finds some of them."""
    n = sum(count(_pair(batch)[0]) for batch in loader())
    _refuse_empty(n)

    def take(index: Tensor) -> Batch:
        found: list[Batch] = []
        start = 0
        for batch in loader():
            x, y = _pair(batch)
            stop = start + count(x)
            here = index[(index >= start) & (index < stop)] - start
            if len(here):
                found.append((rows(x, here), rows(y, here)))
            start = stop
        return join([x for x, _ in found]), join([y for _, y in found])

    return PointSource(n, lambda size: _merged(loader(), size), take)


def _merged(loader: DataLoader[Any], size: int) -> Iterator[Batch]:
    """The loader's batches, joined until there are `size` points."""
    waiting: list[Batch] = []
    points = 0
    for batch in loader:
        x, y = _pair(batch)
        if count(x) != count(y):
            raise UserError(f"A batch of the data has {count(x)} points but {count(y)} labels.")
        waiting.append((x, y))
        points += count(x)
        if points >= size:
            yield join([x for x, _ in waiting]), join([y for _, y in waiting])
            waiting, points = [], 0
    if waiting:
        yield join([x for x, _ in waiting]), join([y for _, y in waiting])


def _pair(batch: Any) -> Batch:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return batch[0], batch[1]
    raise UserError("An item of the data must be a pair (x, y); wrap the data set to give pairs.")


def _tensors(part: Any, dtype: torch.dtype) -> Any:
    if isinstance(part, np.ndarray):
        if part.dtype.kind not in "fiub":
            raise UserError(f"An array of {part.dtype} holds no numbers; x and y must.")
        tensor = torch.from_numpy(part) if part.flags.writeable else torch.tensor(part)
        return tensor.to(dtype) if tensor.is_floating_point() else tensor
    if isinstance(part, Mapping):
        return {name: _tensors(value, dtype) for name, value in part.items()}
    if isinstance(part, tuple | list):
        return tuple(_tensors(value, dtype) for value in part)
    if not isinstance(part, Tensor):
        raise UserError(f"data holds a {type(part).__name__}; (x, y) are tensors or arrays.")
    return part


def _refuse_empty(n: int) -> None:
    if n == 0:
        raise UserError("The data are empty; a coreset needs at least one point.")
