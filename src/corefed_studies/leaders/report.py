"""The tables of docs/leaders-study.md, from the lines of the study alone."""

from __future__ import annotations

from statistics import fmean, mode
from typing import Any

from corefed_studies.leaders.cells import SHOWN, TUNED, Line
from corefed_studies.leaders.published import FIGURES, SOURCES
from corefed_studies.leaders.results import Lines
from corefed_studies.leaders.rows import known_rows
from corefed_studies.leaders.settings import PAPER, QUICK, LeadersSetting
from corefed_studies.pages import Table

COLUMNS = (
    "", "personal %", "against the best", "NLL", "ECE", "global %", "against the best", "NLL",
    "ECE", "s", "MB", "published %",
)  # fmt: skip


def tables(lines: Lines) -> list[Table]:
    """One table per setting that has results, then the settings that were chosen."""
    found = [
        _table(setting, lines)
        for setting in (*PAPER, *QUICK)
        if any(setting.name == name and part == SHOWN for name, _, part in lines)
    ]
    return [*found, _chosen(lines)] if found else []


def _table(setting: LeadersSetting, lines: Lines) -> Table:
    mine = {row: line for (name, row, part), line in lines.items()
            if name == setting.name and part == SHOWN}  # fmt: skip
    tuned = {row: line for (name, row, part), line in lines.items()
             if name == setting.name and part == TUNED}  # fmt: skip
    done = {row: line for row, line in mine.items() if "failure" not in line}
    best = {kind: _best(done, kind) for kind in ("personal", "global")}
    usual = mode(map(_device, done.values())) if done else ""
    order = sorted(done, key=lambda row: -mean_of_seeds(done[row], setting.judged, "accuracy"))
    rows = [_row(setting, row, done, best, usual) for row in order]
    lost = {**tuned, **mine}
    rows += [
        (row, "diverged" if "diverged" in line["failure"] else "failed", *[""] * 10)
        for row, line in lost.items()
        if "failure" in line
    ]
    return Table(setting.title, COLUMNS, rows, _note(setting, lines, done))


def _row(
    setting: LeadersSetting, row: str, done: dict[str, Line], best: dict[str, str], usual: str
) -> tuple[str, ...]:
    """`usual` is the device that most rows were trained on; seconds on another say so."""
    line = done[row]
    cells: list[str] = []
    for kind in ("personal", "global"):
        if kind not in line["metrics"]:
            cells += ["-"] * 4
            continue
        accuracy = 100 * mean_of_seeds(line, kind, "accuracy")
        cells += [f"{accuracy:.2f}", _against(done, row, best[kind], kind)]
        cells += [f"{mean_of_seeds(line, kind, name):.3f}" for name in ("nll", "ece")]
    cost = line["cost"]
    told = FIGURES.get(setting.name, {}).get(row, "")
    place = "" if _device(line) == usual else f" on {line['environment']['device']}"
    seconds = f"{cost['seconds']:.1f}{place}"
    return (row, *cells, seconds, f"{cost['bytes'] / 1e6:.0f}", told)


def _best(done: dict[str, Line], kind: str) -> str:
    able = [row for row, line in done.items() if kind in line["metrics"]]
    return max(able, key=lambda row: mean_of_seeds(done[row], kind, "accuracy")) if able else ""


def _against(done: dict[str, Line], row: str, best: str, kind: str) -> str:
    """Points that a row is above the best one, paired by seed, and half of the 95 % interval."""
    if row == best:
        return "best"
    from corefed_studies.reproduce.selectors.verdicts import mean_of  # scipy, and rich

    pairs = zip(*(done[one]["metrics"][kind]["accuracy"] for one in (row, best)), strict=True)
    gap = mean_of([100 * (a - b) for a, b in pairs])
    return f"{gap.value:+.2f} ± {gap.half:.2f}" if gap.half == gap.half else f"{gap.value:+.2f}"


def mean_of_seeds(line: Line, kind: str, name: str) -> float:
    """Over seeds; a model that the method has not comes last."""
    each: list[float] = line["metrics"].get(kind, {}).get(name, [])
    return fmean(each) if each else -1.0


def _note(setting: LeadersSetting, lines: Lines, done: dict[str, Line]) -> str:
    flags = setting.flags
    rows, missing = known_rows(setting)
    waiting = [row.name for row in rows if (setting.name, row.name, SHOWN) not in lines]
    waiting = [row for row in waiting if "failure" not in lines.get((setting.name, row, TUNED), {})]
    words = [
        f"{flags['rounds']} rounds of {flags['local_steps']} steps with minibatches of "
        f"{flags.get('batch_size', 100)}; {len(setting.seeds)} seeds, none of them that of the "
        f"search. Candidates were compared by the {setting.judged} model's validation NLL."
    ]
    others = [row.name for row in rows if row.judged not in ("", setting.judged)]
    others = [row for row in others if row in done]
    if others:
        words.append(f"By that of the shared model: {'; '.join(others)}.")
    source = SOURCES.get(setting.name)
    if source is not None:
        words.append(f"Published: {source.words}; beside our {source.kind} figure.")
    slowed = [
        f"{row} ({line['rates']:g})" for row, line in done.items() if line.get("rates", 1) < 1
    ]
    if slowed:
        words.append(
            "Training with the chosen learning rates diverged on a shown seed, so they were "
            f"multiplied by the number in brackets: {'; '.join(slowed)}."
        )
    devices = sorted({_device(line) for line in done.values()})
    words.append(f"Trained on {', '.join(devices)}.") if devices else None
    if waiting:
        words.append(f"Not trained yet: {'; '.join(waiting)}.")
    if missing:
        words.append(f"Not known to this version: {'; '.join(missing)}.")
    return " ".join(words)


def _device(line: Line) -> str:
    about: dict[str, Any] = line.get("environment", {})
    return f"{about.get('device') or 'an unknown device'} (torch {about.get('torch') or '?'})"


def _chosen(lines: Lines) -> Table:
    rows = []
    for (setting, row, part), line in lines.items():
        if part != TUNED or "failure" in line:
            continue
        chosen = ", ".join(f"{name} {_number(value)}" for name, value in line["chosen"].items())
        nll = [f"{each:.4f}" if each is not None else "diverged" for each in line["nll"]]
        rows.append((setting, row, str(line["candidates"]), " to ".join(nll), chosen))
    note = (
        "Of each search: its candidates, the validation NLL of the defaults and of the best, and "
        "the settings of the best. All methods have the same number of candidates on a setting; a "
        "method that declares nothing to search has one."
    )
    columns = ("setting", "method", "candidates", "validation NLL", "chosen")
    return Table("What the searches chose", columns, sorted(rows), note)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
