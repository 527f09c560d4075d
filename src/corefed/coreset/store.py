"""Potentials of one problem (C = 1) with many points: `problem.Potentials` in bounded memory.

`FileStore` writes them once into a scratch file and reads it in blocks into one reused buffer (the
pages of mmap would count as resident). The file has no name where the system allows that, so
nothing is left behind even after kill -9. `Recompute` keeps nothing and evaluates the likelihood
again in every pass, for those who have neither the memory nor the disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.coreset.problem import Dense, Potentials

BLOCK = 16 << 20
"""Bytes read at once: large against the cost of a call, small against memory."""


class Sink(Protocol):
    """Takes the potentials [b, S] of all points in order, then serves them."""

    def append(self, g: Tensor) -> None: ...
    def points(self) -> Potentials: ...
    def close(self) -> None: ...


class MemorySink:
    """All potentials in one tensor on the device."""

    def __init__(self, n: int, draws: int, dtype: torch.dtype, device: torch.device) -> None:
        self.g = torch.empty(n, draws, dtype=dtype, device=device)
        self.filled = 0

    def append(self, g: Tensor) -> None:
        self.g[self.filled : self.filled + len(g)] = g
        self.filled += len(g)

    def points(self) -> Potentials:
        return Dense(self.g.unsqueeze(0))

    def close(self) -> None:
        pass


class _Store:
    """A store is its own sink. It keeps ||g_j||^2 from the first pass."""

    def __init__(self, n: int, draws: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (1, n, draws)
        self.dtype = dtype
        self.device = device
        self.filled = 0
        self._squares = torch.empty(1, n, dtype=dtype, device=device)

    def squares(self) -> Tensor:
        return self._squares

    def append(self, g: Tensor) -> None:
        self._squares[0, self.filled : self.filled + len(g)] = g.square().sum(-1)
        self.filled += len(g)

    def close(self) -> None:
        pass


class FileStore(_Store):
    """Potentials in a scratch file, one row per point."""

    def __init__(
        self,
        n: int,
        draws: int,
        dtype: torch.dtype,
        device: torch.device,
        folder: Path | None = None,
        block: int = BLOCK,
    ) -> None:
        super().__init__(n, draws, dtype, device)
        self.folder = folder or Path(tempfile.gettempdir())
        with self._using("write"):
            # Open as long as the store is; `close` and the garbage collector remove it.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        kind = np.float64 if dtype == torch.float64 else np.float32
        rows = max(1, min(n, block // (draws * dtype.itemsize)))
        self._buffer = np.empty((rows, draws), kind)
        self._row = np.empty(draws, kind)

    def append(self, g: Tensor) -> None:
        super().append(g)
        content = g.to("cpu", self.dtype).contiguous().numpy().data.cast("B")
        with self._using("write"):
            while content:
                content = content[self._file.write(content) :]

    def points(self) -> Potentials:
        return self

    def correlate(self, r: Tensor) -> Tensor:
        """Phi^T r in one pass over the file."""
        result = torch.empty(1, self.shape[1], dtype=self.dtype, device=self.device)
        row = r[0].unsqueeze(-1)
        for start, g in self._blocks():
            result[0, start : start + len(g)] = (g.to(self.device) @ row).squeeze(-1)
        return result

    def gather(self, index: Tensor) -> Tensor:
        """[1, m, S], read in the order of the file."""
        out = torch.empty(index.shape[1], self.shape[2], dtype=self.dtype)
        rows = out.numpy()
        size = self._row.nbytes
        with self._using("read"):
            for place, j in sorted(enumerate(index[0].tolist()), key=lambda pair: pair[1]):
                self._file.seek(j * size)
                self._fill(rows[place])
        return out.unsqueeze(0).to(self.device)

    def close(self) -> None:
        self._file.close()

    def _blocks(self) -> Iterator[tuple[int, Tensor]]:
        """(first point, [b, S]) in order; the tensor is a view of the buffer."""
        with self._using("read"):
            self._file.seek(0)
        for start in range(0, self.filled, len(self._buffer)):
            part = self._buffer[: min(len(self._buffer), self.filled - start)]
            with self._using("read"):
                self._fill(part)
            yield start, torch.from_numpy(part)

    def _fill(self, target: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> None:
        view = target.data.cast("B")
        while view:
            got = self._file.readinto(view)
            if not got:
                raise OSError(5, "the scratch file is shorter than what was written to it")
            view = view[got:]

    @contextmanager
    def _using(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"Cannot {what} the scratch file of potentials in {self.folder}: {error.strerror}. "
                "Give another folder by scratch=, or keep nothing by store='recompute'."
            ) from error


class Recompute(_Store):
    """Potentials computed again in each pass: `passes` yields all of them in order, [b, S] at a
    time, and `some` those of given points."""

    def __init__(
        self,
        n: int,
        draws: int,
        dtype: torch.dtype,
        device: torch.device,
        passes: Callable[[], Iterator[Tensor]],
        some: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(n, draws, dtype, device)
        self._passes = passes
        self._some = some

    def points(self) -> Potentials:
        return self

    def correlate(self, r: Tensor) -> Tensor:
        row = r[0].unsqueeze(-1)
        return torch.cat([(g @ row).squeeze(-1) for g in self._passes()]).unsqueeze(0)

    def gather(self, index: Tensor) -> Tensor:
        order = index[0].argsort()
        rows = torch.empty(index.shape[1], self.shape[2], dtype=self.dtype, device=self.device)
        rows[order] = self._some(index[0][order].cpu())
        return rows.unsqueeze(0)
