"""`corefed watch`: what it reads of a growing folder, and what it shows, at a frozen time."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, corefed
from growing_runs import NOW, SETTINGS, begin, line, write
from rich.console import Console

from corefed.base.errors import UserError
from corefed.show import watch
from corefed.show.watch import Reader, duration, size, sparkline
from corefed.training import record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return begin(tmp_path / "run")


def shown(folder: Path, **more: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, color_system=None)
    assert watch.follow(folder, console=console, clock=lambda: NOW, **more) == 0
    return out.getvalue()


def test_the_picture(run: Path) -> None:
    write(run, line(1, 0.2), line(2, 0.4))
    text = shown(run)
    assert "coreset-pfedbayes on wards, iid, 3 clients, seeds 0, 1\n" in text
    assert "round 2/4" in text
    assert "20 s left" in text  # two rounds of 10 seconds
    assert "after round 2, mean ± std over 2 seeds" in text
    assert "│ personal │ 45.00 ± 7.07 │" in text
    assert "│ global   │ 30.00 ± 0.00 │" in text
    assert "personal accuracy  ▁█  25.0 % to 45.0 %" in text
    assert "coreset error      █▁  0.300 to 0.150" in text
    assert "10 % of the data, at least 2,000 passes, 4 kB up, 60 B down, " in text
    assert "16 s of training (8.00 s per round), 4 s of evaluation" in " ".join(text.split())
    assert "round 2 was written 3 s ago" in text


def test_before_the_first_round(run: Path) -> None:
    text = shown(run)
    assert "round 0/4" in text
    assert "began 20 s ago; its first round is not finished" in text
    (run / record.ROUNDS).touch()
    assert "began 20 s ago" in shown(run)


def test_a_round_without_evaluation_or_figures(run: Path) -> None:
    """As of a federation whose clients say nothing of themselves, or of a round not evaluated."""
    bare = line(1, loss=[None], coreset={"held_out_error": [None, 0.2]})
    del bare["metrics"], bare["evaluate_seconds"]
    write(run, bare)
    text = shown(run)
    assert "24 s left" in text
    assert "accuracy" not in text
    assert "coreset error" not in text


def test_a_figure_that_is_no_number(run: Path) -> None:
    (run / record.EXPERIMENT).write_text(SETTINGS.replace("[0, 1]", "[0]"))
    figures = (0.5, float("nan"), 0.6)
    write(run, *(line(t, metrics={"personal_nll": [x]}) for t, x in enumerate(figures, 1)))
    assert "personal nll ▁█ 0.500 to 0.600" in " ".join(shown(run).split())


def test_when_nothing_comes_any_more(run: Path) -> None:
    write(run, line(1), ago=301)
    assert "nothing new for 5 min: stopped? Go on with: corefed run --resume" in shown(run)
    write(run, line(2, seconds=100.0), ago=301)  # such a round may well take as long
    assert "round 2 was written 5 min ago" in shown(run)
    write(run, ago=511)
    assert "nothing new for 9 min" in shown(run)


def test_a_run_of_a_federation(tmp_path: Path) -> None:
    folder = tmp_path / "fed" / "server" / "runs" / "first"
    folder.mkdir(parents=True)
    (folder / record.EXPERIMENT).write_text(SETTINGS.replace("[0, 1]", "[0]"))
    (folder / record.EVENTS).touch()
    answered = {"accepted": ["alice", "bob"], "lost": {"carol": "not connected"}}
    write(folder, line(1, federation=answered), ago=1000)
    text = shown(folder)
    assert "last round: 2 clients answered; left out: carol (not connected)" in text
    joined = text.replace("\n", " ")
    assert f"corefed federation resume {tmp_path / 'fed'} --name first" in joined.replace("  ", " ")


def test_a_finished_run(run: Path) -> None:
    write(run, *(line(t) for t in (1, 2, 3, 4)), ago=7200)
    (run / record.SUMMARY).write_text("{}")
    text = shown(run)
    assert "round 4/4" in text
    assert "left" not in text
    assert "finished 2.0 h ago" in text


def test_only_what_was_added_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(run, line(1))
    reader = Reader(run)
    assert len(reader.look().lines) == 1
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read the whole file"))
    monkeypatch.setattr(Path, "read_text", lambda path, **named: pytest.fail("read settings again"))
    taken: list[bytes] = []
    take = reader._take
    monkeypatch.setattr(reader, "_take", lambda added: taken.append(added) or take(added))
    second = (json.dumps(line(2)) + "\n").encode()
    with (run / record.ROUNDS).open("ab") as file:
        file.write(second[:30])
        file.flush()
        assert len(reader.look().lines) == 1  # half a line is none
        file.write(second[30:])
    assert [each["round"] for each in reader.look().lines] == [1, 2]
    assert taken == [second[:30], second]


def cut_back(run: Path) -> None:
    """What resuming does: fewer rounds, new settings in a new file."""
    with (run / record.ROUNDS).open("rb+") as file:
        file.truncate(len(file.readline()))
    (run / "new").write_text(SETTINGS.replace("rounds = 4", "rounds = 6"))
    (run / "new").replace(run / record.EXPERIMENT)


@pytest.mark.parametrize("later", [0, 1, 4], ids=["shorter", "as many rounds", "longer"])
def test_a_resumed_run(later: int, run: Path) -> None:
    """Also where it has already grown beyond what was read before, between two looks."""
    write(run, line(1), line(2))
    reader = Reader(run)
    assert len(reader.look().lines) == 2
    cut_back(run)
    write(run, *(line(t, seconds=123.456) for t in range(2, 2 + later)))
    look = reader.look()
    assert look.values["rounds"] == 6
    assert [each["round"] for each in look.lines] == list(range(1, 2 + later))
    assert [each["seconds"] for each in look.lines[1:]] == [123.456] * later


def test_a_file_cut_back_within_a_line(run: Path) -> None:
    """Where only the lines tell: the new ones are longer, and the end of the old falls in one."""
    write(run, line(1), line(2))
    reader = Reader(run)
    reader.look()
    (run / record.ROUNDS).unlink()
    write(run, line(1), line(2, seconds=123.456), line(3))
    assert [each["seconds"] for each in reader.look().lines] == [8.0, 123.456, 8.0]
    (run / record.ROUNDS).unlink()
    assert reader.look().lines == []


def test_a_damaged_line_is_refused(run: Path) -> None:
    write(run, line(1))
    with (run / record.ROUNDS).open("a") as file:
        file.write("{broken\n")
    write(run, line(2))
    reader = Reader(run)
    for _ in range(2):
        with pytest.raises(UserError, match=r"Line 2 of .*rounds\.jsonl is damaged"):
            reader.look()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "holds no run of corefed"),
        (lambda folder: folder.mkdir(), "holds no run of corefed"),
        (lambda folder: folder.touch(), "holds no run of corefed"),
        (lambda folder: (folder.mkdir(), (folder / record.EXPERIMENT).mkdir()), "Cannot read"),
        (lambda f: (f.mkdir(), (f / record.EXPERIMENT).write_text("a = ")), "is not valid TOML"),
        (lambda f: (f.mkdir(), (f / record.EXPERIMENT).write_text("a = 1")), "is not of a run"),
    ],
)
def test_what_is_no_run(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    make(folder)
    result = corefed("watch", folder)
    assert result.code == 2
    assert words in result.err
    assert result.err.count("\n") == 1


def live(run: Path, moments: list[Callable[[], None]]) -> tuple[int, str]:
    """Watch in a terminal; between looks, what happens next happens."""
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    code = watch.follow(
        run, console=console, clock=lambda: NOW, sleep=lambda seconds: moments.pop(0)()
    )
    assert moments == []
    return code, out.getvalue()


def test_a_terminal_is_followed_to_the_end(run: Path) -> None:
    code, text = live(
        run,
        [
            lambda: write(run, line(1), line(2), line(3)),
            lambda: None,
            lambda: (write(run, line(4)), (run / record.SUMMARY).write_text("{}"))[0],
        ],
    )
    assert code == 0
    assert text.index("round 0/4") < text.index("round 3/4") < text.index("round 4/4")
    assert text.rstrip("\x1b[?25h\n").endswith("finished 3 s ago")


def test_ctrl_c_leaves_the_run_alone(run: Path) -> None:
    write(run, line(1))
    before = sorted(run.iterdir())

    def interrupt() -> None:
        raise KeyboardInterrupt

    code, text = live(run, [interrupt])
    assert code == 130
    assert text.count("\x1b[?25h") == 1  # the cursor is back
    assert sorted(run.iterdir()) == before


def test_once_does_not_wait(run: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    waited: list[float] = []
    assert watch.follow(run, once=True, console=console, sleep=waited.append) == 0
    assert waited == []


def test_the_command(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert corefed("run", *SMALL, "--out", folder).code == 0
    result = corefed("watch", folder, "--once")
    assert result.code == 0
    assert "pfedbayes on digits" in result.out
    assert "finished" in result.out


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([0, 2, 4, 6], width=2, marks="_#") == "_#"  # means 1 and 5
    assert len(sparkline(range(1000))) == watch.WIDTH


def test_units() -> None:
    assert [duration(s) for s in (0, 89, 300, 7200, 86400 * 3)] == [
        "0 s", "89 s", "5 min", "2.0 h", "3 days",
    ]  # fmt: skip
    assert [size(n) for n in (999, 1500, 2.5e6, 1e9, 4e12)] == [
        "999 B", "1.5 kB", "2.5 MB", "1 GB", "4 TB",
    ]  # fmt: skip


def test_plain_marks_where_a_terminal_has_no_others(run: Path) -> None:
    (run / record.EXPERIMENT).write_text(SETTINGS.replace("[0, 1]", "[0]"))
    write(run, *(line(t, t / 10, metrics={"personal_accuracy": [t / 10]}) for t in (1, 2)))
    with (run / "out").open("w", encoding="ascii") as out:
        console = Console(file=out, width=100, color_system=None)
        assert watch.follow(run, console=console, clock=lambda: NOW) == 0
    assert "personal accuracy  _@  10.0 % to 20.0 %" in (run / "out").read_text()


def test_a_folder_that_goes_away(run: Path) -> None:
    reader = Reader(run)
    reader.look()
    (run / record.EXPERIMENT).unlink()
    with pytest.raises(UserError, match="holds no run"):
        reader.look()
