"""Figure 3 of the paper and the KL figure of its appendix.

KL(q_w || q) over rounds for coresets and random subsets, and the training loss of Algorithm 1 with
and without the KL term in the coreset's objective.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import track

from corefed import report, rng
from corefed.bayes import gaussian
from corefed.config import Experiment, resolve
from corefed.experiment import Setup, prepare
from corefed.types import Tree

Flags = dict[str, object]


def reproduce(name: str, scale: str, folder: Path, console: Console) -> None:
    paper = scale == "paper"
    common: Flags = {"data": "mnist" if paper else "digits", "rounds": 60 if paper else 5}
    common |= {"seeds": (0, 1, 2)} if paper else {}
    kinds: dict[str, Flags] = {
        "full data": {"method": "pfedbayes"},
        "coreset 50 %": {"method": "coreset-pfedbayes", "fraction": 0.5},
        "random 50 %": {"method": "random-subset", "fraction": 0.5},
        "coreset 10 %": {"method": "coreset-pfedbayes", "fraction": 0.1},
        "random 10 %": {"method": "random-subset", "fraction": 0.1},
    }
    console.print("KL(q_w || q): full data, coresets and random subsets side by side")
    experiments = {k: resolve(flags={**common, **f}) for k, f in kinds.items()}
    divergence = _kept(folder / "kl.json", lambda: divergences(experiments))

    console.print("training loss of preset paper, with and without the KL term")
    common = {"data": "digits", "rounds": 10 if paper else 2, "method": "coreset-pfedbayes"}
    common |= {"preset": "paper", "fraction": 0.5, "zeta": 1.0}
    terms = {"with the KL term": 1.0, "without it": 0.0}
    ablation = {k: resolve(flags={**common, "kl_weight": weight}) for k, weight in terms.items()}
    loss = _kept(folder / "loss.json", lambda: training_losses(ablation))
    figures = {"kl": divergence, "loss": loss}
    (folder / "figure3.json").write_text(json.dumps(figures, indent=1) + "\n")
    _picture(figures, folder / "figure3.png")
    text = ["KL(q_w || q), nats a parameter, mean over clients and seeds", ""]
    length = len(next(iter(divergence.values())))
    marks = [m for m in sorted({0, 4, 9, 19, 39, length - 1}) if m < length]
    text += ["| round | " + " | ".join(str(m + 1) for m in marks) + " |"]
    text += ["|---" * (len(marks) + 1) + "|"]
    for label, curve in divergence.items():
        text.append(f"| {label} | " + " | ".join(f"{curve[m]:.4f}" for m in marks) + " |")
    text += ["", "E_q of the negative log-likelihood of all training data, nats a datum", ""]
    for label, curve in loss.items():
        text.append(f"- {label}: " + ", ".join(f"{value:.3f}" for value in curve))
    (folder / "figure3.md").write_text("\n".join(text) + "\n")


def divergences(experiments: dict[str, Experiment]) -> dict[str, list[float]]:
    """KL(q_w || q) a parameter after each round, of every experiment against the first.

    All start from the same weights and draw the same noise; they differ in what they train on.
    """
    setups = {label: prepare(experiment) for label, experiment in experiments.items()}
    servers = {label: setup.servers for label, setup in setups.items()}
    first = next(iter(setups))
    curves: dict[str, list[float]] = {label: [] for label in setups if label != first}
    for t in _progress(setups[first].experiment.run.rounds, "rounds of all"):
        for label, setup in setups.items():
            servers[label] = _advance(setup, servers[label], t)
        q = setups[first].clients.private["q"]
        for label, curve in curves.items():
            divergence = gaussian.kl(setups[label].clients.private["q"], q)
            curve.append(float(divergence.mean()) / q.shape[-1])
    return curves


def training_losses(experiments: dict[str, Experiment]) -> dict[str, list[float]]:
    """E_q[-log p] a datum of *all* training points after each round, by 4 draws.

    The loss that training itself sees is weighted by w and cannot be compared between coresets.
    """
    curves: dict[str, list[float]] = {}
    for label, experiment in experiments.items():
        setup = prepare(experiment)
        servers, curve = setup.servers, curves.setdefault(label, [])
        data, rows = setup.clients.data, range(len(setup.clients.who))
        for t in _progress(experiment.run.rounds, label):
            servers = _advance(setup, servers, t)
            noise = setup.clients.streams(rows, t).normal("evaluate", 4, setup.model.size)
            theta = gaussian.sample(setup.clients.private["q"], noise)
            log_p = setup.model.log_likelihood(theta, data.x, data.y).mean(1)
            curve.append(float(-(log_p * data.weight).sum() / data.weight.sum()))
    return curves


def _progress(rounds: int, title: str) -> Iterable[int]:
    return track(range(rounds), title, console=Console(stderr=True), transient=True)


def _kept(path: Path, work: Callable[[], dict[str, list[float]]]) -> dict[str, list[float]]:
    """What an earlier call found, or the work done now and kept."""
    if not path.exists():
        path.write_text(json.dumps(work()) + "\n")
    kept: dict[str, list[float]] = json.loads(path.read_text())
    return kept


def _advance(setup: Setup, servers: list[Tree], t: int) -> list[Tree]:
    run = setup.experiment.run
    cohorts = [rng.choose(seed, t, run.clients, run.cohort or run.clients) for seed in run.seeds]
    updates, _, _ = setup.clients.train(t, servers, cohorts)
    return [setup.method.aggregate(s, u) for s, u in zip(servers, updates, strict=True)]


def _picture(figures: dict[str, dict[str, list[float]]], path: Path) -> None:
    figure, axes = report.panels(2)
    labels = {"kl": "KL(q_w || q), nats a parameter", "loss": "training loss a datum"}
    for axis, (key, label) in zip(axes, labels.items(), strict=True):
        for name, curve in figures[key].items():
            color = "tab:blue" if name.startswith(("coreset", "with ")) else "tab:red"
            alpha = 0.45 if "10 %" in name else 1.0
            xs = range(1, len(curve) + 1)
            axis.plot(xs, curve, color=color, alpha=alpha, label=name)
        axis.set(xlabel="round", ylabel=label, yscale="log" if key == "kl" else "linear")
        axis.legend(frameon=False)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
