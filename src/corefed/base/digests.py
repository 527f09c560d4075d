"""Digests in files that are read back, so that damage is found and the file refused by name.

A file contains the SHA-256 of itself, taken with 64 zeros in the place of the digest:

    JSON            `sha256`, the first key of the object
    TOML            `# sha256: ...`, the first line
    safetensors     `sha256`, first in the metadata of the header (`tensor_file.py`)
    JSON lines      `sha256`, the last key of every line

A flipped bit anywhere is found, also one in the digest or in the word before it: a file that begins
almost like one with a digest must have a right one. Files of earlier versions have none and are
read with a note.

Digests find damage by disks, copies and editors. They are no signatures: who may write to a folder
can write a digest that fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from corefed.base.shown import say_note

KEY = "sha256"
ZEROS = b"0" * 64
TOML = b"# sha256: "
_JSON = b'{\n "sha256": "'
_LINE = b', "sha256": "', b'"}\n'  # before and after the digest, at the end of a line
_ALMOST = 2
"""Bytes that may differ where a digest is recognised. A flipped bit changes one; files without a
digest differ in five or more."""
_CHUNK = 1 << 20

_CHANGED = "its content is not what was written"


class DamagedError(ValueError):
    """What was read is not what was written."""


LARGE = 1 << 20
"""Bytes of a part that another thread hashes."""


class Stream(NamedTuple):
    """A file in parts, whose digest is known after the last of them.

    It goes to the offset `at` in the first part, which has zeros there.
    """

    at: int
    parts: Iterable[bytes | memoryview]


class Hashed:
    """Parts of a file, hashed while they are written: large ones by another thread."""

    def __init__(self, parts: Iterable[bytes | memoryview], size: int = 0) -> None:
        self.bytes = size  # of all parts, where it is known
        self._parts, self._digest = parts, hashlib.sha256()

    def __iter__(self) -> Iterator[bytes | memoryview]:
        with ThreadPoolExecutor(1) as beside:
            for part in self._parts:
                if len(part) < LARGE:
                    self._digest.update(part)
                    yield part
                else:
                    hashed = beside.submit(self._digest.update, part)
                    yield part
                    hashed.result()

    def hexdigest(self) -> str:
        """Of the parts that were taken."""
        return self._digest.hexdigest()


# --- whole files ----------------------------------------------------------------------------------


def to_json(content: Mapping[str, Any]) -> bytes:
    """The bytes of a JSON file with a digest."""
    text = json.dumps({KEY: ZEROS.decode(), **content}, indent=1) + "\n"
    return seal(text.encode(), len(_JSON))


def from_json(content: bytes, where: Path) -> dict[str, Any]:
    """The object in a JSON file; a ValueError if the file is damaged or has no object."""
    if not check(content, _JSON):
        note_unsealed(where)
    return _object(content)


def read_json(path: Path) -> dict[str, Any]:
    """`from_json` of a file; an OSError if it cannot be read."""
    return from_json(path.read_bytes(), path)


def has_digest(path: Path) -> bool:
    """Whether a JSON file has a digest, be it right or wrong."""
    with path.open("rb") as file:
        return _almost(file.read(len(_JSON)), _JSON)


def to_toml(text: str) -> bytes:
    """The bytes of a TOML file with a digest."""
    return seal(TOML + ZEROS + b"\n" + text.encode(), len(TOML))


def check_toml(path: Path) -> None:
    """A `DamagedError` if a TOML file is not what was written; an OSError if it cannot be read."""
    if not check(path.read_bytes(), TOML):
        note_unsealed(path)


def seal(content: bytes, at: int) -> bytes:
    """The content with its digest in the place of the zeros."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return content[:at] + digest + content[at + len(digest) :]


def joined(stream: Stream) -> bytes:
    """The whole file."""
    digest, parts = hashlib.sha256(), list(stream.parts)
    for part in parts:
        digest.update(part)
    first, at = parts[0], stream.at
    return b"".join([first[:at], _hex(digest), first[at + len(ZEROS) :], *parts[1:]])


def check(content: bytes, start: bytes, skip: int = 0) -> bool:
    """Whether there is a digest; a `DamagedError` if it does not fit.

    A file with a digest has `start` after `skip` bytes, and then the digest.
    """
    at = skip + len(start)
    if not _almost(content[skip:at], start):
        return False
    digest = hashlib.sha256(content[:at])
    digest.update(ZEROS)
    digest.update(memoryview(content)[at + len(ZEROS) :])
    if content[skip:at] != start or content[at : at + len(ZEROS)] != _hex(digest):
        raise DamagedError(_CHANGED)
    return True


def check_file(path: Path, start: bytes, skip: int = 0) -> bool:
    """`check` of a file that need not fit into memory."""
    at = skip + len(start)
    with path.open("rb") as file:
        head = file.read(at + len(ZEROS))
        if not _almost(head[skip:at], start):
            return False
        digest = hashlib.sha256(head[:at] + ZEROS)
        while part := file.read(_CHUNK):
            digest.update(part)
    if head[skip:at] != start or head[at:] != _hex(digest):
        raise DamagedError(_CHANGED)
    return True


def hash_file(path: Path) -> str:
    """The SHA-256 of a file as it is."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- lines ----------------------------------------------------------------------------------------


def to_line(content: Mapping[str, Any]) -> bytes:
    """A line of JSON with a digest."""
    text = json.dumps({**content, KEY: ZEROS.decode()}) + "\n"
    return seal(text.encode(), len(text.encode()) - len(_LINE[1]) - len(ZEROS))


def from_line(raw: bytes, where: Path) -> dict[str, Any]:
    """The object in a line, which ends with a newline; a ValueError if the line is damaged."""
    if ends_sealed(raw):
        at = len(raw) - len(_LINE[1]) - len(ZEROS)
        zeroed = raw[:at] + ZEROS + raw[at + len(ZEROS) :]
        if seal(zeroed, at) != raw:
            raise DamagedError(_CHANGED)
    else:
        note_unsealed(where)
    return _object(raw)


def ends_sealed(raw: bytes) -> bool:
    """Whether a line ends with a digest, be it right or wrong, its newline included."""
    before, after = _LINE
    at = len(raw) - len(after) - len(ZEROS)
    return at >= len(before) and _almost(
        raw[at - len(before) : at] + raw[-len(after) :], before + after
    )


# --- parts ----------------------------------------------------------------------------------------


def note_unsealed(path: Path | str) -> None:
    """Say once per process that a file has no digest."""
    global _noted
    if not _noted:
        _noted = True
        say_note(
            f"{path} has no digest, as files of earlier versions; damage to it would not be found"
        )


_noted = False


def _object(content: bytes) -> dict[str, Any]:
    """The object in some JSON, without its digest."""
    found = json.loads(content)
    if not isinstance(found, dict):
        raise DamagedError("it has no JSON object")
    found.pop(KEY, None)
    return found


def _almost(found: bytes, wanted: bytes) -> bool:
    if len(found) != len(wanted):
        return False
    return sum(a != b for a, b in zip(found, wanted, strict=True)) <= _ALMOST


def _hex(digest: hashlib._Hash) -> bytes:
    return digest.hexdigest().encode()
