"""Laws of every partition: disjoint, in range, deterministic, and the counts of the protocol."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.data import Dataset, Split, load, split
from corefed.data.partition import count_classes, default_for, notes, thin

SEEDS = st.integers(0, 2**63)
ALL_SPECS = ["labels:1", "labels:3", "labels:4:20", "dirichlet:0.5", "iid", "quantity:1", "natural"]


def pool(name: str, per_label: int, classes: int = 10) -> Dataset:
    y = torch.arange(per_label * classes) % classes
    return Dataset(name, torch.zeros(len(y), 1), y, classes, groups=y // 2)


def regression(points: int = 60) -> Dataset:
    groups = torch.arange(points) % 3
    return Dataset("targets", torch.zeros(points, 1), torch.zeros(points, 1), 0, groups)


def rows(splits: list[Split]) -> list[int]:
    return [row for one in splits for part in one for row in part.tolist()]


def same(first: list[Split], second: list[Split]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a.train, b.train) and torch.equal(a.test, b.test) for a, b in pairs)


def check_laws(splits: list[Split], dataset: Dataset, clients: int) -> None:
    assert len(splits) == clients
    dealt = rows(splits)
    assert len(set(dealt)) == len(dealt)
    assert min(dealt) >= 0
    assert max(dealt) < len(dataset.y)
    for one in splits:
        assert len(one.train) >= 2
        assert len(one.test) >= 1
        assert one.train.dtype == one.test.dtype == torch.int64


# Protocol counts


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
@pytest.mark.parametrize(("size", "train", "test"), [("small", 50, 950), ("medium", 200, 800)])
def test_shards_have_the_counts_of_the_protocol(
    size: str, train: int, test: int, seed: int
) -> None:
    check_shards(pool("mnist", 6000), f"shards-{size}", train, test, seed)


def test_shards_large_n_is_4500() -> None:
    check_shards(pool("fashion-mnist", 6000), "shards-large", 900, 300, seed=3)


def test_shards_of_cifar10() -> None:
    check_shards(pool("cifar10", 6000), "shards-small", 25, 450, seed=0)
    check_shards(pool("cifar10", 6000), "shards-large", 475, 150, seed=0)
    with pytest.raises(UserError, match="no shards-medium for cifar10, only shards-small"):
        split("shards-medium", pool("cifar10", 6000), 10, 0)


@pytest.mark.parametrize(
    ("size", "train", "test"), [("small", 5, 29), ("medium", 15, 19), ("large", 25, 9)]
)
def test_shards_of_digits(size: str, train: int, test: int) -> None:
    check_shards(load("digits"), f"shards-{size}", train, test, seed=1)


def check_shards(dataset: Dataset, spec: str, train: int, test: int, seed: int) -> None:
    splits = split(spec, dataset, 10, seed)
    check_laws(splits, dataset, 10)
    for client, one in enumerate(splits):
        labels = list(range(5)) if client % 2 == 0 else list(range(5, 10))
        for part, count in ((one.train, train), (one.test, test)):
            counts = dataset.y[part].bincount(minlength=10)
            assert counts.nonzero().flatten().tolist() == labels
            assert set(counts.tolist()) == {0, count}


def test_labels_with_a_cap() -> None:
    splits = split("labels:3:333", pool("mnist", 6500), 10, 0)
    assert [len(one.train) for one in splits] == [999] * 10


# Laws


@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, clients=st.integers(1, 5), spec=st.sampled_from(ALL_SPECS))
def test_laws_of_every_other_partition(seed: int, clients: int, spec: str) -> None:
    dataset = pool("any", 100)
    splits = split(spec, dataset, clients, seed)
    check_laws(splits, dataset, clients)
    assert same(splits, split(spec, dataset, clients, seed))
    assert not same(splits, split(spec, dataset, clients, seed + 1))
    for one in splits:
        total = len(one.train) + len(one.test)
        if spec != "labels:4:20":
            assert abs(len(one.test) - 0.2 * total) <= 1


@pytest.mark.parametrize("spec", ["dirichlet:0.3", "iid", "quantity:0.5"])
def test_all_points_are_dealt(spec: str) -> None:
    dataset = pool("any", 100)
    assert sorted(rows(split(spec, dataset, 7, 0))) == list(range(1000))


@settings(max_examples=25, deadline=None)
@given(
    seed=SEEDS,
    clients=st.integers(1, 15),
    classes=st.integers(1, 10),
    data=st.data(),
)
def test_labels_are_assigned_evenly(
    seed: int, clients: int, classes: int, data: st.DataObject
) -> None:
    per_client = data.draw(st.integers(1, classes))
    dataset = pool("any", 60, classes)
    splits = split(f"labels:{per_client}", dataset, clients, seed)
    owned = [sorted(set(dataset.y[torch.cat([*one])].tolist())) for one in splits]
    assert [len(labels) for labels in owned] == [per_client] * clients
    sharers = np.bincount(np.concatenate(owned), minlength=classes)
    assert sharers.max() - sharers.min() <= 1


def test_labels_are_divided_equally() -> None:
    splits = split("labels:5", pool("any", 100), 10, 0)
    counts = torch.tensor(count_classes(splits, pool("any", 100)))
    assert counts[counts > 0].min() >= 15  # 20 points a client and label, one in five for testing
    assert counts[counts > 0].max() <= 17


def test_single_class_client() -> None:
    dataset = pool("any", 50)
    for one in split("labels:1", dataset, 10, 0):
        assert len(set(dataset.y[torch.cat([*one])].tolist())) == 1


def test_skewed_sizes_differ_and_concentration_evens_them_out() -> None:
    dataset = pool("any", 100)

    def spread(spec: str) -> int:
        sizes = [len(one.train) for one in split(spec, dataset, 5, 0)]
        return max(sizes) - min(sizes)

    assert spread("iid") <= 2
    for name in ("quantity", "dirichlet"):
        assert spread(f"{name}:0.5") > 100
        assert spread(f"{name}:100000") < 20


def test_test_points_are_stratified() -> None:
    dataset = pool("any", 100)
    for one in split("iid", dataset, 2, 0):
        held = dataset.y[one.test].bincount(minlength=10).numpy()
        total = held + dataset.y[one.train].bincount(minlength=10).numpy()
        assert (np.abs(held - total / 5) < 1).all()


def test_split_does_not_touch_the_global_generators() -> None:
    before = torch.random.get_rng_state(), str(np.random.get_state())
    split("dirichlet:1", pool("any", 100), 4, 0)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == str(np.random.get_state())


def test_natural_follows_the_groups() -> None:
    dataset = regression()
    assert dataset.groups is not None
    for client, one in enumerate(split("natural", dataset, 3, 0)):
        assert set(dataset.groups[torch.cat([*one])].tolist()) == {client}
    assert len(split("natural", dataset, 2, 0)) == 2


def test_table() -> None:
    dataset = pool("mnist", 6000)
    counts = count_classes(split("shards-small", dataset, 10, 0), dataset)
    assert counts == [[50] * 5 + [0] * 5, [0] * 5 + [50] * 5] * 5
    assert count_classes(split("iid", regression(), 3, 0), regression()) == [[16]] * 3


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("digits", "shards-medium"),
        ("mnist", "shards-medium"),
        ("fashion-mnist", "shards-medium"),
        ("cifar10", "shards-large"),
        ("synthetic-linear", "natural"),
        ("synthetic-regression", "natural"),
        ("my-table", "iid"),
    ],
)
def test_defaults(name: str, spec: str) -> None:
    assert default_for(name) == spec


# Test points that must stay apart


def divided(train: int = 60, test: int = 20, classes: int = 3) -> Dataset:
    """Per class, `train` points and then `test` points that are held out."""
    held_out = (torch.arange(train + test) >= train).repeat(classes)
    y = torch.arange(classes).repeat_interleave(train + test)
    names = ("bacteria", "Normal", "virus", "other")[:classes]
    x = torch.zeros(len(y), 1)
    return Dataset("scans", x, y, classes, held_out=held_out, labels=names, keep_split=True)


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    clients=st.integers(1, 4),
    spec=st.sampled_from(["labels:1", "labels:2:7", "dirichlet:1", "iid", "quantity:1"]),
)
def test_held_out_points_are_never_trained_on(seed: int, clients: int, spec: str) -> None:
    dataset = divided()
    splits = split(spec, dataset, clients, seed)
    check_laws(splits, dataset, clients)
    assert same(splits, split(spec, dataset, clients, seed))
    assert dataset.held_out is not None
    for one in splits:
        assert not dataset.held_out[one.train].any()
        assert dataset.held_out[one.test].all()
    if spec in ("dirichlet:1", "iid", "quantity:1"):
        assert sorted(rows(splits)) == list(range(240))


@pytest.mark.parametrize("spec", ["dirichlet:0.7", "iid", "quantity:0.7", "labels:3"])
def test_training_and_test_points_are_dealt_alike(spec: str) -> None:
    """A client has the same part p of both; each cut of a class rounds by less than one point."""
    dataset = divided(600, 200)
    for one in split(spec, dataset, 3, 0):
        for label in range(3) if spec.startswith(("dirichlet", "labels")) else [None]:
            train, test = (
                int((dataset.y[part] == label).sum()) if label is not None else len(part)
                for part in one[:2]
            )
            assert abs(train / 3 - test) <= 1.5


def test_shards_of_divided_data() -> None:
    dataset = divided(120, 1000)
    for client, one in enumerate(split("shards-small", dataset, 2, 0)):
        assert dataset.held_out is not None
        assert (
            dataset.y[one.train].bincount(minlength=3).tolist() == [[50, 50, 0], [0, 0, 50]][client]
        )
        assert (
            dataset.y[one.test].bincount(minlength=3).tolist()
            == [[950, 950, 0], [0, 0, 950]][client]
        )
        assert dataset.held_out[one.test].all()
        assert not dataset.held_out[one.train].any()
    with pytest.raises(UserError, match=r"label 0 of scans has 120 training points.*3 clients"):
        split("shards-small", dataset, 6, 0)
    with pytest.raises(UserError, match=r"label 0 of scans has 900 test points, but 1 client"):
        split("shards-small", divided(50, 900), 2, 0)


def test_shared_normal() -> None:
    """Client 0 has the first other class, client 1 the second, each half of the normal points."""
    dataset = divided(61, 20)
    splits = split("shared-normal", dataset, 2, 0)
    check_laws(splits, dataset, 2)
    assert sorted(rows(splits)) == list(range(243))
    counts = count_classes(splits, dataset)
    assert counts in ([[61, 31, 0], [0, 30, 61]], [[61, 30, 0], [0, 31, 61]])
    for client, one in enumerate(splits):
        assert dataset.held_out is not None
        assert dataset.held_out[one.test].all()
        counts = dataset.y[one.test].bincount(minlength=3).tolist()
        assert counts == ([20, 10, 0], [0, 10, 20])[client]
    assert not same(splits, split("shared-normal", dataset, 2, 1))
    assert notes("shared-normal", splits, dataset) == []


def test_shared_normal_without_a_division() -> None:
    dataset = divided()._replace(held_out=None, keep_split=False)
    for client, one in enumerate(split("shared-normal", dataset, 2, 0)):
        own = (0, 2)[client]
        assert set(dataset.y[torch.cat([*one])].tolist()) == {own, 1}
        assert len(one.train) + len(one.test) == 120
        assert len(one.test) == 24
    official = divided()._replace(keep_split=False)
    assert official.held_out is not None
    assert all(official.held_out[one.test].all() for one in split("shared-normal", official, 2, 0))


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (("a", "NORMAL", "b"), 1),
        (("a", "b", "healthy"), 2),
        (("mild", "No_DR", "severe"), 1),
        (("nodule", "normality", "no finding"), 2),
        (("a", "b", "c"), 0),
        ((), 0),
    ],
)
def test_which_class_is_normal(names: tuple[str, ...], shared: int) -> None:
    dataset = divided()._replace(labels=names)
    counts = torch.tensor(count_classes(split("shared-normal", dataset, 2, 0), dataset))
    assert counts[:, shared].tolist() == [30, 30]
    said = notes("shared-normal", split("shared-normal", dataset, 2, 0), dataset)
    guessed = names in (("a", "b", "c"), ())
    first = names[0] if names else "0"
    assert said == ([f"No class is named normal; shared-normal shares the first, {first!r}."]
                    if guessed else [])  # fmt: skip


def test_shared_normal_refuses() -> None:
    for dataset, clients, message in (
        (
            divided(classes=4),
            2,
            r"three classes.*scans has 4\. Choose three by --set classes=A,B,C",
        ),
        (divided(classes=2), 2, "scans has 2"),
        (divided(), 3, "for 2 clients, not 3; use --clients 2"),
        (divided()._replace(labels=("normal", "healthy", "x")), 2, "'normal' and 'healthy' could"),
        (regression(), 2, "regression without labels"),
    ):
        with pytest.raises(UserError, match=message):
            split("shared-normal", dataset, clients, 0)


def test_one_normal_test_point() -> None:
    """It goes to one client; the other has its own class to be tested on."""
    tested = [len(one.test) for one in split("shared-normal", divided(test=1), 2, 0)]
    assert sorted(tested) == [1, 2]


def test_too_few_test_points_for_the_clients() -> None:
    with pytest.raises(UserError, match=r"needs 2 to train on and 1 to test\. Use fewer"):
        split("iid", divided(60, 1), 4, 0)


def test_note_on_classes_without_training_points() -> None:
    dataset = divided()
    whole = torch.arange(240)
    splits = [Split(whole[:60], whole[60:80]), Split(whole[80:120], whole[220:])]
    (note,) = notes("iid", splits, dataset)
    assert "1 of 2 clients" in note
    assert "client 1, class 'virus'" in note
    targets = regression()
    assert notes("iid", split("iid", targets, 3, 0), targets) == []


# Errors


@pytest.mark.parametrize(
    ("spec", "clients", "message"),
    [
        ("shard-medium", 10, "Did you mean 'shards-medium'"),
        ("label:3", 10, "Did you mean 'labels:C or"),
        ("dirichlet", 10, "write dirichlet:A"),
        ("iid:3", 10, "write iid"),
        ("labels:3:4:5", 10, "write labels:C or labels:C:CAP"),
        ("labels:11", 10, "11 labels per client; any has only 10"),
        ("labels:0", 10, "whole number"),
        ("labels:2.5", 10, "whole number"),
        ("labels:3:", 10, "whole number"),
        ("dirichlet:0", 10, "number from 0.001"),
        ("dirichlet:nan", 10, "number from 0.001"),
        ("dirichlet:x", 10, "number from 0.001"),
        ("quantity:-1", 10, "number from 0.001"),
        ("quantity:inf", 10, "number from 0.001"),
        ("dirichlet:0.001", 20, "each of 100 draws"),
        ("quantity:0.001", 20, "each of 100 draws"),
        ("iid", 0, "at least 1 client"),
        ("iid", 200, "at most 166 clients"),
        ("labels:1", 166, "leaves client"),
        ("labels:10", 60, "label 0 of any has 50 points for the 60 clients"),
        ("natural", 10, "5 natural clients, 10 are asked for"),
        ("shards-small", 10, "label 0 of any has 50 points.*need 5000"),
    ],
)
def test_errors(spec: str, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split(spec, pool("any", 50), clients, 0)


def test_shards_name_what_is_available() -> None:
    with pytest.raises(UserError, match=r"label 0 of digits has 178 points.*at most 10 clients"):
        split("shards-medium", load("digits"), 12, 0)
    with pytest.raises(UserError, match="two labels"):
        split("shards-small", pool("any", 6000, classes=1), 2, 0)


def test_label_partitions_need_labels() -> None:
    for spec in ("shards-small", "labels:2", "dirichlet:1"):
        with pytest.raises(UserError, match="regression without labels"):
            split(spec, regression(), 3, 0)
    with pytest.raises(UserError, match="no natural clients"):
        split("natural", pool("any", 50)._replace(groups=None), 3, 0)
    with pytest.raises(UserError, match="seed"):
        split("iid", pool("any", 50), 3, -1)


def test_clients_that_are_thinned_keep_a_part_of_their_own_points() -> None:
    splits = split("iid", pool("any", 11, 9), 4, seed=0)
    half = thin(splits, 0.5, seed=0)
    for before, after in zip(splits, half, strict=True):
        assert len(after.train) == -(-len(before.train) // 2)  # rounded up
        assert set(after.train.tolist()) < set(before.train.tolist())
        assert after.train.tolist() == sorted(after.train.tolist())
        assert torch.equal(after.test, before.test)
    again, other = (thin(splits, 0.5, seed=s) for s in (0, 1))
    assert all(torch.equal(a.train, b.train) for a, b in zip(half, again, strict=True))
    assert any(not torch.equal(a.train, b.train) for a, b in zip(half, other, strict=True))
    assert thin(splits, 1.0, seed=0) is splits
    assert all(len(one.train) == 1 for one in thin(splits, 1e-9, seed=0))


@given(SEEDS, st.sampled_from([0.1, 0.25, 0.35, 0.5, 0.9]))
@settings(max_examples=20, deadline=None)
def test_a_share_of_each_client_is_held_out(seed: int, share: float) -> None:
    """Within one point per client and per class, and disjoint from what is trained on."""
    dataset = pool("other", 30, classes=3)
    splits = split("iid", dataset, 3, seed, share)
    check_laws(splits, dataset, 3)
    for one in splits:
        held, every = len(one.test), len(one.test) + len(one.train)
        assert abs(held - share * every) <= 1
        for label in range(3):
            mine = int((dataset.y[one.test] == label).sum())
            of = mine + int((dataset.y[one.train] == label).sum())
            assert abs(mine - share * of) <= 1


def test_the_default_share_is_a_fifth_as_ever_and_none_keeps_all() -> None:
    dataset = pool("other", 30, classes=3)
    assert same(split("iid", dataset, 3, 4, 0.2), split("iid", dataset, 3, 4))
    whole = split("iid", dataset, 3, 4, 0.0)
    assert [len(one.test) for one in whole] == [0, 0, 0]
    assert sum(len(one.train) for one in whole) == 90


def test_a_client_keeps_points_to_train_on() -> None:
    dataset = Dataset("few", torch.zeros(9, 1), torch.arange(9) % 2, 2)
    for one in split("iid", dataset, 3, 0, 0.95):
        assert len(one.train) >= 2


@pytest.mark.parametrize(("name", "spec"), [("mnist", "shards-small"), ("marked", "iid")])
def test_data_with_test_points_of_their_own_take_no_share(name: str, spec: str) -> None:
    dataset = pool("mnist", 3000) if name == "mnist" else pool(name, 30)
    if name == "marked":
        dataset = dataset._replace(held_out=torch.arange(300) % 4 == 0, keep_split=True)
    with pytest.raises(UserError, match=r"test_fraction is 0.1, but .* has test points of its own"):
        split(spec, dataset, 2, 0, 0.1)
