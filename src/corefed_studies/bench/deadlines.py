"""`corefed bench deadlines`: clients of different sizes and speeds, and a deadline per round.

Five ways to deal with clients that would be late, on the same federations, devices and seeds:

    wait      all data, and everybody is waited for: no deadline
    drop      all data; late clients take no part
    partial   all data; late clients take as many steps as fit (as FedProx lets them)
    random    late clients train on a random subset that fits, redrawn
    coreset   late clients train on the coreset that fits; its selection is part of their time

All five are PFedBayes, so that only the rule differs. Each chooses its batch size, of the same
few, by the validation accuracy on another seed after the same simulated time. Then *time to
target* is when a seed's mean personal accuracy on test points first reaches 95 % of what waiting
ends with on that seed, in simulated seconds.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from corefed.settings.config import resolve
from corefed.training import rounds
from corefed.training.loop import Line
from corefed_studies.bench.parted import Part, Parted

DEADLINES = Parted("deadlines", {"rows": Part("deadlines", "bench deadlines")})
PART = 0.95
"""Of the accuracy without a deadline: the target."""

Row = dict[str, Any]
Flags = dict[str, object]

RIVALS: dict[str, Flags] = {
    "wait": {"method": "pfedbayes"},
    "drop": {"method": "pfedbayes", "late": "drop"},
    "partial": {"method": "pfedbayes", "late": "partial"},
    "random": {"method": "random-subset", "fraction": 1.0, "late": "fit", "redraw_every": 20},
    "coreset": {
        "method": "coreset-pfedbayes", "fraction": 1.0, "late": "fit", "refresh_every": 100,
        # Digits have few features, so that heads are a seventh of the network: fewer draws of them.
        "draws": 8, "feature_draws": 1,
    },
}  # fmt: skip
BASE: Flags = {
    "data": "digits", "partition": "dirichlet:0.5", "hidden": "16", "local_epochs": 10,
    "zeta": 0.03, "eta_1": 0.003, "eta_2": 0.003, "evaluate_every": 1, "evaluate_draws": 3,
    "checkpoint_every": 0, "calibrate": "off", "device": "cpu",
}  # fmt: skip


class Setting(NamedTuple):
    clients: int
    seeds: tuple[int, ...]
    tuning_seed: int
    batches: tuple[int, ...]
    speeds: str
    deadline: float
    waiting: int  # rounds without a deadline
    most: int  # rounds with one, at most
    tuning: int  # rounds with a deadline that a batch size is chosen by


SETTINGS = {
    "paper": Setting(20, (0, 1, 2, 3, 4), 100, (10, 20), "lognormal:100,1", 6.0, 8, 20, 4),
    "quick": Setting(4, (0, 1), 100, (20,), "lognormal:100,1", 12.0, 2, 3, 1),
}


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device_name: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
) -> None:
    """By itself; it is a part of `corefed bench pays` as well."""
    DEADLINES.main(scale, out, console, page=page, source=source)


def measure(scale: str, console: Console, known: Sequence[Row]) -> Iterator[Row]:
    """A row per rival, but for those that are known already."""
    there = {row["rival"]: row for row in known}
    waited = None
    for name in RIVALS:
        row = there.get(name) or compare(name, SETTINGS[scale], waited)
        waited = waited or row  # the first
        yield row
        console.print(f"{name}: done")


def compare(name: str, setting: Setting, waited: Mapping[str, Any] | None) -> Row:
    """One rival: its batch size, chosen on another seed, and its times on those shown."""
    batch, tried = tune(name, setting)
    targets = [] if waited is None else [PART * end for end in waited["personal"]]

    def reached(line: Line) -> list[bool]:
        now = line["metrics"]["personal_accuracy"]
        return [a >= target for a, target in zip(now, targets, strict=True)]

    lines: list[Line] = []
    there = [False] * len(setting.seeds)

    def over() -> bool:
        nonlocal there
        if not targets or not lines:  # asked before the first round is told
            return False
        there = [a or b for a, b in zip(there, reached(lines[-1]), strict=True)]
        return all(there)

    flags = flags_of(name, setting, batch, setting.seeds)
    train(flags, lines, over)
    last = lines[-1]["metrics"]
    if waited is None:
        targets = [PART * end for end in last["personal_accuracy"]]
    return {
        "rival": name, "batch": batch, "tried": tried, "rounds": len(lines),
        "late": lines[-1]["late"], "personal": last["personal_accuracy"],
        "global": last["global_accuracy"], "seconds": [times[-1] for times in clocks(lines)],
        "time": [_first(times, lines, g, targets[g]) for g, times in enumerate(clocks(lines))],
        "personal curve": [x["metrics"]["personal_accuracy"] for x in lines],
        "global curve": [x["metrics"]["global_accuracy"] for x in lines],
        "clock": clocks(lines),
    }  # fmt: skip


def tune(name: str, setting: Setting) -> tuple[int, dict[str, float]]:
    """The batch size with the best validation accuracy after about the same simulated time."""
    if len(setting.batches) == 1:
        return setting.batches[0], {}
    tried = {}
    for batch in setting.batches:
        lines: list[Line] = []
        flags = flags_of(name, setting, batch, (setting.tuning_seed,))
        # A round that waits is longer: a quarter as many are still several times as long.
        length = setting.tuning if name != "wait" else -(-setting.tuning // 4)
        train({**flags, "rounds": length, "evaluate_every": length, "validation": 0.2}, lines)
        tried[str(batch)] = lines[-1]["validation"]["personal_accuracy"][0]
    return max(setting.batches, key=lambda batch: tried[str(batch)]), tried


def flags_of(name: str, setting: Setting, batch: int, seeds: Sequence[int]) -> Flags:
    waits = name == "wait"
    return {
        **BASE, **RIVALS[name], "clients": setting.clients, "speeds": setting.speeds,
        "deadline": 0.0 if waits else setting.deadline, "batch_size": batch,
        "rounds": setting.waiting if waits else setting.most, "seeds": tuple(seeds),
    }  # fmt: skip


def train(flags: Flags, lines: list[Line], stop: Any = lambda: False) -> None:
    rounds.train(resolve(flags=flags, where="bench"), on_round=lines.append, stop=stop)


def clocks(lines: Sequence[Line]) -> list[list[float]]:
    """Simulated seconds since the start after each round, by seed."""
    each = zip(*(line["simulated_seconds"] for line in lines), strict=True)
    return [list(itertools.accumulate(times)) for times in each]


def _first(times: Sequence[float], lines: Sequence[Line], g: int, target: float) -> float | None:
    pairs = zip(times, lines, strict=True)
    return next((t for t, x in pairs if x["metrics"]["personal_accuracy"][g] >= target), None)


def table(rows: Sequence[Row]) -> str:
    """Times to target, and gains over waiting and over the best rival but the coreset."""
    by = {row["rival"]: row for row in rows}
    lines = [
        "| | batch size | time to target, s | against waiting | seeds that reached it | personal, "
        "global accuracy at the end (after s) |",
        "|---" * 6 + "|",
    ]
    for row in rows:
        reached = [t for t in row["time"] if t is not None]
        mean = f"{statistics.fmean(reached):.3g}" if reached else "not reached"
        personal, shared, end = (
            statistics.fmean(row[key]) for key in ("personal", "global", "seconds")
        )
        lines.append(
            f"| {row['rival']} | {row['batch']} | {mean} | {gain(by['wait'], row)} | "
            f"{len(reached)} of {len(row['time'])} | {100 * personal:.1f} %, {100 * shared:.1f} % "
            f"({end:.3g}) |"
        )
    others = [row for row in rows if row["rival"] not in ("wait", "coreset")]
    whole = [row for row in others if None not in row["time"]]
    if "coreset" in by and whole:
        best = min(whole, key=lambda row: statistics.fmean(row["time"]))
        lines += ["", f"The coreset against the best rival, {best['rival']}: "
                  f"{gain(best, by['coreset'])}."]  # fmt: skip
    return "\n".join(lines) + "\n"


def gain(slow: Row, quick: Row) -> str:
    """How many times sooner `quick` is at the target: geometric mean over seeds, and the range."""
    if None in slow["time"] or None in quick["time"]:
        return "-"
    ratios = [a / b for a, b in zip(slow["time"], quick["time"], strict=True)]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"{mean:.2g}x ({min(ratios):.2g} to {max(ratios):.2g})"
