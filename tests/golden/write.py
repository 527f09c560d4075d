"""Write the golden digests anew, of all groups or of those named:

    OMP_WAIT_POLICY=PASSIVE python tests/golden/write.py [GROUP...]

To write is to declare that all changed numbers are right: look at `make same AS=HEAD` first, and
say why in the commit.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import golden_cases
import golden_digest


def main(words: list[str]) -> int:
    cases = [*golden_cases.CASES, golden_cases.FEDERATION]
    known = sorted({case.group for case in cases})
    if unknown := sorted(set(words) - set(known)):
        print(
            f"error: no group {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    for group in words or known:
        found = {}
        for case in (case for case in cases if case.group == group):
            with tempfile.TemporaryDirectory() as folder:
                found[case.name] = golden_digest.digest(case.make(Path(folder)))
        golden_digest.write(group, found)
        print(f"{group}: {len(found)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
