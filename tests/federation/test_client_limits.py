"""What work a server can make a client do, what late tasks change, and what a client logs."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corefed
from malicious_server import AGREEMENT, NOISE, ask, client, linear, points

from corefed.base import files
from corefed.base.errors import UserError
from corefed.base.tables import markdown_table
from corefed.federation import audit, limits, replacing
from corefed.federation.client import FAILED, UNLOGGED, answer
from corefed.federation.flower import records
from corefed.federation.limits import Limits, TimeUpError, time_limit
from corefed.federation.operate.folder import ClientFolder
from corefed.federation.protocol import Agreement, Reply, check_run
from corefed.federation.task_context import ClientSettings
from corefed.methods import registry
from corefed.settings import config
from corefed.settings.fields import list_settings
from corefed.training import client_side, fitted, record

# Limits


WORK: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"local_steps": 10_001}, "local_steps = 10001, and this client allows 10000"),
    "draws": ({"evaluate_draws": 20_000}, "evaluate_draws = 20000.*repeats in the table"),
    "a method's own": ({"method": "pfedme", "inner_steps": 10**6}, "inner_steps = 1e+06"),
    "memory": (
        {"method": "coreset-pfedbayes", "selection_mb": 10**6},
        "selection_mb = 1e+06.*memory_mb in the table",
    ),
    "rounds": ({"rounds": 1001}, "rounds = 1001"),
    "a wide layer": ({"hidden": "1000000000"}, "the number of weights = 6e+09.*parameters"),
    "many layers": ({"hidden": "4000,4000,4000"}, "the number of weights = 3.2"),
    "channels": (
        {"model": "cnn", "channels": "100000,100000"},
        "the number of weights = 9.00037e+10",
    ),
}


@pytest.mark.parametrize(("flags", "words"), WORK.values(), ids=WORK)
@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_more_work_than_allowed_is_refused_before_it_begins(
    kind: Any, flags: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr(client_side, "train", never)
    place = client(tmp_path, False)._replace(data="npz:/there/is/none.npz")
    agreement = Agreement((3, 8, 8), ("a", "b"), 0) if "model" in flags else AGREEMENT
    reply = answer(ask(kind, linear(1.0), agreement=agreement, **flags), place)
    assert re.search(words.replace("+", r"\+"), reply.error), reply.error
    assert not list(place.state.glob("*/*"))  # nothing was kept


@pytest.mark.parametrize(
    ("kind", "round_"), [("test", 0), ("", 0), ("train", -1), ("train", 2), ("join", 0)]
)
def test_what_is_no_task_is_refused(kind: Any, round_: Any, tmp_path: Path) -> None:
    """Limits count tasks by kind and round: neither can be made up."""
    task = ask("train")._replace(kind=kind, round=round_)
    reply = answer(task, client(tmp_path, False))
    assert "a task, or for a round, that there is not" in reply.error and not reply.figures


@pytest.mark.parametrize(
    "wrong",
    [{"round": 0.5}, {"round": True}, {"round": "0"}, {"run": 1}, {"dp_noise": "1"}, {"extra": 1}],
)
def test_a_message_that_is_no_task_is_not_read(wrong: dict[str, Any]) -> None:
    message = records.task_to_records(ask("train"))
    assert records.task_from(message).kind == "train"
    message.config_records["corefed"].update(wrong)
    with pytest.raises(ValueError, match="other fields than a task has"):
        records.task_from(message)


def test_limits_are_the_clients_own(tmp_path: Path) -> None:
    place = client(tmp_path, False, limits=Limits(local_steps=5, rounds=1, parameters=8))
    assert (
        "local_steps = 6, and this client allows 5"
        in answer(ask("train", rounds=1, local_steps=6), place).error
    )
    assert "rounds = 2, and this client allows 1" in answer(ask("train"), place).error
    assert not answer(ask("train", rounds=1), place).error
    small = place._replace(limits=Limits(parameters=7))
    assert "the number of weights = 8" in answer(ask("train", run="other"), small).error


def test_default_settings_are_within_default_limits() -> None:
    """All defaults of all methods are allowed by the default limits."""
    for method in registry.METHODS:
        limits.check_settings(config.resolve(flags={"method": method}), Limits())


def endless() -> None:
    with time_limit(0.1):
        while True:
            try:
                time.sleep(0.01)
            except Exception:  # does not catch it
                raise AssertionError from None


def test_a_time_limit_ends_python_and_leaves_no_timer() -> None:
    began = time.monotonic()
    with pytest.raises(TimeUpError):
        endless()
    assert time.monotonic() - began < 5
    with time_limit(0.05):
        pass
    time.sleep(0.1)  # no signal comes
    passed: list[bool] = []

    def elsewhere() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
        passed.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert passed  # in another thread there is none


# Finished runs


def trained(place: ClientSettings, **flags: Any) -> None:
    """A run of two rounds up to its last evaluation."""
    for task in (ask("train", **flags), ask("train", linear(0.1), round_=1, **flags)):
        assert not answer(task, place).error


def model_of(place: ClientSettings, run: str = "first") -> torch.Tensor:
    assert place.models is not None
    return fitted.load(place.models / run).models["server.theta"]


def test_a_late_task_never_changes_a_finished_model(tmp_path: Path) -> None:
    place = client(tmp_path, False, models=tmp_path / "models")
    trained(place)
    last = ask("evaluate", linear(0.2), round_=1)
    said = answer(last, place).figures["models"]
    before = {path: path.read_bytes() for path in tmp_path.glob("models/first/*")}
    assert torch.equal(model_of(place)[0], linear(0.2)["theta"])
    state = sorted((path, path.read_bytes()) for path in place.state.glob("first/round-*"))
    late = [
        ask("train"),  # of an earlier round, done before
        ask("train", linear(0.3)),  # another one
        ask("train", linear(0.3), round_=1),
        ask("evaluate", linear(0.3)),
        ask("evaluate", linear(0.3), round_=1),
        ask("evaluate", linear(0.3), round_=1, temperature='{"global": 2.0}'),
    ]
    for task in late:
        reply = answer(task, place)
        assert "of 2 rounds is finished at this client" in reply.error and not reply.figures
    assert {path: path.read_bytes() for path in tmp_path.glob("models/first/*")} == before
    assert state == sorted((path, path.read_bytes()) for path in place.state.glob("first/round-*"))
    # A server that was killed after the last evaluation asks its last round again.
    again = answer(ask("train", linear(0.1), round_=1), place)
    assert not again.error and again.tree
    assert answer(last, place).figures["models"] == said
    assert {path: path.read_bytes() for path in tmp_path.glob("models/first/*")} == before


def test_a_finished_run_may_be_calibrated_and_go_on(tmp_path: Path) -> None:
    place = client(tmp_path, False, models=tmp_path / "models")
    flags = {"validation": 0.3, "planned_rounds": 3}
    trained(place, **flags)
    assert not answer(ask("evaluate", linear(0.2), round_=1, **flags), place).error
    told = ask("evaluate", linear(0.2), round_=1, temperature='{"global": 0.5}', **flags)
    assert not answer(told, place).error
    kept = fitted.load(tmp_path / "models" / "first").models
    assert kept["temperature.global"].tolist() == [0.5]
    # Asked again without temperatures: the calibrated model stays.
    assert not answer(ask("evaluate", linear(0.2), round_=1, **flags), place).error
    other = told._replace(temperature='{"global": 0.3}')
    answer(other, place)
    kept = fitted.load(tmp_path / "models" / "first").models
    assert kept["temperature.global"].tolist() == [0.5]
    longer = {**flags, "rounds": 3}
    assert not answer(ask("train", linear(0.2), round_=2, **longer), place).error
    state = (place.state / "first" / "round-3.safetensors").read_bytes()
    shorter = answer(ask("train", linear(0.1), round_=1, **flags), place)
    assert "of 2 rounds is finished at this client" in shorter.error
    assert (place.state / "first" / "round-3.safetensors").read_bytes() == state
    assert not answer(ask("evaluate", linear(0.4), round_=2, **longer), place).error
    assert torch.equal(model_of(place)[0], linear(0.4)["theta"])


def test_a_run_may_be_resumed_with_fewer_rounds(tmp_path: Path) -> None:
    place = client(tmp_path, False)
    assert not answer(ask("train", rounds=9, planned_rounds=9), place).error
    assert not answer(ask("train", round_=1, rounds=2, planned_rounds=9), place).error
    assert not answer(ask("evaluate", round_=1, rounds=2, planned_rounds=9), place).error


def test_a_model_that_could_not_be_kept_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = client(tmp_path, False, models=tmp_path / "models")
    trained(place)
    last = ask("evaluate", linear(0.2), round_=1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "symlink", full)
        assert not answer(last, place).error
    assert not (tmp_path / "models" / "current").exists()
    assert not answer(last, place).error
    assert (tmp_path / "models" / "current").exists()


@pytest.mark.parametrize("name", ["current", "../x", "a.refused", "", "A"])
def test_no_run_is_named_as_the_link_to_the_model_in_use(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no name for a run"):
        check_run(name)
    place = client(tmp_path, False, models=tmp_path / "models")
    for kind in ("join", "train", "evaluate"):
        assert answer(ask(kind, run=name), place).error  # type: ignore[arg-type]


@pytest.mark.parametrize("T", ["0", "1e9", "-1", "NaN", "true", '"1"', "[1]"])
def test_a_temperature_that_is_none_is_refused(T: str, tmp_path: Path) -> None:
    place = client(tmp_path, False, models=tmp_path / "models")
    task = ask("evaluate", round_=1, validation=0.3, temperature=f'{{"global": {T}}}')
    assert answer(task, place).error == FAILED
    assert not (tmp_path / "models").exists()


# The model in use


def losses(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_the_paired_test_by_hand() -> None:
    """t = mean / (sd / sqrt n) of the differences, one-sided at 5 %: 1.833 for 9 degrees."""
    old = torch.zeros(10).double()
    spread = torch.linspace(-1, 1, 10).double()
    error = float(spread.std()) / 10**0.5
    assert not replacing.is_worse(spread + 1.82 * error, old)
    assert replacing.is_worse(spread + 1.85 * error, old)
    assert not replacing.is_worse(spread - 10, old)
    assert replacing.is_worse(old + 1e-9, old) and not replacing.is_worse(old, old)
    assert replacing.is_worse(losses(float("nan"), 0.0), losses(1.0, 1.0))
    assert not replacing.is_worse(losses(1.0, 1.0), losses(float("inf"), 1.0))
    assert not replacing.is_worse(losses(9.0), losses(1.0)) and not replacing.is_worse(
        losses(), losses()
    )


def finish(place: ClientSettings, run: str, size: float, **flags: Any) -> Reply:
    return answer(ask("evaluate", linear(size), run=run, round_=1, **flags), place)


def test_a_worse_model_does_not_replace_the_one_in_use(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    place, link = client(tmp_path, False, models=models), models / "current"
    longer = {"rounds": 3, "planned_rounds": 3}
    finish(place, "first", 1.0)
    assert os.readlink(link) == "first"
    finish(place, "poisoned", -1.0)
    assert os.readlink(link) == "first" and record.begun(models / "poisoned")
    assert f"ln -sfn poisoned {link}" in capfd.readouterr().err
    finish(place, "better", 2.0, planned_rounds=3)
    assert os.readlink(link) == "better"
    assert not list(models.glob(".current*"))
    # The same run with more rounds: the model in use is not written over by a worse one.
    worse = ask("evaluate", linear(-1.0), run="better", round_=2, **longer)
    assert not answer(worse, place).error
    assert os.readlink(link) == "better"
    assert torch.equal(model_of(place, "current")[0], linear(2.0)["theta"])
    assert torch.equal(model_of(place, "better.refused")[0], linear(-1.0)["theta"])
    said = corefed(
        "predict", link, "--client", "north", "--input", place.data, "--out", tmp_path / "a.csv"
    )
    assert said.code == 0, said.err


def test_models_are_compared_on_the_points_of_today(tmp_path: Path) -> None:
    """Under other scales, and after the data have changed."""
    models = tmp_path / "models"
    place = client(tmp_path, False, models=models)
    finish(place, "first", 1.0)
    data = points(False)
    y_test = np.where(data["y_test"] == "a", "b", "a")
    np.savez(place.data, **{**data, "y_test": y_test})  # now the other way around
    scaled = Agreement((3,), ("a", "b"), 0, (0.5,), (2.0,))
    answer(ask("evaluate", linear(-1.0), run="second", round_=1, agreement=scaled), place)
    assert os.readlink(models / "current") == "second"


def test_a_model_that_cannot_be_compared_does_not_replace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    place = client(tmp_path, False, models=models)
    finish(place, "first", 1.0)
    data = points(False)
    y = {name: np.char.upper(data[name]) for name in ("y_train", "y_test")}
    np.savez(place.data, **{**data, **y})
    agreement = Agreement((3,), ("A", "B"), 0)
    answer(ask("evaluate", linear(5.0), run="second", round_=1, agreement=agreement), place)
    assert os.readlink(models / "current") == "first" and record.begun(models / "second")
    assert "cannot be compared" in capfd.readouterr().err
    (models / "first" / "fitted.safetensors").unlink()
    np.savez(place.data, **data)
    finish(place, "third", 5.0)
    assert os.readlink(models / "current") == "first"  # a person decides
    (models / "current").unlink()
    finish(place, "fourth", 0.1)
    assert os.readlink(models / "current") == "fourth"


def test_the_model_in_use_runs_no_code_that_client_toml_does_not_name(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    place = client(tmp_path, False, models=models)
    finish(place, "first", 1.0)
    path = models / "first" / record.EXPERIMENT
    path.write_text(re.sub("(?m)^model = .*$", 'model = "no_such_module:make"', path.read_text()))
    finish(place, "second", 1.0)
    assert os.readlink(models / "current") == "first"
    said = capfd.readouterr().err
    assert "cannot be compared" in said and "client.toml does not name its network" in said


# The audit log


def test_every_reply_is_logged_before_it_is_sent(tmp_path: Path) -> None:
    place = client(tmp_path, False, **NOISE)
    replies = [
        answer(task, place)
        for task in (
            ask("join"), ask("train"), ask("train"), ask("evaluate"), ask("train", rounds=5000)
        )
    ]  # fmt: skip
    lines = audit.read(place.state)
    path = place.state / audit.FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [(line["kind"], line["round"]) for line in lines] == [
        ("join", 0), ("train", 1), ("train", 1), ("evaluate", 1), ("train", 1),
    ]  # fmt: skip
    for reply, line in zip(replies, lines, strict=True):
        assert line["numbers"].keys() == reply.figures.keys()
        assert line["tensors"].keys() == reply.tree.keys()
        assert line["error"] == reply.error and line["run"] == "first"
    assert lines[1]["tensors"] == {"theta": {"shape": [8], "bytes": 32}}
    assert lines[1]["digest"] == lines[2]["digest"] != lines[3]["digest"]
    assert lines[0]["epsilon"] is None
    assert lines[1]["epsilon"] == lines[2]["epsilon"] == pytest.approx(1.99, abs=0.01)
    before = path.read_bytes()
    answer(ask("evaluate"), place)
    assert path.read_bytes().startswith(before)  # lines are only added


def test_what_cannot_be_logged_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    place = client(tmp_path, False)
    answer(ask("train"), place)
    before = (place.state / audit.FILE).read_bytes()
    write = files.write

    def full(handle: int, content: bytes) -> None:
        if b'"kind": "evaluate"' in bytes(content):
            os.write(handle, content[:20])
            raise OSError(errno.ENOSPC, "No space left on device")
        write(handle, content)

    monkeypatch.setattr(files, "write", full)
    reply = answer(ask("evaluate"), place)
    assert reply.error == UNLOGGED and not reply.figures and not reply.tree
    assert "No space left on device" in capfd.readouterr().err
    assert (place.state / audit.FILE).read_bytes() == before


def test_a_line_that_a_crash_cut_off_is_removed(tmp_path: Path) -> None:
    place = client(tmp_path, False)
    answer(ask("train"), place)
    path = place.state / audit.FILE
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": "20')
    assert len(audit.read(place.state)) == 1
    answer(ask("evaluate"), place)
    assert path.read_bytes().startswith(whole) and len(audit.read(place.state)) == 2
    path.write_bytes(b"{}\n" + whole)
    with pytest.raises(UserError, match=r"Line 1 of .*audit.jsonl is damaged"):
        audit.read(place.state)


def test_the_command_shows_what_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ca.crt").touch()
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "client.toml").write_text('name = "north"\naddress = "localhost:8000"\n')
    result = corefed("federation", "audit", tmp_path)
    assert (result.code, result.out) == (0, "Nothing has left this client.\n")
    monkeypatch.setenv("COREFED_CLIENT_DATA", str(tmp_path / "data.npz"))
    monkeypatch.setenv("COLUMNS", "200")
    np.savez(tmp_path / "data.npz", **points(False))
    place = ClientFolder.read(tmp_path).settings()
    answer(ask("train"), place)
    answer(ask("train", run="\x1b[b]x"), place)
    result = corefed("federation", "audit", tmp_path)
    assert result.code == 0, result.err
    assert "theta [8]" in result.out and "examples, seconds, loss" in result.out
    assert r"\x1b[b]x" in result.out and "\x1b" not in result.out
    (first, second) = json.loads(corefed("federation", "audit", tmp_path, "--json").out)
    assert first["tensors"]["theta"]["bytes"] == 32 and second["error"]


def test_client_toml_has_the_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_CLIENT_DATA", "data.npz")
    (tmp_path / "ca.crt").touch()
    (tmp_path / "key").touch(mode=0o600)
    text = 'name = "north"\naddress = "localhost:8000"\n'
    (tmp_path / "client.toml").write_text(
        f'{text}[privacy]\nmin_noise = 1.5\nclip = 0.5\nexamples = 7\n[data]\nclasses = ["a"]\n'
        "[limits]\nlocal_steps = 30\nseconds = 60\n"
    )
    settings = ClientFolder.read(tmp_path).settings()
    assert settings.limits == Limits(local_steps=30, seconds=60.0)
    assert (settings.min_noise, settings.clip, settings.examples) == (1.5, 0.5, 7)
    assert settings.classes == ("a",) and settings.private and not settings.tells_all
    (tmp_path / "client.toml").write_text(f"{text}[limits]\nlocal_step = 30\n")
    with pytest.raises(UserError, match="did you mean 'local_steps'"):
        ClientFolder.read(tmp_path)


def test_every_limit_is_on_the_page() -> None:
    """The table is made from the code: paste what this test expects."""
    text = (Path(__file__).parents[2] / "docs" / "deploy.md").read_text()
    found = re.search(r"<!-- limits -->\n(.*?)<!-- /limits -->", text, re.DOTALL)
    assert found is not None
    rows = [
        [f"`{each.name}`", f"`{each.default_words}`", each.help] for each in list_settings(Limits)
    ]
    expected = markdown_table(["limit", "default", "what it does"], rows)
    assert found[1].strip() == "\n".join(expected)
