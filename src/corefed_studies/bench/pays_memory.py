"""Data that do not fit, or must be decoded: what resident=coreset takes, beside all points.

    images    a folder of MNIST as PNG files, which are decoded whenever they are read
    table     a Parquet file, under a limit of memory in which its features do not fit twice

Three runs each, in a process of its own with one thread, clients one after the other:

    all, in memory          pfedbayes on all points, resident=all
    all, streamed           the same, every minibatch read from the files
    coreset, streamed       coreset-pfedbayes, fraction 0.1: the coresets in memory, all points read
                            when they are reselected

`python -m corefed_studies.bench.pays_memory quick|paper [--page docs/pays.md]` measures.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.console import Console

from corefed_studies import pages
from corefed_studies.bench import isolated, tables

NAME = "bench pays memory"
MODULE = "corefed_studies.bench.pays_memory"
Row = dict[str, Any]

MODES = {
    "all, in memory": ("--method=pfedbayes", "--set=resident=all"),
    "all, streamed": ("--method=pfedbayes", "--set=resident=coreset"),
    "coreset, streamed": ("--set=resident=coreset",),
}


class Scale(NamedTuple):
    images: int
    rows: int
    rounds: int


SCALES = {"quick": Scale(100, 3_000, 2), "paper": Scale(1_000, 1_200_000, 5)}
SITES, FEATURES = 5, 30
ROOM = 360
"""MB of data (RLIMIT_DATA) that a run on the table has beside those it has when it begins."""


def measure(scale: str, console: Console, known: Sequence[Row] = ()) -> Iterator[Row]:
    """A row per run; those that are known are not measured again."""
    there = {(row["data"], row["run"]): row for row in known}
    size = SCALES[scale]
    with TemporaryDirectory() as temporary:
        for data in ("images", "table"):
            path = Path(temporary) / ("images" if data == "images" else "table.parquet")
            if any((data, run) not in there for run in MODES):
                make(data, path, size)
            for run in MODES:
                console.print(f"{data}: {run}")
                known_row = there.get((data, run))
                yield known_row or {
                    "data": data, "run": run,
                    **isolated.measure(MODULE, "one", data, str(path), run, str(size.rounds)),
                }  # fmt: skip


def make(data: str, path: Path, size: Scale) -> None:
    if data == "table":
        tables.make(tables.Table("parquet", size.rows, FEATURES, 0.0, 0, 0), path)
        return
    from PIL import Image  # an extra

    from corefed.data import datasets

    digits = datasets.load("mnist", download=False)
    for row in range(size.images):
        folder = path / f"site{row % SITES}" / str(int(digits.y[row]))
        folder.mkdir(parents=True, exist_ok=True)
        pixels = digits.x[row].reshape(28, 28)
        levels = pixels if pixels.element_size() == 1 else (255 * pixels).byte()
        Image.fromarray(levels.numpy()).save(folder / f"{row}.png")


def one(data: str, path: str, run: str, rounds: str) -> Row:
    """A run in this process: peak memory, CPU seconds, what was read."""
    import corefed.training.rounds  # noqa: F401  # what a process takes without data
    from corefed.commands import cli

    _import_the_rest()
    begun, bare = time.process_time(), isolated.peak_mb()
    which = {
        "images": [f"--data=image-folder:{path}", "--client=folder", "--set=embedding=none",
                   "--model=mlp", "--set=scale=unit"],
        "table": [f"--data=table:{path}", "--target=outcome", "--client=site"],
    }  # fmt: skip
    if data == "table":
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + (ROOM << 20),) * 2)
    with TemporaryDirectory() as folder:
        sys.argv = [
            "corefed", "run", *which[data], *MODES[run], "--set=runtime=loop", "--device=cpu",
            f"--rounds={rounds}", f"--set=evaluate_every={rounds}", f"--out={folder}/run",
            "--quiet",
        ]  # fmt: skip
        code, said = 0, io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        except (MemoryError, RuntimeError) as error:  # torch has one of its own
            if "memory" not in str(error) and not isinstance(error, MemoryError):
                raise
            code = -1
        row: Row = {
            "fits": code == 0,
            "cpu s": time.process_time() - begun,
            "peak MB": isolated.peak_mb() - bare,
        }
        if code == 0:
            summary = json.loads(Path(f"{folder}/run/summary.json").read_text(encoding="utf-8"))
            about = json.loads(Path(f"{folder}/run/data.json").read_text(encoding="utf-8"))
            points = sum(each["train"] for each in about["clients"][0])
            told = summary.get("streaming", {})
            resident = told.get("resident_points", points)
            row |= {
                "points": points,
                "resident": resident,
                "read": told.get("read_points", 0),
                "read s": told.get("read_seconds", 0.0),
                "accuracy": summary["metrics"]["personal_accuracy"]["mean"],
            }
    return row


def _import_the_rest() -> None:
    """What some of the runs import later, and torch with the first streamed tensor."""
    import pyarrow.parquet  # noqa: F401
    import torch
    from PIL import Image  # noqa: F401

    from corefed.data.file_rows import Scratch
    from corefed.data.streaming import of_rows

    of_rows(Scratch((1,), torch.float32).rows(), 2)[:1].view(1, 1, 1)


def table(rows: Sequence[Row]) -> str:
    found = []
    for row in rows:
        start = [row["data"], row["run"]]
        if not row["fits"]:
            found.append([*start, "does not fit", *[""] * 6])
            continue
        found.append([
            *start, f"{row['points']:,}", f"{row['resident']:,}",
            f"{row['resident'] / row['points']:.3f}", f"{row['peak MB']:,.0f}",
            f"{row['read']:,}" if row["read"] else "",
            f"{row['read s']:.1f}" if row["read"] else "",
            f"{row['cpu s']:.0f}",
        ])  # fmt: skip
    columns = [
        "data", "run", "training points", "of them in memory", "share", "peak MB beside Python",
        "points read", "reading, CPU s", "whole run, CPU s",
    ]  # fmt: skip
    note = (
        "Points in memory at the end of the run. Points read count every point each time it is "
        "read from its file, tests and the first look at scales included."
    )
    return pages.markdown([pages.Table("All points and coresets, streamed", columns, found, note)])


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="pays_memory")
    parser.add_argument("scale", choices=SCALES)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(words)
    marked = pages.Marked(given.page, NAME) if given.page is not None else None
    console, rows = Console(), list[Row]()
    if given.out is not None and given.out.exists():
        rows = json.loads(given.out.read_text(encoding="utf-8"))
    found: list[Row] = []
    for row in measure(given.scale, console, rows):
        found.append(row)
        if given.out is not None:
            text = json.dumps(found, indent=1) + "\n"
            given.out.write_text(text, encoding="utf-8")
    console.print(table(found), markup=False, soft_wrap=True)
    if marked is not None:
        marked.write(table(found))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(one(*sys.argv[2:])))
    else:
        main(sys.argv[1:])
