"""What crosses the wire: decode(encode(x)) == x, and nothing else is decoded."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corefed.base.types import Tree
from corefed.data.columns import Column
from corefed.federation import wire
from corefed.federation.flower import records
from corefed.federation.protocol import Agreement, Reply, Task
from corefed.federation.wire import Packed, WireError

DTYPES = list(wire.DTYPES.values())


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    names = draw(st.lists(st.text(min_size=1, max_size=8), unique=True, max_size=3))
    tree = {}
    for name in names:
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 10
        tree[name] = values.to(dtype)
    return tree


@given(trees())
def test_unpack_of_pack_is_the_tree(tree: Tree) -> None:
    back = wire.unpack(wire.pack(tree), 1 << 20)
    assert back.keys() == tree.keys()
    for name, value in tree.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape
        assert torch.equal(back[name], value)


def test_values_that_are_not_numbers_survive_bit_for_bit() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    back = wire.unpack(wire.pack({"v": odd}), 100)["v"]
    assert torch.equal(back.view(torch.int32), odd.view(torch.int32))


def test_a_transposed_or_sliced_tensor_is_sent_as_it_looks() -> None:
    whole = torch.arange(12.0).view(3, 4)
    lone = torch.zeros(2, 72)[:1, 3]  # one number, a stride of 72, and contiguous all the same
    tree = {"t": whole.mT, "s": whole[:, 1:3], "e": torch.tensor(2.5).expand(3), "l": lone}
    back = wire.unpack(wire.pack(tree), 1000)
    assert all(torch.equal(back[name], value) for name, value in tree.items())


@pytest.mark.parametrize(
    ("packed", "words"),
    [
        (Packed("float32", (3,), b"\0" * 8), "8 bytes, not the 12"),
        (Packed("float32", (-1,), b""), "shape"),
        (Packed("float32", (2, -1), b"\0" * 8), "shape"),
        (Packed("object", (1,), b"\0" * 8), "dtype 'object'"),
        (Packed("float32", (1 << 40,), b"\0" * 4), "not the"),
        (Packed("float32", (), b""), "not the 4"),
        (Packed("bool", (1,), b"\x02"), "truth values"),
    ],
)
def test_what_is_no_tensor(packed: Packed, words: str) -> None:
    with pytest.raises(WireError, match=words):
        wire.unpack({"v": packed}, 1 << 20)


def test_more_than_allowed() -> None:
    packed = wire.pack({"a": torch.zeros(10), "b": torch.zeros(10)})
    assert wire.unpack(packed, 80)
    with pytest.raises(WireError, match="80 bytes of tensors, more than the 79"):
        wire.unpack(packed, 79)


def test_differences_and_halves_are_restored() -> None:
    g = torch.Generator().manual_seed(0)
    sent = {"v": torch.randn(2, 100, generator=g), "only here": torch.zeros(1)}
    trained = {"v": sent["v"] + 1e-3 * torch.randn(2, 100, generator=g), "n": torch.ones(3)}
    up = wire.narrow(wire.difference(trained, sent), "float16")
    assert up["v"].dtype == torch.float16
    back = wire.restore(up, sent, differences=True)
    assert back["v"].dtype == torch.float32
    # A step of up to 4e-3 keeps 11 bits: 2e-6; and float32 of about 3 rounds at 2e-7.
    torch.testing.assert_close(back["v"], trained["v"], rtol=0, atol=3e-6)
    assert torch.equal(back["n"], trained["n"].half())
    plain = wire.restore(wire.narrow(trained, "float32"), sent, differences=False)
    assert torch.equal(plain["v"], trained["v"])


AGREEMENT = Agreement((1, 8, 8), ("no", "yes, perhaps é"), 0, (0.25,), (1.5,))
TABLES = Agreement(
    (4,), (), 1, (0.25, 0.0, 0.0, 0.0), (1.5, 1.0, 1.0, 1.0),
    columns=(Column("age", (), True), Column("sex", ("f", "m; é"))),
    own_scale=True, target_mean=(0.5,), target_std=(2.0,),
)  # fmt: skip


@pytest.mark.parametrize("agreement", [None, AGREEMENT, TABLES])
def test_tasks_through_flowers_records(agreement: Agreement | None) -> None:
    tree = {"v": torch.randn(2, 3), "clients": torch.tensor(2.0)}
    task = Task(
        "train", "run-1", 3, 2, 'method = "fedavg"\n', agreement, "float16", True, 0.5, 2.0, tree
    )
    back = records.task_from(records.task_to_records(task))
    assert back._replace(tree={}) == task._replace(tree={})
    assert all(torch.equal(back.tree[name], value) for name, value in tree.items())


def test_replies_through_flowers_records() -> None:
    figures = {"examples": 7, "loss": 0.1 + 0.2, "models": {"personal": {"gap": [1e-300, -2.0]}}}
    reply = Reply("evaluate", "r", 0, 1, figures, {"w": torch.zeros(0)}, "a sentence.")
    back = records.reply_from(records.reply_to_records(reply), 100)
    assert back._replace(tree={}) == reply._replace(tree={})
    assert torch.equal(back.tree["w"], reply.tree["w"])
