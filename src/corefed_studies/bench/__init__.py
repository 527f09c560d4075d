"""Benchmarks: speed, memory and quality, measured on this machine. One module per benchmark.

`main` looks a name up in `NAMES` and imports its module only then: torch takes a second.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

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
    "neighbours": Benchmark(
        "neighbours", "main", "a run beside busy processes against a run alone, on a CPU",
        ("page",), files=True,
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
    "defaults": Benchmark(
        "defaults", "main",
        "defaults chosen on some problems and judged on others; paper is an hour on a GPU",
        ("page", "jobs", "source"), files=True,
    ),
    "million": Benchmark(
        "million", "million", "a coreset of a million points, time and memory", ("scale",)
    ),
    "submodular": Benchmark(
        "submodular", "submodular", "greedy selection, beside submodlib where it is installed",
        ("scale",),
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
    source: Path | None = None,
) -> None:
    """Run one benchmark and show what it measured; with `out`, write its numbers there as JSON."""
    if name not in NAMES:
        raise UserError(f"There is no benchmark {name!r}; there are {', '.join(NAMES)}.")
    entry = NAMES[name]
    given = {"page": page, "jobs": jobs, "source": source}
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in entry.options:
            able = " and ".join(each for each, other in NAMES.items() if key in other.options)
            flag = "from" if key == "source" else key
            raise UserError(f"--{flag} is for bench {able}; {name} does not take it.")
    function = getattr(import_module(f"corefed_studies.bench.{entry.module}"), entry.function)
    if entry.files:
        function(scale, out, Console(stderr=True), device, **given)
        return
    from corefed_studies.bench import rows  # torch takes a second

    taken = {"scale": scale, "out": out}
    taken = {key: value for key, value in taken.items() if key in entry.options}
    rows.show(name, lambda where: function(where, **taken), device, out)
