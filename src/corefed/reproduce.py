"""Experiments behind the tables and figures in `docs/results.md`, each by one command.

Every run is an ordinary run folder, so a command that was stopped goes on where it was, and
`corefed compare` reads the parts. `--scale paper` is what the documentation shows; `quick` is the
same code on the built-in digits, small enough to watch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from corefed import record, rng
from corefed.bayes import gaussian
from corefed.config import Experiment, resolve
from corefed.errors import UserError
from corefed.experiment import Setup, prepare
from corefed.runtime import rounds
from corefed.types import Tree

Flags = dict[str, object]


class Cell(NamedTuple):
    """One run of a table: where it stands, and what defines it."""

    row: str
    column: str
    flags: Flags


def main(name: str, scale: str, out: Path | None) -> None:
    """Run what `name` needs, then write `NAME.md`, and pictures where it has them."""
    names: dict[str, Callable[[str, str, Path, Console], None]] = {
        "shards-medium": _shards,
        "shards-large": _shards,
        "grid": _grid,
        "figure3": _figure3,
    }
    if name not in names:
        raise UserError(f"There is no table or figure {name!r}; there are {', '.join(names)}.")
    folder = out or Path("runs") / f"reproduce-{name}-{scale}"
    folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    names[name](name, scale, folder, console)
    console.print(f"written to {folder / f'{name}.md'}")


def place_of(cell: Cell, folder: Path) -> Path:
    """The run folder of a cell."""
    words = f"{cell.row} {cell.column}".replace("%", "").lower().split()
    return folder / "-".join(words)


def trained(cell: Cell, folder: Path, console: Console) -> dict[str, Any]:
    """The summary of a cell: read if it is finished, resumed if begun, trained if neither."""
    place = place_of(cell, folder)
    experiment = resolve(flags=cell.flags)
    if record.begun(place):
        summary, lines = record.read(place)
        if len(lines) == experiment.run.rounds:
            return summary
    console.print(f"{cell.row}, {cell.column}: {experiment.run.rounds} rounds")
    done = rounds.train(experiment, place, resume=record.begun(place))
    return done.summary


# --- shards-medium and shards-large: full data, coresets and random subsets -----------------------

SUBSETS = (
    ("full data", {"method": "pfedbayes"}),
    ("coreset 10 %", {"method": "coreset-pfedbayes", "fraction": 0.1}),
    ("coreset 50 %", {"method": "coreset-pfedbayes", "fraction": 0.5}),
    ("random 10 % once", {"method": "random-subset", "fraction": 0.1}),
    ("random 10 % redrawn", {"method": "random-subset", "fraction": 0.1, "redraw_every": 100}),
    ("random 50 % once", {"method": "random-subset", "fraction": 0.5}),
    ("random 50 % redrawn", {"method": "random-subset", "fraction": 0.5, "redraw_every": 100}),
)


def shards(partition: str, scale: str) -> Iterator[Cell]:
    """R = 20, b = 100, learning rates 0.001, zeta = 1; 3 seeds, last round."""
    settings: Flags = {"partition": partition, "zeta": 1.0, "evaluate_every": 20}
    settings |= {"rounds": 100, "seeds": (0, 1, 2)} if scale == "paper" else {"rounds": 5}
    for data in ("mnist", "fashion-mnist") if scale == "paper" else ("digits",):
        for row, flags in SUBSETS:
            yield Cell(row, data, {"data": data, **settings, "checkpoint_every": 10, **flags})


def _shards(partition: str, scale: str, folder: Path, console: Console) -> None:
    cells = list(shards(partition, scale))
    found = {(c.row, c.column): trained(c, folder, console) for c in cells}
    text = []
    for metric in ("personal_accuracy", "global_accuracy", "localized_accuracy"):
        text += [f"**{metric.replace('_', ' ')} (%)**", "", *_markdown(found, metric), ""]
    text += ["**personal NLL**", "", *_markdown(found, "personal_nll", 1.0), ""]
    text += ["**personal ECE (%)**", "", *_markdown(found, "personal_ece"), ""]
    text += ["**held-out error of the coreset**", "", *_held_out(found), ""]
    (folder / f"{partition}.md").write_text("\n".join(text))
    _curves(cells, folder, folder / f"{partition}.png")


def _markdown(
    found: dict[tuple[str, str], dict[str, Any]], metric: str, factor: float = 100.0
) -> list[str]:
    """mean ± std over seeds, one row a method and one column a data set."""
    columns = list(dict.fromkeys(column for _, column in found))
    rows = list(dict.fromkeys(row for row, _ in found))
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    digits = 2 if factor == 100.0 else 3
    for row in rows:
        cells = []
        for column in columns:
            value = found[row, column]["metrics"][metric]
            mean, std = factor * value["mean"], factor * value["std"]
            cells.append(f"{mean:.{digits}f} ± {std:.{digits}f}")
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    return lines


def _curves(cells: list[Cell], folder: Path, path: Path) -> None:
    """Personal accuracy against rounds, a panel a data set; bands are one std over seeds."""
    columns = list(dict.fromkeys(cell.column for cell in cells))
    figure, axes = _panels(len(columns))
    styles = {"full": ("black", "-"), "coreset": ("tab:blue", "-"), "random": ("tab:red", "--")}
    for axis, column in zip(axes, columns, strict=True):
        for cell in (c for c in cells if c.column == column):
            _, lines = record.read(place_of(cell, folder))
            evaluated = [line for line in lines if "metrics" in line]
            spread = [record.over_seeds(e["metrics"]["personal_accuracy"]) for e in evaluated]
            mean = [100 * each["mean"] for each in spread]
            std = [100 * each["std"] for each in spread]
            color, line = styles[cell.row.split()[0]]
            alpha = 0.45 if "10 %" in cell.row else 1.0
            line = ":" if "redrawn" in cell.row else line
            xs = [e["round"] for e in evaluated]
            axis.plot(xs, mean, line, color=color, alpha=alpha, marker=".", label=cell.row)
            low = [m - d for m, d in zip(mean, std, strict=True)]
            high = [m + d for m, d in zip(mean, std, strict=True)]
            axis.fill_between(xs, low, high, color=color, alpha=0.08)
        axis.set(title=column, xlabel="round", ylabel="personal accuracy %")
        axis.grid(alpha=0.3)
    axes[-1].legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=150)


def _panels(number: int) -> tuple[Any, Any]:
    """A figure drawn without a window, and its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * number + 1, 3.8), layout="constrained")
    return figure, figure.subplots(1, number, squeeze=False)[0]


def _held_out(found: dict[tuple[str, str], dict[str, Any]]) -> list[str]:
    lines = ["| | data | error on fresh draws | refreshes a client |", "|---|---|---|---|"]
    for (row, column), summary in found.items():
        figures = summary["coreset"]
        if "held_out_error" in figures:
            lines.append(
                f"| {row} | {column} | {figures['held_out_error']:.3f} | "
                f"{figures['refreshes']:.1f} |"
            )
    return lines


# --- grid: a coreset run never falls below a random subset ----------------------------------------


def grid(scale: str) -> Iterator[Cell]:
    """Fractions from 0.01 to 1 against local steps from 1 to 300, 900 steps in all."""
    fractions = (0.01, 0.1, 0.5, 1.0) if scale == "paper" else (0.1, 1.0)
    steps = (1, 20, 300) if scale == "paper" else (5, 20)
    data = "mnist" if scale == "paper" else "digits"
    total = 900 if scale == "paper" else 100
    for local_steps in steps:
        for fraction in fractions:
            for method in ("coreset-pfedbayes", "random-subset"):
                yield Cell(
                    f"{method} R {local_steps}",
                    f"{fraction:g}",
                    {
                        "data": data,
                        "method": method,
                        "fraction": fraction,
                        "local_steps": local_steps,
                        "rounds": total // local_steps,
                        "evaluate_every": total // local_steps,
                        "seeds": (0, 1) if scale == "paper" else (0,),
                        "checkpoint_every": max(1, 100 // local_steps),
                    },
                )


def _grid(name: str, scale: str, folder: Path, console: Console) -> None:
    found = {(c.row, c.column): trained(c, folder, console) for c in grid(scale)}
    text = ["**personal accuracy (%)**", "", *_markdown(found, "personal_accuracy"), ""]
    text += ["**worst coreset minus random**", ""]
    gaps = {
        key: found[key]["metrics"]["personal_accuracy"]["mean"]
        - found[key[0].replace("coreset-pfedbayes", "random-subset"), key[1]]["metrics"][
            "personal_accuracy"
        ]["mean"]
        for key in found
        if key[0].startswith("coreset")
    }
    worst = min(gaps, key=lambda key: gaps[key])
    text.append(f"{100 * gaps[worst]:+.2f} points, at fraction {worst[1]}, {worst[0]}")
    (folder / "grid.md").write_text("\n".join(text) + "\n")


# --- figure 3: KL(q_w || q) over rounds, and the loss with and without the KL term ---------------


def _figure3(name: str, scale: str, folder: Path, console: Console) -> None:
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
    for t in range(setups[first].experiment.run.rounds):
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
        for t in range(experiment.run.rounds):
            servers = _advance(setup, servers, t)
            noise = setup.clients.streams(rows, t).normal("evaluate", 4, setup.model.size)
            theta = gaussian.sample(setup.clients.private["q"], noise)
            log_p = setup.model.log_likelihood(theta, data.x, data.y).mean(1)
            curve.append(float(-(log_p * data.weight).sum() / data.weight.sum()))
    return curves


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
    figure, axes = _panels(2)
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
