"""Run a measurement in a subprocess, to isolate its peak memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def measure(module: str, *arguments: str) -> dict[str, Any]:
    """What `python -m module arguments` prints, as JSON; the last line of its error if it fails."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row
