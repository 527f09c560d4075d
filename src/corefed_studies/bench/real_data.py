"""`corefed bench real-data`: public tables with sites of their own, beside scikit-learn.

Every table goes through the same steps as a user's own: a CSV file, the column to predict, the
column of the site. corefed has its defaults. scikit-learn has its defaults too, on the same rows,
encoded and scaled by the same training points, once for all sites together and once per site.
Nothing is tuned, so no row is used to choose anything.

The newcomer is a site that takes no part: the others train, and it gets a model from a few rows.

Writes real-data.json, from which the tables of docs/real-data-study.md are made.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from corefed.base import files
from corefed.base.device import device_for
from corefed.data.clients import FederatedData
from corefed.settings.config import resolve
from corefed.training import fitted, newcomers, rounds
from corefed.training.setup import concrete, load
from corefed.use import newcomer
from corefed_studies import pages, result_file
from corefed_studies.bench import real_data_tables
from corefed_studies.defaults.files import ensure
from corefed_studies.defaults.prepare import FILES

NAME, SCHEMA = "real-data", 1
SEEDS = {"paper": 5, "quick": 2}
NEWCOMER_ROWS = 50
"""Rows that a newcomer trains on; all its others are tested on."""
LEAST = 1e-6
"""Probabilities below are raised to this in every NLL: a site may have no row of a class."""

Floats = NDArray[np.float64]
Scores = dict[str, list[float]]


class RealSet(NamedTuple):
    """A table with natural sites."""

    name: str
    file: str
    target: str
    site: str
    joins: str  # the site that is left out as a newcomer
    regression: bool = False


SETS = (
    RealSet("aids2", "aids2.csv", "status", "state", "QLD"),
    RealSet("chile", "chile.csv", "vote", "region", "N"),
    RealSet("ofp", "ofp.csv", "privins", "region", "west"),
    RealSet(
        "housing", "housing.csv", "median_house_value", "ocean_proximity", "NEAR BAY",
        regression=True,
    ),
)  # fmt: skip
QUICK = ("aids2",)


def main(
    scale: str,
    out: Path | None,
    console: Console,
    device: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
) -> None:
    """Measure what is missing in `out`, or take the results of a file; show them."""
    folder = pages.make(out or Path("runs") / f"bench-{NAME}-{scale}")
    marked = pages.Marked(page, f"bench {NAME}") if page is not None else None
    if source is not None:
        study = result_file.read(source, NAME, SCHEMA)
    else:
        seeds = list(range(SEEDS[scale]))
        chosen = [each for each in SETS if scale == "paper" or each.name in QUICK]
        study = {
            "schema": SCHEMA, "name": NAME, "scale": scale, "seeds": seeds,
            "newcomer_rows": NEWCOMER_ROWS, "sets": {},
        }  # fmt: skip
        for each in chosen:  # the file has what is measured so far
            found = _kept(each, folder, seeds, device, console)
            study["sets"][each.name] = result_file.rounded(found, 6)
            text = json.dumps(study, indent=1) + "\n"
            files.replace(folder / f"{NAME}.json", text.encode())
    pages.put(folder, NAME, real_data_tables.tables(study), marked)
    console.print(f"written to {page or folder / f'{NAME}.md'}")


def _kept(
    each: RealSet, folder: Path, seeds: list[int], device: str, console: Console
) -> dict[str, Any]:
    """The results of a set; one that was measured before is read."""
    place = folder / f"{each.name}.json"
    if not place.exists():
        console.print(f"{each.name}: {len(seeds)} seeds")
        tables = pages.make(folder / "files")
        ensure(FILES[each.file], tables)
        found = measure(each, tables, seeds, str(device_for(device)))
        files.replace(place, json.dumps(found).encode())
    content: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return content


def measure(each: RealSet, tables: Path, seeds: Sequence[int], device: str) -> dict[str, Any]:
    """Scores of every model, by seed, on the test rows of all sites together."""
    flags: dict[str, object] = {
        "target": each.target, "client_column": each.site, "device": device, "evaluate_clients": 0,
        "seeds": ",".join(map(str, seeds)), "data": f"table:{tables.absolute() / each.file}",
    }  # fmt: skip
    data = load(concrete(resolve(None, flags)).run)
    sites = data.names[: len(data.names) // len(seeds)]
    models = {"corefed": _corefed(flags, len(sites), each)}
    for name, make in _estimators(each).items():
        for pooled in (True, False):
            key = f"{name}, {'all sites together' if pooled else 'per site'}"
            models[key] = _scikit(data, len(sites), each, make, pooled=pooled)
    real = data.train.weight.sum(1) + data.test.weight.sum(1)
    return {
        "sites": {site: int(real[i]) for i, site in enumerate(sites)},
        "models": models,
        "newcomer": {"site": each.joins, **_newcomer(each, tables, flags, seeds, device)},
    }


def _corefed(flags: dict[str, object], sites: int, each: RealSet) -> Scores:
    """Personal models at the defaults, on the rows that they kept apart."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        rounds.train(resolve(None, flags), run)
        found = fitted.read_tensors(run, fitted.HELD_OUT)
    seed = found["row"] // sites
    answers = [
        (found["personal.mean"][seed == g].double().numpy(), found["y"][seed == g].numpy())
        for g in range(int(seed.max()) + 1)
    ]
    return _scores(answers, each)


def _estimators(each: RealSet) -> dict[str, Callable[[], Any]]:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    from sklearn.linear_model import LogisticRegression, Ridge

    if each.regression:
        return {
            "ridge regression": Ridge,
            "boosted trees": lambda: HistGradientBoostingRegressor(random_state=0),
        }
    return {
        "logistic regression": lambda: LogisticRegression(max_iter=1000),
        "boosted trees": lambda: HistGradientBoostingClassifier(random_state=0),
    }


def _scikit(
    data: FederatedData, sites: int, each: RealSet, make: Callable[[], Any], *, pooled: bool
) -> Scores:
    """One model for the rows of all sites, or one per site, on the same test rows."""
    answers = []
    for g, preparation in enumerate(data.preparations):
        rows = range(g * sites, (g + 1) * sites)
        train, test = ([_points(part, row) for row in rows] for part in (data.train, data.test))
        whole = tuple(np.concatenate(parts) for parts in zip(*train, strict=True))
        predicted = []
        for own, (x, _) in zip(train, test, strict=True):
            fit_x, fit_y = whole if pooled else own
            predicted.append(_predict(make, fit_x, fit_y, x, data.classes))
        y = np.concatenate([truth for _, truth in test])
        found = np.concatenate(predicted)
        if each.regression:
            mean, std = (value.numpy() for value in preparation.unit)
            found = found * std + mean
        answers.append((found, y))
    return _scores(answers, each)


def _points(part: Any, row: int) -> tuple[Floats, Floats]:
    real = part.weight[row] > 0
    return part.x[row][real].double().numpy(), part.y[row][real].numpy()


def _predict(make: Callable[[], Any], x: Floats, y: Floats, at: Floats, classes: int) -> Floats:
    """Probabilities of all classes, or means; a single class needs no model."""
    if not classes:
        return np.asarray(make().fit(x, y.ravel()).predict(at), dtype=np.float64).reshape(-1, 1)
    known = np.unique(y)
    found = np.zeros((len(at), classes))
    if len(known) == 1:
        found[:, int(known[0])] = 1.0
    else:
        model = make().fit(x, y)
        found[:, model.classes_.astype(int)] = model.predict_proba(at)
    return found


def _scores(answers: Sequence[tuple[Floats, Floats]], each: RealSet) -> Scores:
    """By seed, over the test rows of all sites."""
    if each.regression:
        errors = [float(np.sqrt(np.mean((p - y) ** 2))) for p, y in answers]
        return {"rmse": errors}
    found: Scores = {"accuracy": [], "nll": []}
    for p, y in answers:
        found["accuracy"].append(float((p.argmax(1) == y).mean()))
        likely = np.clip(p, LEAST, None)
        likely = likely / likely.sum(1, keepdims=True)
        found["nll"].append(float(-np.log(likely[np.arange(len(y)), y.astype(int)]).mean()))
    return found


def _newcomer(
    each: RealSet, tables: Path, flags: dict[str, object], seeds: Sequence[int], device: str
) -> dict[str, Any]:
    """The others train; the newcomer is tested with their shared model, with its own, and alone."""
    with TemporaryDirectory() as folder:
        here = Path(folder)
        rest, own = here / "others.csv", here / "newcomer.csv"
        count = _divide(tables / each.file, each, rest, own)
        rounds.train(resolve(None, {**flags, "data": f"table:{rest}"}), here / "run")
        fit = fitted.load(here / "run")
        found: dict[str, Scores] = {}
        for g, seed in enumerate(seeds):
            points = newcomer.read(own, fit, g, each.joins, 1 - NEWCOMER_ROWS / count, 4096)
            joined = newcomers.join(fit, points, seed=seed, device=device)
            for kind in ("global", "personal", "alone"):
                scores = found.setdefault(kind, {})
                for metric in ("rmse",) if each.regression else ("accuracy", "nll"):
                    value = joined.summary["metrics"][f"{kind}_{metric}"]["mean"]
                    scores.setdefault(metric, []).append(value)
    return {"tested": count - NEWCOMER_ROWS, "models": found}


def _divide(path: Path, each: RealSet, rest: Path, own: Path) -> int:
    """The table without one site, and that site; returns the rows of the latter."""
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.DictReader(handle))
    count = 0
    for place, mine in ((rest, False), (own, True)):
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        chosen = [row for row in rows if (row[each.site] == each.joins) == mine]
        writer.writerows(chosen)
        place.write_text(text.getvalue(), encoding="utf-8")
        count = len(chosen)
    return count
