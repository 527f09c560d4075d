"""The commands as a user types them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, corefed
from saved_state import bits_of

from corefed import __version__
from corefed.methods import registry
from corefed.methods.registry import METHODS
from corefed.settings.config import resolve
from corefed.settings.fields import list_settings
from corefed.settings.run import Run
from corefed.training import record, rounds

SUMMARY_KEYS = {
    "schema", "method", "data", "partition", "clients", "rounds", "seeds", "config", "metrics",
    "classes", "overconfidence", "coreset", "cost", "environment", "checkpoints", "measures",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "done"
    result = corefed("run", *SMALL, "--seed", "0,1", "--out", folder)
    assert result.code == 0, result.err
    return folder


def test_help_and_names_need_no_torch() -> None:
    code = (
        "import sys, corefed.commands.cli as c\n"
        "for a in ('--help', 'run --help', 'tune --help', 'methods', '--version'):\n"
        "    try: c.main(a.split())\n"
        "    except SystemExit as stop: assert stop.code == 0, (a, stop.code)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "coreset-pfedbayes" in done.stdout
    assert __version__ in done.stdout


def test_training_and_recording_need_torch_and_numpy_only(tmp_path: Path) -> None:
    """A GPU machine that cannot install anything still trains: from Python, without checkpoints."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name.split('.')[0] in ('safetensors', 'rich', 'typer', 'click', 'pooch',\n"
        "                                  'sklearn', 'matplotlib', 'scipy'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import corefed, pathlib\n"
        "flags = dict(method='pfedbayes', data='synthetic-linear', rounds=1, checkpoint_every=0)\n"
        "corefed.train(corefed.resolve(flags=flags), pathlib.Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "summary.json").exists()


def test_the_folder_of_a_run(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    assert summary.keys() == {*SUMMARY_KEYS, "sha256"}
    assert (summary["schema"], summary["rounds"], summary["seeds"]) == (1, 2, [0, 1])
    assert summary["partition"] == "shards-medium"
    assert summary["config"]["device"] == "cpu"
    for model in ("personal", "global", "localized"):
        accuracy = summary["metrics"][f"{model}_accuracy"]
        assert 0 <= accuracy["mean"] <= 1
        assert len(accuracy["per_seed"]) == 2
        assert {f"{model}_{m}" for m in ("nll", "ece", "brier")} <= summary["metrics"].keys()
        ece = summary["metrics"][f"{model}_ece"]["mean"]
        assert abs(summary["overconfidence"][model]["mean"]) <= ece + 1e-12
    lines = [json.loads(text) for text in (finished / "rounds.jsonl").read_text().splitlines()]
    assert [each["round"] for each in lines] == [1, 2]
    assert len(lines[1]["clients"]) == 2
    assert len(lines[1]["clients"][0]) == 4
    # 2 seeds x 2 rounds x 4 clients x (64-8-10 network: 2 x 610 float32)
    assert summary["cost"]["bytes_up"] == summary["cost"]["bytes_down"] == 16 * 2 * 610 * 4
    assert summary["cost"]["examples_processed"] == sum(sum(each["examples"]) for each in lines)
    assert sorted(p.name for p in finished.iterdir()) == [
        ".lock", "checkpoint", "data.json", "experiment.toml", "fitted.safetensors",
        "held_out.safetensors",
        "reach.safetensors", "rounds.jsonl", "summary.json",
    ]  # fmt: skip
    assert sorted(p.name for p in (finished / "checkpoint").iterdir()) == [
        "000002-000.safetensors", "000002-server.safetensors", "state.json",
    ]  # fmt: skip


def test_experiment_toml_repeats_the_run(finished: Path, tmp_path: Path) -> None:
    result = corefed("run", "--config", finished / "experiment.toml", "--out", tmp_path / "again")
    assert result.code == 0, result.err
    one, two = (record.read(path)[0] for path in (finished, tmp_path / "again"))
    assert one["metrics"] == two["metrics"]
    assert one["config"] == two["config"]
    assert bits_of(finished) == bits_of(tmp_path / "again")


def test_a_seed_does_not_depend_on_its_company(finished: Path) -> None:
    """Seeds trained together differ from one alone by rounding only (other shapes, same draws)."""
    alone = rounds.train(resolve(finished / "experiment.toml", {"seeds": "1"})).summary["metrics"]
    together = record.read(finished)[0]["metrics"]
    for name in ("personal_nll", "global_nll", "localized_nll"):
        assert alone[name]["mean"] == pytest.approx(together[name]["per_seed"][1], rel=1e-4)


def test_without_a_folder_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = {"method": "pfedbayes", "clients": 2, "rounds": 1, "local_steps": 1, "hidden": "4"}
    trained = rounds.train(resolve(flags=flags))
    assert trained.finished
    assert list(tmp_path.iterdir()) == []


def test_seeds_by_repetition_and_by_comma() -> None:
    result = corefed("run", *SMALL, "--seed", "0", "--seed", "0")
    assert result.code == 2
    assert "seeds is 0,0; it must be" in result.err


def test_json_prints_the_summary_and_nothing_else(tmp_path: Path) -> None:
    result = corefed("run", *SMALL, "--json", "--out", tmp_path / "run")
    assert json.loads(result.out).keys() == SUMMARY_KEYS
    assert result.err == ""


def test_quiet_prints_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = corefed("run", *SMALL, "--quiet")
    assert result.out.startswith("runs/digits-pfedbayes-")
    assert result.err == ""
    assert Path(result.out.strip(), "summary.json").exists()


def test_a_talkative_run_ends_with_table_and_folder(tmp_path: Path) -> None:
    result = corefed("run", *SMALL, "--out", tmp_path / "run")
    assert "personal" in result.out
    assert "localized" in result.out
    assert f"written to {tmp_path / 'run'}" in result.out
    assert re.search(r"2 checkpoints in \S+ s; a crash would have lost at most \S+ s", result.out)
    assert "round 2/2" in result.err


def test_resuming_a_finished_run_changes_nothing_but_time(finished: Path) -> None:
    before = record.read(finished)[0]
    assert corefed("run", "--resume", finished, "--json").code == 0
    assert record.read(finished)[0]["metrics"] == before["metrics"]


def test_resume_with_more_rounds_goes_on(tmp_path: Path) -> None:
    corefed("run", *SMALL, "--set", "planned_rounds=4", "--out", tmp_path / "run")
    assert corefed("run", "--resume", tmp_path / "run", "--rounds", 4, "-q").code == 0
    corefed("run", *SMALL, "--rounds", 4, "--out", tmp_path / "whole")
    grown, whole = (record.read(tmp_path / name)[0] for name in ("run", "whole"))
    assert grown["rounds"] == 4
    assert grown["metrics"] == whole["metrics"]


@pytest.mark.usefixtures("heard")
def test_ctrl_c_finishes_the_round_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = rounds.Simulation.train

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return inner(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(rounds.Simulation, "train", interrupted)
        result = corefed("run", *SMALL, "--set=checkpoint_every=9", "--out", tmp_path / "run")
    assert result.code == 130
    assert f"stopped after round 1; go on with: corefed run --resume {tmp_path}" in result.err
    assert corefed("compare", tmp_path / "run").code == 0
    assert corefed("run", "--resume", tmp_path / "run", "-q").code == 0
    corefed("run", *SMALL, "--out", tmp_path / "whole")
    resumed, whole = (record.read(tmp_path / name)[0] for name in ("run", "whole"))
    assert resumed["metrics"] == whole["metrics"]


@pytest.mark.usefixtures("heard")
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object) -> object:
        """Raised in this thread: another one could still hold the first when the second comes."""
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(rounds.Simulation, "train", interrupted)
    result = corefed("run", *SMALL, "--out", tmp_path / "run")
    assert result.code == 130
    assert "stopped inside a round; go on with" in result.err


@pytest.mark.usefixtures("heard")
def test_ctrl_c_while_loading_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "prepare", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    result = corefed("run", *SMALL, "--out", tmp_path / "run")
    assert result.code == 130
    assert result.err == "nothing written\n"
    assert not (tmp_path / "run").exists()


def test_compare(finished: Path, tmp_path: Path) -> None:
    corefed("run", *SMALL, "--method=random-subset", "--fraction=0.5", "--out", tmp_path / "half")
    picture = tmp_path / "curves.png"
    result = corefed("compare", finished, tmp_path / "half", "--plot", picture)
    assert result.code == 0, result.err
    assert "pfedbayes" in result.out
    assert "random-subset" in result.out
    assert "±" in result.out
    assert f"1  {finished}: seeds 0,1" in result.out.replace("\n", " ")
    words = " ".join(result.out.split())
    assert "Lowest NLL: " in words and "one seed cannot tell a difference from chance" in words
    assert picture.read_bytes().startswith(b"\x89PNG")
    both = json.loads(corefed("compare", finished, tmp_path / "half", "--json").out)
    assert [each["coreset"]["fraction"] for each in both] == [1.0, 0.5]
    assert both[0]["folder"] == str(finished)
    assert [each["label"] for each in both] == ["pfedbayes", "random-subset (50 %)"]
    assert all(each["cost"]["wall_seconds"] > each["cost"]["seconds"] for each in both)
    bad = corefed("compare", finished, "--plot", tmp_path / "curves.nonsense")
    assert bad.code == 2
    assert "Cannot write the picture" in bad.err


@pytest.mark.parametrize("method", METHODS)
def test_methods_shows_a_few_settings_or_all(method: str) -> None:
    assert method in corefed("methods").out
    own = list_settings(registry.config_class(method))
    common = [each.name for each in own if not each.ablation]
    assert 1 <= len(common) <= 15
    few = corefed("methods", method).out
    assert shown(few) == common
    more = len(own) - len(common) + len(list_settings(Run))
    assert f"There are {more} more settings (" in few
    assert f"corefed methods {method} --all" in few
    every = shown(corefed("methods", method, "--all").out)
    assert sorted(every) == sorted(each.name for each in (*own, *list_settings(Run)))


def shown(text: str) -> list[str]:
    """The first column of tables."""
    return re.findall(r"^│ (\w+)", text, re.MULTILINE)


def test_methods_for_scripts() -> None:
    listed = json.loads(corefed("methods", "--json").out)
    assert [each["method"] for each in listed] == list(METHODS)
    found = json.loads(corefed("methods", "coreset-pfedbayes", "--json").out)
    assert found["method"] == "coreset-pfedbayes"
    assert {each["name"] for each in found["settings_of_every_run"]} >= {"rounds", "seeds"}
    settings = {each["name"]: each for each in found["settings"]}
    assert settings["selection_mb"] == {
        "name": "selection_mb", "group": "selection", "type": "int", "choices": [],
        "default": 2048, "range": "at least 1", "unit": "MB",
        "help": "Memory bound of a selection; draws are reduced to fit it.", "ablation": True,
    }  # fmt: skip
    assert settings["optimizer"]["choices"] == ["adam", "sgd", "ivon"]
    assert settings["widths"]["default"] == [1.0]
    assert not settings["solver"]["ablation"]


def test_methods_refuses_what_it_cannot_show() -> None:
    unknown = corefed("methods", "pfedbays")
    assert unknown.code == 2 and "Did you mean 'pfedbayes'" in unknown.err
    alone = corefed("methods", "--all")
    assert alone.code == 2 and "corefed methods NAME --all" in alone.err


def test_datasets() -> None:
    assert "digits" in corefed("datasets").out
    shown = corefed("datasets", "--show", "digits", "--partition", "labels:2", "--clients", 5)
    assert shown.code == 0
    assert "labels:2" in shown.out
    assert corefed("datasets", "--show", "synthetic-linear").code == 0


@pytest.mark.parametrize("data", ["synthetic-linear", "synthetic-regression"])
def test_regression(data: str, tmp_path: Path) -> None:
    result = corefed("run", *SMALL, "--data", data, "--seed=0,1", "--json", "--out", tmp_path / "r")
    assert result.code == 0, result.err
    metrics = json.loads(result.out)["metrics"]
    assert metrics["personal_rmse"]["mean"] > 0
    assert "personal_accuracy" not in metrics
    assert "RMSE" in corefed("compare", tmp_path / "r").out


@pytest.mark.parametrize("extra", [("--set=cohort=2",), ("--set=runtime=loop",)])
def test_cohorts_and_the_loop(extra: tuple[str, ...], tmp_path: Path) -> None:
    result = corefed("run", *SMALL, *extra, "--json", "--out", tmp_path / "run")
    assert result.code == 0, result.err


def test_divergence_is_told_and_what_was_recorded_kept(tmp_path: Path) -> None:
    result = corefed(
        "run", *SMALL, "--rounds=50", "--set=optimizer=sgd", "--set=eta_1=1e30",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert result.code == 2
    assert "diverged: in round 1 the loss of seed 0 is nan, first at client 0." in result.err
    assert "Lower eta_1 (1e+30 now) or eta_2" in result.err


def test_a_later_divergence_keeps_the_rounds_before(tmp_path: Path) -> None:
    """The first round's line and state are there, and no model of the second."""
    run = tmp_path / "run"
    result = corefed(
        "run", "--data=synthetic-linear", "--clients=3", "--rounds=8", "--local-steps=1",
        "--method=pfedbayes", "--device=cpu", "--set=optimizer=sgd", "--set=eta_1=50",
        "--out", run,
    )  # fmt: skip
    assert result.code == 2 and "round 2" in result.err and "lower eta_1 (50 now)" in result.err
    (line,) = (run / "rounds.jsonl").read_text().splitlines()
    assert json.loads(line)["round"] == 1
    assert (run / "checkpoint" / "000001-server.safetensors").exists()
    assert not (run / "fitted.safetensors").exists()


def test_corefed_alone_shows_its_help_and_no_empty_error() -> None:
    done = corefed()
    assert done.code == 2 and "Usage: " in done.out
    assert "error" not in done.err


def test_a_misspelt_command_is_hinted_at_once() -> None:
    done = corefed("rn")
    assert done.code == 2 and done.err.count("Did you mean 'run'?") == 1


def test_compare_takes_runs_among_other_things_and_one_level_down(
    finished: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "one").symlink_to(finished)
    (tmp_path / "page.html").write_text("")
    done = corefed("compare", *sorted(tmp_path.iterdir()))
    assert done.code == 0, done.err
    assert "pfedbayes" in done.out
    assert done.err.strip() == f"note: no runs: {tmp_path / 'page.html'}"
    (tmp_path / "empty").mkdir()
    nothing = corefed("compare", tmp_path / "empty")
    assert nothing.code == 2 and "holds no run of corefed" in nothing.err


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("run --method core", "coreset-pfedbayes"),
        ("run --data fash", "fashion-mnist"),
        ("run --data tab", "table:"),
        ("run --method fedavg --set learn", "learning_rate="),
        ("run --set batch", "batch_size="),
        ("pers", "personalize"),
        ("methods pfed", "pfedbayes"),
    ],
)
def test_a_shell_completes_names(typed: str, offered: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["corefed", *typed.split()]
    about = {"_COREFED_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words),
             "COMP_CWORD": str(len(words) - 1)}  # fmt: skip
    for name, value in about.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["corefed"])
    done = corefed()
    assert offered in done.out.split(), done.err


def test_the_package_lists_its_names() -> None:
    import corefed as package

    assert set(package.__all__) <= set(dir(package))
    assert all(hasattr(package, name) for name in package.__all__)


def test_the_coreset_error_is_beside_that_of_a_random_subset(tmp_path: Path) -> None:
    """Alone it says little: it rises in a good run."""
    out = tmp_path / "run"
    result = corefed("run", *SMALL, "--method=coreset-pfedbayes", "--fraction=0.3", f"--out={out}")
    assert result.code == 0, result.err
    said = " ".join(result.out.split())
    ratio = json.loads((out / "summary.json").read_text())["coreset"]["over_uniform"]
    assert f"({ratio:.2f} times a random subset's)" in said


@pytest.mark.parametrize(
    "asked",
    [
        ("run", "--out"),
        ("run", "--resume"),
        ("report", "runs", "--out"),
        ("predict", "run", "--input=x.csv", "--out"),
        ("tune", "--out"),
        ("coreset", "--data=digits", "--out"),
        ("export", "run", "--out"),
        ("datasets", "--show=digits", "--write"),
        ("federation", "init", ""),
    ],
)
def test_an_empty_name_is_not_the_working_folder(
    asked: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = corefed(*asked, *([] if "" in asked else [""]))
    assert result.code == 2 and "it is empty; name a file or folder" in result.err, result
    assert not list(tmp_path.iterdir())
