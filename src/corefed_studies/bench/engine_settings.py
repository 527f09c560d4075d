"""How much `corefed bench engine` measures, by scale and device."""

from __future__ import annotations

from typing import NamedTuple

from corefed_studies.bench.timed import WIDTHS


class EngineSetting(NamedTuple):
    """Sizes at a scale on a type of device."""

    widths: tuple[int, ...] = WIDTHS
    clients: tuple[int, ...] = (10, 100, 1000)
    few: int = 100  # clients up to which each has `points`
    points: int = 1000
    points_of_many: int = 200
    compiled: bool = True  # whether to compile on a CPU
    repeats: int = 5
    coreset_clients: tuple[int, ...] = (10, 100)
    coreset_rounds: int = 10
    stacked_clients: int = 10
    run_rounds: int = 100
    run_evaluate_every: int = 10
    saved_clients: int = 1000
    saved_rounds: int = 200
    many_clients: int = 10_000
    many_points: int = 20
    many_cohort: int = 100
    many_rounds: int = 5
    linear_clients: int = 100_000


SETTINGS = {
    ("paper", "cuda"): EngineSetting(),
    ("paper", "cpu"): EngineSetting(
        repeats=3, coreset_clients=(10,), saved_clients=200, saved_rounds=15
    ),
}
QUICK = EngineSetting(
    widths=(16, 8, 3), clients=(3, 12), few=3, points=30, points_of_many=20, compiled=False,
    repeats=1, coreset_clients=(3,), coreset_rounds=2, stacked_clients=2, run_rounds=4,
    run_evaluate_every=2, saved_clients=12, saved_rounds=3, many_clients=40, many_points=5,
    many_cohort=4, many_rounds=2, linear_clients=30,
)  # fmt: skip
"""Seconds on two cores: shows that everything works."""


def setting_for(scale: str, device: str) -> EngineSetting:
    return QUICK if scale == "quick" else SETTINGS[scale, device]
