"""The counts of one source tree, as JSON: `python -P probe.py SRC [STUDIES, RUN]`.

It runs in a process of its own whose PYTHONPATH is the tree, so that any commit can be counted.
It therefore imports nothing of corefed but what it counts. How each number is counted:

**Packages.** A room is a folder directly under `corefed`; what lies inside it belongs to it. The
files directly under `corefed` are one more package, the root. `corefed_studies`, where it exists,
is one package. `__main__` is left out, since nothing can import it.

**Imports.** grimp reads the source: an import counts wherever it stands, inside a function or under
TYPE_CHECKING as well. Two modules count once, however many names are imported. Names that the root
fetches by a string when they are first used do not count.

**Cycles.** Packages that belong to a strongly connected component of two or more packages.

**Upward imports.** Imports from a room to one that stands above it in the `layers` of
`pyproject.toml`. They are only counted where that order exists.

**Switches.** `corefed run` is run under a profiler. The functions of the package are put into the
order of their first call. A switch is a place in this order where the next function lies in another
file, or in another package. Not counted are comprehensions and lambdas, whatever runs while a
module is imported, and the file with the entry point `main`. At commit 81f7802 with MNIST this
gives the 88 package switches, 152 file switches and 50 files that a review of it found.

**Lines.** All lines of all Python files, comments and blank lines included.

**Settings.** Those of coreset-pfedbayes without the settings that every run has: all of them, and
those that `corefed methods coreset-pfedbayes` shows when it is not asked for all.

**Fields of Method.** Of the NamedTuple itself, and with the fields of the groups inside it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import grimp

PACKAGE, STUDIES, ROOT = "corefed", "corefed_studies", "root"
METHOD = "coreset-pfedbayes"
ANONYMOUS = re.compile(r"<(lambda|genexpr|listcomp|dictcomp|setcomp)>")

Edges = Mapping[tuple[str, str], int]
"""(importing, imported) package -> number of imports between their modules."""


def count(src: Path, studies: Sequence[str], run: Sequence[str]) -> dict[str, Any]:
    """All numbers; those of the profiler only where `run` has the arguments of `corefed`."""
    graph = grimp.build_graph(*_packages(src), cache_dir=None)
    edges = imports(graph)
    order = layers(src)
    rooms = {package_of(module) for module in graph.modules if not _is_main(module)}
    found: dict[str, Any] = {
        "files_at_root": len(list((src / PACKAGE).glob("*.py"))),
        "packages": len(rooms),
        "packages_in_cycles": sum(map(len, cycles(edges))),
        "upward_imports": upward(edges, order) if order else None,
        "imports": sum(edges.values()),
        **lines(src, studies),
        **settings(),
        **contract(),
        "rooms": sizes(src, order),
        "edges": [[*pair, number] for pair, number in sorted(edges.items())],
    }
    return {**found, **switches(src, run)} if run else found


# --- imports -------------------------------------------------------------------------------------


def _packages(src: Path) -> list[str]:
    return [name for name in (PACKAGE, STUDIES) if (src / name).is_dir()]


def _is_main(module: str) -> bool:
    return module.endswith(".__main__")


def package_of(module: str) -> str:
    """corefed.data.table -> data, corefed.cli -> root, corefed_studies.x -> corefed_studies."""
    top, *rest = module.split(".")
    if top == STUDIES:
        return STUDIES
    found = import_module(f"{PACKAGE}.{rest[0]}") if rest else None
    return rest[0] if hasattr(found, "__path__") else ROOT


def imports(graph: grimp.ImportGraph) -> Counter[tuple[str, str]]:
    """Those between different packages."""
    found: Counter[tuple[str, str]] = Counter()
    for module in graph.modules:
        if _is_main(module):
            continue
        for imported in graph.find_modules_directly_imported_by(module):
            pair = package_of(module), package_of(imported)
            found[pair] += pair[0] != pair[1]
    return Counter({pair: number for pair, number in found.items() if number})


def cycles(edges: Edges) -> list[set[str]]:
    """The strongly connected components of two or more packages."""
    below: dict[str, set[str]] = {}
    for importing, imported in edges:
        below.setdefault(importing, set()).add(imported)
    reached = {name: _reached(name, below) for name in below}
    found: list[set[str]] = []
    for name in sorted(below):
        ring = {other for other in reached[name] if name in reached.get(other, ())}
        if ring and ring not in found:
            found.append(ring)
    return found


def _reached(start: str, below: Mapping[str, set[str]]) -> set[str]:
    waiting, reached = [start], set[str]()
    while waiting:
        for name in below.get(waiting.pop(), ()):
            if name not in reached:
                reached.add(name)
                waiting.append(name)
    return reached


def layers(src: Path) -> list[str]:
    """The rooms, top to bottom, as the contract of import-linter has them; empty: no contract."""
    file = src.parent / "pyproject.toml"
    tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}) if file.exists() else {}
    contracts = tool.get("importlinter", {}).get("contracts", [])
    names = [name for each in contracts for name in each.get("layers", [])]
    return [name.removeprefix(f"{PACKAGE}.") for name in names]


def upward(edges: Edges, order: Sequence[str]) -> int:
    """Imports from a room to one above it. The root is below all rooms."""
    height = {name: -place for place, name in enumerate(order)} | {ROOT: -len(order)}
    return sum(number for (a, b), number in edges.items() if height[a] < height[b])


# --- sizes ---------------------------------------------------------------------------------------


def lines(src: Path, studies: Sequence[str]) -> dict[str, int]:
    """`studies` are patterns of files inside the package that belong to the studies."""
    every = {file.relative_to(src).as_posix(): _length(file) for file in src.rglob("*.py")}
    patterns = [f"{STUDIES}/*", *(f"{PACKAGE}/{pattern}" for pattern in studies)]
    package = [
        number
        for name, number in every.items()
        if not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    return {"lines": sum(every.values()), "lines_without_studies": sum(package)}


def sizes(src: Path, order: Sequence[str]) -> list[list[Any]]:
    """[room, files, lines], top to bottom."""
    folders = {name: src / (name if name == STUDIES else f"{PACKAGE}/{name}") for name in order}
    files = {name: list(folder.rglob("*.py")) for name, folder in folders.items()}
    return [[name, len(own), sum(map(_length, own))] for name, own in files.items()]


def _length(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


# --- settings and the contract -------------------------------------------------------------------


def _first(*names: str) -> ModuleType:
    """The module of the first name that exists: where it is, or where it was before the rooms."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return import_module(name)
    raise ModuleNotFoundError(names[0])


def _main() -> Callable[[list[str]], None]:
    main: Callable[[list[str]], None] = _first("corefed.commands.cli", "corefed.cli").main
    return main


def settings() -> dict[str, int]:
    """Of the default method, from `corefed methods --json` where there is one, else its Config."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        try:
            _main()(["methods", METHOD, "--json"])
        except SystemExit as ended:
            if ended.code:
                registry = import_module("corefed.methods.registry")
                number = len(dataclasses.fields(registry.config_class(METHOD)))
                return {"settings": number, "settings_shown": number}
    every = json.loads(out.getvalue())["settings"]
    shown = [each for each in every if not each["ablation"]]
    return {"settings": len(every), "settings_shown": len(shown)}


def contract() -> dict[str, int]:
    types = _first("corefed.base.types", "corefed.types")
    fields = types.Method.__annotations__
    names = [str(getattr(kind, "__forward_arg__", kind)) for kind in fields.values()]
    groups = [getattr(types, name.removesuffix(" | None"), None) for name in names]
    inside = sum(len(getattr(group, "_fields", ())) for group in groups)
    return {"method_fields": len(fields), "method_fields_with_groups": len(fields) + inside}


# --- calls ---------------------------------------------------------------------------------------


def switches(src: Path, run: Sequence[str]) -> dict[str, int]:
    """Functions, files and switches of one command."""
    main = _main()
    first: dict[tuple[str, str], None] = {}  # (file, function), in the order of the first call
    known: dict[CodeType, tuple[str, str] | None] = {}
    package = f"{src / PACKAGE}{os.sep}"

    def named(code: CodeType) -> tuple[str, str] | None:
        name = code.co_qualname
        if not code.co_filename.startswith(package) or ANONYMOUS.search(name):
            return None
        if code.co_filename == main.__code__.co_filename:
            return None
        return code.co_filename.removeprefix(package), name

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in known:
            known[code] = named(code)
        name = known[code]
        if name is not None and name not in first and _called_by(main, frame):
            first[name] = None

    with tempfile.TemporaryDirectory() as folder:
        arguments = [*run, "--out", f"{folder}/run"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            sys.setprofile(watch)
            try:
                main(arguments)
            except SystemExit as ended:
                sys.setprofile(None)
                if ended.code:
                    raise RuntimeError(f"corefed {' '.join(run)} ended with {ended.code}") from None
            finally:
                sys.setprofile(None)
    files = [file for file, _ in first]
    rooms = [file.split(os.sep)[0] if os.sep in file else ROOT for file in files]
    return {
        "functions": len(first),
        "files": len(set(files)),
        "file_switches": _changes(files),
        "package_switches": _changes(rooms),
    }


def _called_by(main: Callable[[list[str]], None], frame: FrameType) -> bool:
    """Whether a frame lies below `main`, and not in the import of a module."""
    above = frame.f_back
    while above is not None and above.f_code is not main.__code__:
        if above.f_code.co_name == "<module>":
            return False
        above = above.f_back
    return above is not None


def _changes(names: Sequence[str]) -> int:
    return sum(a != b for a, b in pairwise(names))


if __name__ == "__main__":
    tree, given = sys.argv[1:]
    json.dump(count(Path(tree).resolve(), *json.loads(given)), sys.stdout)
