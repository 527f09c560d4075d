"""Benchmarks: speed, memory and quality, measured on this machine. One module per benchmark.

`main` looks a name up in `NAMES` and imports its module only then: torch takes a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from corefed.base.errors import UserError


class Benchmark(NamedTuple):
    """Where a benchmark is, and which options of the command line it takes beside its device."""

    module: str
    function: str
    description: str
    options: tuple[str, ...] = ()
    files: bool = False  # writes its own files; the others give rows, which `rows.py` shows


NAMES = {
    "runtime": Benchmark("runtime", "runtime", "all clients at once against one after the other"),
    "coreset": Benchmark(
        "runtime", "coreset", "what a round on coresets costs beside one on all data"
    ),
    "optimizers": Benchmark(
        "runtime", "optimizers", "what a posterior's step costs by Adam, SGD and IVON"
    ),
    "own": Benchmark("runtime", "own", "a step of an own CNN beside the same in plain torch"),
    "engine": Benchmark(
        "engine", "main",
        "rounds by runtime, whole runs and very many clients; paper is minutes",
        ("page", "sources"), files=True,
    ),
    "pfl": Benchmark(
        "pfl", "main",
        "client trainings per second on CIFAR-10 in the setting of pfl-research",
        ("page", "rounds", "sources"), files=True,
    ),
    "neighbours": Benchmark(
        "neighbours", "main", "a run beside busy processes against a run alone, on a CPU",
        ("page",), files=True,
    ),
    "faults": Benchmark(
        "faults", "main",
        "a real federation whose processes are killed and frozen, with full disks and cut links",
        ("page", "sources"), files=True,
    ),
    "solvers": Benchmark(
        "solvers", "main", "the coreset solvers compared, quality and time",
        ("page",), files=True,
    ),
    "selectors": Benchmark(
        "selectors", "main",
        "ways to choose a coreset compared by training on it; paper is hours on a GPU",
        ("page", "jobs", "source"), files=True,
    ),
    "selectors-defaults": Benchmark(
        "selectors", "defaults",
        "the default, random subsets and all data with today's settings; paper is half an hour "
        "on a GPU",
        ("page", "jobs", "source"), files=True,
    ),
    "defaults": Benchmark(
        "defaults", "main",
        "defaults chosen on some problems and judged on others; paper is an hour on a GPU",
        ("page", "jobs", "source"), files=True,
    ),
    "attacks": Benchmark(
        "attacks", "main", "clients that lie, against every rule of a federation",
        ("page", "source"), files=True,
    ),
    "real-data": Benchmark(
        "real_data", "main",
        "public tables with sites of their own, corefed and scikit-learn at their defaults",
        ("page", "source"), files=True,
    ),
    "tables": Benchmark(
        "tables", "main",
        "whole runs on large tables, CPU time and memory; paper is half an hour",
        ("page", "sources"), files=True,
    ),
    "million": Benchmark(
        "million", "million", "a coreset of a million points, time and memory", ("scale",)
    ),
    "pays": Benchmark(
        "pays", "main",
        "where a coreset pays: NUTS, passes and seconds, memory, deadlines; paper is hours",
        ("page", "source", "parts"), files=True,
    ),
    "deadlines": Benchmark(
        "deadlines", "main",
        "slow clients and a deadline: wait, drop, partial work, random subset, coreset",
        ("page", "source"), files=True,
    ),
    "submodular": Benchmark(
        "submodular", "submodular", "greedy selection, beside submodlib where it is installed",
        ("scale",),
    ),
    "newcomers": Benchmark(
        "newcomers", "bench", "newcomers' models against the shared one",
        ("scale", "out"),
    ),
    "review": Benchmark(
        "review", "review",
        "whether predictions kept by `corefed predict` reach the promised error rate",
        ("scale", "out"),
    ),
}  # fmt: skip


def main(
    name: str,
    *,
    device: str = "auto",
    out: Path | None = None,
    scale: str = "paper",
    page: Path | None = None,
    jobs: int | None = None,
    rounds: int | None = None,
    sources: Sequence[Path] = (),
    parts: Sequence[str] = (),
) -> None:
    """Run one benchmark and show what it measured; with `out`, write its numbers there as JSON."""
    if name not in NAMES:
        raise UserError(f"There is no benchmark {name!r}; there are {', '.join(NAMES)}.")
    entry = NAMES[name]
    one = "source" in entry.options
    given: dict[str, object] = {
        "page": page,
        "jobs": jobs,
        "rounds": rounds,
        "parts": parts,
        "source" if one else "sources": sources,
    }
    given = {key: value for key, value in given.items() if value is not None and value != ()}
    for key in given:
        if key not in entry.options:
            alike = ("source", "sources") if key == "sources" else (key,)
            able = [each for each, other in NAMES.items() if {*alike} & {*other.options}]
            flag = "from" if key == "sources" else key
            raise UserError(f"--{flag} is for bench {' and '.join(able)}; {name} does not take it.")
    if one and sources:
        if len(sources) > 1:
            raise UserError(f"bench {name} takes one --from, not {len(sources)}.")
        given["source"] = sources[0]
    function = getattr(import_module(f"corefed_studies.bench.{entry.module}"), entry.function)
    if entry.files:
        from rich.console import Console  # a module alone runs where only torch and numpy are

        function(scale, out, Console(stderr=True), device, **given)
        return
    from corefed_studies.bench import rows  # torch takes a second

    taken = {"scale": scale, "out": out}
    taken = {key: value for key, value in taken.items() if key in entry.options}
    rows.show(name, lambda where: function(where, **taken), device, out)
