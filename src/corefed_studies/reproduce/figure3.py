"""Figure 3 of the paper: KL(q_w || q) over rounds, for coresets and random subsets."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from corefed.base.progress import track
from corefed.bayes import gaussian
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.training.setup import prepare
from corefed_studies.reproduce.cells import MATCHING, Flags, published
from corefed_studies.reproduce.stepwise import RoundCurves, advance, picture, read_or_compute, table

KINDS: dict[str, Flags] = {
    "full data": {"method": "pfedbayes"},
    "coreset 50 %": {**MATCHING, "fraction": 0.5},
    "random 50 %": {"method": "random-subset", "fraction": 0.5},
    "coreset 10 %": {**MATCHING, "fraction": 0.1},
    "random 10 %": {"method": "random-subset", "fraction": 0.1},
}


def reproduce(name: str, scale: str, folder: Path, console: Console) -> None:
    paper = scale == "paper"
    common: Flags = {"data": "mnist" if paper else "digits", "rounds": 60 if paper else 5}
    common |= {"seeds": (0, 1, 2)} if paper else {}
    console.print("KL(q_w || q): full data, coresets and random subsets side by side")
    experiments = {k: resolve(flags=published({**common, **f})) for k, f in KINDS.items()}
    curves = read_or_compute(folder / "kl.json", lambda: divergences(experiments))
    (folder / f"{name}.json").write_text(json.dumps({"kl": curves}, indent=1) + "\n")
    label = "KL(q_w || q), nats per parameter"
    picture(curves, folder / f"{name}.png", label=label, scale="log", style=_style)
    text = ["KL(q_w || q), nats per parameter, mean over clients and seeds", "", *table(curves, 4)]
    (folder / f"{name}.md").write_text("\n".join(text) + "\n")


def _style(name: str) -> dict[str, object]:
    color = "tab:blue" if name.startswith("coreset") else "tab:red"
    return {"color": color, "alpha": 0.45 if "10 %" in name else 1.0}


def divergences(experiments: dict[str, Experiment]) -> RoundCurves:
    """KL(q_w || q) a parameter after each round, of every experiment against the first.

    All start from the same weights and draw the same noise; they differ in what they train on.
    """
    setups = {label: prepare(experiment) for label, experiment in experiments.items()}
    servers = {label: setup.servers for label, setup in setups.items()}
    first = next(iter(setups))
    curves: RoundCurves = {label: [] for label in setups if label != first}
    for t in track(range(setups[first].experiment.run.rounds), "rounds of all"):
        for label, setup in setups.items():
            servers[label] = advance(setup, servers[label], t)
        q = setups[first].clients.private["q"]
        for label, curve in curves.items():
            divergence = gaussian.kl(setups[label].clients.private["q"], q)
            curve.append(float(divergence.mean()) / q.shape[-1])
    return curves
