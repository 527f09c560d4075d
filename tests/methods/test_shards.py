"""One process and two workers give the same numbers: every method, with real processes.

Both workers are started once for all methods. As in `test_runtimes.py`, sums in another order
differ by roundings, and 1e-8 in float64 holds after several rounds with all selections.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from method_rows import EVERYONE, ROWS, TIGHT, Row, assert_same_tree, build, every_method, loop
from safetensors.torch import load_file
from shard_rows import CASES, whole

from corefed.base.rng import SERVER
from corefed.base.types import Update

SUPPORT = Path(__file__).parents[1] / "support"
WORKERS = 2


@every_method
def test_a_mean_is_all_that_a_method_with_this_trait_needs(row: Row) -> None:
    before, after, method = loop(row, 0), loop(row, 1), build(row)
    kind, update = method.traits.mean, after.updates[0]
    if not kind:
        return
    n = update.examples.double() if kind == "examples" else torch.ones(len(EVERYONE)).double()
    mean = {
        name: torch.tensordot(n / n.sum(), value, 1).unsqueeze(0)
        for name, value in update.message.items()
    }
    one = Update((SERVER,), mean, update.examples.sum(0, keepdim=True))
    server = before.servers[0]
    assert_same_tree(method.aggregate(server, one), method.aggregate(server, update), **TIGHT)


def test_methods_that_need_every_message_say_so() -> None:
    kinds = {p.id: build(p.values[0]).traits.mean for p in ROWS}
    every = [name for name, kind in kinds.items() if not kind]
    assert all(name.startswith(("bnfed", "pfnm")) or "precision" in name for name in every)
    assert kinds["fedavg"] == "examples"
    assert kinds["independent"] == "equal"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two workers made of every method."""
    path = tmp_path_factory.mktemp("shards")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(SUPPORT / "shard_rows.py"), str(path)],
            env={**common, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORKERS)
    ]
    try:
        assert [each.wait(300) for each in started] == [0] * WORKERS
    finally:
        for each in started:
            each.kill()
    return path


def test_one_process_and_two_workers_agree(folder: Path) -> None:
    """One test for all methods, so that the workers are started once.

    At the end one worker makes a mistake, and a loss diverges at both: all say the same.
    """
    for number, case in enumerate(CASES):
        lines, servers, private = whole(case)
        found = json.loads((folder / f"{number}.json").read_text())
        assert_alike(found, json.loads(json.dumps(lines)), str(case))
        assert_same_tree(load_file(folder / f"{number}.servers"), servers, **TIGHT)
        assert_same_tree(load_file(folder / f"{number}.private"), private, **TIGHT)
    for rank in range(WORKERS):
        one, other = json.loads((folder / f"said-{rank}.json").read_text())
        assert one == "Worker 1 of 2: There is no disk."
        assert other.startswith("Training diverged: in round ")


def assert_alike(found: Any, expected: Any, where: str) -> None:
    """The same keys and values; numbers up to the rounding of losses, which are float32."""
    assert type(found) is type(expected), where
    if isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            assert_alike(found[key], value, f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where} {number}")
    elif isinstance(expected, float) and not math.isnan(expected):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6), where
    elif not isinstance(expected, float):
        assert found == expected, where
