"""Can its confidence be trusted? Calibration, and the error when uncertain points are left out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from corefed.base.types import Tree
from corefed.show import boldness
from corefed.show.page import charts
from corefed.show.page.content import (
    Figure,
    Figures,
    Missing,
    Part,
    ReportTable,
    Section,
    TableCell,
    missing,
    number,
    percent,
)
from corefed.show.page.gather import RunFolder, capitalize
from corefed.show.page.sections import intervals
from corefed.show.page.sections.intervals import sentence
from corefed.training import calibration
from corefed.training.record import MODELS
from corefed.training.scoring import BINS
from corefed.use import selective

TARGETS = (0.01, 0.02, 0.05)
CONFIDENCE = 0.9
"""Confidence level of a threshold's guarantee."""
POINTS = 160
"""Points drawn of a risk-coverage curve; the table has a tenth of them."""


def section(run: RunFolder, prefix: str) -> Section:
    name, title = f"{prefix}trust", "Can its confidence be trusted?"
    if isinstance(run.held_out, Missing):
        return Section(name, title, "", [missing(run.held_out)])
    held = run.held_out
    kinds = [kind for kind in MODELS if f"{kind}.mean" in held]
    if not kinds or not len(held["y"]):
        return Section(name, title, "", [missing("No client of this run has test points.")])
    if run.labels:
        aid = (
            "Reliability should follow the diagonal: of the predictions with 80 % confidence, 80 % "
            "should be correct. Risk and coverage: the error rate when a person handles the least "
            "certain predictions."
        )
        items = [*_calibrated(run, _reliability, kinds, name), _risk(held, kinds, name)]
        return Section(name, title, aid, [Figures(items), _thresholds(held, kinds[0], run.seeds)])
    aid = (
        "Intervals should contain the nominal share of the targets, as on the diagonal. In the "
        "last chart, exact predictions lie on the diagonal."
    )
    items = [
        *_calibrated(run, intervals.coverage, kinds, name),
        intervals.against(held, kinds[0], name),
    ]
    parts: list[Part] = [Figures(items)]
    return Section(name, title, aid, parts)


Draw = Callable[[RunFolder, Tree, Sequence[str], str], Figure]


def _calibrated(run: RunFolder, draw: Draw, kinds: Sequence[str], name: str) -> list[Figure]:
    """What the models predict, and before it what they would predict without temperatures."""
    assert not isinstance(run.held_out, Missing)
    after = draw(run, run.held_out, kinds, name)
    raw = _without_temperature(run, kinds)
    if raw is None or isinstance(run.models, Missing):
        return [after]
    before = draw(run, raw, kinds, f"{name}-raw")
    words = sentence([_temperatures(run.models, kind) for kind in kinds])
    title = f"{after.title} after calibration"
    return [
        replace(before, title=f"{before.title} before calibration"),
        replace(after, title=title, finding=f"{after.finding} {words}"),
    ]


def _without_temperature(run: RunFolder, kinds: Sequence[str]) -> Tree | None:
    """Held-out predictions as they were before calibration; None of a run without temperatures.

    p_T is proportional to p^(1/T), so p is proportional to p_T^T. A variance was multiplied by T^2.
    """
    assert not isinstance(run.held_out, Missing)
    if isinstance(run.models, Missing):
        return None
    held, found = run.held_out, dict(run.held_out)
    for kind in kinds:
        T = run.models.get(f"{calibration.PREFIX}{kind}")
        if T is None:
            return None
        row = held["row"] if kind == "personal" else held["row"] // len(run.names)
        T = T[row].unsqueeze(-1)
        mean, total = held[f"{kind}.mean"].double(), held[f"{kind}.total"].double()
        if run.labels:
            power = mean.pow(T)
            found[f"{kind}.mean"] = power / power.sum(-1, keepdim=True)
        else:
            found[f"{kind}.total"] = total / T.square()
    return found


def _temperatures(models: Tree, kind: str) -> str:
    T = models[f"{calibration.PREFIX}{kind}"]
    low, high = T.min().item(), T.max().item()
    return f"{kind} temperature {low:.2f}" + (f" to {high:.2f}" if high - low >= 0.005 else "")


def ece_words(ece: float, chance: float) -> str:
    """An ECE beside that of a perfect model with these confidences, which is not 0 either."""
    if ece <= chance:
        return f"{ece:.3f}, no more than the {chance:.3f} that are expected from chance"
    return f"{ece:.3f}, of which {chance:.3f} is expected from chance"


def _ece(run: RunFolder, held: Tree, kind: str) -> tuple[float, float]:
    """The mean over seeds, and what of it is chance.

    The ECE is that of the run's summary, which the other parts of the page show too: after
    calibration for the predictions of its models, before it for those without temperatures.
    """
    seeds = held["row"] // len(run.names)
    every = [(held[f"{kind}.mean"][seeds == g], held["y"][seeds == g]) for g in seeds.unique()]
    chance = math.fsum(calibration.chance_ece(mean.amax(-1)) for mean, _ in every) / len(every)
    if held is run.held_out:
        known = run.metrics.get(f"{kind}_ece")
    else:
        test = run.summary.get("calibration", {}).get(kind, {}).get("test", {})
        known = test.get("before", {}).get("ece")
    if known is not None:
        return float(known["mean"]), chance
    each = [float(selective.reliability(mean, y).ece) for mean, y in every]
    return math.fsum(each) / len(each), chance


def _lean(run: RunFolder, held: Tree, kind: str) -> str:
    """Too bold or too cautious, by how much: as the verdict has it."""
    gaps = run.summary.get("overconfidence", {}).get(kind, {}).get("per_seed", [])
    if not gaps or held is not run.held_out:
        sure, guess = held[f"{kind}.mean"].double().max(-1)
        each, seeds = sure - (guess == held["y"]).double(), held["row"] // len(run.names)
        gaps = [each[seeds == g].mean().item() for g in seeds.unique()]
    way, size = boldness.direction(gaps)
    return ", ".join(filter(None, (f"{way[0].lower()}{way[1:]}", size)))


def _reliability(run: RunFolder, held: Tree, kinds: Sequence[str], name: str) -> Figure:
    data, rows, words = [], [], []
    for kind in kinds:
        found = selective.reliability(held[f"{kind}.mean"], held["y"])
        words.append(f"{kind} ECE {ece_words(*_ece(run, held, kind))}")
        for b in range(BINS):
            if found.points[b]:
                confidence, accuracy = found.confidence[b].item(), found.accuracy[b].item()
                data.append({"series": kind, "x": confidence, "y": accuracy})
                rows.append(
                    (
                        kind,
                        f"{b / BINS:.2f} to {(b + 1) / BINS:.2f}",
                        TableCell(str(found.points[b]), float(found.points[b])),
                        number(confidence),
                        number(accuracy),
                    )
                )
    finding = f"{sentence(words)} {capitalize(kinds[0])}: {_lean(run, held, kinds[0])}."
    spec = charts.series(
        data, MODELS, "confidence", "share correct", form=".1f", x_form=".1f", diagonal=True,
        zero=True,
    )  # fmt: skip
    table = ReportTable(
        f"{BINS} bins of confidence, all test points and seeds",
        ("model", "confidence", "points", "mean confidence", "share correct"),
        rows,
    )
    return Figure(f"{name}-reliability", "Reliability", spec, finding, table)


def _risk(held: Tree, kinds: Sequence[str], name: str) -> Figure:
    data, rows, words = [], [], []
    for kind in kinds:
        found = selective.risk_coverage(held[f"{kind}.total"], _wrong(held, kind))
        words.append(f"{kind} AURC {found.aurc:.4f} ({found.excess:.4f} above an oracle)")
        n = len(found.risk)
        places = np.unique(np.linspace(0, n - 1, min(n, POINTS)).round().astype(int))
        for count, place in enumerate(places.tolist()):
            x, y = found.coverage[place].item(), found.risk[place].item()
            data.append({"series": kind, "x": 100 * x, "y": 100 * y})
            if count % 10 == 0 or place == n - 1:
                rows.append((kind, percent(x), percent(y, 2)))
    first = selective.risk_coverage(held[f"{kinds[0]}.total"], _wrong(held, kinds[0]))
    half = first.risk[len(first.risk) // 2 - 1 if len(first.risk) > 1 else 0]
    finding = (
        f"{sentence(words)} {capitalize(kinds[0])}: {100 * half:.2f} % of the more certain half "
        "of the predictions are wrong."
    )
    spec = charts.series(
        data, MODELS, "kept, %", "wrong among the kept, %", form=".2~g", points=False, zero=True
    )
    table = ReportTable(
        "Error among the most certain predictions", ("model", "kept", "wrong"), rows
    )
    return Figure(f"{name}-risk", "Risk and coverage", spec, finding, table)


def _wrong(held: Tree, kind: str) -> npt.NDArray[np.float64]:
    wrong = held[f"{kind}.mean"].argmax(-1) != held["y"]
    return np.asarray(wrong.double().numpy())


def review(run: RunFolder, target: float) -> selective.Threshold | None:
    """The threshold that `_thresholds` shows for this error rate; None for a regression."""
    if isinstance(run.held_out, Missing) or not run.labels or not len(run.held_out["y"]):
        return None
    kind = next((kind for kind in MODELS if f"{kind}.mean" in run.held_out), None)
    if kind is None:
        return None
    total, wrong = run.held_out[f"{kind}.total"], _wrong(run.held_out, kind)
    return selective.threshold(total, wrong, target, CONFIDENCE)


def _thresholds(held: Tree, kind: str, seeds: Sequence[int]) -> ReportTable:
    """What `corefed predict` would guarantee, and the error on the same points."""
    rows = []
    for target in TARGETS:
        found = selective.threshold(held[f"{kind}.total"], _wrong(held, kind), target, CONFIDENCE)
        rows.append(
            (
                f"{100 * target:g} %",
                number(found.value, ".4g") if found.kept else TableCell("none", 0.0),
                percent(found.kept / found.points),
                percent(found.wrong / found.kept if found.kept else None, 2),
            )
        )  # fmt: skip
    over = "all seeds" if len(seeds) > 1 else f"seed {seeds[0]}"
    return ReportTable(
        f"Thresholds for review: {kind} models, {len(held['y']):,} test points, {over}",
        ("guaranteed error", "keep below (entropy, nats)", "kept", "error among the kept"),
        rows,
        note="A person handles the predictions whose total uncertainty reaches the threshold. With "
        f"{100 * CONFIDENCE:.0f} % confidence the error among the others stays below the "
        "guaranteed one. None: too few test points, or too many errors among the certain ones.",
    )
