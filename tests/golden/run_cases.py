"""Run golden cases of this file's tree by the package of any tree, and keep what they leave:

    PYTHONPATH=TREE/src python tests/golden/run_cases.py TREE FOLDER [PART OF A NAME]

`same.py` starts it. FOLDER gets a file for each case: its fields, or why the case failed.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_cases
import golden_digest
import torch

import corefed

UNKNOWN = re.compile(r"There is no setting '([^']+)'")


def main(tree: Path, out: Path, part: str) -> None:
    assert Path(corefed.__file__).is_relative_to(tree), f"{corefed.__file__} is not of {tree}"
    golden_digest.checkpoint = own_checkpoint(tree)
    command = golden_cases.corefed
    for case in chosen(part):
        left_out: list[str] = []
        golden_cases.corefed = without_unknown(command, left_out)
        found: dict[str, Any] = {"left_out": left_out}
        with tempfile.TemporaryDirectory() as folder:
            try:
                found["fields"] = case.make(Path(folder))
            except Exception as error:
                found["failed"] = f"{type(error).__name__}: {error}"
        path = file_of(out, case)
        torch.save(found, path.with_suffix(".part"))
        path.with_suffix(".part").replace(path)


def chosen(part: str) -> list[golden_cases.Case]:
    """Cases whose name has this part."""
    cases = [*golden_cases.CASES, golden_cases.FEDERATION]
    return [case for case in cases if part in name_of(case)]


def name_of(case: golden_cases.Case) -> str:
    return f"{case.group}/{case.name}"


def file_of(folder: Path, case: golden_cases.Case) -> Path:
    return folder / f"{case.group}.{case.name}.pt"


def own_checkpoint(tree: Path) -> Callable[[Path], dict[str, torch.Tensor]]:
    """How this tree reads its own checkpoints: from its own golden_digest.py."""
    path = tree / "tests/golden/golden_digest.py"
    spec = importlib.util.spec_from_file_location("golden_digest_of_tree", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Callable[[Path], dict[str, torch.Tensor]] = module.checkpoint
    return found


def without_unknown(command: Callable[..., None], left_out: list[str]) -> Callable[..., None]:
    """The command, again without each setting that this tree's package does not know."""

    def run(*words: object) -> None:
        given = list(words)
        while True:
            try:
                return command(*given)
            except RuntimeError as error:
                unknown = UNKNOWN.search(str(error))
                at = [
                    i
                    for i, w in enumerate(given)
                    if unknown and f"{w}".startswith(f"{unknown[1]}=")
                ]
                if not unknown or not at:
                    raise
                left_out.append(unknown[1])
                for i in reversed(at):
                    del given[i - 1 : i + 1]  # --set NAME=VALUE

    return run


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), "".join(sys.argv[3:]))
