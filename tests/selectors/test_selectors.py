"""Every selector by table: what holds for all of them. test_selector_proofs.py is on each alone."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
from rounding import OtherOrder, assert_same_choice
from selector_cases import CASES, look_of
from torch import Tensor

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.selectors import gradmatch, guard, sampling
from corefed.selectors.frame import Choice, Look
from corefed.selectors.settings import Selection

NAMES = list(selectors.SELECTORS)
SIZES, KEEP = (40, 25, 12, 1, 33), (8, 5, 12, 1, 2)  # all of the third and fourth are kept


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_what_every_selector_gives(name: str, case: str) -> None:
    look = look_of(case, SIZES, KEEP)
    weight, memory = selectors.get(name)(look)
    assert weight.shape == look.data.weight.shape and weight.dtype == torch.float32
    assert (weight >= 0).all() and weight.isfinite().all() and (weight[~look.mask] == 0).all()
    size = (weight > 0).sum(-1)
    assert (size <= look.k).all() and (size > 0).all()
    if not selectors.look_up(name).fewer:
        assert (size == look.k).all()
    for row in (2, 3):  # k = n
        assert torch.equal(weight[row], look.mask[row].float())
    assert torch.equal(memory, look.memory) != selectors.look_up(name).remembers


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_client_alone_has_the_points_it_has_in_a_stack(name: str, case: str) -> None:
    """Up to rounding, which is another one alone. Five iterations of A-IHT, which does not forgive
    any: of 180 clients none then chose other points, and 9 within a hundred."""

    def look() -> Look:
        return look_of(case, SIZES, KEEP)._replace(settings=Selection(max_iterations=5))

    together, bare = selectors.get(name)(look()).weight, selectors.unguarded(name)(look()).weight
    for row, size in enumerate(SIZES):
        with OtherOrder():
            alone = selectors.get(name)(guard.take_clients(look(), [row])).weight[0]
        assert_same_choice(together[row, :size], alone)
        if KEEP[row] < size:
            assert_same_choice(bare[row, :size], alone)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_and_padding_changes_nothing(name: str) -> None:
    first = selectors.get(name)(look_of("classes", (40, 25), (8, 5))).weight
    again = selectors.get(name)(look_of("classes", (40, 25), (8, 5))).weight
    padded = look_of("classes", (40, 25), (8, 5), padding=7)
    assert torch.equal(first, again)
    assert torch.equal(selectors.get(name)(padded).weight[:, :40], first)
    other = selectors.get(name)(look_of("classes", (40, 25), (8, 5), seed=1)).weight
    assert torch.equal(other, first) != selectors.look_up(name).random


@pytest.mark.parametrize("name", ["craig", "gradmatch", "loss", "gradient-norm", "leverage"])
def test_gradients_at_draws_of_the_posterior_and_sketched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both depend on the seed and, up to rounding, on no other client; sizes are kept."""
    monkeypatch.setattr(gradmatch, "WIDEST", 15)
    monkeypatch.setattr(sampling, "WIDEST", 15)

    def chosen(seed: int, rows: list[int]) -> Tensor:
        look = guard.take_clients(look_of("classes", (30, 40), (6, 5), seed=seed), rows)
        return guard.guarded(partial(selectors.unguarded(name), draws=3))(look).weight

    both = chosen(0, [0, 1])
    assert ((both > 0).sum(-1) <= torch.tensor([6, 5])).all() and (both > 0).any(-1).all()
    assert_same_choice(both[1:], chosen(0, [1]))
    assert torch.equal(both, chosen(0, [0, 1]))
    assert not torch.equal(both, chosen(1, [0, 1]))


@pytest.mark.parametrize("name", NAMES)
def test_one_class_and_equal_points(name: str) -> None:
    look = look_of("classes", (20, 15), (4, 6))
    look = look._replace(data=look.data._replace(y=torch.zeros_like(look.data.y)))
    same = look._replace(data=look.data._replace(x=torch.ones_like(look.data.x)))
    for case in (look, same):
        weight = selectors.get(name)(case).weight
        assert ((weight > 0).sum(-1) <= case.k).all()
        if name in ("craig", "herding", "k-centre", "random"):
            torch.testing.assert_close(weight.sum(-1), case.n.float())
            assert ((weight > 0).sum(-1) == case.k).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", NAMES)
def test_a_posterior_that_has_diverged_still_gives_points(name: str, value: float) -> None:
    look = look_of("classes", (20, 15), (4, 6))
    q = look.q.clone()
    q[0, 0] = value
    weight = selectors.get(name)(look._replace(q=q)).weight
    assert weight.isfinite().all() and (weight >= 0).all()
    assert ((weight > 0).sum(-1) <= look.k).all() and (weight > 0).any(-1).all()
    sane = selectors.get(name)(look_of("classes", (20, 15), (4, 6))).weight
    assert torch.equal(weight[1], sane[1])


def test_a_choice_of_nothing_becomes_a_random_one() -> None:
    look = look_of("classes", (20, 15), (4, 6))

    def nothing(own: Look) -> Choice:
        return Choice(torch.zeros_like(own.data.weight), own.memory + 1)

    weight, memory = guard.guarded(nothing)(look)
    plain = selectors.get("random")(look_of("classes", (20, 15), (4, 6))).weight
    assert torch.equal(weight, plain)
    assert (memory[look.mask] == 1).all()


def test_clients_without_points_are_left_alone() -> None:
    look = look_of("classes", (20, 0), (4, 1))
    for name in NAMES:
        weight = selectors.get(name)(look).weight
        assert (weight[0] > 0).any() and (weight[1] == 0).all()


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no selector 'k-center'\. Did you mean 'k-centre'\?"):
        selectors.look_up("k-center")
    with pytest.raises(UserError, match="There are calibrated"):
        selectors.get("zzz")


def test_a_selector_of_another_module_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selectors, "SELECTORS", dict(selectors.SELECTORS))
    entry = selectors.SELECTORS["herding"]
    selectors.register("mine", entry)
    selectors.register("mine", entry)
    assert selectors.unguarded("mine") is selectors.unguarded("herding")
    with pytest.raises(UserError, match=r"There is a selector 'craig' already"):
        selectors.register("craig", entry)


def test_names_and_texts_need_no_torch() -> None:
    code = "import sys, corefed.selectors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [name for name in NAMES if name != "matching"])
def test_a_gpu_chooses_as_a_cpu_does(name: str) -> None:
    """Both draw the same numbers. Not of A-IHT, which can turn a rounding into another coreset."""
    look = look_of("classes", (40, 25, 33), (8, 5, 12))
    there = look._replace(
        q=look.q.cuda(),
        z=look.z.cuda(),
        data=look.data.to(torch.device("cuda")),
        k=look.k.cuda(),
        memory=look.memory.cuda(),
        streams=Streams(look.streams.who, look.streams.round, "cuda"),
    )
    expected = selectors.get(name)(look).weight
    torch.testing.assert_close(
        selectors.get(name)(there).weight.cpu(), expected, rtol=1e-3, atol=1e-4
    )
