"""Files of tensors that are written in pieces are those that safetensors reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from corefed.base import files, tensor_file


def test_pieces_are_read_as_one_file(tmp_path: Path) -> None:
    tree = {
        "flags": torch.tensor([True, False, True]),
        "w": torch.randn(5, 3),
        "n": torch.arange(4),
        "none": torch.empty(0, 2, dtype=torch.float64),
        "half": torch.randn(7).to(torch.bfloat16),
    }
    shapes = {name: (value.dtype, tuple(value.shape)) for name, value in tree.items()}
    pieces = tensor_file.encode(shapes, lambda name: tree[name].split(2), {"about": "ä"})
    files.replace_all(tmp_path, [("file", pieces), ("other", b"abc")])
    found = load_file(tmp_path / "file")
    assert set(found) == set(tree)
    assert all(torch.equal(found[name], value) for name, value in tree.items())
    with safe_open(tmp_path / "file", "pt") as file:
        assert file.metadata().keys() == {"sha256", "about"}
        assert file.metadata()["about"] == "ä"
    tensor_file.check(tmp_path / "file")
    assert tensor_file.save(tree, {"about": "ä"}) == (tmp_path / "file").read_bytes()
    assert (tmp_path / "other").read_bytes() == b"abc"


def test_tensors_of_any_memory_are_written(tmp_path: Path) -> None:
    """Views, tensors that share memory, single numbers with a stride, none at all."""
    whole = torch.arange(12.0).view(3, 4)
    tree = {
        "turned": whole.T, "part": whole[:, 1:3], "same": whole, "again": whole,
        "one": whole[:1, 3], "scalar": whole[2, 1], "none": whole[:0, 1:],
    }  # fmt: skip
    found = tensor_file.load(tensor_file.save(tree, {}), tmp_path)
    assert found.keys() == tree.keys()
    assert all(torch.equal(found[name], value) for name, value in tree.items())


def test_a_failing_piece_leaves_the_old_files(tmp_path: Path) -> None:
    files.replace(tmp_path / "file", b"old")

    def pieces() -> Iterator[bytes]:
        yield b"new"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.replace_all(tmp_path, [("file", pieces())])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_piece_of_another_shape_is_refused() -> None:
    shapes = {"w": (torch.float32, (2, 3))}
    with pytest.raises(ValueError, match="w has a piece of"):
        list(tensor_file.encode(shapes, lambda name: [torch.zeros(2, 4)], {}).parts)
