"""`corefed bench tables`: whole runs on large tables, in CPU time and memory.

Each run is `corefed run` in a process of its own, with one thread, from the file to the written
folder:

    CSV        200,000 rows of 30 numbers, 10 rounds; sites of about one size, and of very different
               ones. With --from CHECKOUT, the same runs by the code of another checkout, in turn.
    Parquet    10 million rows of 10 numbers in float64, 2 rounds; sites differ in size

CPU time is that of the process, so that neighbours matter little. Memory is the largest resident
set, also as a multiple of the features in float32, which are what training needs.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from corefed.base import machine
from corefed.base.errors import UserError, install
from corefed_studies import pages
from corefed_studies.bench import isolated

NAME = "tables"
SITES = 50
BLOCK = 1 << 18
"""Rows that are made at once: a row group of a Parquet file."""


class Table(NamedTuple):
    """A table to be made, and the run on it."""

    kind: str  # csv or parquet
    rows: int
    features: int
    spread: float  # of the logarithms of the sites' sizes
    rounds: int
    repeats: int


SCALES = {
    "paper": (
        Table("csv", 200_000, 30, 0.0, 10, 3),
        Table("csv", 200_000, 30, 1.0, 10, 3),
        Table("parquet", 10_000_000, 10, 1.0, 2, 1),
    ),
    "quick": (Table("csv", 3_000, 5, 1.0, 1, 1), Table("parquet", 6_000, 5, 1.0, 1, 1)),
}


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    sources: Sequence[Path] = (),
) -> None:
    """Measure, and write tables.json, .md and .html into `out`; the table also into a page."""
    if device not in ("auto", "cpu"):
        raise UserError(f"bench {NAME} measures a CPU; device is {device!r}, leave it out.")
    for each in sources:
        if not (each / "src" / "corefed").is_dir():
            raise UserError(f"--from is {each}, which is no checkout of corefed: it has no src.")
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    study = measure_all(SCALES[scale], sources, console)
    text = json.dumps(study, indent=1) + "\n"
    (folder / f"{NAME}.json").write_text(text, encoding="utf-8")
    found = tables(study)
    pages.put(folder, NAME, found, marked)
    console.print(pages.markdown(found), markup=False, soft_wrap=True)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def measure_all(
    plan: Sequence[Table], sources: Sequence[Path], console: Console
) -> list[dict[str, Any]]:
    """One row per table and checkout, with the median of the repetitions."""
    found = []
    with TemporaryDirectory() as temporary:
        for number, table in enumerate(plan):
            path = Path(temporary) / f"{number}.{table.kind}"
            make(table, path)
            # Parquet files were not read in bounded memory before.
            codes = ["", *(map(str, sources) if table.kind == "csv" else ())]
            runs: dict[str, list[dict[str, Any]]] = {code: [] for code in codes}
            for repeat in range(table.repeats):
                for code in codes:
                    console.print(f"{path.name}, {table.rows:,} rows, run {repeat + 1} {code}")
                    words = str(path), str(table.rounds), code
                    runs[code].append(isolated.measure(__name__, *words))
            path.unlink()
            for code, rows in runs.items():
                middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
                about = {**table._asdict(), "code": code and Path(code).name}
                found.append({**about, **middle})
    return found


def tables(study: Sequence[dict[str, Any]]) -> list[pages.Table]:
    now = {(row["kind"], row["spread"]): row["cpu s"] for row in study if not row["code"]}
    rows = []
    for row in study:
        single = 4 * row["rows"] * row["features"] / 2**20
        ratio = row["cpu s"] / now[row["kind"], row["spread"]]
        rows.append([
            f"{row['rows']:,} x {row['features']}, {row['kind']}",
            "alike" if not row["spread"] else "differ",
            str(row["rounds"]),
            row["code"] or "this checkout",
            f"{row['cpu s']:.1f}",
            f"{ratio:.2f}" if row["code"] else "1",
            f"{row['wall s']:.1f}",
            f"{row['peak MB']:,.0f}",
            f"{single:,.0f}",
            f"{(row['peak MB'] - row['import MB']) / single:.1f}",
        ])  # fmt: skip
    columns = [
        "table", "sites' sizes", "rounds", "code", "CPU s", "times this checkout", "wall s",
        "peak MB", "features MB", "peak over features",
    ]  # fmt: skip
    note = (
        f"{SITES} sites, the defaults of `corefed run`, one thread; start-up, reading, training, "
        "ten evaluations or fewer, checkpoints and the run's folder included. Features are in "
        "float32; `peak over features` leaves out what Python and PyTorch take by themselves."
    )
    return [pages.Table("Whole runs on tables", columns, rows, note)]


# --- tables ---------------------------------------------------------------------------------------


def make(table: Table, path: Path) -> None:
    """Write a table: a logistic regression with a level per site."""
    try:
        import pyarrow as arrow  # an extra
        from pyarrow import csv, parquet
    except ImportError as error:
        raise UserError(f"bench {NAME} needs pyarrow: {install('tables')}.") from error
    writer: Any = None
    for sites, x, y in _blocks(table):
        block = arrow.table({
            "site": arrow.array([f"site {each:02d}" for each in sites.tolist()]),
            **{f"f{column}": x[:, column] for column in range(table.features)},
            "outcome": y.astype(np.int64),
        })  # fmt: skip
        if writer is None:
            kind = csv.CSVWriter if table.kind == "csv" else parquet.ParquetWriter
            writer = kind(path, block.schema)
        writer.write_table(block)
    writer.close()


def _blocks(
    table: Table,
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]]:
    rng = np.random.Generator(np.random.PCG64(0))
    share = np.exp(table.spread * rng.normal(size=SITES))
    w, level = rng.normal(size=table.features), rng.normal(size=SITES)
    for start in range(0, table.rows, BLOCK):
        n = min(BLOCK, table.rows - start)
        x = rng.normal(size=(n, table.features))
        if table.kind == "csv":
            x = x.round(4)  # as people write numbers
        sites = rng.choice(SITES, size=n, p=share / share.sum())
        chance = 1 / (1 + np.exp(-(0.5 * x @ w + level[sites])))
        yield sites, x, rng.random(n) < chance


# --- a run in a process of its own ----------------------------------------------------------------


def one(path: str, rounds: str, code: str) -> dict[str, float]:
    """CPU and wall seconds of a run, and its largest memory."""
    own = machine.polite(os.environ, 1)
    environment = own | ({"PYTHONPATH": str(Path(code).resolve() / "src")} if code else {})
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "corefed", "run", f"--data=table:{path}", "--target=outcome",
            "--client=site", f"--rounds={rounds}", "--device=cpu", f"--out={folder}/run", "--quiet",
        ]  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = used.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    bare = isolated.measure("corefed_studies.bench.tables", environment=own)["peak MB"]
    return {
        "cpu s": used.ru_utime + used.ru_stime, "wall s": seconds, "peak MB": peak,
        "import MB": bare,
    }  # fmt: skip


def nothing() -> dict[str, float]:
    """What a process takes that only imports what a run imports."""
    import corefed.training.rounds  # noqa: F401

    return {"peak MB": isolated.peak_mb()}


if __name__ == "__main__":
    print(json.dumps(one(*sys.argv[1:]) if len(sys.argv) > 1 else nothing()))
