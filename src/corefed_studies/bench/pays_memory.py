"""`corefed bench pays --parts memory`: data that do not fit, or must be decoded.

    images    a folder of MNIST as PNG files, which are decoded whenever they are read
    table     Parquet files of two sizes, under a limit of memory
    array     an .npz of float32 that is larger than the limit

Runs, each in a process of its own with one thread, clients one after the other:

    all, in memory          pfedbayes on all points, resident=all
    all, streamed           the same, every minibatch read from the files
    coreset, streamed       coreset-pfedbayes, fraction 0.1: the coresets in memory, all points read
                            when they are reselected
    smaller coreset, ...    the same, fraction 0.02

The limit is RLIMIT_DATA: memory that the process may write to, reserved or used, beside what it has
when all is imported. pyarrow takes the system's allocator in every run; its own would reserve more
than the limit at once.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

from corefed.base import machine
from corefed_studies import pages
from corefed_studies.bench import isolated, tables
from corefed_studies.bench.parted import Shown

MODULE = "corefed_studies.bench.pays_memory"
Row = dict[str, Any]

MODES = {
    "all, in memory": ("--method=pfedbayes", "--set=resident=all"),
    "all, streamed": ("--method=pfedbayes", "--set=resident=coreset"),
    "coreset, streamed": ("--set=resident=coreset",),
    "smaller coreset, streamed": ("--set=resident=coreset", "--set=fraction=0.02"),
}


class Scale(NamedTuple):
    images: int
    rows: tuple[int, int]  # of the tables; coresets on both, all in memory on the larger one
    points: int  # of the array
    rounds: int


SCALES = {
    "quick": Scale(100, (2_000, 4_000), 2_000, 2),
    "paper": Scale(1_000, (1_200_000, 2_400_000), 1_000_000, 2),
}
ALL = "all, streamed"
SITES = 5
FEATURES = {"table": 30, "array": 200}
ENDINGS = {"images": "", "table": ".parquet", "array": ".npz"}
ROOM = 320
"""MB (RLIMIT_DATA) that a run on a table or an array has beside what is there when it begins."""


def jobs(size: Scale) -> Iterator[tuple[str, int, str]]:
    """(data, how many, run)."""
    small, large = size.rows
    some, smaller = list(MODES)[-2:]
    yield from (("images", size.images, run) for run in MODES if run != smaller)
    yield from (("table", small, run) for run in (some, smaller))
    yield from (("table", large, run) for run in MODES if run != ALL)
    yield from (("array", size.points, run) for run in (next(iter(MODES)), some, smaller))


def measure(scale: str, console: Shown, known: Sequence[Row]) -> Iterator[Row]:
    """A row per run; those that are known are not measured again."""
    size = SCALES[scale]
    with TemporaryDirectory() as temporary:
        for data, count, run in jobs(size):
            name = {"data": data, "count": count, "run": run}
            earlier = next((row for row in known if {**row, **name} == row), None)
            path = Path(temporary) / f"{data}-{count}{ENDINGS[data]}"
            if earlier is None and not path.exists():
                make(data, path, count)
            words = "one", data, str(path), run, str(size.rounds)
            yield earlier or {**name, **isolated.measure(MODULE, *words, environment=own())}
            console.print(f"{data}, {count:,}, {run}: done")


def own() -> dict[str, str]:
    return {**machine.polite(os.environ, 1), "ARROW_DEFAULT_MEMORY_POOL": "system"}


def make(data: str, path: Path, count: int) -> None:
    if data == "table":
        tables.make(tables.Table("parquet", count, FEATURES[data], 0.0, 0, 0), path)
        return
    if data == "array":
        draw = np.random.default_rng(0)
        x = draw.standard_normal((count, FEATURES[data]), dtype=np.float32)
        score = x @ draw.standard_normal(FEATURES[data], dtype=np.float32)
        np.savez(path, X=x, y=(score + 10 * draw.standard_normal(count) > 0).astype(np.int64))
        return
    from PIL import Image  # an extra

    from corefed.data import datasets

    digits = datasets.load("mnist", download=False)
    for row in range(count):
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
        "array": [f"--data=npz:{path}", "--partition=iid", f"--clients={SITES}"],
    }  # fmt: skip
    if data in FEATURES:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        used = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (used + (ROOM << 20),) * 2)
    with TemporaryDirectory() as folder:
        sys.argv = [
            "corefed", "run", *which[data], *MODES[run], "--set=runtime=loop", "--device=cpu",
            f"--rounds={rounds}", f"--set=evaluate_every={rounds}", f"--out={folder}/run",
            "--quiet",
        ]  # fmt: skip
        code, said, wrong = 0, io.StringIO(), io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
                cli.main()
        except SystemExit as error:
            code = int(error.code or 0)
        if code and "memory" not in wrong.getvalue():
            raise RuntimeError(wrong.getvalue())
        row: Row = {
            "fits": code == 0,
            "room MB": ROOM if data in FEATURES else None,
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
        start = [row["data"], f"{row['count']:,}", row["run"]]
        if not row["fits"]:
            found.append([*start, "does not fit", *[""] * 7])
            continue
        found.append([
            *start, f"{row['resident']:,}", f"{row['resident'] / row['points']:.3f}",
            f"{row['peak MB']:,.0f}", _megabytes(row), f"{row['read']:,}" if row["read"] else "",
            f"{row['read s']:.1f}" if row["read"] else "", _less(row, rows), f"{row['cpu s']:.0f}",
        ])  # fmt: skip
    columns = [
        "data", "points", "run", "training points in memory", "share of all",
        "peak MB beside Python", "features, MB", "points read", "reading, CPU s",
        "less reading than minibatches", "whole run, CPU s",
    ]  # fmt: skip
    note = (
        f"Runs on a table or an array may have {ROOM} MB (RLIMIT_DATA) beside what they begin "
        "with. Features are float64 in the table and float32 in the array. The peak also counts "
        "pages of the file itself, which the limit does not. Points in "
        "memory at the end of the run; one point in five is a test point. Points read count every "
        "point each time it is read from its file, tests and the first look at scales included."
    )
    return pages.markdown([pages.Table("All points and coresets, streamed", columns, found, note)])


def _megabytes(row: Row) -> str:
    """Of all features in the file, as they are there."""
    size = {"table": 8, "array": 4}.get(row["data"], 0)
    return f"{size * row['count'] * FEATURES[row['data']] / 2**20:,.0f}" if size else ""


def _less(row: Row, rows: Sequence[Row]) -> str:
    """How many times less CPU time reading took than minibatches of all data."""
    whole = [
        each["read s"] for each in rows
        if (each["data"], each["count"], each["run"]) == (row["data"], row["count"], ALL)
        and each["fits"]
    ]  # fmt: skip
    if not whole or row["run"] == ALL or not row["read"]:
        return ""
    return f"{whole[0] / row['read s']:.1f}x"


if __name__ == "__main__":
    print(json.dumps(one(*sys.argv[2:])))
