"""`corefed bench submodular`: time and memory to choose half of the points, by objective.

Features are absolute values of normal draws, 512 per point: not negative, like pooled activations.
Each row is measured in a subprocess, so that its peak memory is its own. At n = 2000 submodlib, if
installed, makes the same choice in the same process. Without it, the ratio is to `naive`, which
recomputes f for every candidate, at a size that it can manage.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from corefed.selectors.similarity import Metric
from corefed.selectors.submodular import Objective, greedy
from corefed.training.loop import peak_memory_mb
from corefed_studies.bench import isolated

OBJECTIVES: tuple[Objective, ...] = ("logdet", "dispsum", "dispmin")
SIZES = {"paper": (2_000, 10_000), "quick": (200, 400)}
NAIVE_SIZE = 100
FEATURES = 512
REGULARISER = 1.0
REPEATS = 3


def submodular(device: torch.device, scale: str) -> list[dict[str, Any]]:
    """One row per objective and size, each from a subprocess."""
    compared, alone = SIZES[scale]
    if find_spec("submodlib") is None:
        print(
            f"submodlib is not installed (pip install submodlib-py): ratios are to a naive greedy "
            f"at n = {NAIVE_SIZE}.",
            file=sys.stderr,
        )
        jobs = [(NAIVE_SIZE, "naive"), (compared, ""), (alone, "")]
    else:
        jobs = [(compared, "submodlib"), (alone, "")]
    rows = []
    for n, other in jobs:
        for objective in OBJECTIVES:
            rows.append(isolated.measure(__name__, objective, str(n), other, device.type))
    return rows


def one(objective: Objective, n: int, other: str, device: str) -> dict[str, Any]:
    x = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(0)).abs().to(device)
    k = n // 2
    greedy(x[:20], 10, objective)  # warm up
    before = peak_memory_mb(device)
    timed = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        picks = greedy(x, k, objective, regulariser=REGULARISER).chosen.tolist()
        timed.append(time.perf_counter() - begun)
    seconds = statistics.median(timed)
    row: dict[str, Any] = {
        "objective": objective,
        "n": n,
        "k": k,
        "s": seconds,
        "peak MB": peak_memory_mb(device),
        "before": before,
        "compared with": "-",
        "its s": "-",
        "ratio": "-",
        "same picks": "-",
        "in order": "-",
    }
    if other:
        choose = by_submodlib if other == "submodlib" else naive
        choose(x[:3].cpu(), 2, objective)  # imports take seconds
        begun = time.perf_counter()
        theirs = choose(x.cpu(), k, objective)
        its = time.perf_counter() - begun
        row |= {
            "compared with": f"submodlib {version('submodlib-py')}" if other != "naive" else other,
            "its s": its,
            "ratio": its / seconds,
            "same picks": len(set(picks) & set(theirs)),
            "in order": sum(map(int.__eq__, picks, theirs)),
        }
    return row


def by_submodlib(
    x: Tensor,
    k: int,
    objective: Objective,
    *,
    metric: Metric = "cosine",
    regulariser: float = REGULARISER,
) -> list[int]:
    """What submodlib picks, in order; k must be below n."""
    submodlib = import_module("submodlib")
    data = {"n": len(x), "mode": "dense", "data": x.flatten(1).numpy(), "metric": metric}
    if objective == "logdet":
        function = submodlib.LogDeterminantFunction(lambdaVal=regulariser, **data)
    elif objective == "dispsum":
        function = submodlib.DisparitySumFunction(**data)
    else:
        function = submodlib.DisparityMinFunction(**data)
    return [i for i, _ in function.maximize(budget=k, show_progress=False)]


def naive(
    x: Tensor,
    k: int,
    objective: Objective,
    *,
    metric: Metric = "cosine",
    regulariser: float = REGULARISER,
) -> list[int]:
    """The slow, obvious twin of `greedy`: every f(A + j) from its definition, for every pick."""
    S = similarities(x, metric)
    chosen: list[int] = []
    while len(chosen) < k:
        left = [j for j in range(len(x)) if j not in chosen]
        values = torch.stack([value(S, [*chosen, j], objective, regulariser) for j in left])
        if objective == "dispmin" and len(chosen) == 1:
            values = values.clamp_max(1.0)
        ties = values >= values.max() - 1e-11 * values.max().abs().clamp_min(1.0)
        chosen.append(left[int(ties.nonzero()[-1])])
    return chosen


def similarities(x: Tensor, metric: Metric) -> Tensor:
    """All of S [n, n]."""
    x = x.flatten(1).double()
    if metric == "euclidean":
        return torch.exp(-(x.unsqueeze(1) - x).norm(dim=-1) / x.shape[1])
    unit = torch.nn.functional.normalize(x, eps=torch.finfo(x.dtype).tiny)
    S = unit @ unit.T
    return S.diagonal_scatter((x != 0).any(-1).to(S.dtype))  # exactly 1


def value(S: Tensor, chosen: list[int], objective: Objective, regulariser: float) -> Tensor:
    """f(A) by its definition; of the sum and the minimum over no pair, 0."""
    A = torch.tensor(chosen)
    S = S[A.unsqueeze(-1), A]
    if objective == "logdet":
        return torch.logdet(S + regulariser * torch.eye(len(A), dtype=S.dtype))
    pairs = torch.tril_indices(len(A), len(A), -1)
    distances = 1 - S[pairs[0], pairs[1]]
    if objective == "dispsum":
        return distances.sum()
    return distances.min() if len(distances) else distances.sum()


if __name__ == "__main__":
    name, size, other_name, where = sys.argv[1:]
    wanted = next(known for known in OBJECTIVES if known == name)
    print(json.dumps(one(wanted, int(size), other_name, where)))
