"""The result file of a benchmark that is shown on a page: JSON, small enough to be committed.

{"schema": 1, "name": NAME, "scale": "paper", "device": "cuda", "machine": ..., ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from corefed.base import files
from corefed.base.errors import UserError
from corefed_studies import result_file

SCHEMA = 1
DIGITS = 4


def about(name: str, scale: str, device: torch.device) -> dict[str, Any]:
    """What every file begins with: what was measured, and on what."""
    threads = torch.get_num_threads()
    machine = f"{threads} CPU thread{'s' if threads > 1 else ''}"
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    return {
        "schema": SCHEMA, "name": name, "scale": scale, "device": device.type, "machine": machine,
        "torch": torch.__version__,
    }  # fmt: skip


def write(path: Path, study: Mapping[str, Any]) -> dict[str, Any]:
    """The study as a file has it, with a few digits of each number."""
    found: dict[str, Any] = result_file.rounded(study, DIGITS)
    files.write_folder(path.parent, [(path.name, (json.dumps(found, indent=1) + "\n").encode())])
    return found


def read(path: Path, name: str, fields: Sequence[str]) -> dict[str, Any]:
    """The study of a file, refused unless it is one of this benchmark and whole."""
    found = result_file.read(path, name, SCHEMA)
    missing = [field for field in ("scale", "machine", *fields) if field not in found]
    if missing:
        raise UserError(f"{path} is not whole: it lacks {', '.join(missing)}; measure again.")
    return found
