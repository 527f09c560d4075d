"""What a search tries: the method's own space or the user's, and candidates spread over it."""

from __future__ import annotations

import math
from typing import Any

import pytest

from corefed import UserError
from corefed.methods.registry import METHODS
from corefed.settings import config, space
from corefed.settings.config import resolve
from corefed.settings.fields import list_settings, to_flat
from corefed.settings.run import Experiment
from corefed.settings.space import Axis


def experiment(method: str = "pfedbayes", **flags: Any) -> Experiment:
    return resolve(flags={"method": method, **flags})


def named(axes: list[Axis]) -> dict[str, Axis]:
    return {axis.name: axis for axis in axes}


# The method's own space


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_a_space_around_its_defaults(method: str) -> None:
    given = experiment(method)
    axes = space.axes(given)
    assert 1 <= len(axes) <= 3
    assert space.are_defaults(given, axes)
    for axis in axes:
        value = space.searched(given, [axis])[axis.name]
        ends = axis.values or (axis.low, axis.high)
        assert min(ends) < value < max(ends)
    found = space.candidates(given, axes, 16)
    assert len(found) == 16
    assert found[0] is given
    for each in found:
        config.check(each)  # pfedme refuses some combinations: they are not among them


def test_the_space_moves_with_the_settings() -> None:
    one, other = (named(space.axes(experiment(zeta=zeta))) for zeta in (1.0, 10.0))
    assert other["zeta"].low == pytest.approx(10 * one["zeta"].low)
    assert not space.are_defaults(experiment(zeta=10.0), list(one.values()))
    assert "zeta" not in named(space.axes(experiment(zeta=0.0)))  # nothing is relative to 0
    assert named(space.axes(experiment(initial_rho=0.0)))["initial_rho"].high == 1.0


def test_idle_settings_are_not_searched() -> None:
    assert "learning_rate" not in named(space.axes(experiment("random-subset")))
    other = space.axes(experiment("random-subset", base="fedavg"))
    assert set(named(other)) == {"learning_rate"}


def test_a_follower_keeps_its_proportion() -> None:
    given = experiment(eta_1=0.01, eta_2=0.002)
    axes = space.axes(given)
    assert named(axes)["eta_1"].followers == ("eta_2",)
    for each in space.candidates(given, axes, 16):
        flat = to_flat(each.settings)
        assert flat["eta_2"] / flat["eta_1"] == pytest.approx(0.2, rel=0.01)  # three digits each
    both = space.axes(given, ["eta_1=0.001..0.1", "eta_2=0.001..0.1"])
    assert [axis.followers for axis in both] == [(), ()]


# The user's space


def test_ranges_and_lists() -> None:
    given = experiment()
    texts = ["eta_1=0.0003..0.03", "zeta=0.01, 0.1,1", "initial_rho=-5..-1", "local_steps=5..50"]
    axes = named(space.axes(given, [*texts, "optimizer=adam,sgd"]))
    assert (axes["eta_1"].low, axes["eta_1"].high, axes["eta_1"].log) == (0.0003, 0.03, True)
    assert axes["zeta"].values == (0.01, 0.1, 1.0)
    assert not axes["initial_rho"].log
    assert axes["local_steps"].whole
    assert axes["optimizer"].values == ("adam", "sgd")
    for each in space.candidates(given, list(axes.values()), 20)[1:]:
        flat = {**to_flat(each.run), **to_flat(each.settings)}
        assert 0.0003 <= flat["eta_1"] <= 0.03
        assert flat["zeta"] in (0.01, 0.1, 1.0)
        assert isinstance(flat["local_steps"], int) and 5 <= flat["local_steps"] <= 50
        assert flat["optimizer"] in ("adam", "sgd")


def test_python_has_tuples_lists_and_texts() -> None:
    asked = {"eta_1": (0.001, 0.1), "zeta": [0.1, 1], "initial_rho": "-5..-1"}
    axes = named(space.axes(experiment(), asked))
    assert (axes["eta_1"].low, axes["eta_1"].high) == (0.001, 0.1)
    assert axes["zeta"].values == (0.1, 1.0)
    assert (axes["initial_rho"].low, axes["initial_rho"].high) == (-5.0, -1.0)


def test_a_name_alone_takes_the_methods_range() -> None:
    given = experiment()
    assert space.axes(given, ["zeta"]) == [named(space.axes(given))["zeta"]]


def test_names_with_their_group() -> None:
    given = experiment("coreset-pfedbayes")
    assert space.axes(given, ["selection.draws=16,32"])[0].name == "draws"


WRONG = [
    ("eta=0.1..1", "There is no setting 'eta'"),
    ("learning_rate=0.1..1", "is a setting of random-subset, fedavg"),
    ("rounds=10,20", "rounds .* cannot be searched: a search changes settings of the method"),
    ("preset=default,paper", "preset .* stands for several settings"),
    ("eta_1=0.1..0.01", "--space eta_1=0.1..0.01 is an empty range"),
    ("eta_1=0.1..0.1", "is an empty range"),
    ("eta_1=", "has no values; write eta_1=LOW..HIGH or eta_1=A,B,C"),
    ("beta", "has no range of its own; write beta=LOW..HIGH"),
    ("eta_1=-1..1", r"eta_1 .* is -1.0; it must be above 0"),
    ("beta=0.5,2", "beta .* is 2.0; it must be above 0 and at most 1"),
    ("zeta=0..inf", "must be a finite number"),
    ("zeta=low..high", "must be a number, not 'low'"),
    ("optimizer=adam,adamw", "it must be 'adam' or 'sgd'"),
    ("optimizer=adam..sgd", "is a range, but optimizer is no number; write optimizer=A,B,C"),
    ("local_steps=0.5..3", "must be a whole number"),
]


@pytest.mark.parametrize(("text", "words"), WRONG)
def test_wrong_spaces(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        space.axes(experiment(), [text])


def test_other_mistakes() -> None:
    with pytest.raises(UserError, match="names zeta for a second time"):
        space.axes(experiment(), ["zeta=0.1..1", "zeta=1,2"])
    coreset = experiment("coreset-pfedbayes")
    with pytest.raises(UserError, match=r"widths .* is a list of numbers; it cannot be searched"):
        space.axes(coreset, ["widths=1"])
    with pytest.raises(UserError, match="cannot be 'herdin'; did you mean 'herding'"):
        space.axes(coreset, ["selector=calibrated,herdin"])
    same = space.axes(experiment(), {"zeta": [1.0]})
    with pytest.raises(UserError, match="no settings but those that the run has already"):
        space.candidates(experiment(), same, 4)
    subset = experiment("random-subset")
    with pytest.raises(UserError, match="No settings of the space are allowed: learning_rate is"):
        space.candidates(subset, space.axes(subset, ["learning_rate=0.1..1"]), 4)


# Candidates


def test_candidates_are_spread_over_the_range() -> None:
    """Of a Sobol sequence every half of an axis has about half of the points."""
    given = experiment()
    axes = space.axes(given, ["eta_1=0.001..0.1", "zeta=0.01..1"])
    found = [to_flat(each.settings) for each in space.candidates(given, axes, 33)[1:]]
    for name, middle in (("eta_1", 0.01), ("zeta", 0.1)):
        below = sum(each[name] < middle for each in found)
        assert abs(below - 16) <= 2
    assert len({each["eta_1"] for each in found}) > 28
    assert all(each["eta_1"] == float(f"{each['eta_1']:.3g}") for each in found)


def test_candidates_follow_the_seed() -> None:
    one, same, other = (
        [space.searched(each, axes) for each in space.candidates(given, axes, 8)]
        for given in (experiment(), experiment(), experiment(seeds="1"))
        for axes in [space.axes(given)]
    )
    assert one == same != other


def test_lists_alone_are_combined_whole_where_they_are_few() -> None:
    given = experiment(zeta=1.0, monte_carlo=1)
    axes = space.axes(given, {"zeta": [0.1, 1.0, 10.0], "monte_carlo": [1, 2]})
    found = [
        tuple(space.searched(each, axes).values()) for each in space.candidates(given, axes, 16)
    ]
    assert found[0] == (1.0, 1)
    assert sorted(found) == [(z, m) for z in (0.1, 1.0, 10.0) for m in (1, 2)]
    few = [tuple(space.searched(each, axes).values()) for each in space.candidates(given, axes, 4)]
    assert len(set(few)) == 4


def test_axes_survive_json() -> None:
    axes = space.axes(experiment(), ["eta_1", "optimizer=adam,sgd", "local_steps=5..50"])
    assert [Axis.from_json(axis.to_json()) for axis in axes] == axes


def test_what_is_searched_can_be_stacked() -> None:
    """All of it but bnfed's sigma: its few values make a few groups."""
    alone = {
        axis.name
        for method in METHODS
        for axis in space.axes(experiment(method))
        for setting in list_settings(type(experiment(method).settings))
        if setting.name == axis.name and not setting.per_run
    }
    assert alone == {"sigma"}
    assert math.prod(len(a.values) or 1 for a in space.axes(experiment("bnfed"))) == 3
