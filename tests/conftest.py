"""Settings of all tests, and the real federation that some of them share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from federation_processes import Federation

# Two threads, as users have several, which sleep while they wait, as those of `corefed` do: tests
# run side by side. Read when torch is loaded, and by what tests start.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A test's files need not outlive the machine, and waiting for the disk took a quarter of the time
# of those that federate in one process. Tests that count calls put their own in its place.
os.fsync = lambda handle: None  # type: ignore[assignment]


TESTS = Path(__file__).parent
PLACES = {
    "federation": ("federation", "golden"),
    "jax": ("coreset", "studies/test_pays_bench.py", "docs/test_pages.py"),
}
"""Where tests of a mark lie. Those of one mark alone are found without reading other files."""

IMPORT_JAX = ("test_adapters.py", "test_pays_bench.py")


def lies_in(path: Path, mark: str) -> bool:
    return any(path.is_relative_to(TESTS / place) for place in PLACES[mark])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Reading some files imports JAX, which a process that leaves them out must not."""
    chosen = config.option.markexpr
    if not collection_path.is_relative_to(TESTS) or collection_path.is_dir():
        return None
    elsewhere = chosen in PLACES and not lies_in(collection_path, chosen)
    apart = collection_path.name in IMPORT_JAX and "not jax" in chosen
    return True if elsewhere or apart else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A marked test that lies elsewhere would never be run."""
    for item in items:
        for mark in PLACES:
            if item.get_closest_marker(mark) and not lies_in(item.path, mark):
                raise pytest.UsageError(f"{item.nodeid}: add its file to {mark} of PLACES")


def pytest_collection_finish() -> None:
    """What is imported by now stays; the garbage collector need not look through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def fed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Server, alice and bob as processes; carol is registered and never comes.

    Tests that use it are marked `federation`; the files they stand in share it where they run in
    the same process.
    """
    from federation_processes import shared

    with shared(tmp_path_factory.mktemp("federation")) as running:
        yield running


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small convolutions: two threads wait for each other longer than they compute, and tests
    side by side took ten times as long."""
    import torch  # takes a second, and reads the variables above

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def heard() -> Iterator[None]:
    """Ctrl-C as Python takes it; a shell has what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
