"""What was run, and its main results."""

from __future__ import annotations

import shlex
from typing import Any

from corefed.settings.run import LOCAL, MEMORY
from corefed.show.page.content import Command, Fold, Part, ReportTable, Section, Text, Tile, Tiles
from corefed.show.page.gather import RunFolder, capitalize, score_name, score_text
from corefed.show.report import sample, stopped
from corefed.training import record

METRICS = {"nll": "NLL", "ece": "ECE"}
AIDS = {"nll": "lower is better", "ece": "0 is calibrated"}
AID = (
    "Measured on every client's own test points after the last evaluated round: each client's "
    "personal model, the global model, and the global model localized to the client."
)


def section(run: RunFolder, prefix: str) -> Section:
    parts: list[Part] = [Tiles(_tiles(run))]
    if not run.finished:
        config = run.summary["config"]
        parts.append(
            Text(
                f"This run is not finished: it has {run.summary['rounds']} of {config['rounds']} "
                f"rounds. Continue it with corefed run --resume {shlex.quote(str(run.path))}.",
                missing=True,
            )
        )
    notes = run.summary["environment"].get("notes", [])
    notes = [*(f"Metrics are {each}." for each in sample(run.summary)), *notes]
    notes = [*(f"These are {each}." for each in stopped(run.summary)), *notes]
    parts += [Text(f"Note: {note}") for note in notes]
    if run.summary["data"] not in (LOCAL, MEMORY) and not run.place:
        toml = shlex.quote(str(run.path / record.EXPERIMENT))
        parts.append(Command("Run it again:", f"corefed run --config {toml}"))
    parts.append(Fold("All settings and the machine", _settings(run)))
    aid = sentence(run) if prefix else AID  # a page of one run has the sentence as its subtitle
    return Section(f"{prefix}overview", "Main results", aid, parts)


def sentence(run: RunFolder) -> str:
    """The run in a line."""
    summary = run.summary
    config = summary["config"]
    seeds = ", ".join(map(str, run.seeds))
    words = [
        f"{summary['method']} on {data_name(summary['data'])}",
        f"split by {summary['partition']} over {_count(summary['clients'], 'client')}"
        if summary["partition"]
        else _count(summary["clients"], "client"),
        f"seed{'s' if len(run.seeds) > 1 else ''} {seeds}",
        f"{_count(summary['rounds'], 'round')} of {config['local_steps']} local steps",
        f"{100 * summary['coreset']['fraction']:g} % of the data",
    ]
    return ", ".join(words) + "."


def data_name(data: str) -> str:
    """The name of the data in a sentence."""
    return {LOCAL: "clients' own data", MEMORY: "data in memory"}.get(data, data)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _tiles(run: RunFolder) -> list[Tile]:
    """Scores of every model, the main model's calibration, and the cost."""
    found = []
    for model in run.models_with(run.score) if run.score else []:
        each, name = run.metrics[f"{model}_{run.score}"], score_name(run.score)
        words = f"{name} elsewhere" if model == "others" else f"{model} {name}"
        more = ", on other clients' points" if model == "others" else ""
        value = score_text(each["mean"], run.score)
        found.append(Tile(capitalize(words), value, _spread(run, each, run.score) + more))
    for metric, name in METRICS.items():
        each = run.metrics.get(f"{run.main}_{metric}")
        if each is not None:
            more = f"{_spread(run, each, metric)}, {AIDS[metric]}{_before(run, metric)}"
            found.append(Tile(f"{name}, {run.main}", f"{each['mean']:.3f}", more))
    area = run.summary.get("measures", {}).get("auroc", {})
    if area.get("value") is not None:
        ends = area["interval"]
        more = f"95 % interval {ends[0]:.3f} to {ends[1]:.3f}, " if ends else ""
        over = f"class {run.labels[1]}" if len(run.labels) == 2 else "mean over classes"
        found.append(Tile(f"AUROC, {run.main}", f"{area['value']:.3f}", f"{more}{over}"))
    cost = run.summary["cost"]
    sent = (cost["bytes_up"] + cost["bytes_down"]) / 1e6
    found.append(Tile("Time to train", duration(cost["seconds"]), "all seeds together"))
    found.append(Tile("Sent and received", f"{sent:.3g} MB", "all clients, all seeds"))
    privacy = run.summary.get("privacy")
    if privacy and privacy.get("server") is not None:
        more = f"against anyone who sees uploads, delta {privacy['delta']:g}"
        found.append(Tile("Privacy, epsilon", f"{privacy['server']:.3g}", more))
    return found


def _before(run: RunFolder, metric: str) -> str:
    """What the metric was without temperatures, where the run has some."""
    found = run.summary.get("calibration", {}).get(run.main)
    if found is None:
        return ""
    return f", {found['test']['before'][metric]['mean']:.3f} before calibration"


def _spread(run: RunFolder, each: dict[str, Any], metric: str) -> str:
    if len(run.seeds) == 1:
        return f"seed {run.seeds[0]}"
    std = each["std"] * (100 if metric == "accuracy" else 1)
    return f"± {std:.2g} over {len(run.seeds)} seeds"


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _settings(run: RunFolder) -> ReportTable:
    about = [(key, value) for key, value in run.summary["environment"].items() if key != "notes"]
    rows = [(key, _plain(value)) for key, value in (*run.summary["config"].items(), *about)]
    return ReportTable("Every setting, versions and hardware", ("setting", "value"), rows)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "not set" if value == "" else str(value)
