"""Run a measurement in a subprocess, to isolate its peak memory."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
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
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}, no words"]
        raise RuntimeError(f"{' '.join(arguments)}: {said[-1]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def peak_mb() -> float:
    """The most memory that this process has had resident.

    Linux keeps the peak of whoever started it in what `getrusage` gives, so it is read elsewhere.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 2**10
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)  # macOS counts bytes


if __name__ == "__main__":  # what a process takes that does nothing
    print(json.dumps({"peak_mb": peak_mb()}))
