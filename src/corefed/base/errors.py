"""The one exception a user is meant to see, and the hint that names want in it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """A mistake the user can mend. The command line prints its sentence and exits with code 2.

    The sentence says what happened, where, and what to do; it never carries a traceback.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, where a known name is near; else nothing."""
    nearest = get_close_matches(name, list(known), n=1)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells expect."""
