"""`corefed theory` as a user types it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import corefed
from PIL import Image
from rich.console import Console

from corefed_studies import theory
from corefed_studies.theory import figures, showing


def test_it_works_with_no_argument(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = corefed("theory")
    assert (result.code, result.err) == (0, "")
    assert "n = 5,000" in result.out and "n_k = 500" in result.out
    assert "does not hold" in result.out and "above 1: a bound that says nothing" in result.out
    assert "all are taken as 1" in result.out
    assert max(map(len, result.out.splitlines())) <= 120
    with Image.open(tmp_path / "runs/theory/theory.png") as picture:
        assert picture.format == "PNG" and picture.width > 1000
    first = (tmp_path / "runs/theory/theory.json").read_text(encoding="utf-8")
    printed = corefed("theory", "--json")
    assert printed.out == first  # and nothing else


def test_the_json_is_what_the_functions_give(tmp_path: Path) -> None:
    result = corefed(
        "theory", "--n", 2000, "--k", 100, "--inputs", 5, "--layers", 2, "--width", 8, "--beta", 2,
        "--dimension", 3, "--zeta", 0.5, "--delta", 1.5, "--bound", 2, "--noise", 0.3,
        "--weight-bound", 0.9, "--clients", 4, "--set", "C=0.1", "--set", "C_3=2",
        "--json", "--out", tmp_path,
    )  # fmt: skip
    assert result.code == 0, result.err
    found = json.loads(result.out)
    setting = theory.TheorySetting(
        n=2000, n_k=100, s_0=5, L=2, M=8, beta=2, Lambda=3, zeta=0.5, delta=1.5, F=2, sigma=0.3,
        Omega=0.9, N=4, constants=theory.Constants(C=0.1, C_3=2),
    )  # fmt: skip
    assert found == json.loads(json.dumps(figures.as_json(setting)))
    sizes = {row["symbol"]: row for row in found["at_sizes"]}
    assert sizes["epsilon_n^2"]["n_k"] == theory.epsilon_n_squared(
        100, setting.parameter_count, setting.fraktur_g, 1.5
    )
    assert sizes["lower rate"]["n"] == theory.lower_rate(2000, 2, 3, 2)
    both = {row["symbol"]: row["value"] for row in found["together"] if "value" in row}
    gap = theory.lower_bound_gap(2000, 100, 2, 3, 2)
    assert both["gap of sums"] == pytest.approx(4 / theory.c_f(2, 0.3) * gap)
    assert [len(curve) for curve in found["curves"].values()] == [figures.POINTS] * 7
    assert found["statements"][4]["name"] == "Lemma 3"


def test_parameters_of_the_proof_or_a_number() -> None:
    values = {"n": 10000, "beta": 1.0, "Lambda": 2.0}
    for given, expected in (("proof", 300.0), ("77", 77.0), ("network", 441)):
        assert pytest.approx(expected) == showing.read(values, given, ["C_1=3"]).parameter_count


@pytest.mark.parametrize(
    "numbers",
    [
        ("--layers", "400"),  # sigma_n^2 is far below the smallest float
        ("--width", "1", "--weight-bound", "2", "--inputs", "2", "--k", "1"),  # G < 0
        ("--n", "10", "--k", "10"),
        ("--n", "1000000000000", "--k", "3"),
    ],
)
def test_odd_numbers_are_shown(numbers: tuple[str, ...], tmp_path: Path) -> None:
    result = corefed("theory", *numbers, "--out", tmp_path)
    assert (result.code, result.err) == (0, "")
    written = (tmp_path / "theory.json").read_text(encoding="utf-8")
    assert "NaN" not in written and "Infinity" not in written and "nan" not in result.out


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (("--k", "6000"), "n_k is 6000"),
        (("--n", "5"), "at least 10"),
        (("--beta", "0"), "beta is 0.0"),
        (("--dimension", "21"), "at most s_0 = 20"),
        (("--delta", "1"), "delta is 1.0; it must be above 1."),
        (("--delta", "900"), "range of a float"),
        (("--parameters", "many"), "network, proof or a number"),
        (("--parameters", "nan"), "T is nan"),
        (("--parameters", "1e308"), "range of a float"),
        (("--parameters", "proof", "--beta", "-1"), "beta is -1.0"),
        (("--width", "1"), "Omega M is 1"),
        (("--set", "C_9=1"), "'C_9' is no constant"),
        (("--set", "C=x"), "C is 'x'"),
        (("--set", "C_prime=0"), "C_prime is 0.0"),
    ],
)
def test_a_mistake_is_one_sentence(numbers: tuple[str, ...], words: str, tmp_path: Path) -> None:
    result = corefed("theory", *numbers, "--out", tmp_path / "out")
    assert result.code == 2
    assert words in result.err and result.err.count("\n") == 1 and result.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_chart_fits(width: int) -> None:
    """Every column has a mark of every curve that is a number there; n_k is pointed at."""
    setting = theory.TheorySetting(n_k=100)
    console = Console(file=io.StringIO(), width=width)
    text = showing.chart(setting, figures.curves(setting), console).plain
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    drawn = [line[10:] for line in lines[1 : 1 + showing.HEIGHT]]
    columns = len(drawn[0])
    for mark in showing.MARKS:
        assert sum(any(row[c] == mark for row in drawn) for c in range(columns)) > 0.9 * columns
    assert any("^ n_k = 100" in line for line in lines)


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, corefed.commands.cli as c\n"
        "def call(*a):\n"
        "    try: c.main(list(a))\n"
        "    except SystemExit as stop: assert stop.code == 0\n"
        "call('theory', '--help')\n"
        "assert 'scipy' not in sys.modules and 'numpy' not in sys.modules\n"
        "call('theory', '--out', sys.argv[1])\n"
        "assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "theory")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "corefed theory --n 5000 --k 20" in done.stdout
