"""No number changes: every golden case is run anew and compared with what was recorded.

In the environment of the recording (environment.json) all must be equal bit for bit, elsewhere
within the tolerances of `golden_digest.py`. `write.py` says how digests are written.
"""

from __future__ import annotations

from pathlib import Path

import golden_digest
import pytest
from golden_cases import CASES, FEDERATION, SAME_AS, Case


def name_of(case: Case) -> str:
    return f"{case.group}/{case.name}"


def compare(case: Case, folder: Path) -> None:
    recorded = golden_digest.read(case.group).get(case.name)
    assert recorded is not None, f"{name_of(case)} was not recorded; see tests/golden/write.py"
    with golden_digest.one_thread():
        now = case.make(folder)
    exact = golden_digest.same_environment()
    found = golden_digest.differences(
        name_of(case), recorded, now, exact=exact, discrete=case.discrete
    )
    how = "bit for bit" if exact else "loosely, as this is not the environment of the recording"
    assert not found, f"compared {how}:\n" + "\n".join(found)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_golden(case: Case, tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.federation
def test_golden_federation(tmp_path: Path) -> None:
    compare(FEDERATION, tmp_path)


@pytest.mark.parametrize("name", SAME_AS)
def test_recorded_cases_that_are_the_same(name: str) -> None:
    """A run that was resumed is recorded with the very numbers of one that was not."""
    group, other = SAME_AS[name]
    straight, resumed = golden_digest.read(group)[other], golden_digest.read("others")[name]
    found = golden_digest.differences(name, straight, resumed, exact=True, discrete=False)
    assert not found, "\n".join(found)


def test_recorded_cases_are_those_there_are() -> None:
    """A case that was dropped would leave digests that nothing is compared with."""
    cases = [*CASES, FEDERATION]
    names = sorted(name_of(case) for case in cases)
    assert len(set(names)) == len(names)
    groups = sorted(path.stem for path in golden_digest.DIGESTS.glob("*.json"))
    assert names == sorted(f"{g}/{name}" for g in groups for name in golden_digest.read(g))
