"""A search's progress on stderr: a bar that names the leader."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corefed.base.progress import bars
from corefed.training.candidates import Standing

BESIDE, LEAST = 48, 20
"""Columns of a terminal that the bar, its name and the time take; and what is left at least."""


@contextmanager
def search_progress(*, silent: bool = False) -> Iterator[Callable[[Standing], None]]:
    """Yields a function that shows where a search stands; without a terminal, only its rungs."""
    with bars(keep=True, silent=silent) as shown:

        def show(now: Standing) -> None:
            rungs, settings = len(now.rungs), named(now.leader)
            text = f"{now.rung}/{rungs}  {now.left} left"
            if now.leader:
                text += f"  NLL {now.nll:.3g}: {settings.replace(',', '')}"
            room = max(LEAST, shutil.get_terminal_size().columns - BESIDE)
            text = text if len(text) <= room else f"{text[: room - 1]}…"
            line = f"rung {now.rung} of {rungs}, round {now.rungs[now.rung - 1]}: "
            line += f"best NLL {now.nll:.4g} with {settings}"
            if now.rung < rungs:
                line += f"; {now.left} candidates go on"
            shown.show("tune", now.done, now.total, text, line=line if now.compared else "")

        yield show


def named(settings: Mapping[str, Any]) -> str:
    """`eta_1=0.004, zeta=0.1`."""
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in settings.items()
    )
