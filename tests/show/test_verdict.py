"""The sentences under a comparison: on made-up runs, the right one whatever the numbers say."""

from __future__ import annotations

import math

import pytest
from made_runs import made

from corefed.show.contrast import ACCURACY, NLL, Comparisons, contrast
from corefed.show.verdict import sentences

# Differences of three seeds, in accuracy. Student's interval is mean +- 4.303 std / sqrt 3.
CLEAR = [0.020, 0.021, 0.022]  # 0.021 +- 0.0025
NOISE = [0.020, -0.010, 0.005]  # 0.005 +- 0.037
BASE = [0.90, 0.91, 0.92]
LOSS = [0.30, 0.31, 0.32]
ALONE = "pfedbayes against independent (every client alone, by SGD without a posterior)"


def up(values: list[float], by: list[float], sign: int = 1) -> list[float]:
    return [value + sign * each for value, each in zip(values, by, strict=True)]


def said(*runs: object) -> str:
    return " ".join(sentences(runs))  # type: ignore[arg-type]


def test_an_interval_by_hand() -> None:
    a, b = made("pfedbayes", up(BASE, CLEAR), LOSS), made("fedavg", BASE, LOSS)
    found = contrast(a, b, ACCURACY, [0, 1, 2])
    reach = 4.302652729911275 * 0.001 / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.021 - reach, 0.021 + reach))
    assert found.outcome == "better"
    assert found.clause == "accuracy is 2.10 points higher (95 % interval 1.85 to 2.35)"
    back = contrast(b, a, ACCURACY, [0, 1, 2])
    assert back.outcome == "worse"
    assert back.clause == "accuracy is 2.10 points lower (95 % interval 1.85 to 2.35)"


def test_claims_go_by_p_values_corrected_for_all_that_is_compared() -> None:
    """0.020 +- 0.012 has p = 0.020: enough alone, not beside two that say nothing."""
    by = [0.015, 0.020, 0.025]
    a, b = made("pfedbayes", up(BASE, by), up(LOSS, NOISE)), made("independent", BASE, LOSS)
    alone = contrast(a, b, ACCURACY, [0, 1, 2])
    assert alone.outcome == "better" and alone.p == pytest.approx(0.0202, abs=5e-5)
    asked = Comparisons()
    assert asked.of(a, b, ACCURACY, [0, 1, 2]) == alone._replace(corrected=alone.p)
    text = " ".join(sentences([a, b], asked))
    assert asked.tests == 2, "accuracy and NLL, however many sentences they are in"
    found = asked.of(a, b, ACCURACY, [0, 1, 2])
    assert found.corrected == pytest.approx(2 * alone.p) and found.outcome == "better"
    assert "pfedbayes beats independent in accuracy. " in text
    other = made("fedavg", up(BASE, NOISE, -1), up(LOSS, NOISE, -1))
    text = said(a, b, other)
    assert "Whether pfedbayes beats independent stays open: 3 seeds cannot tell it" in text
    assert (
        "accuracy cannot be told apart (93.00 % against 91.00 %, 95 % interval 0.76 to 3.24, "
        "corrected p 0.061)" in text
    )


def test_a_comparison_is_made_once_and_can_be_turned() -> None:
    a, b = made("pfedbayes", up(BASE, CLEAR), LOSS), made("fedavg", BASE, LOSS)
    asked = Comparisons()
    there, back = (asked.of(*pair, ACCURACY, [0, 1, 2]) for pair in ((a, b), (b, a)))
    assert asked.tests == 1 and there.p == back.p
    assert (there.outcome, back.outcome) == ("better", "worse")
    assert back == contrast(b, a, ACCURACY, [0, 1, 2])._replace(corrected=back.p)


def test_lower_is_better_for_a_loss() -> None:
    a, b = made("pfedbayes", BASE, up(LOSS, CLEAR, -1)), made("fedavg", BASE, LOSS)
    found = contrast(a, b, NLL, [0, 1, 2])
    assert found.outcome == "better"
    assert found.clause == "NLL is 0.021 lower (95 % interval 0.019 to 0.023)"


def test_the_best_and_the_next() -> None:
    """Accuracy and NLL need not agree, and a difference within the noise is not claimed."""
    text = said(
        made("pfedbayes", up(BASE, NOISE), up(LOSS, CLEAR)), made("independent", BASE, LOSS)
    )
    assert (
        "Lowest NLL: independent at 0.310, ahead of pfedbayes at 0.331 by 0.021 (95 % interval "
        "0.019 to 0.023)." in text
    )
    assert (
        "Highest accuracy: pfedbayes at 91.50 %, but it cannot be told from independent at "
        "91.00 % (difference: 95 % interval -3.23 to 4.23)." in text
    )
    assert "corrected for 2 comparisons by Holm's method, is at most 0.05." in text


@pytest.mark.parametrize(
    ("scores", "nll", "head"),
    [
        (up(BASE, CLEAR), up(LOSS, CLEAR, -1), f"pfedbayes beats independent. {ALONE}: "),
        (up(BASE, CLEAR, -1), up(LOSS, CLEAR), "pfedbayes does not beat independent. "),
        (up(BASE, NOISE), up(LOSS, CLEAR, -1), "pfedbayes beats independent in NLL. "),
        (up(BASE, CLEAR), up(LOSS, CLEAR), "pfedbayes beats independent in accuracy, not in NLL. "),
        (up(BASE, NOISE), up(LOSS, CLEAR), "pfedbayes does not beat independent. "),
        (up(BASE, NOISE), up(LOSS, NOISE),
         "Whether pfedbayes beats independent stays open: 3 seeds cannot tell it from chance. "),
        (BASE, LOSS, "pfedbayes does not beat independent. "),
    ],
)  # fmt: skip
def test_federated_against_alone(scores: list[float], nll: list[float], head: str) -> None:
    """Both are named: `independent` has no posterior either, so the gain is not federating's."""
    runs = made("pfedbayes", scores, nll), made("independent", BASE, LOSS)
    assert head in said(*runs) and head in said(*reversed(runs))
    assert "ederating" not in said(*runs)


def test_federating_is_judged_by_all_data() -> None:
    """A subset that is worse does not speak against federating, nor one that is better for it."""
    text = said(
        made("coreset-pfedbayes", up(BASE, CLEAR, -1), up(LOSS, CLEAR)),
        made("pfedbayes", up(BASE, CLEAR), up(LOSS, CLEAR, -1)),
        made("independent", BASE, LOSS),
    )
    assert f"pfedbayes beats independent. {ALONE}: " in text
    alone = said(made("pfedbayes", BASE, LOSS), made("fedavg", BASE, LOSS))
    assert "pfedbayes beats" not in alone and "every client alone" not in alone


def test_what_a_coreset_costs_and_saves() -> None:
    full = made("pfedbayes", BASE, LOSS, passes=3000.0, seconds=20.0)
    worse = made(
        "coreset-pfedbayes", up(BASE, CLEAR, -1), up(LOSS, NOISE), passes=1200.0, seconds=30.0
    )
    text = said(full, worse)
    assert (
        "On 20 % of the points, coreset-pfedbayes (20 %) against pfedbayes: accuracy is 2.10 "
        "points lower (95 % interval 1.85 to 2.35), NLL cannot be told apart (0.315 against "
        "0.310, 95 % interval -0.032 to 0.042); it takes 0.40 times the passes (selection "
        "included) and 1.50 times the seconds." in text
    )
    better = made("coreset-pfedbayes", up(BASE, CLEAR), up(LOSS, CLEAR, -1), passes=6000.0)
    text = said(full, better)
    assert "accuracy is 2.10 points higher" in text
    assert "2.00 times the passes (selection included) and 0.50 times the seconds" in text


def test_costs_that_are_not_known_are_not_compared() -> None:
    full = made("pfedbayes", BASE, LOSS, passes=3000.0)
    least = made("coreset-pfedbayes", BASE, LOSS, passes=600.0, complete=False, preset="paper")
    text = said(full, least)
    assert "it takes at least 0.20 times the passes (selection is not counted) and" in text
    unknown = made("pfedbayes", BASE, LOSS, complete=False)
    assert "times the passes" not in said(unknown, made("coreset-pfedbayes", BASE, LOSS))
    elsewhere = made("coreset-pfedbayes", BASE, LOSS)
    elsewhere.summary["environment"]["device"] = "another"
    assert "times the seconds" not in said(full, elsewhere)
    longer = made("coreset-pfedbayes", BASE, LOSS, rounds=20)
    text = said(full, longer)
    assert "the cost is not compared, since rounds differ" in text
    assert "The runs also differ in rounds, which may be why." in text


def test_the_cost_is_per_seed() -> None:
    full = made("pfedbayes", BASE, LOSS, passes=3000.0)
    one = made("coreset-pfedbayes", BASE[:1], LOSS[:1], passes=500.0)
    text = said(full, one)
    assert "it takes 0.50 times the passes (selection included)." in text
    assert "A comparison is over the seeds that its runs have in common." in text


@pytest.mark.parametrize(
    ("scores", "nll", "head"),
    [
        (up(BASE, CLEAR), up(LOSS, CLEAR, -1), "The coreset beats a random subset of its size"),
        (up(BASE, CLEAR, -1), up(LOSS, NOISE), "The coreset does not beat a random subset"),
        (up(BASE, NOISE), up(LOSS, NOISE), "Whether the coreset beats a random subset of its size"),
    ],
)
def test_a_random_subset(scores: list[float], nll: list[float], head: str) -> None:
    run = made("coreset-pfedbayes", scores, nll)
    text = said(run, made("random-subset", BASE, LOSS))
    assert f"{head}" in text and "(redrawn every 20 steps)" in text
    assert "(drawn once)" in said(run, made("random-subset", BASE, LOSS, redraw_every=0))
    for other in ({"fraction": 0.1}, {"base": "fedavg"}):  # that is another question
        assert "of its size" not in said(run, made("random-subset", BASE, LOSS, **other))


def test_a_coreset_is_compared_with_its_own_kind() -> None:
    """Of two runs on all data, with that of the same settings; what differs is said."""
    tuned = made("coreset-pfedbayes", BASE, LOSS, eta_1=0.003)
    plain = made("pfedbayes", BASE, LOSS, path="runs/plain")
    fast = made("pfedbayes", BASE, LOSS, path="runs/fast", eta_1=0.003)
    text = said(tuned, plain, fast)
    assert "coreset-pfedbayes (20 %) against pfedbayes (eta_1 0.003): " in text
    assert "They also differ" not in text
    assert "against pfedbayes: " in said(tuned, plain)
    assert "They also differ in eta_1." in said(tuned, plain)


def test_one_seed_claims_nothing() -> None:
    text = said(
        made("pfedbayes", [0.97], [0.1]),
        made("independent", [0.5], [0.9]),
        made("coreset-pfedbayes", [0.96], [0.2]),
        made("random-subset", [0.9], [0.3]),
    )
    one = "one seed cannot tell a difference from chance: run three"
    assert f"Lowest NLL: pfedbayes at 0.100, then coreset-pfedbayes (20 %) at 0.200; {one}." in text
    assert f"Whether pfedbayes beats independent stays open: {one}. {ALONE}: " in text
    assert "accuracy is 97.00 % against 50.00 %, NLL is 0.100 against 0.900." in text
    for claim in ("ahead", "interval", "pfedbayes beats independent.",
                  "beats a random subset of its size (redrawn every 20 steps)."):  # fmt: skip
        assert claim not in text


def test_two_seeds_are_too_few() -> None:
    text = said(made("pfedbayes", [0.97, 0.98], [0.1, 0.1]), made("fedavg", [0.5] * 2, [1.0] * 2))
    assert (
        "then fedavg at 1.000; 2 seeds are too few to tell a difference from chance: run three."
        in text
    )


def test_ties() -> None:
    text = said(made("pfedbayes", BASE, LOSS), made("independent", BASE, LOSS))
    assert "Lowest NLL: pfedbayes and independent, both at 0.310." in text
    assert "accuracy is the same (91.00 %), NLL is the same (0.310)." in text
    same = said(made("pfedbayes", up(BASE, [0.01] * 3), LOSS), made("independent", BASE, LOSS))
    assert "the difference is the same in all 3 seeds, so it has no interval" in same


def test_a_small_difference_is_not_shown_as_none() -> None:
    tiny = [0.000020, 0.000021, 0.000022]
    text = said(made("pfedbayes", BASE, up(LOSS, tiny)), made("fedavg", BASE, LOSS))
    assert "by 2e-05 (95 % interval 2e-05 to 2e-05)" in text


def test_regression() -> None:
    text = said(
        made("pfedbayes", up(BASE, CLEAR, -1), up(LOSS, CLEAR, -1), score="rmse"),
        made("independent", BASE, LOSS, score="rmse"),
    )
    assert "Lowest RMSE: pfedbayes at 0.889, ahead of independent at 0.910 by 0.021" in text
    assert f"pfedbayes beats independent. {ALONE}: RMSE is 0.021 lower" in text
    assert "accuracy" not in text and "ECE" not in text


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data", "mnist", "data differs (digits, mnist)"),
        ("partition", "iid", "partition differs (shards-medium, iid)"),
        ("classes", ["0", "1"], "classes differs (none, 0,1)"),
    ],
)
def test_different_data_get_no_verdict(key: str, value: object, words: str) -> None:
    other = made("independent", BASE, LOSS, gaps=CLEAR, **{key: value})
    assert sentences([made("pfedbayes", BASE, LOSS), other]) == [
        f"These runs do not have the same test points: {words}. Their scores cannot be compared."
    ]


def test_settings_that_may_be_why() -> None:
    """Those of runs are named once; a device leaves scores as they are."""
    runs = [
        made("pfedbayes", BASE, LOSS, hidden=[100], device="cpu"),
        made("independent", BASE, LOSS, hidden=[50], device="cuda"),
    ]
    assert "The runs also differ in hidden, which may be why." in said(*runs)
    assert "which may be why" not in said(runs[0], made("independent", BASE, LOSS, device="cuda"))


def test_other_seeds() -> None:
    """Runs are paired over seeds that both have; without any, none is the best."""
    text = said(
        made("pfedbayes", up(BASE, CLEAR), LOSS), made("fedavg", BASE, LOSS, seeds=[7, 8, 9])
    )
    assert "no seed in common" in text and "Highest" not in text
    mixed = said(
        made("pfedbayes", [0.5, *up(BASE, CLEAR)], [0.9, *up(LOSS, CLEAR, -1)]),
        made("independent", BASE, LOSS, seeds=[1, 2, 3]),
    )
    assert "pfedbayes beats independent. " in mixed and "accuracy is 2.10 points higher" in mixed


def test_models_of_different_kinds_are_named() -> None:
    text = said(made("pfedbayes", BASE, LOSS), made("fedavg", BASE, LOSS, model="global"))
    assert "pfedbayes [personal model]" in text and "fedavg [global model]" in text


def test_runs_without_scores_are_left_out() -> None:
    lost = made("independent", [0.9, 0.9, 0.9], [math.nan, 1.0, 1.0])
    assert sentences([lost]) == ["independent has no finite scores."]
    text = said(lost, made("pfedbayes", BASE, LOSS), made("fedavg", BASE, LOSS))
    assert "independent has no finite scores." in text and "Lowest NLL: pfedbayes" in text


@pytest.mark.parametrize(
    ("gaps", "words"),
    [
        ([0.18, 0.19, 0.20], "Too bold on average: pfedbayes by 19.0 points (ECE 0.100)."),
        ([-0.18, -0.19, -0.2], "Too cautious on average: pfedbayes by 19.0 points (ECE 0.100)."),
        ([0.02, -0.01, 0.0],
         "Neither clearly too bold nor too cautious: pfedbayes +0.3 points (ECE 0.100)."),
        ([0.0, 0.0, 0.0],
         "Neither clearly too bold nor too cautious: pfedbayes +0.0 points (ECE 0.100)."),
        (None, "Too bold or too cautious is not recorded: pfedbayes (ECE 0.100)."),
        ([math.nan] * 3, "Too bold or too cautious is not recorded: pfedbayes (ECE 0.100)."),
    ],
)  # fmt: skip
def test_probabilities(gaps: list[float] | None, words: str) -> None:
    assert sentences([made("pfedbayes", BASE, LOSS, gaps=gaps)]) == [words]


def test_probabilities_of_one_seed() -> None:
    (text,) = sentences([made("pfedbayes", [0.9], [0.3], gaps=[-0.187])])
    assert text == (
        "Too cautious on average in one seed, where a small gap may be chance: pfedbayes by 18.7 "
        "points (ECE 0.100)."
    )


def test_many_coresets() -> None:
    runs = [made("coreset-pfedbayes", BASE, LOSS, path=f"runs/{z}", zeta=z) for z in range(5)]
    text = said(made("pfedbayes", BASE, LOSS), *runs)
    assert text.count("On 20 % of the points") == 3
    assert "Of 5 coresets only the first 3 are described." in text
