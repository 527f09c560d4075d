"""`corefed bench neighbours`, and the processes that studies start side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed

from corefed.base import machine, threads
from corefed_studies import pages
from corefed_studies.bench import isolated, neighbours
from corefed_studies.workers import workers

ROOT = Path(__file__).parents[2]
MARKS = "<!-- bench neighbours: begin -->", "<!-- bench neighbours: end -->"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests were started with."""
    for name in (*machine.NUMBER, *machine.WAITING):
        monkeypatch.delenv(name, raising=False)


def seen() -> tuple[int, dict[str, str]]:
    return torch.get_num_threads(), dict(os.environ)


def test_a_worker_has_one_thread_from_its_first_import(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    before = dict(os.environ)
    with workers(1) as pool:
        number, environment = pool.submit(seen).result()
    assert number == 1
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert dict(os.environ) == before


def test_what_waits_is_dropped_on_an_error_and_the_environment_is_as_before() -> None:
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="stop"), workers(1) as pool:
        raise RuntimeError("stop")
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(seen)
    assert dict(os.environ) == before


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_busy_processes_end_with_the_measurement() -> None:
    with neighbours.busy_processes(2) as started:
        assert len(started) == 2 and all(map(alive, started))
    assert not any(map(alive, started))
    with pytest.raises(KeyboardInterrupt), neighbours.busy_processes(1) as started:
        raise KeyboardInterrupt
    assert not any(map(alive, started))


@pytest.mark.parametrize(
    ("run", "busy", "cores", "share"),
    [(2, 0, 2, 1.0), (2, 3, 2, 2.5), (2, 4, 2, 3.0), (1, 1, 4, 1.0), (4, 4, 4, 2.0)],
)
def test_the_fair_share_is_the_load_per_core(run: int, busy: int, cores: int, share: float) -> None:
    assert neighbours.fair_share(run, busy, cores) == share


def test_the_used_share_counts_what_is_neither_idle_nor_waiting_for_a_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = iter(["cpu 10 0 5 100 7 0 0 0 0 0\ncpu0 1", "cpu 30 0 15 160 17 0 0 0 0 0\ncpu0 1"])
    monkeypatch.setattr(Path, "read_text", lambda path, **rest: next(ticks))
    assert neighbours.used_share(0.0) == 0.3


def test_ratios_are_within_a_repetition() -> None:
    assert neighbours.ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0


def test_ways_to_run_differ_in_the_variables_alone() -> None:
    given = {"HOME": "here", "OMP_NUM_THREADS": "9", "GOMP_SPINCOUNT": "5"}
    ways = neighbours.environments(given, 2)
    assert ways["default"] == {"HOME": "here"}
    assert ways["active"]["OMP_WAIT_POLICY"] == "ACTIVE"
    assert ways["active"]["OMP_NUM_THREADS"] == "2"
    assert ways["corefed"]["OMP_WAIT_POLICY"] == "PASSIVE"
    assert ways["corefed"]["OMP_NUM_THREADS"] == str(machine.usable_cores())


@pytest.mark.parametrize("way", ["corefed", "default"])
def test_a_measurement_trains_real_clients(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "WORTH_THREADS", threads.WORTH_THREADS)  # put back afterwards
    monkeypatch.setattr(neighbours, "CLIENTS", 2)
    monkeypatch.setattr(neighbours, "ENOUGH_SECONDS", 1e-9)
    row = neighbours.one(way)
    assert len(row["seconds"]) == 1 and row["seconds"][0] > 0
    assert row["threads"] == torch.get_num_threads()
    assert (threads.threads_for(1 << 40) == 1) == (way != "corefed" or row["threads"] == 1)


def fake(seconds: dict[str, float], cores: int) -> Any:
    """A measurement that takes as long as the neighbours of the moment make it."""
    busy: list[int] = []

    class Busy:
        def __init__(self, number: int) -> None:
            busy[:] = [number]

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    def measure(module: str, way: str, *, environment: dict[str, str]) -> dict[str, Any]:
        assert module == "corefed_studies.bench.neighbours"
        return {"seconds": [seconds[way] * (1 + busy[0] / 2)] * 3, "threads": cores}

    return Busy, measure


def test_the_table_is_written_into_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy, measure = fake({"corefed": 0.4, "default": 0.5, "active": 0.6}, 2)
    monkeypatch.setattr(neighbours, "busy_processes", busy)
    monkeypatch.setattr(isolated, "measure", measure)
    monkeypatch.setattr(machine, "usable_cores", lambda: 2)
    shares = iter([0.02, 0.3, *[0.01] * 100])
    monkeypatch.setattr(neighbours, "used_share", lambda: next(shares))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    out = tmp_path / "out"
    done = corefed("bench", "neighbours", f"--out={out}", f"--page={page}")
    assert done.code == 0, done.err
    study = json.loads((out / "neighbours.json").read_text())
    assert [row["busy"] for row in study["rows"]] == [0, 2, 3, 4]
    assert [row["fair"] for row in study["rows"]] == [1, 2, 2.5, 3]
    assert study["rows"][-1]["ratio"]["corefed"] == pytest.approx(3)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 4 | 3.0 | 1.20 | 3.0 | 1.50 | 3.0 | 1.80 | 3.0 |" in text
    assert "other programs used at most 30% of the machine. The machine was not quiet" in text
    assert "Beside 2 and 3 busy processes it is reached." in text
    assert "Beside 4 busy processes it is missed." in text
    assert "Beside 4 busy processes it is below the fair share" in text
    assert (out / "neighbours.md").read_text() in text


def test_mistakes_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = corefed("bench", "neighbours", "--device=cuda", f"--out={tmp_path / 'out'}")
    assert done.code == 2 and "measures a CPU" in done.err
    (tmp_path / "page.md").write_text("no marks")
    page = f"--page={tmp_path / 'page.md'}"
    done = corefed("bench", "neighbours", page, f"--out={tmp_path / 'out'}")
    assert done.code == 2 and MARKS[0] in done.err
    assert not (tmp_path / "out").exists()


def test_the_page_has_room_for_the_table() -> None:
    pages.Marked(ROOT / "docs" / "performance.md", "bench neighbours")


def test_a_process_of_its_own_has_our_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, str]] = []

    class Done:
        returncode, stdout = 0, "{}"

    monkeypatch.setattr(
        isolated.subprocess, "run", lambda command, env, **rest: (taken.append(env), Done())[1]
    )
    forget(monkeypatch)
    isolated.measure("module")
    isolated.measure("module", environment={"A": "b"})
    assert taken[0]["OMP_WAIT_POLICY"] == "PASSIVE" and taken[1] == {"A": "b"}
