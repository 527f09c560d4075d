"""What `--track` logs is read back with each tool's own reader and held to the run's record."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, corefed

from corefed.base.errors import UserError
from corefed.show import tracking
from corefed.training import record, rounds

TWO_SEEDS = (*SMALL, "--rounds=3", "--seed=4,7", "--set=evaluate_every=1", "--quiet")
BOTH = ("--track=mlflow", "--track=tensorboard")
NOTED = (
    "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID",
    "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_HTTP_REQUEST_MAX_RETRIES",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "MLFLOW_HTTP_REQUEST_TIMEOUT",
)  # fmt: skip


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; no variable of MLflow comes from outside or stays behind."""
    monkeypatch.chdir(tmp_path)
    for name in NOTED:
        monkeypatch.setenv(name, "")  # so that what the run sets is undone
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run of two seeds in `run`, followed by both tools."""
    place = tmp_path_factory.mktemp("finished")
    before = Path.cwd(), dict(os.environ)
    os.chdir(place)
    for name in NOTED:
        os.environ.pop(name, None)
    try:
        result = corefed("run", *TWO_SEEDS, *BOTH, "--out=run")
    finally:
        os.chdir(before[0])
        os.environ.clear()
        os.environ.update(before[1])
    assert result.code == 0
    assert result.err == ""
    return place


class Logged:
    """The one MLflow run of a run's folder."""

    def __init__(self, folder: Path) -> None:
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        about = json.loads((folder / "mlflow.json").read_text())
        self.client = import_module("mlflow").MlflowClient(about["tracking_uri"])
        self.id = about["run_id"]
        self.run = self.client.get_run(self.id)

    def curve(self, name: str) -> dict[int, float]:
        history = self.client.get_metric_history(self.id, name)
        assert len({metric.step for metric in history}) == len(history), "a point was logged twice"
        return {metric.step: metric.value for metric in history}


def events(folder: Path) -> Any:
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(folder / "tensorboard"), {module.SCALARS: 0})
    return found.Reload()


def scalars(folder: Path, name: str) -> dict[int, float]:
    found = events(folder).Scalars(name)
    assert len({event.step for event in found}) == len(found), "a point was logged twice"
    return {event.step: event.value for event in found}


def mean_by_round(folder: Path, name: str) -> dict[int, float]:
    """Of a metric, by hand from rounds.jsonl."""
    lines, _ = record.read_lines(folder / record.ROUNDS)
    return {x["round"]: sum(x["metrics"][name]) / len(x["metrics"][name]) for x in lines}


def final(summary: dict[str, Any]) -> dict[str, float]:
    """The figures of summary.json under the names of curves."""
    return {
        **{name: values["mean"] for name, values in summary["metrics"].items()},
        **{f"coreset/{k}": v for k, v in summary["coreset"].items() if k != "fraction"},
        **{f"cost/{name}": v for name, v in summary["cost"].items() if name not in WHOLE_RUN},
    }


WHOLE_RUN = ("passes_complete", "passes_over_data", "wall_seconds")
"""What only a finished run has, and no round."""


def test_mlflow_has_the_run(finished: Path) -> None:
    folder = finished / "run"
    logged = Logged(folder)
    summary, lines = record.read(folder)
    data = logged.run.data
    assert logged.run.info.status == "FINISHED"
    assert data.params.keys() == summary["config"].keys()
    assert data.params["seeds"] == "[4, 7]"
    assert data.params["method"] == "pfedbayes"
    assert {
        "method": "pfedbayes",
        "data": "digits",
        "folder": str(folder),
    }.items() <= data.tags.items()
    assert data.tags["corefed"] == summary["environment"]["corefed"]
    assert data.tags["mlflow.runName"] == "run"
    assert logged.client.get_experiment(logged.run.info.experiment_id).name == "corefed"
    assert logged.curve("personal_accuracy") == pytest.approx(
        mean_by_round(folder, "personal_accuracy")
    )
    assert logged.curve("personal_accuracy.seed_7") == {
        line["round"]: line["metrics"]["personal_accuracy"][1] for line in lines
    }
    assert logged.curve("loss.seed_4") == {line["round"]: line["loss"][0] for line in lines}
    names = {artefact.path for artefact in logged.client.list_artifacts(logged.id)}
    assert names == {record.EXPERIMENT, record.ROUNDS, record.SUMMARY}


def test_the_last_step_is_the_summary(finished: Path) -> None:
    folder = finished / "run"
    expected = final(json.loads((folder / record.SUMMARY).read_text()))
    metrics = Logged(folder).run.data.metrics
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    read = events(folder)
    last = {name: read.Scalars(name)[-1].value for name in expected}
    assert last == pytest.approx(expected, rel=1e-6)  # single precision: 6e-8


def test_tensorboard_has_the_run(finished: Path) -> None:
    folder = finished / "run"
    _, lines = record.read(folder)
    assert scalars(folder, "global_nll") == pytest.approx(mean_by_round(folder, "global_nll"))
    assert scalars(folder, "personal_nll/seed-7") == pytest.approx(
        {line["round"]: line["metrics"]["personal_nll"][1] for line in lines}
    )
    read = events(folder)
    (text,) = read.Tensors("settings/text_summary")
    assert b"| zeta | 1.0 |" in text.tensor_proto.string_val[0]
    (image,) = read.Images("learning_curves")
    assert image.step == 3
    assert image.encoded_image_string.startswith(b"\x89PNG")
    plugin = import_module("tensorboard.plugins.hparams.metadata")
    content = {tag: read.SummaryMetadata(tag).plugin_data.content for tag in read.summary_metadata}
    begun = plugin.parse_session_start_info_plugin_data(content["_hparams_/session_start_info"])
    assert begun.hparams["clients"].number_value == 4
    assert begun.hparams["method"].string_value == "pfedbayes"
    shown = plugin.parse_experiment_plugin_data(content["_hparams_/experiment"])
    assert "personal_accuracy" in {metric.name.tag for metric in shown.metric_infos}


def stop_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The process dies when so many rounds are recorded, as by kill -9: nothing is tidied up."""
    append = record.Folder.append

    def dying(folder: record.Folder, line: record.Line, *, flush: bool = True) -> None:
        append(folder, line, flush=flush)
        if line["round"] == number:
            raise SystemExit(9)

    monkeypatch.setattr(record.Folder, "append", dying)
    monkeypatch.setattr(tracking.Trackers, "finish", lambda *ignored: None)


def test_resumed_run_goes_on_without_doubled_points(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("corefed.show.tracking.mlflow.PAUSE", 0.0)
    settings = (*SMALL, "--rounds=6", "--set=evaluate_every=1", "--set=checkpoint_every=3")
    with monkeypatch.context() as dying:
        stop_after(dying, 5)
        corefed("run", *settings, *BOTH, "--out=run")
    first = Logged(place / "run")
    assert first.run.info.status == "RUNNING"  # as of any process that was killed
    assert sorted(first.curve("loss")) == [1, 2, 3, 4]
    assert sorted(scalars(place / "run", "loss")) == [1, 2, 3, 4]
    # The run goes back to round 3, and to more rounds than it began with.
    result = corefed("run", "--resume=run", "--rounds=8", *BOTH, "--quiet")
    assert (result.code, result.err) == (0, "")
    again = Logged(place / "run")
    assert again.id == first.id
    assert again.run.info.status == "FINISHED"
    assert again.run.data.params["rounds"] == "6"
    assert again.run.data.tags["resumed.rounds"] == "8"
    expected = mean_by_round(place / "run", "personal_accuracy")
    assert sorted(expected) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert again.curve("personal_accuracy") == pytest.approx(expected)
    assert scalars(place / "run", "personal_accuracy") == pytest.approx(expected)


def test_rounds_that_were_not_followed_are_logged_later(place: Path) -> None:
    """Also of a run that is complete: nothing is trained, all of it is logged."""
    assert corefed("run", *SMALL, "--set=evaluate_every=1", "--out=run", "--quiet").code == 0
    for _ in range(2):
        assert corefed("run", "--resume=run", "--track=mlflow,tensorboard", "--quiet").code == 0
    expected = mean_by_round(place / "run", "personal_accuracy")
    assert Logged(place / "run").curve("personal_accuracy") == pytest.approx(expected)
    assert scalars(place / "run", "personal_accuracy") == pytest.approx(expected)
    noted = corefed("run", "--resume=run", "--quiet").err
    assert noted == (
        "note: mlflow followed this run; --track mlflow goes on\n"
        "note: tensorboard followed this run; --track tensorboard goes on\n"
    )


def test_a_run_deleted_in_mlflow_is_made_anew(finished: Path, place: Path) -> None:
    shutil.copytree(finished, place, dirs_exist_ok=True)
    about = json.loads((place / "run" / "mlflow.json").read_text())
    about["tracking_uri"] = (place / "mlruns").as_uri()
    (place / "run" / "mlflow.json").write_text(json.dumps(about))
    Logged(place / "run").client.delete_run(about["run_id"])
    assert corefed("run", "--resume=run", "--track=mlflow", "--quiet").code == 0
    anew = Logged(place / "run")
    assert anew.id != about["run_id"]
    assert sorted(anew.curve("loss")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("raised", "status"), [(KeyboardInterrupt, "KILLED"), (UserError("diverged"), "FAILED")]
)
def test_what_became_of_the_run(
    raised: BaseException, status: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*ignored: object) -> None:
        raise raised

    monkeypatch.setattr(rounds.Simulation, "evaluate", failing)
    assert corefed("run", *SMALL, "--out=run", "--track=mlflow").code in (2, 130)
    assert Logged(place / "run").run.info.status == status


def test_stopped_between_rounds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = rounds.train
    monkeypatch.setattr(
        rounds, "train", lambda *given, **named: train(*given, **{**named, "stop": lambda: True})
    )
    arguments = (*SMALL, "--set=evaluate_every=1", "--out=run", *BOTH)
    assert corefed("run", *arguments).code == 130
    assert Logged(place / "run").run.info.status == "KILLED"
    read = events(place / "run")
    assert read.Tags()["images"] == ["learning_curves"]
    assert "_hparams_/session_start_info" not in read.summary_metadata


def test_variables_of_mlflow_are_honoured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "elsewhere")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "wards")
    assert corefed("run", *SMALL, "--out=run", "--track=mlflow").code == 0
    logged = Logged(place / "run")
    assert logged.client.get_experiment(logged.run.info.experiment_id).name == "wards"
    assert (place / "elsewhere").is_dir()
    assert not (place / "mlruns").exists()
    # A resumed run needs no variable to find it again.
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert corefed("run", "--resume=run", "--rounds=3", "--track=mlflow").code == 0
    assert sorted(Logged(place / "run").curve("loss")) == [1, 2, 3]
    assert not (place / "mlruns").exists()


def test_nothing_calls_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*ignored: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert corefed("run", *SMALL, "--out=run", *BOTH).code == 0
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    utils = import_module("mlflow.telemetry.utils")
    monkeypatch.setattr(utils, "_IS_IN_CI_ENV_OR_TESTING", False)
    assert utils.is_telemetry_disabled()
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY")
    assert not utils.is_telemetry_disabled(), "it was the variable that did it"


@pytest.mark.parametrize("name", ["mlflow", "tensorboard"])
def test_a_tool_that_fails_midway_costs_a_warning(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*ignored: object, **named: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("corefed.show.tracking.mlflow.PAUSE", 0.0)
    append, hook = record.Folder.append, threading.excepthook
    target = {
        "mlflow": "mlflow.store.tracking.file_store.FileStore.log_batch",
        "tensorboard": "tensorboard.summary.writer.record_writer.RecordWriter.write",
    }[name]

    def filling(folder: record.Folder, line: record.Line, *, flush: bool = True) -> None:
        append(folder, line, flush=flush)
        if line["round"] == 2:
            monkeypatch.setattr(target, full)

    monkeypatch.setattr(record.Folder, "append", filling)
    settings = (*SMALL, "--rounds=5", "--set=evaluate_every=1", "--out=run", "--quiet")
    result = corefed("run", *settings, *BOTH)
    assert result.code == 0
    warnings = result.err.splitlines()
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: --track {name} failed and is left out")
    assert "No space left on device" in warnings[0]
    assert f"corefed run --resume run --track {name}" in warnings[0]
    assert record.read(Path("run"))[0]["rounds"] == 5
    assert threading.excepthook is hook
    other = {"mlflow": scalars, "tensorboard": lambda f, n: Logged(f).curve(n)}[name]
    assert sorted(other(place / "run", "loss")) == [1, 2, 3, 4, 5]


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """A server of MLflow's that answers the first questions and then is broken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = "experiments/get-by-name" in self.path
            content = b'{"experiment": {"experiment_id": "1", "name": "corefed"}}'
            self.send_response(200 if known else 500)
            self.end_headers()
            self.wfile.write(content if known else b"gone")

        do_POST = do_GET  # noqa: N815

        def log_message(self, *ignored: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_a_server_that_breaks(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reached before training, then gone: training goes on. Its password is not printed."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{server.server_port}")
    result = corefed("run", *SMALL, "--out=run", "--quiet", "--track=mlflow")
    assert result.code == 0
    assert result.err.count("warning: --track mlflow failed") == 1
    assert "secret" not in result.err
    assert Path("run", record.SUMMARY).exists()
    assert not Path("run", "mlflow.json").exists()


def test_a_server_that_is_not_there(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:secret@127.0.0.1:{port}")
    result = corefed("run", *SMALL, "--out=run", "--track=mlflow")
    assert result.code == 2
    assert f"error: --track mlflow cannot use http://127.0.0.1:{port}: " in result.err
    assert "Connection refused" in result.err
    assert "secret" not in result.err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("uri", ["http://[", "nothing://here", "a-file"])
def test_a_store_that_cannot_be(uri: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "a-file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    result = corefed("run", *SMALL, "--out=run", "--track=mlflow")
    assert result.code == 2
    assert result.err.startswith("error: --track mlflow cannot use ")
    assert [path.name for path in place.iterdir()] == ["a-file"]


def test_a_deleted_experiment_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = import_module("mlflow").MlflowClient((place / "mlruns").as_uri())
    client.delete_experiment(client.create_experiment("corefed"))
    result = corefed("run", *SMALL, "--out=run", "--track=mlflow")
    assert result.code == 2
    assert "experiment 'corefed' was deleted" in result.err
    assert not (place / "run").exists()


@pytest.mark.parametrize("name", ["mlflow", "tensorboard"])
def test_a_tool_that_is_not_installed(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module(f"corefed.show.tracking.{name}")
    monkeypatch.setattr(module, "find_spec", lambda asked: None)
    result = corefed("run", *SMALL, "--out=run", f"--track={name}")
    assert result.code == 2
    assert f"pip install -e '.[{name}]'" in result.err
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("mflow", "did you mean 'mlflow'?"),
        ("tensorbord", "did you mean 'tensorboard'?"),
        ("mlflow,wandb", "there are mlflow and tensorboard."),
        ("", "there are mlflow and tensorboard."),
    ],
)
def test_a_name_that_is_none(given: str, hint: str, place: Path) -> None:
    result = corefed("run", *SMALL, "--out=run", f"--track={given}")
    assert result.code == 2
    assert hint in result.err
    assert list(place.iterdir()) == []


def test_names_are_taken_once() -> None:
    assert tracking.names(["tensorboard, mlflow", "mlflow"]) == ["tensorboard", "mlflow"]
    assert tracking.names([]) == []


def test_nothing_is_logged_of_a_run_that_never_began(place: Path) -> None:
    result = corefed("run", *SMALL, "--partition=labels:99", "--out=run", *BOTH)
    assert result.code == 2
    assert list(place.iterdir()) == []


def test_figures_that_no_client_has_are_left_out() -> None:
    """As of a federation whose clients do not say them."""
    line = {
        "round": 1, "loss": [None], "examples": [5], "bytes_up": [1], "bytes_down": [2],
        "seconds": 4.0, "coreset": {"held_out_error": [None], "size": [3.0]},
        "peak_memory_mb": 9.0,
    }  # fmt: skip
    figures = tracking.RoundLog([0])
    assert figures.add(line).means == {
        "coreset/size": 3.0, "cost/seconds": 4.0, "cost/evaluate_seconds": 0.0,
        "cost/peak_memory_mb": 9.0, "cost/bytes_up": 1.0, "cost/bytes_down": 2.0,
        "cost/examples_processed": 5.0, "cost/passes": 5.0, "cost/seconds_per_round": 4.0,
    }  # fmt: skip
    later = figures.add({**line, "round": 2, "peak_memory_mb": 8.0, "seconds": 1.0})
    assert later.means["cost/seconds_per_round"] == 2.5
    assert later.means["cost/peak_memory_mb"] == 9.0
    assert later.by_seed == {}
