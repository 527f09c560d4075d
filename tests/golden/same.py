"""Does this tree give the numbers of a commit, to the bit?

    make same AS=COMMIT                    every golden case, on one thread
    make same AS=COMMIT CASES=selectors/   those with this in their name
    make same AS=COMMIT THREADS=2          on two threads

The golden cases of this tree are run by the package of that commit, in a worktree of its own, and
by the package of this tree, at the same time on this machine. Every tensor, metric and count of a
case is compared. A setting that one of the two does not know is left out there, and the case's line
says so. What the environment has, such as ATEN_CPU_CAPABILITY, holds for both. The exit code is 1
if anything differs or could not be compared.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import run_cases
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]

Side = subprocess.Popen[bytes]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="same.py", description=__doc__)
    parser.add_argument("commit")
    parser.add_argument("--cases", default="")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args(words)
    if not run_cases.chosen(given.cases):
        return refuse(f"no golden case has {given.cases!r} in its name")
    found = git("rev-parse", "--verify", "--quiet", "--short", f"{given.commit}^{{commit}}")
    if found.returncode != 0:
        return refuse(f"this repository has no commit {given.commit!r}; git fetch may bring it")
    commit = found.stdout.strip()
    with worktree(commit) as other:
        return compare({commit: other, "this tree": TREE}, given.cases, given.threads)


def refuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(TREE), *words], capture_output=True, text=True)


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """The commit's files in a folder that goes away."""
    with tempfile.TemporaryDirectory(prefix="corefed-same-") as folder:
        place = Path(folder).resolve() / "tree"
        added = git("worktree", "add", "--detach", "--quiet", str(place), commit)
        if added.returncode != 0:
            raise SystemExit(f"error: {added.stderr.strip()}")
        try:
            yield place
        finally:
            git("worktree", "remove", "--force", str(place))


def compare(trees: dict[str, Path], part: str, threads: int) -> int:
    """Run both trees, of the names that `trees` gives them; 1 if anything differs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corefed-same-")))
        sides = {
            name: stack.enter_context(running(tree, folder / str(i), part, threads))
            for i, (name, tree) in enumerate(trees.items())
        }
        fields, cases = 0, 0
        for case in run_cases.chosen(part):
            files = [run_cases.file_of(folder / str(i), case) for i in range(len(trees))]
            found = [wait(file, side) for file, side in zip(files, sides.values(), strict=True)]
            notes, differing = judge(dict(zip(trees, found, strict=True)))
            fields, cases = fields + len(differing), cases + bool(differing)
            words = [*notes, f"{len(differing)} fields differ" if differing else "the same"]
            print(f"{run_cases.name_of(case)}: {'; '.join(words)}", flush=True)
            for sentence in differing:
                print(f"    {sentence}")
    number = len(run_cases.chosen(part))
    print(f"{number - cases} of {number} cases are the same to the bit", end="")
    print(f"; {fields} fields of {cases} differ" if cases else "")
    return 1 if cases else 0


@contextmanager
def running(tree: Path, out: Path, part: str, threads: int) -> Iterator[Side]:
    """The golden cases with the package of one tree, as a process."""
    out.mkdir()
    process = subprocess.Popen(
        [sys.executable, str(HERE / "run_cases.py"), str(tree), str(out), part],
        cwd=out,
        env={
            **os.environ,
            "PYTHONPATH": str(tree / "src"),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        },
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def wait(file: Path, side: Side) -> dict[str, Any]:
    """What a side left of a case, once it has."""
    while not file.exists():
        if side.poll() is not None and not file.exists():
            raise SystemExit(f"error: {' '.join(map(str, side.args))} ended early")  # type: ignore[union-attr]
        time.sleep(0.05)
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


def judge(sides: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """What to know of a case, and a sentence for every field that differs."""
    notes = [
        f"without {', '.join(sorted(set(side['left_out'])))} in {name}, which does not know it"
        for name, side in sides.items()
        if side["left_out"]
    ]
    failed = [
        f"not compared, {name} fails: {said}"
        for name, side in sides.items()
        if (said := side.get("failed"))
    ]
    if failed:
        return notes, failed
    (was, then), (name, now) = ((name, side["fields"]) for name, side in sides.items())
    differing = []
    for field in sorted(then.keys() | now.keys()):
        if field not in now or field not in then:
            differing.append(f"{field}: only in {was if field in then else name}")
        elif said := difference(then[field], now[field]):
            differing.append(f"{field}: {said}")
    return notes, differing


def difference(a: Any, b: Any) -> str:
    """How b differs from a; nothing if it is the same to the bit."""
    if repr(a) == repr(b) and not isinstance(a, Tensor):  # repr: NaN equals NaN
        return ""
    x, y = as_tensor(a), as_tensor(b)
    if x is None or y is None:
        return shorten(f"{a} -> {b}")
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return f"{x.dtype} {list(x.shape)} -> {y.dtype} {list(y.shape)}"
    if torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (x, y))):
        return ""
    if not torch.equal(x.isfinite(), y.isfinite()):
        return "other values are not finite"
    x, y = x[x.isfinite()].double(), y[y.isfinite()].double()
    farthest, largest = float((x - y).abs().max()), float(x.abs().max())
    part = f"{farthest / largest:.2g} of the largest" if largest else "where all were 0"
    return f"{int((x != y).sum())} of {len(x)} values differ, by at most {farthest:.3g}, {part}"


def as_tensor(value: Any) -> Tensor | None:
    """A tensor, or a list of numbers as one."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError):
        return None


def shorten(text: str, most: int = 160) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
