"""Is one run better than another? Differences from the baseline by score, NLL and AUROC.

All are of the predictions that runs keep, and have one rule for their intervals (`show/kept.py`):
it allows for points of the same client, and of the same seed where there are three or more. With
fewer seeds there is no p-value: an interval over clients then compares these trained models, not
training with another seed. P-values of all comparisons on a page, those of its sentences included,
are corrected together by Holm's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.show import kept, verdict
from corefed.show.contrast import (
    ACCURACY,
    AUROC,
    NLL,
    RMSE,
    Comparisons,
    Contrast,
    interval,
    values,
)
from corefed.show.page.content import Missing
from corefed.show.page.gather import RunFolder
from corefed.show.pairs import FEWEST_SEEDS, differs


def comparisons(runs: Sequence[RunFolder], baseline: RunFolder) -> Comparisons:
    """All that a page compares."""
    found = Comparisons()
    for run in runs:
        if run is not baseline:
            compare(run, baseline, found)
    verdict.sentences([run.result for run in runs], found)
    return found


def compare(
    run: RunFolder, baseline: RunFolder, comparisons: Comparisons
) -> list[Contrast] | Missing:
    """The run minus the baseline, by score first; metrics that both runs have."""
    differing = differs(run.summary["config"], baseline.summary["config"])
    if differing:
        return Missing(f"not comparable: {differing} differs")
    if not run.score or run.score != baseline.score:
        return Missing("not comparable: no score that both have")
    seeds = [seed for seed in run.seeds if seed in baseline.seeds]
    if not seeds:
        return Missing("not comparable: no seed that both have")
    found = []
    for metric in (ACCURACY if run.score == "accuracy" else RMSE, NLL, AUROC):
        mine, theirs = values(run.summary, metric), values(baseline.summary, metric)
        if not mine or not theirs:
            continue
        if len(seeds) >= FEWEST_SEEDS:
            found.append(comparisons.of(run.result, baseline.result, metric, seeds))
            continue
        a, b = ([each[seed] for seed in seeds] for each in (mine, theirs))
        means = math.fsum(a) / len(a), math.fsum(b) / len(b)
        whole = (run.path, run.summary), (baseline.path, baseline.summary)
        spread = kept.spread(*whole, metric.key, seeds)
        if isinstance(spread, str):
            found.append(Contrast(metric, *means, math.nan, math.nan, len(seeds)))
        else:
            found.append(interval(metric, *means, spread, len(seeds)))
    return found if found else Missing("not comparable: no score that is finite")
