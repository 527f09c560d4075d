"""The command line sets how OpenMP behaves before torch is loaded; a user's own values stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from corefed.base import machine

NAMES = [*machine.NUMBER, *machine.WAITING]


def variables(code: str, **given: str) -> dict[str, str]:
    """Those of OpenMP that a process has after `code`, which starts with these."""
    bare = {key: value for key, value in os.environ.items() if key not in NAMES}
    code += f"; import json, os; print(json.dumps({{n: os.environ.get(n) for n in {NAMES}}}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=bare | given, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: value for name, value in found.items() if value is not None}


def test_the_command_line_waits_passively_on_the_cores_it_may_use() -> None:
    assert variables("import corefed.commands.cli") == {
        "OMP_NUM_THREADS": str(machine.usable_cores()),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
    }


def test_torch_has_that_number_of_threads() -> None:
    code = (
        "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
        "; import corefed.commands.cli, torch; assert torch.get_num_threads() == 1"
    )
    if hasattr(os, "sched_setaffinity"):
        assert variables(code)["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_stays() -> None:
    given = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}
    assert variables("import corefed.commands.cli", **given) == given


def test_the_library_leaves_a_process_alone() -> None:
    assert variables("import corefed; corefed.UserError") == {}
    # A program that has loaded torch has chosen already.
    assert variables("import torch, corefed.commands.cli") == {}
