"""No number changes: every golden case is run anew and compared with what was recorded.

Within tolerances, which hold on every kind of processor (`golden_digest.py`). For a proof to the
bit there is `make same AS=COMMIT`. `write.py` says how digests are written.
"""

from __future__ import annotations

from pathlib import Path

import golden_digest
import pytest
import same
from golden_cases import CASES, FEDERATION, SAME_AS, Case
from run_cases import name_of


def compare(case: Case, folder: Path) -> None:
    recorded = golden_digest.read(case.group).get(case.name)
    assert recorded is not None, f"{name_of(case)} was not recorded; see tests/golden/write.py"
    now = golden_digest.digest(case.make(folder))
    found = golden_digest.differences(name_of(case), recorded, now)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_golden(case: Case, tmp_path: Path) -> None:
    compare(case, tmp_path)


@pytest.mark.federation
def test_golden_federation(tmp_path: Path) -> None:
    compare(FEDERATION, tmp_path)


@pytest.mark.parametrize("name", SAME_AS)
def test_a_resumed_run_ends_to_the_bit_as_one_that_was_not(name: str, tmp_path: Path) -> None:
    """True everywhere: both do the same on the same machine."""
    wanted = {name_of(case): case for case in CASES}
    resumed, straight = (
        wanted[each].make(tmp_path / each) for each in (f"others/{name}", SAME_AS[name])
    )
    assert resumed.keys() == straight.keys()
    found = {field: same.difference(straight[field], resumed[field]) for field in resumed}
    assert not any(found.values()), found


def test_recorded_cases_are_those_there_are() -> None:
    """A case that was dropped would leave digests that nothing is compared with."""
    cases = [*CASES, FEDERATION]
    names = sorted(name_of(case) for case in cases)
    assert len(set(names)) == len(names)
    groups = sorted(path.stem for path in golden_digest.DIGESTS.glob("*.json"))
    assert names == sorted(f"{g}/{name}" for g in groups for name in golden_digest.read(g))
