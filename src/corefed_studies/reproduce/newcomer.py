"""What joining late is worth: accuracy of a client that took no part, by its number of points.

Data are split among ten clients. Eight train a federation; two come later, with the first m points
of a random order. Clients have five classes each, which is two kinds of clients, or shares of
classes by a Dirichlet distribution, so that no two are alike.

Each newcomer gets a model in several ways: as `corefed personalize` makes it, with parts of that
left out; the global model as it is; and alone. Alone means the same method from the initial prior,
an ordinary network (SGD), and logistic regression. The first is what the global posterior replaces;
the others are what such a client would use instead.

Steps, the ordinary network's learning rate, the least size of a coreset and how class shares are
used were chosen on seeds 100 to 102, which are not among those shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Unpack

import torch
from rich.console import Console

from corefed.base import files
from corefed.base.panels import labelled, legend_below, panels, save
from corefed.base.progress import track
from corefed.base.rng import SERVER, Streams, Who, generator
from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.methods import registry
from corefed.settings.config import resolve
from corefed.training import fitted, newcomers, record, rounds, scoring, summaries
from corefed.training.fitted import Fitted
from corefed.training.setup import concrete, load, network
from corefed_studies import pages
from corefed_studies.reproduce.cells import DEFAULT, Flags
from corefed_studies.reproduce.results import Results
from corefed_studies.reproduce.tables import Options, show

CLIENTS, MEMBERS = 10, 8
"""Clients that the data are split among, and those of them that train together."""
SIZES = (5, 10, 20, 50, 100, 200, 500, 1000)
ALONE_STEPS, ALONE_RATE = 1000, 0.1
"""Of the ordinary network: 3000 steps, or a rate of 0.02, were no better."""
TESTED = 1000
"""Test points of a newcomer that are evaluated, at most."""

PERSONALISED: dict[str, dict[str, Any]] = {
    "personalised": {},
    "without its class shares": {"own_classes": False},
    "nothing trained": {"share": 0.0},
    "all of its own training": {"share": 1.0, "own_classes": False},
    "on all of its points": {"fraction": 1.0},
}
"""Name -> how it differs from the default of `corefed personalize`."""
SHARED, PRIOR = "shared model as it is", "alone, from the prior"
ORDINARY, LOGISTIC = "alone, ordinary network", "alone, logistic regression"
ROWS = (*PERSONALISED, SHARED, ORDINARY, LOGISTIC, PRIOR)

Measured = dict[str, Any]
"""One newcomer with so many points, one way: data, seed, client, points, row and its metrics."""


def flags(scale: str) -> dict[str, Flags]:
    """Data set -> settings of its federation."""
    quick: Flags = {"rounds": 30, "seeds": (0, 1)}
    paper: Flags = {"rounds": 50, "seeds": (0, 1, 2)}
    shared: Flags = {**DEFAULT, "clients": CLIENTS, "device": "cpu"}
    shared |= {"evaluate_every": 50, "checkpoint_every": 10, "partition": "shards-medium"}
    if scale != "paper":
        return {"digits": {"data": "digits", **shared, **quick}}
    names = ("mnist", "fashion-mnist")
    found: dict[str, Flags] = {data: {"data": data, **shared, **paper} for data in names}
    uneven: Flags = {"partition": "dirichlet:0.5", "keep": 0.2}
    return found | {f"{data}-dirichlet": {**found[data], **uneven} for data in names}


def reproduce(
    name: str, scale: str, folder: Path, console: Console, **options: Unpack[Options]
) -> None:
    """Write newcomer.json, .md, .html and .png, and a part of a page."""

    def study() -> Results:
        measured = (_study(data, own, folder, console) for data, own in flags(scale).items())
        return gathered([line for lines in measured for line in lines])

    found = show(name, scale, folder, study, make_tables, options)
    draw(found, folder / f"{name}.png")


# --- measuring ------------------------------------------------------------------------------------


def _study(data: str, own: Flags, folder: Path, console: Console) -> list[Measured]:
    """All newcomers of a data set; each is kept the moment it is there."""
    console.print(f"{data}: a federation of {MEMBERS}, then {CLIENTS - MEMBERS} newcomers")
    experiment = concrete(resolve(flags=own))
    everyone = load(experiment.run)
    model = _federation(own, everyone, folder / data)
    path = folder / f"{data}-newcomers.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    known = {(line["seed"], line["client"], line["points"]) for line in lines}
    todo = [
        (g, client, m)
        for g in range(len(experiment.run.seeds))
        for client in range(MEMBERS, CLIENTS)
        for m in _sizes(int(everyone.train.size[g * CLIENTS + client]))
        if (experiment.run.seeds[g], client, m) not in known
    ]
    for g, client, m in track(todo, "newcomers", console):
        newcomer = few(everyone, g, client, m, experiment.run.seeds[g])
        about = {"data": data, "seed": experiment.run.seeds[g], "client": client, "points": m}
        lines += [{**about, **each} for each in ways(model, newcomer, experiment.run.seeds[g])]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        files.replace(path, text.encode())
    return lines


def _sizes(points: int) -> list[int]:
    return [m for m in SIZES if m < points] + [points]


def _federation(own: Flags, everyone: FederatedData, place: Path) -> Fitted:
    """The run of all members, trained or resumed."""
    runs = len(everyone.preparations)
    rows = [g * CLIENTS + i for g in range(runs) for i in range(MEMBERS)]
    members = everyone._replace(
        train=_rows(everyone.train, rows),
        test=_rows(everyone.test, rows),
        names=[everyone.names[row] for row in rows],
    )
    if not (place / record.SUMMARY).exists():
        experiment = resolve(flags={**own, "clients": MEMBERS})
        rounds.train(experiment, place, data=members, resume=record.begun(place))
    return fitted.load(place)


def _rows(data: ClientData, rows: Sequence[int]) -> ClientData:
    return ClientData(*(field[list(rows)] for field in data))


def few(everyone: FederatedData, g: int, client: int, points: int, seed: int) -> FederatedData:
    """One client with its first points of a random order, and its test points."""
    row = g * CLIENTS + client
    train, test = (_rows(part, [row]) for part in (everyone.train, everyone.test))
    order = torch.randperm(int(train.size), generator=generator(seed, 0, client, "newcomer"))
    chosen = order[:points]
    real = int(test.size)
    stride = -(-real // TESTED)
    return everyone._replace(
        train=ClientData(*(field[:, chosen] for field in train)),
        test=ClientData(*(field[:, :real:stride] for field in test)),
        names=[f"newcomer {client}"],
        preparations=everyone.preparations[g : g + 1],
    )


def ways(model: Fitted, newcomer: FederatedData, seed: int) -> Iterator[Measured]:
    """Every row's metrics for one newcomer."""
    for row, options in PERSONALISED.items():
        first = row == next(iter(PERSONALISED))
        joined = newcomers.join(model, newcomer, seed=seed, compare=first, **options)
        metrics = {k: v["mean"] for k, v in joined.summary["metrics"].items()}
        if first:
            yield {"row": SHARED, **_under("global_", metrics)}
            yield {"row": PRIOR, **_under("alone_", metrics)}
        yield {"row": row, **_under("personal_", metrics)}
    yield {"row": ORDINARY, **ordinary(newcomer, seed)}
    yield {"row": LOGISTIC, **logistic(newcomer)}


def _under(prefix: str, metrics: dict[str, float]) -> dict[str, float]:
    kept = ("accuracy", "nll", "ece")
    return {name: metrics[prefix + name] for name in kept}


def ordinary(newcomer: FederatedData, seed: int) -> dict[str, float]:
    """One network by SGD, as method `independent` trains it."""
    experiment = resolve(flags={"method": "independent", "learning_rate": ALONE_RATE})
    shape = newcomer.train.x.shape[2:]
    net = network(experiment.run, shape, newcomer.classes, newcomer.targets)
    method = registry.build("independent", experiment.settings, net)
    start = method.init_server(Streams([Who(seed, SERVER)], 0))
    who, batch = [Who(seed, CLIENTS)], experiment.run.batch_size
    (last,) = newcomers.adapt(method, start, newcomer.train, who, [ALONE_STEPS], batch)
    x = newcomer.test.x
    return scored(
        method.predict({"theta": last.private["theta"]}, x, x.new_zeros(1, 1, 0)), newcomer
    )


def logistic(newcomer: FederatedData) -> dict[str, float]:
    """scikit-learn's, with its own defaults; classes that the client has not seen have p = 0."""
    from sklearn.linear_model import LogisticRegression

    x, y = newcomer.train.x[0].flatten(1).numpy(), newcomer.train.y[0].numpy()
    seen = sorted(set(y.tolist()))
    test = newcomer.test.x[0].flatten(1)
    p = torch.zeros(1, len(test), newcomer.classes, dtype=torch.float64)
    if len(seen) > 1:
        fit = LogisticRegression(max_iter=1000).fit(x, y)
        p[0, :, seen] = torch.from_numpy(fit.predict_proba(test.numpy())).double()
    else:
        p[0, :, seen] = 1.0
    return scored(p, newcomer)


def scored(p: torch.Tensor, newcomer: FederatedData) -> dict[str, float]:
    each = scoring.score_classes(p, newcomer.test.y)
    sums = scoring.totals(
        {name: value[0] for name, value in each.items()}, newcomer.test.y[0], newcomer.classes
    )
    return _under("", scoring.metrics_of(sums))


# --- showing --------------------------------------------------------------------------------------


def gathered(measured: Sequence[Measured]) -> Results:
    """Row and "data points" -> its metrics over newcomers and seeds."""
    found: Results = {}
    groups: dict[tuple[str, str, int], list[Measured]] = {}
    for line in measured:
        groups.setdefault((line["row"], line["data"], line["points"]), []).append(line)
    for (row, data, points), each in sorted(groups.items(), key=lambda item: item[0][1:]):
        names = ("accuracy", "nll", "ece")
        metrics = {name: summaries.over_seeds([line[name] for line in each]) for name in names}
        about = {"data": data, "points": points, "newcomers": len(each)}
        found[row, f"{data} {points}"] = {**about, "metrics": metrics}
    return found


def make_tables(found: Results) -> list[pages.Table]:
    laid = []
    for data in dict.fromkeys(result["data"] for result in found.values()):
        mine, count = _of(found, data)
        sizes = sorted({result["points"] for result in mine.values()})
        columns = ("own points", *map(str, sizes))
        for metric, words, factor in (("accuracy", "accuracy %", 100.0), ("nll", "NLL", 1.0)):
            rows = [
                [row, *(_cell(mine.get((row, f"{data} {m}"), {}), metric, factor) for m in sizes)]
                for row in ROWS
            ]
            title = f"{data}: {words} of {count} newcomers on their own test points, mean ± std"
            laid.append(pages.Table(title, columns, rows))
    return laid


def _of(found: Results, data: str) -> tuple[Results, int]:
    """Results of a data set at the sizes that all its newcomers have, and how many these are."""
    mine = {key: result for key, result in found.items() if result["data"] == data}
    count = max(result["newcomers"] for result in mine.values())
    return {key: each for key, each in mine.items() if each["newcomers"] == count}, count


def _cell(result: Measured, metric: str, factor: float) -> str:
    spread = result.get("metrics", {}).get(metric)
    if spread is None:
        return "-"
    digits = 1 if factor > 1 else 2
    return f"{factor * spread['mean']:.{digits}f} ± {factor * spread['std']:.{digits}f}"


def draw(found: Results, path: Path) -> None:
    """Accuracy against the number of own points; bands are one standard deviation."""
    sets = list(dict.fromkeys(result["data"] for result in found.values()))
    figure, axes = panels(len(sets), legend=3)
    styles = {
        "personalised": ("tab:blue", "-"), "without its class shares": ("tab:cyan", "--"),
        SHARED: ("black", "-"), ORDINARY: ("tab:red", "-"), LOGISTIC: ("tab:orange", "--"),
    }  # fmt: skip
    for axis, data in zip(axes, sets, strict=True):
        for row in styles:
            mine = [r for (name, _), r in _of(found, data)[0].items() if name == row]
            mine.sort(key=lambda result: result["points"])
            sizes = [result["points"] for result in mine]
            mean, std = (
                [100 * result["metrics"]["accuracy"][key] for result in mine]
                for key in ("mean", "std")
            )
            color, line = styles[row]
            axis.plot(sizes, mean, line, color=color, marker=".", label=row)
            low, high = ([m + s * d for m, d in zip(mean, std, strict=True)] for s in (-1, 1))
            axis.fill_between(sizes, low, high, color=color, alpha=0.08)
        axis.set(title=data, xlabel="own training points", xscale="log")
        axis.set_xticks(sizes, list(map(str, sizes)))
        axis.set_xticks([], minor=True)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("accuracy %")
    legend_below(figure, labelled(axes), across=3)
    save(figure, path)
