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


def made(case: pays_models.Case, warmup: int, samples: int) -> dict[str, Any]:
    names = (
        "full s", "build s", "coreset s", "speed-up", "speed-up cpu", "off", "sampler",
        "ratio least", "ratio most", "uniform off",
    )  # fmt: skip
    return {"set": case.name, "n": case.n, "k": 50, **dict.fromkeys(names, 1.5)}


def test_rows_are_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def once(case: pays_models.Case, *numbers: int) -> dict[str, Any]:
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
    assert "| poisson | 40 | 50 | 1.5 | 1.5 + 1.5 | 1.5x |" in page.read_text()
    pays.main("quick", None, CONSOLE, "cpu", page=page, source=tmp_path)
    assert page.read_text().startswith("before") and page.read_text().endswith("after\n")
    with pytest.raises(UserError, match="is of scale quick"):
        pays.main("paper", tmp_path, CONSOLE, "cpu")


@pytest.mark.parametrize("name", pays_models.SYNTHETIC)
def test_synthetic_rows_are_those_of_their_seed(name: str) -> None:
    one, again = (pays_models.synthetic(name, 30) for _ in range(2))
    assert one.n == 30 and (one.y == again.y).all() and (one.y >= 0).all()
