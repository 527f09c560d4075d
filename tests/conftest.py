"""Settings of all tests, and the real federation that some of them share."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from federation_processes import Federation

# Tests run side by side in processes; OpenMP threads of one would spin while another computes.
torch.set_num_threads(1)

# A test's files need not outlive the machine, and waiting for the disk took a quarter of the time
# of those that federate in one process. Tests that count calls put their own in its place.
os.fsync = lambda handle: None  # type: ignore[assignment]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Reading these files imports JAX, which a process that leaves them out must not."""
    apart = collection_path.name in ("test_adapters.py", "test_pays_bench.py")
    return True if apart and "not jax" in config.option.markexpr else None


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
def heard() -> Iterator[None]:
    """Ctrl-C as Python takes it; a shell has what it runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
