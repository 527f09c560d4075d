"""A search's progress on stderr: a bar that names the leader."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from corefed.base.progress import bars
from corefed.training.candidates import Standing


@contextmanager
def search_progress(*, silent: bool = False) -> Iterator[Callable[[Standing], None]]:
    """Yields a function that shows where a search stands; without a terminal, only its rungs."""
    with bars(keep=True, silent=silent) as shown:

        def show(now: Standing) -> None:
            rung = f"rung {now.rung} of {len(now.rungs)}"
            leader = f"best NLL {now.nll:.4g} with {named(now.leader)}" if now.leader else ""
            text = ", ".join(filter(None, (rung, f"{now.left} candidates", leader)))
            line = f"{rung}, round {now.rungs[now.rung - 1]}: {leader}"
            if now.rung < len(now.rungs):
                line += f"; {now.left} candidates go on"
            shown.show("tune", now.done, now.total, text, line=line if now.compared else "")

        yield show


def named(settings: Mapping[str, Any]) -> str:
    """`eta_1=0.004, zeta=0.1`."""
    return ", ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in settings.items()
    )
