"""Roundings of another processor, and choices of points that agree up to rounding.

What is the same to the bit everywhere: the same run again, a resumed run, as many workers. Not a
client alone and in a stack: a product of another shape may take another kernel of the BLAS, which
adds in another order. Some processors do, some do not; `OtherOrder` makes every one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.aten
PRODUCTS = (ops.mm.default, ops.bmm.default, ops.mm.out, ops.bmm.out)
SUMS = (ops.addmm.default, ops.baddbmm.default)

RELATIVE = 1e-5
"""Weights of a client alone and in a stack. Sums in reversed order moved them by up to 3e-6."""


class OtherOrder(TorchDispatchMode):
    """Matrix products add from the last term to the first."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in PRODUCTS:
            args = (*_reversed(*args[:2]), *args[2:])
        elif func in SUMS:
            args = (args[0], *_reversed(*args[1:3]))
        return func(*args, **(kwargs or {}))


def _reversed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a.flip(-1).contiguous(), b.flip(-2).contiguous()


def assert_same_choice(found: Tensor, expected: Tensor) -> None:
    """The same points, and weights up to rounding."""
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=RELATIVE, atol=0)
