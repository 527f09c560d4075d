"""Run a measurement in a subprocess, to isolate its peak memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from corefed.base import machine


def measure(
    module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """What `python -m module arguments` prints, as JSON; the last line of its error if it fails.

    In this environment; by default in ours, with threads as `corefed run` has them.
    """
    variables = machine.polite(os.environ) if environment is None else environment
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=dict(variables), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row
