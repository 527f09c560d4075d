"""`corefed run` on several workers, with real processes: killed, stopped, and wrongly started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from commands import corefed
from safetensors.torch import load_file

from corefed.base.errors import UserError
from corefed.commands import cli, workers
from corefed.training import record

ROUNDS = 150
RUN = ("run", "--method=fedavg", "--clients=5", f"--rounds={ROUNDS}", "--hidden=8", "--quiet")
PROGRAM = (sys.executable, "-m", "corefed")


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process that hears Ctrl-C and ends with the test."""
    process = subprocess.Popen(
        [str(each) for each in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for_rounds(folder: Path, run: subprocess.Popen[str], count: int) -> int:
    """Wait until the record has so many rounds; how many it has."""
    deadline = time.monotonic() + 120
    while (found := len(record.read_lines(folder / record.ROUNDS)[0])) < count:
        assert run.poll() is None and time.monotonic() < deadline, run.communicate()
        time.sleep(0.01)
    return found


def worker_of(process: subprocess.Popen[str], rank: int) -> int:
    """The process number of a worker."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for child in children:
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError(f"no worker {rank} among {children}")


def untimed(folder: Path) -> list[dict[str, Any]]:
    lines, _ = record.read_lines(folder / record.ROUNDS)
    return [
        {k: v for k, v in line.items() if "seconds" not in k and "memory" not in k}
        for line in lines
    ]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_run_that_is_killed_stopped_and_resumed_ends_like_an_undisturbed_one(
    tmp_path: Path,
) -> None:
    """A worker is killed, then comes Ctrl-C, then the run is resumed; torchrun has it easier."""
    whole, disturbed = tmp_path / "whole", tmp_path / "disturbed"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m")
    with started(sys.executable, *launch, "corefed", *RUN, "--out", whole) as torchrun:
        out, err = torchrun.communicate(timeout=240)
    assert (torchrun.returncode, out) == (0, f"{whole}\n"), err

    with started(*PROGRAM, *RUN, "--out", disturbed, "--workers=2") as run:
        done = wait_for_rounds(disturbed, run, 3)
        os.kill(worker_of(run, 1), signal.SIGKILL)
        done = wait_for_rounds(disturbed, run, done + 5)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=240)
    assert run.returncode == 130, err
    done = len(untimed(disturbed))
    assert err.splitlines() == [
        "note: worker 1 of 2 was killed; starting again from the last checkpoint (1 of 3)",
        "",
        "finishing this round; Ctrl-C again stops at once",
        f"stopped after round {done}; go on with: corefed run --resume {disturbed}",
    ]
    assert 8 <= done < ROUNDS
    refused = corefed("run", "--resume", disturbed)
    assert refused.code == 2
    assert "was trained by 2 workers; go on with it by corefed run --resume" in refused.err

    with started(*PROGRAM, "run", "--resume", disturbed, "--workers=2", "--quiet") as run:
        out, err = run.communicate(timeout=240)
    assert (run.returncode, out, err) == (0, f"{disturbed}\n", "")
    assert untimed(disturbed) == untimed(whole)
    for name in ("fitted.safetensors", "held_out.safetensors"):
        one, other = load_file(disturbed / name), load_file(whole / name)
        assert one.keys() == other.keys()
        assert all(one[k].equal(other[k]) for k in one)
    summary = json.loads((disturbed / record.SUMMARY).read_text())
    assert summary["environment"]["workers"] == 2


def test_mistakes_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "parent" / "run"

    def refused(*more: str, words: str) -> None:
        result = corefed(*RUN, "--out", out, *more)
        assert result.code == 2, result
        assert result.err.startswith("error: ") and result.err.count("\n") == 1
        assert words in result.err
        assert not out.parent.exists()

    refused("--workers=0", words="--workers is 0; it must be at least 1.")
    refused("--worker-timeout=0", words="--worker-timeout is 0; it must be above 0 seconds.")
    refused("--workers=2", "--set=rouns=3", words="did you mean 'rounds'")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "2")
    refused(words="RANK is 2 and WORLD_SIZE is 2: workers count from 0 to 1.")
    monkeypatch.setenv("RANK", "one")
    refused(words="one of them is no whole number")
    monkeypatch.setenv("RANK", "1")
    refused("--workers=2", words="This is worker 1 of 2 already")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(workers._free_port()))
    monkeypatch.setattr(workers, "follow_parent", lambda: None)
    before = signal.getsignal(signal.SIGINT)
    refused("--worker-timeout=0.2", words="Not all 2 workers met at 127.0.0.1:")
    signal.signal(signal.SIGINT, before)
    result = corefed(*RUN)
    assert result.code == 2
    assert "give --out" in result.err


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([[0, 0]], 0),
        ([[2, 2]], 2),
        ([[2, 75]], 2),
        ([[130, 75]], 130),
        ([[75, 1]], 1),  # a mistake in the program: the other only lost it
        ([[-9, 75], [75, 75], [0, 0]], 0),
    ],
)
def test_only_a_group_that_lost_a_worker_is_started_again(
    codes: list[list[int]], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = iter(codes)
    monkeypatch.setattr(workers, "_attempt", lambda *_: next(left))
    monkeypatch.setattr(workers, "rebuild", lambda *_, **__: [])
    assert workers.launch(2, click.Context(click.Command("run"))) == expected
    assert next(left, None) is None


def test_a_worker_that_is_killed_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_attempt", lambda *_: [75, -9])
    with pytest.raises(UserError, match="Worker 1 of 2 was killed for the 4th time"):
        workers.launch(2, click.Context(click.Command("run")))


def test_workers_get_the_options_of_the_command() -> None:
    command = typer.main.get_command(cli.app)
    assert isinstance(command, click.Group)
    given = ["--data=table:a b.csv", "--seed=0,1", "--set=x=1", "--set=y=a,b", "--quiet"]
    context = command.commands["run"].make_context("run", [*given, "--workers=3"])
    found = workers.rebuild(context, without=("workers",))
    assert found[0] == "run"
    assert set(given) - {"--quiet"} <= set(found)
    assert not any(each.startswith("--workers") for each in found)
    again = command.commands["run"].make_context("run", found[1:])
    assert {**again.params, "workers": 3} == context.params
