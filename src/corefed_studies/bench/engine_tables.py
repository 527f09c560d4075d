"""The tables of `corefed bench engine`, from its result file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from corefed_studies.bench.engine_rounds import COMPILE, ONE_BY_ONE
from corefed_studies.pages import Table

Row = Mapping[str, Any]
Cells = Callable[[Row], list[str]]

WAYS = (ONE_BY_ONE, *COMPILE)


def tables(study: Mapping[str, Any]) -> list[Table]:
    """One table per part that was measured."""
    many = [make(study["parts"][part]) for part, make in PARTS.items() if study["parts"].get(part)]
    scale = "" if study["scale"] == "paper" else f", scale {study['scale']}"
    return [table._replace(title=f"{study['machine']}{scale}: {table.title}") for table in many]


def number(value: float | None, digits: int = 3) -> str:
    """With so many digits that count; a dash for what was not measured."""
    if value is None:
        return "—"
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Row], cells: Cells, note: str
) -> Table:
    found = [cells(row) for row in rows if "failed" not in row]
    failed = [row for row in rows if "failed" in row]
    for row in failed:
        found.append([row["failed"], f"failed: {row['why']}", *[""] * (len(columns) - 2)])
    return Table(title, columns, found, note)


def rounds(rows: Sequence[Row]) -> Table:
    columns = ["clients", "points each", *(f"{way}, s" for way in WAYS), "first round compiled, s"]
    columns += [f"{way} / fastest" for way in WAYS]

    def cells(row: Row) -> list[str]:
        times, ratios = row["seconds"], row["times_best"]
        return [
            str(row["clients"]),
            str(row["points"]),
            *(number(times.get(way)) for way in WAYS),
            number(row["first"].get("compiled")),
            *(number(ratios.get(way)) for way in WAYS),
        ]

    repeats = "; ".join(str(row["repeats"]) for row in rows if "failed" not in row)
    note = (
        "PFedBayes, R = 20, b = 100. Medians of turns, in which runtimes follow each other "
        f"(turns per row: {repeats}). One by one is timed on ten clients and scaled. The first "
        "round compiled began with an empty cache of PyTorch's compiler."
    )
    for row in rows:
        for way, why in row.get("missing", {}).items():
            note += f" {row['clients']} clients, {way}, could not be measured: {why}."
    return _table("seconds per round", columns, rows, cells, note)


def coreset(rows: Sequence[Row]) -> Table:
    columns = ["clients", "runtime", "full data, s", "coreset, s", "coreset / full data"]

    def cells(row: Row) -> list[str]:
        times = row["full data s/round"], row["coreset s/round"], row["ratio"]
        return [str(row["clients"]), row["runtime"], *map(number, times)]

    share = next((f" of {row['fraction']:.0%}" for row in rows if "failed" not in row), "")
    note = "Seconds per round; selections are included. The aim is a ratio of at most 1.1."
    return _table(f"coresets{share} beside full data", columns, rows, cells, note)


def stacking(rows: Sequence[Row]) -> Table:
    columns = ["trained together", "runtime", "s per round", "times one run"]

    def cells(row: Row) -> list[str]:
        return [row["what"], row["runtime"], number(row["seconds"]), number(row["ratio"])]

    note = "Seeds and settings are to take no longer than as many clients of one run."
    return _table("several runs side by side", columns, rows, cells, note)


def runs(rows: Sequence[Row]) -> Table:
    columns = [
        "method", "data", "rounds", "compile", "start, s", "first round, s", "training, s",
        "evaluation, s", "checkpoints", "wall, s", "after start, s",
    ]  # fmt: skip

    def cells(row: Row) -> list[str]:
        data = "random" if row["data"] == "memory" else row["data"]
        after = row["wall"] - row["start"] - row["first"]
        times = (row[k] for k in ("start", "first", "training", "evaluation"))
        return [
            row["method"], data, str(row["rounds"]), row["compile"], *map(number, times),
            str(row["checkpoints"]), number(row["wall"]), number(after),
        ]  # fmt: skip

    every = next((str(row["evaluate_every"]) for row in rows if "failed" not in row), "some")
    note = (
        f"Ten clients, recorded in a folder, evaluated every {every} rounds. *First round* is "
        "what it took longer than the others, mostly compiling; the rows above had compiled the "
        "same steps where they are compiled. *After start* is the wall time without start and "
        "first round."
    )
    return _table("whole runs", columns, rows, cells, note)


def saved(rows: Sequence[Row]) -> Table:
    columns = [
        "clients", "rounds", "training, s", "evaluation, s", "checkpoints", "their seconds",
        "after start, s", "after start / training",
    ]  # fmt: skip

    def cells(row: Row) -> list[str]:
        return [
            str(row["clients"]), str(row["rounds"]), number(row["training"]),
            number(row["evaluation"]), str(row["checkpoints"]), number(row["checkpoint_seconds"]),
            number(row["after_start"]), number(row["ratio"]),
        ]  # fmt: skip

    note = (
        "Every client trains in every round. Checkpoints as by default; their seconds are mostly "
        "in the background. *After start* includes the evaluation after the last round and the "
        "saving of all models. The aim is a ratio of at most 1.1."
    )
    return _table("checkpoints", columns, rows, cells, note)


def many(rows: Sequence[Row]) -> Table:
    columns = [
        "network or data", "clients", "cohort", "state in", "s to the end of round 1",
        "s per round", "host memory, MB", "GPU memory, MB", "folder, MB",
    ]  # fmt: skip
    places = {"OnDevice": "device", "InHost": "host", "InFile": "file"}

    def cells(row: Row) -> list[str]:
        return [
            row["what"], f"{row['clients']:,}", str(row["cohort"]), places[row["client_state"]],
            number(row["first_round_ended"]), number(row["round"]), number(row["host_mb"]),
            number(row.get("device_mb")), number(row["folder_mb"]),
        ]  # fmt: skip

    note = (
        "Peaks of memory, each of a process of its own. Seconds to the end of the first round "
        "count from the start of the run, without the import of PyTorch."
    )
    return _table("very many clients", columns, rows, cells, note)


PARTS: dict[str, Callable[[Sequence[Row]], Table]] = {
    "rounds": rounds, "coreset": coreset, "stacking": stacking, "runs": runs, "saved": saved,
    "many": many,
}  # fmt: skip
