"""Write the golden digests anew, and the environment they were made in:

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python tests/golden/write.py

Names of groups (methods, selectors, calibrated, solvers, others, build, federation) write those
only. `--check` writes nothing and says what differs, bit for bit. To write is to declare that all
changed numbers are right: look at the diff first, and say why in the commit.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import golden_cases
import golden_digest


def main(words: list[str]) -> int:
    check = "--check" in words
    cases = [*golden_cases.CASES, golden_cases.FEDERATION]
    groups = [word for word in words if word != "--check"] or sorted({c.group for c in cases})
    if unknown := sorted(set(groups) - {case.group for case in cases}):
        print(f"error: no group {', '.join(unknown)}", file=sys.stderr)
        return 2
    elsewhere = golden_digest.ENVIRONMENT.exists() and not golden_digest.same_environment()
    if not check and elsewhere and len(groups) < len({case.group for case in cases}):
        print("error: this is not the recorded environment: write all groups", file=sys.stderr)
        return 2
    differing = 0
    for group in groups:
        found, recorded = {}, golden_digest.read(group)
        for case in (case for case in cases if case.group == group):
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder, golden_digest.one_thread():
                found[case.name] = case.make(Path(folder))
            name = f"{group}/{case.name}"
            changed = golden_digest.differences(
                name, recorded.get(case.name, {}), found[case.name], exact=True, discrete=False
            )
            differing += len(changed)
            words_now = f"{len(changed)} fields differ" if changed else "as recorded"
            print(f"{time.monotonic() - began:6.2f} s  {name}: {words_now}", flush=True)
            for sentence in changed if check else []:
                print(f"    {sentence}")
        if not check:
            golden_digest.write(group, found)
    if not check:
        golden_digest.write_environment()
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
