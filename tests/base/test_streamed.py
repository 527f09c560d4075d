"""A streamed tensor gives what an ordinary one gives, and reads no more than it is asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from corefed.base.streamed import Streamed, values

X = torch.randn(4, 5, 3, 2, generator=torch.Generator().manual_seed(0))
EVEN = torch.tensor([True, False, True, False, True])
SOME = torch.tensor([3, 1, 1])


class Counted:
    """Points in memory that count how many of them are read."""

    shape, dtype = (3, 2), torch.float32

    def __init__(self) -> None:
        self.times = 0

    def read(self, index: Tensor) -> Tensor:
        self.times += len(index)
        return X.flatten(0, 1)[index]


TAKE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the points of the result
    "a client": (lambda x: x[1:2], 5),
    "clients": (lambda x: x[[0, 2]], 10),
    "one": (lambda x: x[2], 5),
    "the last": (lambda x: x[-1], 5),
    "points": (lambda x: x[:, 1:3], 8),
    "points of clients": (lambda x: x[1:3][:, :4], 8),
    "all": (lambda x: x[:, :9], 20),
    "a minibatch": (lambda x: x[1:2].flatten(0, 1).index_select(0, SOME).unflatten(0, (1, -1)), 3),
    "a mask": (lambda x: x[1:2][:, EVEN], 3),
    "pairs": (lambda x: x[torch.tensor([0, 3]), torch.tensor([4, 1])], 2),
    "a grid": (lambda x: x[torch.tensor([[0], [1]]), torch.tensor([[1, 2], [3, 0]])], 4),
    "joined": (lambda x: x.flatten(0, 1)[SOME], 3),
    "split": (lambda x: x.split(2, 1)[2], 4),
    "detached": (lambda x: x[:1].detach(), 5),
}

COMPUTE: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {  # and the points that are read
    "a sum": (lambda x: x[1:2].sum(), 5),
    "one point": (lambda x: x[0][2], 1),
    "flat": (lambda x: x[1:2].flatten(2), 5),
    "together": (lambda x: torch.cat([x[:1], x[2:3]]), 10),
    "features": (lambda x: x[0][:, :, 0], 5),
    "a product": (lambda x: 2 * x, 20),
}


@pytest.mark.parametrize("name", TAKE)
def test_taking_points_reads_nothing(name: str) -> None:
    rows = Counted()
    take, count = TAKE[name]
    found = take(Streamed(rows, (4, 5)))
    assert isinstance(found, Streamed)
    assert rows.times == 0
    assert torch.equal(values(found), take(X))
    assert rows.times == count


@pytest.mark.parametrize("name", COMPUTE)
def test_computing_reads_the_points_that_are_given(name: str) -> None:
    rows = Counted()
    compute, count = COMPUTE[name]
    found = compute(Streamed(rows, (4, 5)))
    assert not isinstance(found, Streamed)
    assert rows.times == count
    assert torch.equal(found, compute(X))


def test_ordinary_tensors_stay_as_they_are() -> None:
    assert values(X) is X
