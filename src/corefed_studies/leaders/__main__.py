"""Train cells with torch and numpy alone: `python -m corefed_studies.leaders pfllib --minutes 8`.

For a machine that only lends its GPU. The tables are made elsewhere, from the file that it writes:
`corefed reproduce pfllib --from FOLDER/leaders.json --page docs/leaders-study.md`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from corefed.base.errors import UserError
from corefed.base.shown import say
from corefed_studies.leaders import study
from corefed_studies.leaders.settings import STUDIES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m corefed_studies.leaders", description=__doc__)
    parser.add_argument("studies", nargs="*", help=f"{', '.join(STUDIES)}; all if none is given")
    parser.add_argument("--scale", choices=("quick", "paper"), default="paper")
    parser.add_argument("--out", type=Path, default=Path("runs/leaders"))
    parser.add_argument("--jobs", type=int, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="after which no new part of a cell starts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="names of rows, separated by semicolons")
    parser.add_argument("--settings", default="", help="names of settings, likewise")
    given = parser.parse_args()
    names = tuple(given.studies) or STUDIES
    only, settings = (
        tuple(name.strip() for name in text.split(";") if name.strip())
        for text in (given.only, given.settings)
    )
    try:
        study.check_studies(names)
        study.work(
            names, given.scale, given.out, say, jobs=given.jobs, minutes=given.minutes,
            device=given.device, show=False, only=only,
            only_settings=settings,
        )  # fmt: skip
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
