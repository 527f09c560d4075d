"""`corefed bench pays`: rows are kept as they come, and become tables. NUTS itself is not run here;
`tests/coreset/test_adapters.py` has the weighted models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("numpyro", reason="the extra numpyro is not installed")

from corefed.base.errors import UserError
from corefed_studies.bench import pays, pays_models, pays_nuts

pytestmark = pytest.mark.jax
CONSOLE = Console(quiet=True)


def made(case: pays_models.Case, *numbers: Any) -> dict[str, Any]:
    names = (
        "full s", "build s", "coreset s", "speed-up", "speed-up cpu", "off", "sampler",
        "ratio least", "ratio most", "ratio sampler", "uniform off", "paired off", "paired least",
        "paired most",
    )  # fmt: skip
    about = {"set": case.name, "n": case.n, "k": 50, "parameters": 10}
    return {**about, **dict.fromkeys(names, 1.5)}


def test_rows_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(case: pays_models.Case, *numbers: Any) -> dict[str, Any]:
        calls.append(case.name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return made(case, *numbers)

    monkeypatch.setattr(pays_nuts, "compare", once)
    monkeypatch.setitem(
        pays_nuts.SETTINGS, "quick", pays_nuts.Setting((40,), 1, 1, ("logistic", "poisson"), ())
    )
    with pytest.raises(KeyboardInterrupt):
        pays.main("quick", tmp_path, CONSOLE, "cpu", parts=["nuts"])
    kept = json.loads((tmp_path / "pays.json").read_text())
    assert [row["set"] for row in kept["nuts"]] == ["logistic"]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bench pays: begin -->\n<!-- bench pays: end -->\nafter\n")
    pays.main("quick", tmp_path, CONSOLE, "cpu", page=page, parts=["nuts"])
    assert calls == ["logistic", "poisson", "poisson"]  # what was measured is not measured again
    assert "| poisson | 40 | 10 | 50 | 1.5 | 1.5 + 1.5 | 1.5x |" in page.read_text()
    pays.main("quick", None, CONSOLE, "cpu", page=page, source=tmp_path)
    assert page.read_text().startswith("before") and page.read_text().endswith("after\n")
    with pytest.raises(UserError, match="is of scale quick"):
        pays.main("paper", tmp_path, CONSOLE, "cpu")


@pytest.mark.parametrize("name", pays_models.SYNTHETIC)
def test_synthetic_rows_are_those_of_their_seed(name: str) -> None:
    one, again = (pays_models.synthetic(name, 30) for _ in range(2))
    assert one.n == 30 and (one.y == again.y).all() and (one.y >= 0).all()


def test_a_lent_machine_measures_some_rows_after_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of an earlier call stay in the file, whatever this one asks for."""
    monkeypatch.setattr(pays_nuts, "compare", made)
    for arguments in (["--sets", "poisson"], ["--sets", "logistic,hierarchical"]):
        assert pays_nuts.main(["--out", str(tmp_path), "--rows", "30", *arguments]) == 0
    kept = json.loads((tmp_path / "pays.json").read_text())["nuts"]
    assert [(r["set"], r["n"]) for r in kept] == [
        ("logistic", 30), ("hierarchical", 30), ("poisson", 30)
    ]  # fmt: skip
    capsys.readouterr()
    assert pays_nuts.main(["--out", str(tmp_path), "--sets", "iris"]) == 2
    assert "There is no set 'iris'" in capsys.readouterr().err
    assert pays_nuts.main(["--out", str(tmp_path), "--rows", "many"]) == 2
    assert "--rows is 'many'" in capsys.readouterr().err


def test_a_chain_is_kept_and_weighted_draws_show_what_a_coreset_changes(tmp_path: Path) -> None:
    """A coreset of all rows with weight 1 changes nothing; both ways of comparing say so."""
    from corefed.coreset.adapters import numpyro as adapter
    from corefed_studies.bench import pays_chains

    case = pays_models.synthetic("logistic", 200)
    points = (case.x, case.y)
    calls = []

    def make() -> pays_chains.Chain:
        calls.append(1)
        return pays_chains.run(case.model, points, 50, 60)

    one, again = (pays_chains.remembered(tmp_path / "chain.json", make) for _ in range(2))
    assert len(calls) == 1 and (one.draws == again.draws).all()
    same = pays_chains.difference(one, again)
    assert (same.off, same.least, same.most) == (0, 1, 1) and same.off_error > 0.05
    coreset = adapter.build(case.model, *points, 200, samples=100)
    assert len(coreset) == 200
    found = pays_chains.paired(case.model, points, coreset, again)
    assert found.off < 1e-3 and 0.999 < found.least <= found.most < 1.001
