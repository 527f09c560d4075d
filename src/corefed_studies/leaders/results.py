"""What is kept: one line per part of a cell while the study runs, then one small result file.

    results.jsonl    a line per part, in the order of their ends; the last line of a part counts
    leaders.json     {"schema": 1, "name": "leaders", "cells": [a line per part]}

Both are a single file, so that they can come back from a machine that only lends its GPU. Several
`results.jsonl` are joined by reading one after the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from corefed.base import files
from corefed.base.errors import UserError
from corefed_studies import result_file
from corefed_studies.leaders.cells import Line

SCHEMA, NAME = 1, "leaders"
LINES, RESULT = "results.jsonl", "leaders.json"
DIGITS = 6

Key = tuple[str, str, str]  # setting, row, part
Lines = dict[Key, Line]


def key_of(line: Line) -> Key:
    return line["setting"], line["row"], line["part"]


def append(path: Path, line: Line) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(_as_text(line) + "\n")


def read_lines(path: Path) -> Lines:
    """The parts on record; a line that was cut off by a crash does not count."""
    if not path.exists():
        return {}
    found: Lines = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            found[key_of(line)] = line
        except (ValueError, KeyError, TypeError):
            continue
    return found


def write(path: Path, lines: Iterable[Line]) -> None:
    head = json.dumps({"schema": SCHEMA, "name": NAME, "cells": []})
    body = ",\n".join(_as_text(line) for line in lines)
    files.replace(path, (head.removesuffix("]}") + "\n" + body + "\n]}\n").encode())


def read(path: Path) -> Lines:
    """The lines of a result file, or of the lines that a study has written so far."""
    if path.suffix == ".jsonl":
        found = read_lines(path)
        if not found:
            raise UserError(f"{path} has no results of the leaders.")
        return found
    whole = result_file.read(path, NAME, SCHEMA)
    try:
        return {key_of(line): line for line in whole["cells"]}
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not whole: a cell lacks {error}.") from error


def _as_text(line: Line) -> str:
    return json.dumps(result_file.rounded(_finite(line), DIGITS), ensure_ascii=False)


def _finite(value: Any) -> Any:
    """Numbers that JSON has not become None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
