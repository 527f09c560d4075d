"""Sentences that say what a comparison shows, whatever that is.

They say which run is best, whether a federated run beats every client alone, what a coreset costs
and saves against all data, whether it beats a random subset, and whether probabilities are too bold
or too cautious. A sentence claims a difference only where the p-value of its comparison, corrected
for all comparisons of the sentences and of the page around them, is at most 0.05 (`contrast.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from corefed.show import boldness
from corefed.show.contrast import (
    ACCURACY,
    AUROC,
    NLL,
    RMSE,
    Comparisons,
    Contrast,
    Metric,
    values,
)
from corefed.show.distinguish import RUN, base_of, differing, labels, plain
from corefed.show.pairs import ALPHA, differs
from corefed.show.report import RunResult
from corefed.training import cost
from corefed.training.record import main_model

NO_MATTER = {
    "seeds", "device", "runtime", "compile", "memory_mb", "evaluate_every", "checkpoint_every",
    "checkpoint_share", "checkpoint_minutes", "client_state", "data_dir",
}  # fmt: skip
"""Settings that leave the scores of a seed as they are, up to rounding."""
MOST = 3
"""Coresets that get sentences of their own."""


class Named(NamedTuple):
    """A run, and what the sentences call it."""

    name: str
    result: RunResult

    @property
    def summary(self) -> dict[str, Any]:
        return self.result.summary

    @property
    def method(self) -> str:
        return str(self.summary["method"])

    @property
    def fraction(self) -> float:
        return float(self.summary["coreset"]["fraction"])


class Compared(NamedTuple):
    """Runs with scores, the main metric, the seeds that all have, and what is compared."""

    runs: list[Named]
    score: Metric
    seeds: list[int]
    comparisons: Comparisons

    def against(self, one: Named, two: Named) -> list[Contrast]:
        """The first run against the second by score, NLL and AUROC, over seeds that both have."""
        seeds = [seed for seed in one.summary["seeds"] if seed in two.summary["seeds"]]
        areas = all(values(run.summary, AUROC) for run in (one, two))
        metrics = (self.score, NLL, *([AUROC] if areas else [])) if seeds else ()
        return [self.comparisons.of(one.result, two.result, metric, seeds) for metric in metrics]

    def mean(self, run: Named, metric: Metric) -> float:
        found = values(run.summary, metric)
        each = [found[seed] for seed in self.seeds or found]
        return math.fsum(each) / len(each)

    def lowest(self, wanted: Callable[[Named], bool]) -> Named | None:
        """The run with the lowest NLL among those that are wanted."""
        found = [run for run in self.runs if wanted(run)]
        return min(found, key=lambda run: self.mean(run, NLL), default=None)


def sentences(results: Sequence[RunResult], comparisons: Comparisons | None = None) -> list[str]:
    """What these runs show; of a single run, whether its probabilities are right.

    `comparisons` are those of the same page, whose p-values are corrected together with these.
    """
    comparisons = comparisons or Comparisons()
    _sentences(results, comparisons)  # asks for all comparisons, on whose number answers depend
    return _sentences(results, comparisons)


def _sentences(results: Sequence[RunResult], comparisons: Comparisons) -> list[str]:
    names = labels(results)
    every = [Named(name, each) for name, each in zip(names, results, strict=True)]
    apart = _not_comparable(every)
    if apart:
        return [apart]
    score = RMSE if any(values(run.summary, RMSE) for run in every) else ACCURACY
    runs = [run for run in every if values(run.summary, NLL) and values(run.summary, score)]
    said = [f"{run.name} has no finite scores." for run in every if run not in runs]
    kinds = {main_model(run.summary["metrics"]) for run in runs}
    runs = [_with_kind(run, kinds) for run in runs]
    if len(runs) > 1:
        said += _comparisons(runs, score, comparisons)
    return said + _calibration(runs)


def _not_comparable(runs: Sequence[Named]) -> str:
    """Why there is no verdict; empty where there can be one."""
    for run in runs[1:]:
        key = differs(runs[0].summary["config"], run.summary["config"])
        if key:
            found = (plain(each.summary["config"].get(key, "none")) for each in runs)
            return (
                f"These runs do not have the same test points: {key} differs "
                f"({', '.join(dict.fromkeys(found))}). Their scores cannot be compared."
            )
    return ""


def _with_kind(run: Named, kinds: set[str]) -> Named:
    """The name with the kind of model, where runs are scored by different kinds."""
    kind = main_model(run.summary["metrics"])
    return run._replace(name=f"{run.name} [{kind} model]") if len(kinds) > 1 else run


def _comparisons(runs: list[Named], score: Metric, comparisons: Comparisons) -> list[str]:
    shared = [s for s in runs[0].summary["seeds"] if all(s in r.summary["seeds"] for r in runs)]
    compared = Compared(runs, score, shared, comparisons)
    said = ["These runs have no seed in common, so none is called the best."]
    if shared:
        said = [_best(compared, NLL), _best(compared, score)]
        if all(values(run.summary, AUROC) for run in runs):
            said.append(_best(compared, AUROC))
    said += [*_federating(compared), *_coresets(compared)]
    notes = []
    if any(run.summary["seeds"] != shared for run in runs):
        notes.append("A comparison is over the seeds that its runs have in common.")
    if any("interval" in sentence for sentence in said):
        notes.append(
            "Intervals are over paired seeds, and over clients where there are five or more, 95 % "
            "each, not corrected for their number. A difference is claimed where its p-value, "
            f"corrected for {comparisons.tests} comparisons by Holm's method, is at most {ALPHA}."
        )
    return [*said, *_also_differ(runs), *notes]


# --- the best run ---------------------------------------------------------------------------------


def _best(compared: Compared, metric: Metric) -> str:
    """The best run by a metric, and whether it can be told from the next."""
    ranked = sorted(
        compared.runs, key=lambda run: compared.mean(run, metric), reverse=metric.higher
    )
    first, second = ranked[:2]
    found = compared.comparisons.of(first.result, second.result, metric, compared.seeds)
    top = f"{'Highest' if metric.higher else 'Lowest'} {metric.word}: {first.name}"
    own, other = metric.value(found.mine), metric.value(found.other)
    if found.outcome == "same":
        return f"{top} and {second.name}, both at {own}."
    if found.outcome == "better":
        by = f"{metric.amount(found.difference)} ({found.size})"
        return f"{top} at {own}, ahead of {second.name} at {other} by {by}."
    if math.isnan(found.low):
        return f"{top} at {own}, then {second.name} at {other}; {found.why_open}."
    between = f"difference: {found.between}"
    return f"{top} at {own}, but it cannot be told from {second.name} at {other} ({between})."


# --- one run against another ----------------------------------------------------------------------


def _headline(found: Sequence[Contrast], yes: str, no: str, unclear: str) -> str:
    """`yes` in the metrics that say so, `no` where some say that and none the contrary."""
    better = [each.metric.word for each in found if each.outcome == "better"]
    worse = [each.metric.word for each in found if each.outcome == "worse"]
    if better:
        yes = yes if len(better) == len(found) else f"{yes} in {' and '.join(better)}"
        return f"{yes}, not in {' and '.join(worse)}" if worse else yes
    if worse or all(each.outcome == "same" for each in found):
        return no
    reasons = dict.fromkeys(each.why_open for each in found if each.outcome == "open")
    return f"{unclear}: {' and '.join(reasons)}"


def _clauses(found: Sequence[Contrast]) -> str:
    return ", ".join(each.clause for each in found)


def _federating(compared: Compared) -> list[str]:
    """pfedbayes against every client alone; without it, the best federated run.

    Not whether federating pays: `independent` has no posterior, and no Bayesian method runs alone.
    """
    alone = compared.lowest(lambda run: run.method == "independent")
    federated = compared.lowest(lambda run: run.method == "pfedbayes")
    federated = federated or compared.lowest(lambda run: run.method != "independent")
    if alone is None or federated is None:
        return []
    found = compared.against(federated, alone)
    if not found:
        return []
    head = _headline(
        found,
        f"{federated.name} beats {alone.name}",
        f"{federated.name} does not beat {alone.name}",
        f"Whether {federated.name} beats {alone.name} stays open",
    )
    what = f"{alone.name} (every client alone, by SGD without a posterior)"
    return [f"{head}. {federated.name} against {what}: {_clauses(found)}."]


def _coresets(compared: Compared) -> list[str]:
    """Each coreset against all data, and against a random subset of its size."""
    said = []
    chosen = [r for r in compared.runs if r.method == "coreset-pfedbayes" and r.fraction < 1]
    for run in chosen[:MOST]:
        full = [each for each in compared.runs if each.method == "pfedbayes"]
        drawn = [
            each
            for each in compared.runs
            if each.method == "random-subset"
            and base_of(each.summary) == "pfedbayes"
            and each.fraction == run.fraction
        ]
        said += _against_all(compared, run, _nearest(run, full)) if full else []
        said += _against_random(compared, run, _nearest(run, drawn)) if drawn else []
    if len(chosen) > MOST:
        said.append(f"Of {len(chosen)} coresets only the first {MOST} are described.")
    return said


def _nearest(run: Named, others: Sequence[Named]) -> Named:
    """The run that differs in the fewest settings."""
    return min(others, key=lambda each: len(_matter(run, each)))


def _matter(run: Named, other: Named) -> list[str]:
    return [key for key in differing(run.summary, other.summary) if key not in NO_MATTER]


def _caveat(run: Named, other: Named) -> str:
    """Settings of the method that differ beside the points."""
    keys = [key for key in _matter(run, other) if key not in RUN]
    return f" They also differ in {', '.join(keys)}." if keys else ""


def _against_all(compared: Compared, run: Named, full: Named) -> list[str]:
    found = compared.against(run, full)
    if not found:
        return []
    part = f"On {100 * run.fraction:g} % of the points"
    price = _price(run.summary, full.summary)
    words = f"{part}, {run.name} against {full.name}: {_clauses(found)}; {price}."
    return [words + _caveat(run, full)]


def _against_random(compared: Compared, run: Named, drawn: Named) -> list[str]:
    found = compared.against(run, drawn)
    if not found:
        return []
    every = drawn.summary["config"].get("redraw_every", 0)
    how = f"redrawn every {every} steps" if every else "drawn once"
    what = f"a random subset of its size ({how})"
    head = _headline(
        found,
        f"The coreset beats {what}",
        f"The coreset does not beat {what}",
        f"Whether the coreset beats {what} stays open",
    )
    return [f"{head}. {run.name} against {drawn.name}: {_clauses(found)}.{_caveat(run, drawn)}"]


def _price(mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Passes and seconds of one run as a multiple of another's."""
    if mine["rounds"] != other["rounds"]:
        return "the cost is not compared, since rounds differ"
    own, full = cost.of_summary(mine), cost.of_summary(other)
    said = []
    if full.complete and full.total > 0:
        ratio = own.total / len(mine["seeds"]) / (full.total / len(other["seeds"]))
        note = "selection included" if own.complete else "selection is not counted"
        said.append(f"{'' if own.complete else 'at least '}{ratio:.2f} times the passes ({note})")
    machines = {each["environment"].get("device") for each in (mine, other)}
    if mine["seeds"] == other["seeds"] and len(machines) == 1 and other["cost"]["seconds"] > 0:
        said.append(f"{mine['cost']['seconds'] / other['cost']['seconds']:.2f} times the seconds")
    return f"it takes {' and '.join(said)}" if said else "the cost is not known"


def _also_differ(runs: Sequence[Named]) -> list[str]:
    """Settings of runs, beside the method, that may be behind a difference."""
    keys = [key for one in runs for other in runs for key in _matter(one, other) if key in RUN]
    keys += ["rounds"] if len({run.summary["rounds"] for run in runs}) > 1 else []
    if not keys:
        return []
    return [f"The runs also differ in {', '.join(dict.fromkeys(keys))}, which may be why."]


# --- calibration ----------------------------------------------------------------------------------


def _calibration(runs: Sequence[Named]) -> list[str]:
    """Which runs are too bold and which too cautious: mean confidence against accuracy."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        metrics, kind = run.summary["metrics"], main_model(run.summary["metrics"])
        if f"{kind}_ece" not in metrics:
            continue
        gaps = run.summary.get("overconfidence", {}).get(kind, {}).get("per_seed", [])
        way, size = boldness.direction(gaps)
        ece = f"(ECE {metrics[f'{kind}_ece']['mean']:.3f})"
        groups.setdefault(way, []).append(" ".join(filter(None, (run.name, size, ece))))
    return [f"{way}: {', '.join(each)}." for way, each in groups.items()]
