"""The rows that a benchmark measures: a table on the terminal, and a JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from corefed.base.device import device_for
from corefed.show.report import console

Measure = Callable[[torch.device], list[dict[str, Any]]]


def show(name: str, measure: Measure, device: str, out: Path | None) -> None:
    """Measure, print the rows as a table, and with `out` write bench-NAME-DEVICE.json into it."""
    where = device_for(device)
    with Console(stderr=True).status(f"measuring {name} on {where}; this takes a few minutes"):
        rows = measure(where)
    what = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    threads = f", {torch.get_num_threads()} threads" if where.type == "cpu" else ""
    table = Table(*rows[0], title=f"bench {name} on {what}{threads}")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    console().print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"bench-{name}-{where.type}.json").write_text(json.dumps(rows, indent=1) + "\n")
