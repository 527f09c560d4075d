"""A program of Flower's as it is: `python -m corefed.federation.engine.stock NAME ARGUMENTS`.

It ends with its parent. SuperLink is run by it; what clients can reach of SuperLink, and what they
can send, is for `gate.py`.
"""

from __future__ import annotations

import sys

from corefed.federation.engine import patches, signals


def main() -> None:
    signals.end_with_parent()
    patches.check("superlink")
    name = sys.argv[1]
    sys.argv = [name, *sys.argv[2:]]
    patches.flower_program(name)()


if __name__ == "__main__":
    main()
