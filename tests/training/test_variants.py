"""Settings by round, and runs with different settings as one Config."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from corefed.methods import coreset_pfedbayes, fedavg, pfedbayes, pfedme
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.settings.config import resolve
from corefed.settings.run import Run
from corefed.training import variants
from corefed.training.rounds import train

TEN = Run(rounds=10)


def factors(run: Run) -> list[float]:
    return [variants.factor(run, t) for t in range(run.rounds)]


def test_a_constant_schedule_leaves_rates_alone() -> None:
    assert factors(TEN) == [1.0] * 10
    assert variants.at_round(fedavg.Config(), TEN, 3) == fedavg.Config()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_rates_fall_from_one_and_the_last_round_still_learns(schedule: str) -> None:
    found = factors(replace(TEN, schedule=schedule))
    assert found[0] == 1.0 and found == sorted(found, reverse=True)
    assert 0 < found[-1] < 0.15


def test_rates_rise_in_the_warm_up() -> None:
    found = factors(replace(TEN, warmup=3))
    assert found == [0.25, 0.5, 0.75, *[1.0] * 7]


def test_rounds_beyond_the_plan_are_like_its_last() -> None:
    longer = replace(TEN, rounds=14, planned_rounds=10, schedule="linear")
    assert factors(longer)[9:] == [pytest.approx(0.1)] * 5
    assert factors(longer)[:10] == factors(replace(TEN, schedule="linear"))


def test_only_learning_rates_are_scaled() -> None:
    config = pfedme.Config()
    half = variants.at_round(config, replace(TEN, schedule="linear"), 5)
    assert half == replace(
        config, personal_rate=config.personal_rate / 2, learning_rate=config.learning_rate / 2
    )


def test_zeta_rises_to_its_value() -> None:
    config = pfedbayes.Config(zeta=4.0, anneal=0.5)
    found = [variants.at_round(config, TEN, t).zeta for t in range(10)]  # type: ignore[attr-defined]
    assert found == [pytest.approx(4 * min(1, (t + 1) / 5)) for t in range(10)]
    none = pfedbayes.Config(zeta=4.0, anneal=0.0)
    assert variants.at_round(none, TEN, 0) == none


def test_a_resumed_run_may_be_longer_but_keeps_its_plan() -> None:
    first = resolve(flags={"rounds": 3})
    longer = resolve(flags={"rounds": 9, "planned_rounds": 3})
    assert first.run.planned_rounds == 3
    assert [variants.at_round(longer.settings, longer.run, t) for t in range(3)] == [
        variants.at_round(first.settings, first.run, t) for t in range(3)
    ]


def test_numbers_in_which_runs_differ_become_a_tensor_per_client() -> None:
    many = [pfedbayes.Config(zeta=1.0), pfedbayes.Config(zeta=3.0)]
    found = variants.stacked(many, [0, 0, 1], torch.device("cpu"))
    assert found.zeta.tolist() == [1.0, 1.0, 3.0]
    assert found.eta_1 == many[0].eta_1
    assert variants.stacked(many, [1, 1], torch.device("cpu")).zeta == 3.0


def test_what_cannot_differ_is_refused() -> None:
    many = [pfedbayes.Config(monte_carlo=1), pfedbayes.Config(monte_carlo=2)]
    with pytest.raises(ValueError, match="different monte_carlo cannot be trained together"):
        variants.stacked(many, [0, 1], torch.device("cpu"))


def test_methods_are_built_once_where_nothing_changes() -> None:
    model = mlp((3, 2), Categorical(2))
    here = torch.device("cpu")
    at = variants.methods(replace(TEN, method="fedavg"), [fedavg.Config()], model, here)
    assert at(0, [0]) is at(7, [0, 0])
    bayes = variants.methods(replace(TEN, method="pfedbayes"), [pfedbayes.Config()], model, here)
    assert bayes(0, [0]) is bayes(0, [0]) and bayes(0, [0]) is not bayes(1, [0])


def test_groups_of_settings_survive() -> None:
    config = coreset_pfedbayes.Config(anneal=1.0)
    found = variants.at_round(config, replace(TEN, schedule="cosine"), 4)
    assert found.selection == config.selection  # type: ignore[attr-defined]


def test_annealing_changes_a_run_and_falls_back_to_the_plain_one() -> None:
    """With anneal at most 1 / rounds, zeta has its value from the first round."""
    small = {"method": "pfedbayes", "clients": 2, "rounds": 2, "local_steps": 2, "hidden": (4,),
             "evaluate_draws": 2, "device": "cpu"}  # fmt: skip
    nll = {
        anneal: train(resolve(flags={**small, "anneal": anneal})).summary["metrics"]["personal_nll"]
        for anneal in (0.0, 0.5, 1.0)
    }
    assert nll[0.0] == nll[0.5] != nll[1.0]
