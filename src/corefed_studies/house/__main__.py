"""Count this checkout, or another one, and show it: `python -m corefed_studies.house --help`."""

from __future__ import annotations

import sys

from corefed.base.errors import UserError
from corefed_studies.house.counting import app

if __name__ == "__main__":
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
