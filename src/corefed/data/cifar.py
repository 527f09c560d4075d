"""CIFAR-10: the official binary batches, the official Python batches, or the binary archive.

A binary batch is 10000 records of one label byte and 3072 pixel bytes, three planes of 32 x 32
(red, green, blue). A Python batch holds the same bytes as a pickle of Python 2. It is never
unpickled: its instructions are read one by one, and those that would call something only leave a
note of what they would have called. An archive is read where it lies; nothing is unpacked.
"""

from __future__ import annotations

import hashlib
import pickletools
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data.fetch import cache, locate, roots

Bytes = npt.NDArray[np.uint8]

LABELS = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

NAME = "cifar10"
SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
POINTS = 10_000
"""Points in a batch."""

BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

URL = "https://www.cs.toronto.edu/~kriz/"
ARCHIVE = "cifar-10-binary.tar.gz"
ARCHIVE_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"


class Form(NamedTuple):
    """One of the two forms the batches come in."""

    folder: str
    suffix: str
    md5: tuple[str, ...]  # in the order of BATCHES


FORMS = {
    "binary": Form(
        "cifar-10-batches-bin",
        ".bin",
        (
            "5dd7e06a14cb22eb9f671a540d1b7c25",
            "5ea93a67294ea407fff1d09f752e9692",
            "942cd6a4bcdd0dd3c604fbe906cb4421",
            "ae636b3ba5c66a11e91e8cb52e771fcb",
            "53f37980c15c3d472c316c40844f3f0d",
            "803d5f7f4d78ea53de84dbe85f74fb6d",
        ),
    ),
    "python": Form(
        "cifar-10-batches-py",
        "",
        (
            "c99cafc152244af753f735de768cd75f",
            "d4bba439e000b95fd0a9bffe97cbabec",
            "54ebc095f3ab1f0389bbae665268c751",
            "634d18415352ddfa80567beed471001a",
            "482c414d41f54cd18b22e5b47cb7c3cb",
            "40351d587109b95175f43aff81a1287e",
        ),
    ),
}
"""The MD5s are those of the files in the archives on the official page."""


def load(data_dir: Path | None, download: bool) -> tuple[Tensor, Tensor, Tensor]:
    """x [60000, 3, 32, 32] in bytes, y [60000], and which points are the official test ones."""
    points = POINTS * len(BATCHES)
    x, y = np.empty((points, PIXELS), np.uint8), np.empty(points, np.uint8)
    for place, (pixels, labels) in enumerate(_batches(data_dir, download)):
        mine = slice(place * POINTS, (place + 1) * POINTS)
        x[mine], y[mine] = pixels, labels
    held_out = torch.arange(points) >= points - POINTS
    return torch.from_numpy(x).unflatten(1, SHAPE), torch.from_numpy(y).long(), held_out


def _batches(data_dir: Path | None, download: bool) -> Iterator[tuple[Bytes, Bytes]]:
    """Pixels [10000, 3072] and labels [10000] of every batch, from wherever they are found."""
    found = _find(data_dir)
    if found is None:
        archive = _archive(data_dir) or locate(
            NAME, ARCHIVE, URL + ARCHIVE, ARCHIVE_MD5, data_dir, download
        )
        yield from _from_archive(archive)
        return
    kind, folder = found
    form = FORMS[kind]
    parse = {"binary": parse_binary, "python": parse_python}[kind]
    for batch, md5 in zip(BATCHES, form.md5, strict=True):
        path = folder / (batch + form.suffix)
        yield parse(_checked(_read(path, kind), md5, str(path)), str(path))


def _find(data_dir: Path | None) -> tuple[str, Path] | None:
    """The first folder with all six batches, binary before Python ones at the same place."""
    lacking = ""
    for base in _places(data_dir):
        for kind, form in FORMS.items():
            folder = base if base.name == form.folder else base / form.folder
            if not folder.is_dir():
                continue
            files = [batch + form.suffix for batch in BATCHES]
            missing = [file for file in files if not (folder / file).is_file()]
            if not missing:
                return kind, folder
            lacking = lacking or f"{folder} lacks {', '.join(missing)}"
    if lacking:  # a folder that was meant must not turn into a silent download
        raise UserError(f"{lacking}; add what is missing, or remove the folder.")
    return None


def _archive(data_dir: Path | None) -> Path | None:
    places = (base / ARCHIVE for base in _places(data_dir))
    return next((path for path in places if path.is_file()), None)


def _places(data_dir: Path | None) -> Iterator[Path]:
    """Each of data_dir, $COREFED_DATA and the user's cache, and cifar10/ below it."""
    for root in roots(data_dir):
        yield from (root, root / NAME)
    try:
        kept = cache()
    except ImportError:  # without pooch there are no downloads either
        return
    yield from (kept, kept / NAME)


def _read(path: Path, kind: str) -> bytes:
    """A file's content, once its size is known to be sensible."""
    expected = POINTS * (PIXELS + 1)
    try:
        size = path.stat().st_size
        # A Python batch has names of files too: 1 % more bytes than a binary one.
        wrong = size != expected if kind == "binary" else not expected < size < 2 * expected
        content = b"" if wrong else path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    if wrong:
        words = f"{expected}" if kind == "binary" else f"a little more than {expected}"
        raise UserError(f"{path} has {size} bytes, expected {words}. Fetch it again.")
    return content


def _checked(content: bytes, md5: str, where: str) -> bytes:
    actual = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if actual != md5:
        raise UserError(
            f"{where} is corrupt or not the official file: its MD5 is {actual}, expected {md5}. "
            "Delete it, or fetch it again."
        )
    return content


def _from_archive(path: Path) -> Iterator[tuple[Bytes, Bytes]]:
    """The six batches among an archive's members, read in memory, in the order of BATCHES."""
    form, size = FORMS["binary"], POINTS * (PIXELS + 1)
    wanted = {f"{form.folder}/{batch}{form.suffix}": batch for batch in BATCHES}
    parsed: dict[str, tuple[Bytes, Bytes]] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                batch = wanted.get(member.name)
                if batch is None or not member.isreg() or member.size != size:
                    continue
                source = archive.extractfile(member)
                content = source.read() if source is not None else b""
                where = f"{member.name} in {path}"
                md5 = form.md5[BATCHES.index(batch)]
                parsed[batch] = parse_binary(_checked(content, md5, where), where)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole archive: {error}. Fetch it again.") from error
    missing = [name for name, batch in wanted.items() if batch not in parsed]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)} of {size} bytes. Fetch it again.")
    yield from (parsed[batch] for batch in BATCHES)


def parse_binary(content: bytes, where: str) -> tuple[Bytes, Bytes]:
    """Records of a label and its pixels."""
    records = np.frombuffer(content, np.uint8).reshape(-1, PIXELS + 1)
    return records[:, 1:], _in_range(records[:, 0], where)


def parse_python(content: bytes, where: str) -> tuple[Bytes, Bytes]:
    """The entries `data` and `labels` of a dictionary pickled by Python 2."""
    try:
        batch = _inert(content)
        _, shape, kind, by_columns, raw = batch["data"].state
        array = np.frombuffer(raw.encode("latin-1"), np.uint8)
        labels = np.array(batch["labels"])
        if (batch["data"].function, kind.function, kind.arguments[0], by_columns) != _ARRAY:
            raise ValueError("data is not a plain array of bytes")
        if shape != (POINTS, PIXELS) or array.size != POINTS * PIXELS or labels.shape != (POINTS,):
            raise ValueError(f"data {shape} and labels {labels.shape} do not belong together")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not written like an official batch: {error}. Fetch it again."
        ) from error
    return array.reshape(shape), _in_range(labels, where)


_ARRAY = ("numpy.core.multiarray _reconstruct", "numpy dtype", "u1", False)


class _Note:
    """What a pickle asks to be called, with what, and the state it would then set."""

    def __init__(self, function: object, arguments: object) -> None:
        self.function, self.arguments = function, arguments
        self.state: Any = None


def _inert(content: bytes) -> Any:
    """The object a Python 2 pickle describes, with a `_Note` for whatever it would call."""
    stack: list[Any] = []
    marks: list[int] = []
    memory: dict[object, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        items = stack[start:]
        del stack[start:]
        return items

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name in _VALUES:
            stack.append(_VALUES[name](argument))
        elif name in ("BINPUT", "LONG_BINPUT"):
            memory[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memory[argument])
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "TUPLE":
            stack.append(tuple(since_mark()))
        elif name == "APPENDS":
            items = since_mark()
            stack[-1].extend(items)
        elif name == "SETITEMS":
            items = since_mark()
            stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name == "REDUCE":
            stack[-2:] = [_Note(*stack[-2:])]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"it has an instruction {name}")
    return stack[-1]


_VALUES: dict[str, Callable[[Any], Any]] = {
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "NONE": lambda _: None,
    "NEWFALSE": lambda _: False,
    "NEWTRUE": lambda _: True,
    **dict.fromkeys(
        ("BININT", "BININT1", "BININT2", "BINSTRING", "SHORT_BINSTRING", "GLOBAL"), lambda v: v
    ),
}


def _in_range(labels: npt.NDArray[Any], where: str) -> Bytes:
    wrong = (labels < 0) | (labels >= len(LABELS))
    if wrong.any():
        row = int(wrong.argmax())
        raise UserError(
            f"{where} has a label {int(labels[row])} in record {row}; labels are "
            f"0..{len(LABELS) - 1}. Fetch it again."
        )
    return labels.astype(np.uint8)
