"""What a reader should know in half a minute: sentences, and five tiles with numbers.

The tiles: the best run and whether it can be told from the next, its weakest site, whether its
probabilities are too bold or too cautious, how many of its predictions a person should review, and
what it took. A tile is left out where a run has no such number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.show import boldness, verdict
from corefed.show.contrast import ACCURACY, NLL, RMSE, Comparisons, Metric, values
from corefed.show.page.content import Section, Sentences, Tile, Tiles
from corefed.show.page.gather import RunFolder, capitalize, score_name, score_text
from corefed.show.page.sections import intervals, sites, trust
from corefed.show.page.sections.overview import duration
from corefed.show.page.sections.sites import TARGET
from corefed.show.pairs import FEWEST_SEEDS, differs
from corefed.show.report import short
from corefed.training.cost import of_summary


def section(runs: Sequence[RunFolder], comparisons: Comparisons) -> Section:
    """The verdict on these runs; the tiles are of the best one."""
    said = verdict.sentences([run.result for run in runs], comparisons)
    first, tiles = _best(runs, comparisons)
    if first is not None:
        tiles += [*_weakest(first), *_boldness(first), *_review(first), *_spent(first)]
    aid = ""
    if first is not None and len(runs) > 1:
        aid = f"The tiles are about {first.label}, the best run."
    return Section("in-short", "In short", aid, [Tiles(tiles), Sentences(said)])


def _best(
    runs: Sequence[RunFolder], comparisons: Comparisons
) -> tuple[RunFolder | None, list[Tile]]:
    """The run with the lowest NLL (without one: the first), and a tile about it."""
    if len(runs) == 1:
        return runs[0], _score(runs[0])
    configs = [run.summary["config"] for run in runs]
    if any(differs(configs[0], config) for config in configs[1:]):
        return None, []  # they have other test points, which the sentences say
    metric = next((m for m in (NLL, ACCURACY, RMSE) if _have(runs, m) > 1), None)
    if metric is None:
        return None, []
    found = [run for run in runs if values(run.summary, metric)]
    seeds = [s for s in found[0].seeds if all(s in run.seeds for run in found)]
    if not seeds:
        return None, []
    best, then = sorted(found, key=lambda run: _mean(run, metric, seeds), reverse=metric.higher)[:2]
    against = comparisons.of(best.result, then.result, metric, seeds)
    own, other = metric.value(against.mine), metric.value(against.other)
    words = {
        "better": f"{metric.word} {own}, clearly ahead of {then.label} ({other})",
        "same": f"{metric.word} {own}, the same as {then.label}",
    }.get(against.outcome, f"{metric.word} {own}, cannot be told from {then.label} ({other})")
    if against.outcome == "open" and len(seeds) < FEWEST_SEEDS:
        few = "one seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        words = f"{metric.word} {own}, then {then.label} ({other}); {few}: run three to tell"
    return best, [Tile("Best run", best.label, words)]


def _have(runs: Sequence[RunFolder], metric: Metric) -> int:
    return sum(bool(values(run.summary, metric)) for run in runs)


def _mean(run: RunFolder, metric: Metric, seeds: Sequence[int]) -> float:
    found = values(run.summary, metric)
    return math.fsum(found[seed] for seed in seeds) / len(seeds)


def _score(run: RunFolder) -> list[Tile]:
    if not run.score:
        return []
    each = run.metrics[f"{run.main}_{run.score}"]
    seeds = f"{len(run.seeds)} seeds" if len(run.seeds) > 1 else f"seed {run.seeds[0]}"
    words = f"{run.main} models, {seeds}" if run.main != "global" else f"global model, {seeds}"
    return [Tile(capitalize(score_name(run.score)), score_text(each["mean"], run.score), words)]


def _weakest(run: RunFolder) -> list[Tile]:
    found = sites.scores(run)
    if len(found) < 2:
        return []
    name = (max if run.score == "rmse" else min)(found, key=lambda each: found[each])
    mean = math.fsum(found.values()) / len(found)
    words = f"{score_name(run.score)} {score_text(found[name], run.score)}"
    words += f"; the mean of {len(found)} sites is {score_text(mean, run.score)}"
    return [Tile("Weakest site", name, words)]


def _boldness(run: RunFolder) -> list[Tile]:
    """Mean confidence against accuracy; of a regression, the coverage of 90 % intervals."""
    gaps = run.summary.get("overconfidence", {}).get(run.main, {})
    if gaps and math.isfinite(gaps["mean"]):
        way, _ = boldness.direction(gaps["per_seed"])
        ece = run.metrics.get(f"{run.main}_ece")
        more = f"confidence minus accuracy: {way[0].lower()}{way[1:]}"
        more += f"; ECE {ece['mean']:.3f}" if ece else ""
        return [Tile("Calibration", f"{100 * gaps['mean']:+.1f} points", more)]
    inside = intervals.coverage_at(run, 0.9)
    if inside is None:
        return []
    return [Tile("In 90 % intervals", f"{100 * inside:.1f} %", "of the targets; 90 % should be")]


def _review(run: RunFolder) -> list[Tile]:
    """How many predictions a person handles so that few of the others are wrong."""
    found = trust.review(run, TARGET)
    if found is None:
        return []
    label = f"To review at {100 * TARGET:g} % error"
    if not found.kept:
        return [Tile(label, "all", "no threshold keeps the error among the others that low")]
    given = found.points - found.kept
    if not given:
        return [Tile(label, "none", f"all {found.points:,} test predictions can be kept")]
    more = f"{given:,} of {found.points:,} test predictions, the least certain ones"
    return [Tile(label, f"{100 * given / found.points:.1f} %", more)]


def _spent(run: RunFolder) -> list[Tile]:
    cost, passes = run.summary["cost"], of_summary(run.summary)
    sent = (cost.get("bytes_up", 0) + cost.get("bytes_down", 0)) / 1e6
    seeds = "all seeds together" if len(run.seeds) > 1 else f"seed {run.seeds[0]}"
    least = "" if passes.complete else "at least "
    more = f"{least}{short(passes.total)} passes, {sent:.3g} MB sent and received; {seeds}"
    return [Tile("Spent on training", duration(cost["seconds"]), more)]
