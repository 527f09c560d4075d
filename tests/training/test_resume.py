"""kill -9 for real, at random and at the worst moments; the resumed run ends bit for bit the same.

The worst moments are reached by a wrapper that sends SIGKILL to its own process from inside a
write, forked from one that has all imported; the random ones by this test, once the run has begun
to record.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from saved_state import bits_of

from corefed import resolve, train
from corefed.base import files
from corefed.methods import registry
from corefed.training import record

SETTINGS = (
    "--method=coreset-pfedbayes", "--fraction=0.3", "--set=refresh_every=15",
    "--set=check_every=5", "--seed=0,1", "--clients=4",
    "--rounds=12", "--local-steps=5", "--set=hidden=16", "--set=cohort=3",
    "--set=evaluate_draws=2", "--set=evaluate_every=4", "--device=cpu", "--quiet",
)  # fmt: skip
COMMAND = (sys.executable, "-m", "corefed", "run")

SUICIDES = """
import json, os, signal, sys, time
import sklearn.datasets
import torch
from corefed import train
from corefed.commands import cli
from corefed.training import record, rounds, setup
from corefed.methods import coreset_pfedbayes
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def at(name):
    global count
    count -= place == name
    return place == name and count == 0
write, replace, unlink = os.write, os.replace, os.unlink
def dying_write(handle, content):
    name = os.readlink(f"/proc/self/fd/{handle}")
    if "checkpoint" in name and place == "a line ahead of a slow writer":
        time.sleep(0.05)
    lines = "rounds" in name and (at("half a line") or at("a line ahead of a slow writer"))
    if lines or "checkpoint" in name and at("half a checkpoint"):
        write(handle, bytes(content)[: len(content) // 2])
        die()
    return write(handle, content)
def dying_replace(source, target):
    state = "checkpoint" in str(target)
    if state and at("before the rename"):
        die()
    replace(source, target)
    if state and at("after the rename") or "summary" in str(target) and at("after the summary"):
        die()
def dying_unlink(path, **more):
    if "checkpoint" in str(path) and at("before a removal"):
        die()
    unlink(path, **more)
threads = torch.get_num_threads()
for line in sys.stdin:
    place, count, *arguments = json.loads(line)
    child = os.fork()
    if child == 0:
        os.write, os.replace, os.unlink = dying_write, dying_replace, dying_unlink
        torch.set_num_threads(threads)  # a forked process has one, which rounds otherwise
        sys.exit(cli.main(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

MOMENTS = [
    ("half a line", 1),
    ("half a checkpoint", 1),  # the server's file
    ("half a checkpoint", 2),  # the clients' file
    ("half a checkpoint", 3),  # the manifest
    ("after the rename", 3),
    ("before the rename", 5),
    ("half a line", 2),
    ("before a removal", 1),
    ("a line ahead of a slow writer", 4),
    ("after the rename", 2),
]
"""Each resumed run dies at the next one: (where, at which such write of its process).

A checkpoint is three files, here after every round. A slow writer is two rounds behind.
"""


TIMES = ("seconds", "seconds_per_round", "evaluate_seconds", "wall_seconds", "peak_memory_mb")


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that may not depend on having been killed: all but times, memory, versions."""
    summary, lines = record.read(folder)
    for each in (summary["cost"], *lines):
        for key in TIMES:
            each.pop(key, None)
    for key in ("environment", "checkpoints"):
        summary.pop(key)
    summary["config"].pop("checkpoint_every")  # the one setting that these tests change
    return {"summary": summary, "lines": lines, "state": bits_of(folder)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    subprocess.run([*COMMAND, *SETTINGS, "--out", folder], check=True, capture_output=True)
    return outcome(folder)


def arguments(folder: Path) -> list[str]:
    """What a user would type: start it, or go on once it has begun."""
    begun = (folder / record.EXPERIMENT).exists()
    return ["--resume", str(folder), "--quiet"] if begun else [*SETTINGS, "--out", str(folder)]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="names open files by /proc")
def test_killed_at_the_worst_moments(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", SUICIDES]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as runs:
        assert runs.stdin is not None and runs.stdout is not None
        for place, count in MOMENTS:
            line = json.dumps([place, count, "run", *arguments(folder), "--set=checkpoint_every=1"])
            print(line, file=runs.stdin, flush=True)
            assert runs.stdout.readline() == f"{-signal.SIGKILL:d}\n", place
            assert not (folder / record.SUMMARY).exists()
    subprocess.run([*COMMAND, *arguments(folder)], check=True, capture_output=True)
    assert outcome(folder) == undisturbed
    assert not list(folder.rglob(f"*{files.TEMPORARY}"))


def test_killed_at_random_moments(undisturbed: dict[str, Any], tmp_path: Path) -> None:
    """Killed up to 3 times at moments drawn anew in every run of this test; the seed is printed."""
    seed = time.time_ns()
    print(f"seed {seed}")
    draw = random.Random(seed)
    folder = tmp_path / "run"
    kills = 0
    for _ in range(3):
        often = f"--set=checkpoint_every={draw.choice((-1, 1))}"
        command = [*COMMAND, *arguments(folder), often]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        seen = rounds(folder)
        while process.poll() is None and rounds(folder) == seen:
            time.sleep(0.002)  # importing torch takes seconds, the run itself not one
        time.sleep(draw.uniform(0, 0.1))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills > 0
    subprocess.run([*COMMAND, *arguments(folder)], check=True, capture_output=True)
    assert outcome(folder) == undisturbed


@pytest.mark.parametrize("method", registry.METHODS)
def test_every_method_resumes_to_the_same_bits(method: str, tmp_path: Path) -> None:
    """Stopped after 2 of 4 rounds, as by Ctrl-C, and resumed."""
    flags = {"method": method, "clients": 4, "rounds": 4, "local_steps": 3, "device": "cpu"}
    experiment = resolve(flags=flags)
    train(experiment, tmp_path / "whole")
    done: list[dict[str, Any]] = []
    train(experiment, tmp_path / "parts", on_round=done.append, stop=lambda: len(done) == 1)
    assert len((tmp_path / "parts" / record.ROUNDS).read_text().splitlines()) == 2
    train(experiment, tmp_path / "parts", resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


def rounds(folder: Path) -> int:
    path = folder / record.ROUNDS
    return path.stat().st_size if path.exists() else 0
