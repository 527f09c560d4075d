"""Settings as they are declared: ranges, units, groups, and what is read from them."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import pytest

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.settings import (
    ABLATION,
    Finite,
    NotNegative,
    NotNegativeInt,
    Part,
    Positive,
    PositiveInt,
    Probability,
    Range,
    Unit,
    at_least,
)
from corefed.methods import coreset_pfedbayes
from corefed.settings.fields import Setting, check, from_flat, list_settings, to_flat


@dataclass(frozen=True)
class Wheel:
    """A group."""

    spokes: Annotated[PositiveInt, Unit("pieces"), ABLATION] = 32
    """How many
    there are."""
    widths: Annotated[tuple[float, ...], Range(lambda v: len(v) > 0, "one or more")] = (1.0, 2.0)


@dataclass(frozen=True)
class Bicycle:
    """Settings."""

    name: str
    """What it is called."""
    colour: Annotated[Literal["red", "blue"], ABLATION] = "red"
    """Its colour."""
    bell: bool = True
    wheel: Wheel = field(default_factory=lambda: Wheel(spokes=36))
    """A group is explained by the docstring of its class."""
    load: Annotated[NotNegative, Unit("kg")] = 0.0
    """What it carries."""


@dataclass(frozen=True)
class Tandem(Bicycle):
    """Settings that inherit others."""

    riders: Annotated[int, at_least(2)] = 2
    """Who rides it."""


BELOW_ONE = Annotated[Positive, Range(lambda v: v < 1, "below 1")]
"""A range within a range."""


def named(cls: type) -> dict[str, Setting]:
    return {each.name: each for each in list_settings(cls)}


def test_a_field_says_everything_about_its_setting() -> None:
    spokes = named(Bicycle)["spokes"]
    assert (spokes.group, spokes.kind, spokes.default) == ("wheel", int, 36)
    assert (spokes.unit, spokes.ablation, spokes.owner) == ("pieces", True, Wheel)
    assert spokes.range is not None and spokes.range_words == "at least 1, in pieces"
    assert spokes.help == "How many there are."
    words = {n: (s.type_words, s.range_words, s.default_words) for n, s in named(Bicycle).items()}
    assert words == {
        "name": ("str", "", ""),
        "colour": ("red | blue", "", "red"),
        "bell": ("bool", "", "true"),
        "spokes": ("int", "at least 1, in pieces", "36"),
        "widths": ("float, ...", "one or more", "1.0,2.0"),
        "load": ("float", "0 or more, in kg", "0.0"),
    }
    assert named(Bicycle)["name"].default is MISSING
    assert named(Bicycle)["colour"].ablation and named(Bicycle)["colour"].choices == ("red", "blue")
    assert named(Bicycle)["bell"].help == ""


def test_inherited_settings_come_first_and_keep_their_texts() -> None:
    assert list(named(Tandem)) == [*named(Bicycle), "riders"]
    assert named(Tandem)["colour"].help == "Its colour."


def test_flat_and_back() -> None:
    values = {"name": "a", "spokes": 20, "riders": 3}
    tandem = from_flat(Tandem, values)
    assert tandem == Tandem("a", wheel=Wheel(20), riders=3)
    flat = to_flat(tandem)
    assert list(flat) == list(named(Tandem))
    assert flat["spokes"] == 20 and flat["widths"] == (1.0, 2.0)
    assert from_flat(Tandem, flat) == tandem
    assert from_flat(Bicycle, {"name": "a"}).wheel.spokes == 36


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        (Positive, [1e-9, 5.0], [0.0, -1.0], "above 0"),
        (NotNegative, [0.0, 5.0], [-1e-9], "0 or more"),
        (Part, [1e-9, 1.0], [0.0, 1.1], "above 0 and at most 1"),
        (Probability, [0.5], [0.0, 1.0], "between 0 and 1"),
        (Finite, [-3.0], [], "a finite number"),
        (float, [-3.0], [], "a finite number"),
        (PositiveInt, [1, 7], [0, -1], "at least 1"),
        (NotNegativeInt, [0, 7], [-1], "0 or more"),
        (Annotated[float, at_least(1e-6)], [1e-6], [9e-7], "at least 1e-06"),
        (Annotated[Positive, Unit("s"), ABLATION], [1.0], [0.0], "above 0"),
        (BELOW_ONE, [0.5], [0.0, 1.0], "above 0 and below 1"),
        (tuple[float, ...], [(1.0, -2.0), ()], [], "a finite number"),
    ],
)
def test_ranges(kind: Any, good: list[Any], bad: list[Any], words: str) -> None:
    Config = make_dataclass("Config", [("x", kind)], frozen=True)
    for value in good:
        check(Config(value))
    for value in bad:
        with pytest.raises(UserError) as caught:
            check(Config(value), "a.toml")
        assert str(caught.value) == f"x (a.toml) is {value}; it must be {words}."
    if isinstance(good[0], float | tuple):
        for value in (math.nan, math.inf, -math.inf):
            with pytest.raises(UserError, match=r"^x is -?(nan|inf); it must be a finite number"):
                check(Config((1.0, value) if isinstance(good[0], tuple) else value))


def test_a_value_of_several_parts_is_shown_as_it_is_written() -> None:
    with pytest.raises(UserError, match=r"^widths is empty; it must be one or more\.$"):
        check(Wheel(widths=()))


@dataclass(frozen=True)
class Other:
    """A group with a name of the first."""

    spokes: int = 1


def test_names_are_unique_over_groups() -> None:
    @dataclass(frozen=True)
    class Config:
        front: Wheel = field(default_factory=Wheel)
        back: Other = field(default_factory=Other)

    with pytest.raises(TypeError, match=r"Config\.front\.spokes and .*Config\.back\.spokes have"):
        list_settings(Config)


def test_a_group_is_flat_and_has_a_default() -> None:
    @dataclass(frozen=True)
    class Bare:
        wheel: Wheel

    @dataclass(frozen=True)
    class Deep:
        bicycle: Bicycle = field(default_factory=lambda: Bicycle("a"))

    for cls in (Bare, Deep):
        with pytest.raises(TypeError, match="a group has a default and no group in it"):
            list_settings(cls)


def test_names_of_what_can_be_registered_are_choices() -> None:
    """Asked for when they are shown, so a selector that was registered later is among them."""
    known = {each.name: each for each in list_settings(coreset_pfedbayes.Config)}
    selector = known["selector"]
    assert selector.choices == tuple(selectors.SELECTORS)
    assert selector.to_json()["type"] == "choice"
