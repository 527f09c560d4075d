"""The number of cores a process may use, from a made-up /proc and /sys; and its environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from corefed.base import machine
from corefed.base.machine import polite, usable_cores

EIGHT = frozenset(range(8))


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def test_without_any_file_it_is_the_affinity(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, EIGHT) == 8
    assert usable_cores(tmp_path, frozenset({5})) == 1


def test_two_cpus_of_one_core_count_once(tmp_path: Path) -> None:
    for cpu in range(8):
        path = f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        write(tmp_path, path, f"{cpu % 4},{cpu % 4 + 4}")
    assert usable_cores(tmp_path, EIGHT) == 4
    assert usable_cores(tmp_path, frozenset({0, 1, 4})) == 2


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1),
     ("1600000 100000", 8), ("", 8), ("nonsense", 8), ("-5 100000", 8), ("100000 0", 8)],
)  # fmt: skip
def test_a_quota_of_version_2_is_rounded_up(quota: str, cores: int, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/user/job")
    write(tmp_path, "sys/fs/cgroup/user/job/cpu.max", quota)
    assert usable_cores(tmp_path, EIGHT) == cores


def test_the_smallest_quota_on_the_way_to_the_top_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slice/service/part")
    write(tmp_path, "sys/fs/cgroup/slice/service/part/cpu.max", "max 100000")
    write(tmp_path, "sys/fs/cgroup/slice/cpu.max", "300000 100000")
    assert usable_cores(tmp_path, EIGHT) == 3


def test_in_a_container_only_the_top_may_be_there(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/docker/0123abcd")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "250000 100000")
    assert usable_cores(tmp_path, EIGHT) == 3


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("350000", 4)])
def test_a_quota_of_version_1(folder: str, quota: str, cores: int, tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "5:memory:/job\n4:cpu,cpuacct:/job\n3:cpuset:/job\n0::/")
    write(tmp_path, f"sys/fs/cgroup/{folder}/job/cpu.cfs_quota_us", quota)
    write(tmp_path, f"sys/fs/cgroup/{folder}/job/cpu.cfs_period_us", "100000")
    assert usable_cores(tmp_path, EIGHT) == cores


def test_this_machine_has_a_core() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_a_polite_environment_waits_passively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_cores", lambda: 3)
    given = {"LANG": "C"}
    assert polite(given) == {
        "LANG": "C",
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "OMP_NUM_THREADS": "3",
    }
    assert given == {"LANG": "C"}
    assert polite({"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] == "3"  # empty is not set


@pytest.mark.parametrize("name", machine.WAITING)
def test_how_threads_wait_is_the_users_choice(name: str) -> None:
    chosen = polite({name: "7", "OMP_NUM_THREADS": "5"})
    assert chosen == {name: "7", "OMP_NUM_THREADS": "5"}


@pytest.mark.parametrize("name", machine.NUMBER)
def test_the_number_of_threads_is_the_users_choice(name: str) -> None:
    assert polite({name: "5"}) == {name: "5", **machine.PASSIVE}


def test_one_of_several_processes_has_the_number_it_is_given() -> None:
    chosen = polite({"OMP_NUM_THREADS": "16", "MKL_NUM_THREADS": "16"}, threads=1)
    assert chosen == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **machine.PASSIVE}
