"""Figure 4, the ablation of the appendix: Algorithm 1 with and without the KL term of Eq. 8."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from corefed.base.progress import track
from corefed.bayes import gaussian
from corefed.settings.config import resolve
from corefed.settings.run import Experiment
from corefed.training.setup import prepare
from corefed_studies.reproduce.cells import Flags, published
from corefed_studies.reproduce.stepwise import RoundCurves, advance, picture, read_or_compute, table

TERMS = {"with the KL term": 1.0, "without it": 0.0}


def reproduce(name: str, scale: str, folder: Path, console: Console) -> None:
    console.print("training loss of preset paper, with and without the KL term")
    common: Flags = {"data": "digits", "rounds": 10 if scale == "paper" else 2}
    common |= {"method": "coreset-pfedbayes", "preset": "paper", "fraction": 0.5, "zeta": 1.0}
    common = published(common)
    experiments = {k: resolve(flags={**common, "kl_weight": w}) for k, w in TERMS.items()}
    curves = read_or_compute(folder / "loss.json", lambda: training_losses(experiments))
    (folder / f"{name}.json").write_text(json.dumps({"loss": curves}, indent=1) + "\n")
    label = "training loss a datum"
    picture(curves, folder / f"{name}.png", label=label, scale="linear", style=_style)
    title = "E_q of the negative log-likelihood of all training data, nats per datum"
    (folder / f"{name}.md").write_text("\n".join([title, "", *table(curves, 3)]) + "\n")


def _style(name: str) -> dict[str, object]:
    return {"color": "tab:blue" if name.startswith("with ") else "tab:red"}


def training_losses(experiments: dict[str, Experiment]) -> RoundCurves:
    """E_q[-log p] a datum of *all* training points after each round, by 4 draws.

    The loss that training itself sees is weighted by w and cannot be compared between coresets.
    """
    curves: RoundCurves = {}
    for label, experiment in experiments.items():
        setup = prepare(experiment)
        servers, curve = setup.servers, curves.setdefault(label, [])
        data, rows = setup.clients.data, range(len(setup.clients.who))
        for t in track(range(experiment.run.rounds), label):
            servers = advance(setup, servers, t)
            noise = setup.clients.streams(rows, t).normal("evaluate", 4, setup.model.size)
            theta = gaussian.sample(setup.clients.private["q"], noise)
            log_p = setup.model.log_likelihood(theta, data.x, data.y).mean(1)
            curve.append(float(-(log_p * data.weight).sum() / data.weight.sum()))
    return curves
