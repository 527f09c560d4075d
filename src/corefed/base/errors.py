"""The one exception a user is meant to see, and the hint that names want in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class UserError(Exception):
    """A mistake the user can mend. The command line prints its sentence and exits with code 2.

    The sentence says what happened, where, and what to do; it never carries a traceback.
    """


def did_you_mean(
    name: str,
    known: Iterable[str],
    *,
    otherwise: str = "",
    written: Mapping[str, str] | None = None,
) -> str:
    """` Did you mean 'x'?`, where a known name is near; else nothing.

    With `otherwise` it ends a sentence that has begun: `; did you mean 'x'?` or `; OTHERWISE.`.
    `written` has names that are shown in another form than they are compared in.
    """
    names = list(known)
    alike = [each for each in names if each.casefold() == name.casefold()]
    nearest = alike or get_close_matches(name, names, n=1, cutoff=0.5)
    if not nearest:
        return f"; {otherwise}." if otherwise else ""
    shown = repr((written or {}).get(nearest[0], nearest[0]))
    return f"; did you mean {shown}?" if otherwise else f" Did you mean {shown}?"


INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells expect."""
