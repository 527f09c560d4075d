"""The one reader of .npz and .npy files, and what it refuses."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest

from corefed.base import arrays
from corefed.base.errors import UserError

X, Y = np.arange(12.0).reshape(4, 3), np.array(["b", "a", "b", "c"])


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_those_numpy_reads(save: object, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    save(path, X=np.asfortranarray(X), y=Y, n=np.int64(7))  # type: ignore[operator]
    assert arrays.headers(path) == {
        "X": ((4, 3), np.dtype("f8")), "y": ((4,), np.dtype("U1")), "n": ((), np.dtype("i8"))
    }  # fmt: skip
    found = arrays.load(path, ["y", "X", "n"], 1)
    assert list(found) == ["y", "X", "n"]
    with np.load(path) as expected:
        for name, array in found.items():
            np.testing.assert_array_equal(array, expected[name])


def test_an_npy_file_has_one_array_called_x(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", X)
    assert list(arrays.headers(tmp_path / "a.npy")) == ["X"]
    np.testing.assert_array_equal(arrays.load(tmp_path / "a.npy", ["X"], 1)["X"], X)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return exec, ("raise AssertionError('it was unpickled')",)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """Objects beside what is read do no harm; read they are refused, and so is a bare pickle."""
    np.savez(tmp_path / "a.npz", X=X, y=np.array([Trap()] * 99, dtype=object))
    assert arrays.headers(tmp_path / "a.npz")["y"].dtype.hasobject
    np.testing.assert_array_equal(arrays.load(tmp_path / "a.npz", ["X"], 1)["X"], X)
    with pytest.raises(UserError, match=r"y in .* holds Python objects, which are never loaded"):
        arrays.load(tmp_path / "a.npz", ["X", "y"], 1)
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("X.npy", pickle.dumps(Trap()))
    with pytest.raises(UserError, match=r"not a whole \.npz file"):
        arrays.load(tmp_path / "b.npz", ["X"], 1)


def written(array: np.ndarray, shape: tuple[int, ...]) -> bytes:
    """As np.save writes it, with a header that says another shape."""
    stream = io.BytesIO()
    about = {"descr": array.dtype.str, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, about)  # type: ignore[arg-type]
    return stream.getvalue() + array.tobytes()


def test_an_array_that_claims_more_than_it_has(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(written(X, (10**12, 3)))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X.npy", written(X, (10**12, 3)))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(UserError, match=r"X in .* claims shape \(10{12}, 3\), more than it"):
            arrays.headers(tmp_path / name)
        with pytest.raises(UserError, match="more than it has"):
            arrays.load(tmp_path / name, ["X"], 1)


def test_what_was_checked_is_what_is_read(tmp_path: Path) -> None:
    """np.load prefers a member X to the array X.npy, whose header says nothing about it."""
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("X", written(X, (10**12, 3)))
        archive.writestr("X.npy", written(X, (4, 3)))
    np.testing.assert_array_equal(arrays.load(tmp_path / "a.npz", ["X"], 1)["X"], X)


def test_memory_is_checked_before_anything_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, X=np.zeros((3, 2**20), np.uint8), y=np.zeros(4))
    assert arrays.load(path, ["X"], 3)["X"].shape == (3, 2**20)
    for names, working in ((["X", "y"], 0), (["X"], 1)):
        with pytest.raises(UserError, match=r"needs 3 MB .* the 3 MB allowed; cut it in two"):
            arrays.load(path, names, 3, working=working, remedy="cut it in two")


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=X, y=Y)
    whole = (tmp_path / "a.npz").read_bytes()
    with pytest.raises(UserError, match=r"has no array z; it holds X, y\."):
        arrays.load(tmp_path / "a.npz", ["X", "z"], 1)
    for content in (b"", b"hello", whole[: len(whole) // 2]):
        for name in ("b.npz", "b.npy"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(UserError, match=rf"b{name[1:]} is not a whole {name[1:]} file"):
                arrays.headers(tmp_path / name)
    damaged = bytearray(whole)
    damaged[whole.index(X.tobytes()) + 5] ^= 1
    (tmp_path / "b.npz").write_bytes(damaged)
    with pytest.raises(UserError, match="Bad CRC"):
        arrays.load(tmp_path / "b.npz", ["X"], 1)
    with pytest.raises(UserError, match=r"Cannot read .*nowhere\.npz: No such file"):
        arrays.headers(tmp_path / "nowhere.npz")
    with pytest.warns(UserWarning, match=r"format 3\.0"):
        np.savez(tmp_path / "b.npz", X=np.zeros(2, dtype=[("ä€", "f8")]))
    with pytest.raises(UserError, match=r"X in .* is no plain array"):
        arrays.headers(tmp_path / "b.npz")
