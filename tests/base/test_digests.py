"""Digests in files: written and read back, and files of earlier versions that have none."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from pathlib import Path

import pytest

from corefed.base import digests, files
from corefed.base.digests import DamagedError, Stream

CONTENT = {"schema": 1, "names": ["ä", '"sha256": "'], "none": None, "value": 0.1}


@pytest.fixture(autouse=True)
def unnoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_noted", False)


def test_a_digest_is_the_sha256_with_zeros_in_its_place() -> None:
    """What docs/start.md says, so that others can check it too."""
    for content in (
        digests.to_json(CONTENT), digests.to_toml("a = 1\n"), digests.to_line(CONTENT)
    ):  # fmt: skip
        (said,) = re.findall(rb"[0-9a-f]{64}", content)
        assert hashlib.sha256(content.replace(said, b"0" * 64)).hexdigest().encode() == said


def test_content_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert digests.from_json(digests.to_json(CONTENT), tmp_path) == CONTENT
    assert digests.from_line(digests.to_line(CONTENT), tmp_path) == CONTENT
    assert json.loads(digests.to_json(CONTENT)).keys() == {"sha256", *CONTENT}  # plain JSON
    assert tomllib.loads(digests.to_toml("a = 1\n").decode()) == {"a": 1}
    assert capsys.readouterr().err == ""


def test_parts_are_hashed_while_they_are_written(tmp_path: Path) -> None:
    parts = [b"ab" + digests.ZEROS + b"c", b"", b"d" * 100]
    files.replace_all(tmp_path, [("file", Stream(2, parts))])
    written = (tmp_path / "file").read_bytes()
    assert written == digests.joined(Stream(2, parts)) == digests.seal(b"".join(parts), 2)
    assert digests.check(written, b"ab") and digests.check_file(tmp_path / "file", b"ab")
    (tmp_path / "file").write_bytes(written[:-1])
    with pytest.raises(DamagedError):
        digests.check_file(tmp_path / "file", b"ab")


def test_a_file_without_a_digest_is_read_with_one_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / "ol\x1bd.json"
    old.write_text(json.dumps(CONTENT, indent=1) + "\n")
    assert digests.read_json(old) == digests.read_json(old) == CONTENT
    assert digests.from_line(json.dumps(CONTENT).encode() + b"\n", old) == CONTENT
    note = capsys.readouterr().err
    assert note.count("note: ") == 1 and "ol\\x1bd.json has no digest" in note


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff\xff"])
def test_what_is_no_object_is_refused(content: bytes, tmp_path: Path) -> None:
    for read in (digests.from_json, digests.from_line):
        with pytest.raises(ValueError):  # noqa: PT011 (JSON's own, too)
            read(content, tmp_path)


@pytest.mark.parametrize("sizes", [[], [3], [digests.LARGE], [5, digests.LARGE + 1, 0, 7]])
def test_parts_are_hashed_while_they_are_taken(sizes: list[int]) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    hashed = digests.Hashed([memoryview(part) for part in parts], sum(sizes))
    assert b"".join(hashed) == b"".join(parts)
    assert hashed.bytes == sum(sizes)
    assert hashed.hexdigest() == hashlib.sha256(b"".join(parts)).hexdigest()
