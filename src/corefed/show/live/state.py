"""What the live page shows of a run, as plain values for JSON.

Everything is read from the run's folder. Of a real federation that is what the server has: answers
of the sites to its questions, and nothing else of theirs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.errors import UserError
from corefed.base.locks import LOCK, is_locked
from corefed.show import watch
from corefed.show.page import charts
from corefed.show.watch import Snapshot
from corefed.training import fitted, interrupt, record, summaries
from corefed.training.record import MODELS

Values = dict[str, Any]

EVENTS = 12
"""Last events of a federation that are shown."""
SITES = 500
"""Rows of sites at most: a page that is fetched every other second should stay small."""
QUIET = 30.0
"""Seconds without an answer after which a site is called late."""
CURVES = (("accuracy", "accuracy, %", 100.0), ("rmse", "RMSE", 1.0))
"""Metric, title of its axis, and the factor by which it is shown."""


class News(NamedTuple):
    """What a federation's server knows beside the record of rounds."""

    silent: Sequence[str] = ()  # sites that have been asked and have not answered
    since: float = 0.0  # when the last of them was asked, or somebody answered
    events: Sequence[str] = ()


def of_run(look: Snapshot, now: float, news: News | None = None) -> Values:
    """The state of a run at one moment."""
    news = news or News()
    summary = summaries.summarise(look.values, look.lines, {}) if look.lines else None
    words, old = _state(look, max(0.0, now - look.written))
    federated = is_federated(look.path)
    late = news.silent if news.silent and now - news.since > QUIET and not look.finished else ()
    return {
        "title": watch.about(look),
        "round": len(look.lines),
        "rounds": look.values["rounds"],
        "left": watch.time_left(look),
        "finished": look.finished,
        "state": words,
        "old": old,
        "tiles": _tiles(summary, look),
        "late": [_late(name, now - news.since) for name in late],
        "sites": _answers(look, news.silent) if federated else _scores(look),
        "events": [*news.events][-EVENTS:],
        "charts": {"curve": _curve(look), "coreset": _coreset(look)},
        "stop": stop_state(look),
    }


def _state(look: Snapshot, ago: float) -> tuple[str, bool]:
    """How recent the last round is, and whether somebody should do something.

    A run that another process had begun and that nobody works on has stopped, however recently.
    """
    words, style = watch.state_words(look, ago)
    if not look.finished and (look.path / LOCK).exists() and not _at_work(look.path):
        after = f"after round {len(look.lines)}" if look.lines else "before its first round"
        return f"stopped {after}; go on with: {watch.resume_command(look.path)}", True
    return words, style == "yellow"


def is_federated(path: Path) -> bool:
    """Whether the run is one of a real federation."""
    return (path / record.EVENTS).exists()


def stop_state(look: Snapshot) -> Values:
    """Whether the run can be asked to stop, and whether it has been."""
    asked = interrupt.is_asked(look.path)
    going = not look.finished and _at_work(look.path)
    note = f"Go on later with: {watch.resume_command(look.path)}"
    if is_federated(look.path):
        note += ". While a round waits for sites, corefed federation stop ends it at once."
    return {"possible": going, "asked": asked and going, "note": note}


def _at_work(path: Path) -> bool:
    try:
        return is_locked(path)
    except UserError:  # a folder that we may only read
        return False


def _late(name: str, seconds: float) -> str:
    return f"{name}: no answer for {watch.duration(seconds)}"


def _tiles(summary: Values | None, look: Snapshot) -> list[tuple[str, str, str]]:
    """(label, value, more) of the main numbers so far."""
    rounds = f"of {look.values['rounds']}"
    tiles = [("Round", str(len(look.lines)), rounds)]
    if summary is None:
        return tiles
    metrics = summary["metrics"]
    main = record.main_model(metrics)
    for metric, heading in (("accuracy", "accuracy"), ("rmse", "RMSE"), ("nll", "NLL"),
                            ("ece", "ECE")):  # fmt: skip
        each = metrics.get(f"{main}_{metric}")
        if each is not None and math.isfinite(each["mean"]):
            shown = f"{100 * each['mean']:.1f} %" if metric == "accuracy" else f"{each['mean']:.3f}"
            label = f"{main.capitalize()} {heading}"
            tiles.append((label, shown, f"after round {watch.evaluated(look.lines)}"))
    cost = summary["cost"]
    sent = f"{watch.size(cost['bytes_up'])} up, {watch.size(cost['bytes_down'])} down"
    tiles.append(("Training so far", watch.duration(cost["seconds"]), sent))
    return tiles


def _curve(look: Snapshot) -> Values | None:
    """The score of every model over the evaluated rounds."""
    for metric, axis, factor in CURVES:
        data: list[Mapping[str, Any]] = []
        for model in MODELS:
            for line in look.lines:
                each = line.get("metrics", {}).get(f"{model}_{metric}")
                mean = statistics.fmean(each) if each else math.nan
                if math.isfinite(mean):
                    data.append({"series": model, "x": line["round"], "y": factor * mean})
        if data:
            return charts.series(data, MODELS, "round", axis, form=".3~g", x_form="d")
    return None


def _coreset(look: Snapshot) -> Values | None:
    """The measured error of the coresets over rounds."""
    data: list[Mapping[str, Any]] = []
    before: list[float] = []
    for line in look.lines:
        each = [v for v in line["coreset"].get("held_out_error", []) if v is not None]
        if each and each != before:  # a line repeats the last measurement
            data.append({"series": "error", "x": line["round"], "y": statistics.fmean(each)})
            before = each
    axis = "held-out error"
    return charts.series(
        data, ["error"], "round", axis, form=".2~g", x_form="d", zero=True, step=True
    )


def _scores(look: Snapshot) -> Values:
    """Of a simulation: the last score of every site, and how it changed."""
    evaluated = [line["clients"] for line in look.lines if "clients" in line]
    if not evaluated:
        return {"columns": [], "rows": []}
    metric = next((m for m in ("accuracy", "rmse") if _has(look, m)), "score")
    last = _means(evaluated[-1])
    before = _means(evaluated[-2]) if len(evaluated) > 1 else [None] * len(last)
    names = _names(look.path, len(last))
    rows = [
        [name, _shown(now, metric), _change(now, then, metric)]
        for name, now, then in zip(names, last, before, strict=True)
    ]
    return {"columns": ["site", metric, "since the evaluation before"], "rows": rows[:SITES]}


def _has(look: Snapshot, metric: str) -> bool:
    return any(f"{m}_{metric}" in line.get("metrics", {}) for line in look.lines for m in MODELS)


def _means(seeds: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Over seeds, by site."""
    each = ([v for v in values if v is not None] for values in zip(*seeds, strict=True))
    return [statistics.fmean(values) if values else None for values in each]


def _names(path: Path, number: int) -> list[str]:
    try:
        return [each["name"] for each in fitted.read_data(path)["clients"][0]]
    except UserError:  # not written yet, or by an older version
        return [f"client {i}" for i in range(number)]


def _shown(value: float | None, metric: str) -> str:
    if value is None:
        return "-"
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def _change(now: float | None, then: float | None, metric: str) -> str:
    if now is None or then is None:
        return "-"
    return f"{100 * (now - then):+.1f}" if metric == "accuracy" else f"{now - then:+.3g}"


def _answers(look: Snapshot, silent: Sequence[str]) -> Values:
    """Of a federation: who answered in the last round, how fast, and in how many rounds."""
    rounds = [line["federation"] for line in look.lines if "federation" in line]
    names = dict.fromkeys(
        name for each in rounds for name in (*each["accepted"], *each["lost"])
    )  # fmt: skip
    names |= dict.fromkeys(silent)
    rows = []
    for name in names:
        answered = sum(name in each["accepted"] for each in rounds)
        last = rounds[-1] if rounds else {"accepted": [], "lost": {}}
        if name in last["accepted"]:
            seconds = last.get("train_seconds", {}).get(name)
            state = "answered" + (f" in {seconds:.1f} s" if seconds is not None else "")
        else:
            state = f"left out: {last['lost'][name]}" if name in last["lost"] else "not asked"
        if name in silent and not look.finished:
            state = f"asked, no answer yet; before: {state}" if rounds else "asked, no answer yet"
        rows.append([name, state, f"{answered} of {len(rounds)}"])
    return {"columns": ["site", "last round", "rounds answered"], "rows": rows[:SITES]}
