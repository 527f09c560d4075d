"""Potentials on disk and potentials computed anew: the numbers of `Dense`, in bounded memory."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.coreset import build
from corefed.coreset.problem import Dense, Potentials, Problem
from corefed.coreset.store import FileStore, MemorySink, Recompute

N, S = 101, 7
CPU = torch.device("cpu")


def potentials(dtype: torch.dtype) -> Tensor:
    return torch.randn(N, S, generator=torch.Generator().manual_seed(0), dtype=dtype)


def stores(g: Tensor, folder: Path) -> dict[str, FileStore | MemorySink | Recompute]:
    made = {
        "disk": FileStore(N, S, g.dtype, CPU, folder, block=10 * S * g.element_size()),
        "memory": MemorySink(N, S, g.dtype, CPU),
        "recompute": Recompute(N, S, g.dtype, CPU, lambda: iter(g.split(9)), lambda rows: g[rows]),
    }
    for store in made.values():
        for part in g.split(13):
            store.append(part)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["disk", "memory", "recompute"])
def test_every_store_has_the_numbers_of_dense(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    g = potentials(dtype)
    made = stores(g, tmp_path)
    dense, points = Dense(g.unsqueeze(0)), made[kind].points()
    assert (points.shape, points.dtype, points.device) == ((1, N, S), dtype, CPU)
    r = torch.randn(1, S, dtype=dtype)
    index = torch.tensor([[100, 3, 3, 0, 57]])
    for _ in range(2):  # a second pass reads the same
        torch.testing.assert_close(points.correlate(r), dense.correlate(r))
        assert torch.equal(points.gather(index), dense.gather(index))
        torch.testing.assert_close(points.squares(), dense.squares())
    w = torch.zeros(1, N, dtype=dtype)
    w[0, [5, 90]] = 2.0
    mask = torch.ones(1, N, dtype=torch.bool)
    y = g.sum(0, keepdim=True)
    found, expected = (Problem(p, y, torch.tensor([2]), mask).objective(w) for p in (points, dense))
    torch.testing.assert_close(found, expected)
    for store in made.values():
        store.close()


def test_the_scratch_file_is_gone_while_it_is_used_and_after(tmp_path: Path) -> None:
    """It has no name, so nothing can be left behind, whatever ends the program."""
    made = stores(potentials(torch.float32), tmp_path)
    assert list(tmp_path.iterdir()) == []
    for store in made.values():
        store.close()


def logistic(theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return torch.nn.functional.logsigmoid(y * (x @ theta))


def data(n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, generator=g), torch.randn(n, generator=g).sign()


POSTERIOR = (torch.zeros(3), torch.ones(3))


def test_a_scratch_folder_that_is_not_there(tmp_path: Path) -> None:
    for store in ("disk", "auto"):
        with pytest.raises(UserError, match="No such file or directory") as refused:
            build(
                logistic, POSTERIOR, data(3000), 10, store=store, memory_mb=1,
                scratch=tmp_path / "nowhere",
            )  # fmt: skip
        assert "nowhere" in str(refused.value)


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A file-size limit of the kernel is the nearest thing to a full disk without a mount."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(UserError, match="Cannot write the scratch file") as refused:
            build(logistic, POSTERIOR, data(1000), 10, store="disk", scratch=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "store='recompute'" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_a_scratch_file_that_ends_early(tmp_path: Path) -> None:
    store = FileStore(N, S, torch.float32, CPU, tmp_path)
    store.append(potentials(torch.float32))
    store._file.truncate(100)
    with pytest.raises(UserError, match="Cannot read the scratch file"):
        store.correlate(torch.ones(1, S))
    store.close()


def test_an_error_on_the_way_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[FileStore] = []
    inner = FileStore.append

    def fail(self: FileStore, g: Tensor) -> None:
        opened.append(self)
        inner(self, g)
        raise KeyboardInterrupt

    monkeypatch.setattr(FileStore, "append", fail)
    with pytest.raises(KeyboardInterrupt):
        build(logistic, POSTERIOR, data(100), 10, store="disk", scratch=tmp_path)
    assert opened[0]._file.closed


def test_auto_computes_anew_where_the_disk_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tempfile.gettempdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    coreset = build(logistic, POSTERIOR, data(3000), 3, memory_mb=2, iterations=3)
    assert coreset.diagnostics.store == "recompute"


MEASURE = """
import resource, torch
from corefed.coreset import build
torch.set_num_threads(1)
x, y = torch.randn(100_000, 4), torch.randn(100_000).sign()
def log_p(theta, x, y):
    return torch.nn.functional.logsigmoid(y * (x @ theta))
posterior = (torch.zeros(4), torch.ones(4))
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
build(log_p, posterior, (x[:5000], y[:5000]), 50, samples=400, store="disk", memory_mb=64)
before = peak()
coreset = build(log_p, posterior, (x, y), 50, samples=400, store=%r, memory_mb=64)
assert coreset.diagnostics.ratio < 0.1, coreset
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_memory_of_a_large_problem_is_bounded() -> None:
    """Potentials of 160 MB on disk; beside what a twentieth of the points took, memory grows only
    by vectors of n numbers: 0.4 MB each, and a solver has a few dozen at most."""
    code = [sys.executable, "-c", MEASURE % "disk"]
    done = subprocess.run(code, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 24


def test_points_is_what_the_stores_are(tmp_path: Path) -> None:
    made: list[Potentials] = [
        s.points() for s in stores(potentials(torch.float32), tmp_path).values()
    ]
    assert {points.shape for points in made} == {(1, N, S)}
    made[0].close()  # type: ignore[attr-defined]
