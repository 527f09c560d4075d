"""What a client can say about its data when it joins, and what of it counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from corefed.base.errors import UserError
from corefed.federation.reading import majority
from corefed.federation.reading.agreement import agree, median_moments
from corefed.federation.reading.description import Moments
from corefed.federation.rules import Rules
from corefed.federation.told import Told, load, save


def arrays(train: int = 100, mean: float = 0.0, std: float = 1.0, **other: Any) -> dict[str, Any]:
    count = train * math.prod(other.get("shape", [4]))
    found = {
        "train": train, "test": 20, "classes": ["0", "1"], "targets": 0, "shape": [4],
        "count": count, "mean": mean, "m2": std**2 * count,
    }  # fmt: skip
    return found | other


def column(name: str, mean: float = 0.0, std: float = 1.0, **other: Any) -> dict[str, Any]:
    found = {
        "name": name, "kind": "number", "categories": [], "missing": 0, "mean": mean,
        "m2": 100 * std**2,
    }  # fmt: skip
    return found | other


def words(name: str, *categories: str) -> dict[str, Any]:
    return column(name, kind="category", categories=list(categories), m2=0.0)


def table(*columns: dict[str, Any], **other: Any) -> dict[str, Any]:
    found = {
        "train": 100, "test": 20, "classes": ["no", "yes"], "targets": 0,
        "columns": list(columns), "target": [],
    }  # fmt: skip
    return found | other


def named(*descriptions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"c{i}": each for i, each in enumerate(descriptions)}


# Scales


def test_a_wild_mean_of_many_points_moves_nothing() -> None:
    honest = [arrays(mean=m, std=s) for m, s in ((0.4, 1.0), (0.5, 1.1), (0.6, 0.9), (0.5, 1.0))]
    liar = arrays(10**7, mean=1e6, std=1e6)
    before = agree(honest, (), "standard", medians=True)
    after = agree([*honest, liar], (), "standard", medians=True)
    assert abs(after.mean[0] - before.mean[0]) <= 0.1
    assert 0.8 <= after.std[0] <= 1.2
    pooled = agree([*honest, liar], (), "standard")
    assert pooled.mean[0] > 9e5  # which is what one client could do


def test_the_same_of_a_column_and_of_a_regressions_target() -> None:
    honest = [
        table(column("x", m), classes=[], targets=1, target=[10.0 + m, 100.0])
        for m in (0.1, 0.2, 0.3)
    ]
    wild = column("x", 1e9, 1e9, missing=0)
    liar = table({**wild, "m2": 1e18 * 10**7}, train=10**7, classes=[], targets=1,
                 target=[-1e9, 1e25])  # fmt: skip
    found = agree([*honest, liar], (), "features", medians=True)
    assert 0.1 <= found.mean[0] <= 0.3 and 0.9 <= found.std[0] <= 1.2
    assert 9.5 <= found.target_mean[0] <= 10.5 and 0.9 <= found.target_std[0] <= 1.2
    whole = agree([*honest, liar], (), "standard", medians=True)
    assert abs(whole.mean[0]) <= 0.3 and 0.9 <= whole.std[0] <= 1.2


def test_of_equal_clients_the_medians_are_the_pooled_scales() -> None:
    said = [arrays(mean=0.3, std=2.0)] * 5
    assert agree(said, (), "standard", medians=True) == agree(said, (), "standard")


def test_two_clients_are_pooled() -> None:
    said = [arrays(mean=0.0), arrays(300, mean=4.0)]
    assert agree(said, (), "standard", medians=True) == agree(said, (), "standard")


def test_the_spread_between_clients_is_part_of_the_scale() -> None:
    parts = [Moments(10, mean, 0.0) for mean in (-3.0, -1.0, 0.0, 1.0, 3.0)]
    found = median_moments(parts)
    assert found.mean == 0.0 and found.std == pytest.approx(1.0)
    assert median_moments([Moments()]) == Moments()


# Forms


def test_a_client_of_another_shape_is_left_out_by_name() -> None:
    said = named(*[arrays()] * 4, arrays(shape=[2, 2]))
    found = majority.keep_alike(said)
    assert list(found.descriptions) == ["c0", "c1", "c2", "c3"]
    assert found.left_out == {
        "c4": "c0 has points of shape [4] but c4 has [2, 2]; all clients must prepare their data "
        "alike."
    }


@pytest.mark.parametrize(
    ("honest", "odd", "said"),
    [
        (arrays(), arrays(classes=[], targets=1), "as target classes but c3 has a number"),
        (arrays(), table(column("x")), "as data arrays but c3 has a table"),
        (table(column("x")), table(column("y")), "has no column"),
        (table(column("x")), table(words("x", "a")), "Column 'x' has numbers at c0 but text"),
    ],
)
def test_so_is_one_of_another_form(honest: Any, odd: Any, said: str) -> None:
    found = majority.keep_alike(named(honest, honest, honest, odd))
    assert list(found.left_out) == ["c3"] and said in found.left_out["c3"]
    agree(found.descriptions, (), "unit")


def test_the_first_client_has_no_more_to_say_than_the_last() -> None:
    found = majority.keep_alike(named(arrays(shape=[9]), *[arrays()] * 2))
    assert list(found.left_out) == ["c0"]


def test_an_empty_column_is_of_any_kind() -> None:
    empty = table(column("x", kind="empty", missing=100, m2=0.0))
    said = named(table(column("x")), table(column("x")), empty)
    assert not majority.keep_alike(said).left_out


def test_without_a_majority_all_are_kept_and_the_agreement_says_how_they_differ() -> None:
    said = named(arrays(), arrays(), arrays(shape=[9]), arrays(shape=[9]))
    found = majority.keep_alike(said)
    assert not found.left_out
    with pytest.raises(UserError, match="points of shape"):
        agree(found.descriptions, (), "unit")
    assert not majority.keep_alike(named(arrays(), arrays(shape=[9]))).left_out


# Classes


def test_invented_classes_are_left_out() -> None:
    liar = arrays(classes=["0", "1", *(f"made up {i}" for i in range(5000))])
    found = majority.keep_known_classes(named(*[arrays()] * 4, liar), 2, 1000)
    assert agree(found.descriptions, (), "unit").classes == ("0", "1")
    assert len(found.classes_left_out) == 5000 and not found.left_out


def test_a_class_at_one_site_is_left_out_and_named_with_the_cure() -> None:
    rare = table(column("x"), classes=["no", "rare", "yes"])
    found = majority.keep_known_classes(named(*[table(column("x"))] * 3, rare), 2, 1000)
    assert found.classes_left_out == {"rare": ["c3"]}
    assert found.descriptions["c3"]["classes"] == ["no", "yes"]
    note = majority.class_note(found.classes_left_out, ("no", "yes"))
    assert "'rare' (c3)" in note and 'classes = ["no", "yes", "rare"]' in note
    lower = majority.keep_known_classes(named(*[table(column("x"))] * 3, rare), 1, 1000)
    assert not lower.classes_left_out


def test_a_client_without_a_known_class_is_left_out() -> None:
    other = arrays(classes=["8", "9"])
    found = majority.keep_known_classes(named(arrays(), arrays(), other), 2, 1000)
    assert list(found.left_out) == ["c2"]


def test_class_numbers_below_the_largest_stay() -> None:
    """They are outputs of the network anyway."""
    said = named(arrays(classes=["0", "9"]), arrays(classes=["0", "9"]), arrays(classes=["0", "4"]))
    found = majority.keep_known_classes(said, 2, 1000)
    assert not found.classes_left_out and found.descriptions == said


def test_the_number_of_classes_is_bounded() -> None:
    sybil = arrays(classes=["0", "1", *map(str, range(5000, 6000))])
    found = majority.keep_known_classes(named(*[arrays()] * 3, sybil, sybil), 2, 1000)
    assert agree(found.descriptions, (), "unit").classes == ("0", "1")
    names = arrays(classes=["0", "1", *(f"{i:04} made up" for i in range(5000))])
    found = majority.keep_known_classes(named(*[arrays()] * 3, names, names), 2, 1000)
    agreed = agree(found.descriptions, (), "unit").classes
    assert len(agreed) == 1000 and {"0", "1"} <= set(agreed)


def test_two_clients_take_each_others_word() -> None:
    said = named(arrays(), arrays(classes=["0", "2"]))
    assert majority.keep_known_classes(said, 2, 1000).descriptions == said


def test_classes_that_nobody_shares_are_for_the_operator_to_name() -> None:
    said = named(*(table(column("x"), classes=[name]) for name in ("a", "b", "c")))
    with pytest.raises(UserError, match=r'classes = \["a", "b", "c"\]'):
        majority.keep_known_classes(said, 2, 1000)


def test_regressions_have_no_classes() -> None:
    said = named(*[arrays(classes=[], targets=1)] * 3)
    assert majority.keep_known_classes(said, 2, 1000).descriptions == said


def test_invented_categories_do_not_stop_a_run() -> None:
    honest = table(words("ward", "north", "south"))
    own = table(words("ward", "north", "east"))
    liar = table(words("ward", *(f"made up {i}" for i in range(49))))
    few = majority.keep_known_categories(named(honest, honest, own), 2)
    assert few["c2"]["columns"][0]["categories"] == ["north", "east"]  # there is room
    found = majority.keep_known_categories(named(honest, honest, own, liar), 2)
    (ward,) = agree(found, (), "features").columns
    assert ward.categories == ("north", "south")


# Counts


def test_nobody_counts_for_more_than_some_times_the_median() -> None:
    told = Told({"a": 100, "b": 120, "c": 10**7}, {"a": 10, "b": 20, "c": 10**7})
    rules = Rules(max_weight=5.0)
    assert told.weight("train", rules) == 600 and told.weight("test", rules) == 100
    assert told.most("a", "train", rules) == 100
    assert told.most("absent", "train", rules) == rules.max_examples
    assert Told({"a": 1, "b": 99}, {}).weight("train", rules) == math.inf  # who is right?
    assert told.weight("train", Rules(max_weight=0.0)) == math.inf


def test_what_was_told_is_kept(tmp_path: Any) -> None:
    told = Told({"a": 100}, {"a": 10}, ("rare",))
    save(tmp_path, told)
    assert load(tmp_path) == told
    (tmp_path / "joined.json").write_text('{"schema": 1, "train": {"a": "x"}, "test": {}}')
    with pytest.raises(UserError, match=r"joined\.json is damaged"):
        load(tmp_path)
    (tmp_path / "joined.json").unlink()
    assert load(tmp_path) == Told({}, {})
