"""`corefed tune` as a user types it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from commands import corefed

from corefed.base import digests
from corefed.settings.config import resolve
from corefed.training import groups, search

SMALL = (
    "--method=pfedbayes", "--clients=3", "--rounds=4", "--local-steps=2", "--hidden=6",
    "--set=keep=0.4", "--set=evaluate_draws=2", "--device=cpu", "--candidates=4",
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("searches") / "done"
    result = corefed("tune", *SMALL, "--out", folder)
    assert result.code == 0, result.err
    return folder, result.out, result.err


def test_what_is_said(finished: tuple[Path, str, str]) -> None:
    folder, out, err = finished
    report = json.loads((folder / "tune.json").read_text())
    for row in report["candidates"]:
        assert f"{row['nll']:.4f}" in out
        assert f"{row['settings']['eta_1']:g}" in out
    assert "defaults" in out and "chosen" in out and "dropped" in out
    assert f"corefed run --config {folder / 'experiment.toml'}" in out
    assert f"the passes of {report['cost']['runs']:.1f} runs" in out
    assert "Test points were not used" in out
    lines = [line for line in err.splitlines() if line.startswith("rung")]
    assert [line[:21] for line in lines] == [
        "rung 1 of 3, round 1:", "rung 2 of 3, round 2:", "rung 3 of 3, round 4:",
    ]  # fmt: skip
    assert all("best NLL" in line and "eta_1=" in line for line in lines)


def test_the_folder(finished: tuple[Path, str, str]) -> None:
    folder, _, _ = finished
    assert sorted(path.name for path in folder.iterdir()) == [
        "experiment.toml", "search.toml", "tune.json", "what-mattered.png",
    ]  # fmt: skip
    assert (folder / "what-mattered.png").read_bytes().startswith(b"\x89PNG")
    report = json.loads((folder / "tune.json").read_text())
    assert report["finished"] and report["rounds"] == 4 and report["seeds"] == [0]
    assert resolve(folder / "search.toml").run.validation == 0.2
    found = resolve(folder / "experiment.toml")
    assert found.run.validation == 0


def test_the_settings_are_taken_by_run(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, _, _ = finished
    result = corefed("run", "--config", folder / "experiment.toml", "--out", tmp_path / "r", "-q")
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "r" / "summary.json").read_text())
    chosen = json.loads((folder / "tune.json").read_text())["chosen"]["settings"]
    assert {name: summary["config"][name] for name in chosen} == chosen
    assert "validation" not in summary


def test_quiet_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = corefed("tune", *SMALL, "--rounds=1", "--quiet")
    assert result.code == 0
    assert result.out.startswith("runs/tune-digits-pfedbayes-")
    assert Path(result.out.strip(), "tune.json").exists()
    result = corefed("tune", *SMALL, "--rounds=1", "--out=out", "--json")
    assert json.loads(result.out) == digests.read_json(Path("out", "tune.json"))


def test_space_set_and_config(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    """The file of a run has validation = 0, which a search replaces; --set moves the centre."""
    result = corefed(
        "tune", "--config", finished[0] / "experiment.toml", "--set", "zeta=0.5", "--space=zeta",
        "--space=local_steps=2,3", "--candidates=3", "--rounds=2", "--json",
        "--out", tmp_path / "o",
    )  # fmt: skip
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["given"] == "the given settings"
    assert [axis["name"] for axis in report["space"]] == ["zeta", "local_steps"]
    assert report["candidates"][0]["settings"].keys() == {"zeta", "local_steps"}
    assert resolve(tmp_path / "o" / "search.toml").run.validation == 0.2


WRONG = [
    (("--space", "eta=1..2"), "There is no setting 'eta' (--space eta=1..2)"),
    (("--space", "eta_1=0.1..0.01"), "is an empty range"),
    (("--space", "eta_1=-1..1"), "is -1.0; it must be above 0"),
    (("--space", "zeta="), "has no values"),
    (("--candidates", "1"), "candidates is 1; it must be at least 2"),
    (("--candidates", "0"), "candidates is 0; it must be at least 2"),
    (("--validation", "0"), "validation is 0: a search needs validation points"),
    (("--set", "validation=0"), "validation is 0: a search needs validation points"),
    (("--validation", "1.5"), "validation is 1.5; it must be 0 or more and below 1"),
    (("--method", "pfedbays"), "Did you mean 'pfedbayes'"),
]


@pytest.mark.parametrize(("arguments", "words"), WRONG)
def test_mistakes_are_told_before_anything_is_loaded(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "prepare", lambda *_: pytest.fail("data were loaded"))
    result = corefed("tune", *SMALL, *arguments, "--out", tmp_path / "out")
    assert result.code == 2
    assert words in result.err and len(result.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_folders(finished: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, _, _ = finished
    existing = corefed("tune", *SMALL, "--out", folder)
    assert existing.code == 2
    assert "is not empty, it has search.toml; choose another --out, or go on" in existing.err
    none = corefed("tune", "--resume", tmp_path)
    assert none.code == 2 and "holds no search to resume" in none.err
    both = corefed("tune", "--resume", folder, "--out", tmp_path / "x")
    assert both.code == 2 and "leave out --out, --space and --candidates" in both.err
    other = corefed("tune", "--resume", folder, "--rounds", 8)
    assert other.code == 2 and "holds a search with other settings" in other.err
    again = corefed("tune", "--resume", folder)
    assert again.code == 0 and "corefed run --config" in again.out
    missing = corefed("tune", *SMALL, "--validation", "0.0001", "--out", tmp_path / "few")
    assert missing.code == 2 and "leaves no client a validation point" in missing.err
    assert not (tmp_path / "few").exists()


@pytest.mark.usefixtures("heard")
def test_ctrl_c_in_the_first_rung(
    finished: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, folder = groups.Group.train, tmp_path / "out"

    def interrupted(group: groups.Group) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return train(group)

    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "train", interrupted)
        result = corefed("tune", *SMALL, "--out", folder)
    assert result.code == 130
    assert f"stopped after round 1; go on with: corefed tune --resume {folder}" in result.err
    assert corefed("tune", "--resume", folder, "-q").code == 0
    one, other = (without_seconds(each / "tune.json") for each in (folder, finished[0]))
    assert one == other
    assert (folder / "experiment.toml").read_bytes() == (
        finished[0] / "experiment.toml"
    ).read_bytes()


@pytest.mark.usefixtures("heard")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(group: groups.Group) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    with monkeypatch.context() as patch:
        patch.setattr(groups.Group, "train", interrupted)
        result = corefed("tune", *SMALL, "--out", tmp_path / "out")
    assert result.code == 130 and "stopped inside a round; go on with" in result.err
    assert corefed("tune", "--resume", tmp_path / "out", "-q").code == 0


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_loading_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "prepare", lambda *_: signal.raise_signal(signal.SIGINT))
    result = corefed("tune", *SMALL, "--out", tmp_path / "out")
    assert (result.code, result.err) == (130, "nothing written\n")
    assert not (tmp_path / "out").exists()


def without_seconds(path: Path) -> dict[str, Any]:
    found = digests.read_json(path)
    del found["cost"]["seconds"]
    return found
