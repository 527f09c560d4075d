"""The exception for a user's mistakes, and hints at similar names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches


class UserError(Exception):
    """A mistake that the user can mend: what happened, where, and what to do, in one sentence.

    The command line prints it without a traceback and exits with code 2.
    """


def did_you_mean(
    name: str,
    known: Iterable[str],
    *,
    otherwise: str = "",
    written: Mapping[str, str] | None = None,
) -> str:
    """` Did you mean 'x'?` if a known name is similar, else nothing.

    With `otherwise` it ends a sentence: `; did you mean 'x'?` or `; OTHERWISE.`. `written` maps
    names to the form in which they are shown.
    """
    names = list(known)
    alike = [each for each in names if each.casefold() == name.casefold()]
    whole = [each for each in names if name in each.split("_")]  # batch: batch_size, not match
    nearest = alike or whole or get_close_matches(name, names, n=1, cutoff=0.5)
    if not nearest:
        return f"; {otherwise}." if otherwise else ""
    shown = repr((written or {}).get(nearest[0], nearest[0]))
    return f"; did you mean {shown}?" if otherwise else f" Did you mean {shown}?"


LACK = ("can't allocate memory", "cannot allocate memory", "bad_alloc")
"""What torch says on a CPU: of its own allocator, of the system, and of C++."""


def is_lack_of_memory(error: Exception) -> bool:
    """Of Python, numpy and pyarrow; torch raises an error of no kind of its own on a CPU."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in LACK)


NO_MEMORY = (
    "There is not enough memory; --set resident=coreset --set runtime=loop leaves the points of "
    "npz:, table: and image-folder: in their files, and fewer points per client or a smaller "
    "fraction take less still. What was recorded up to the last checkpoint is kept."
)

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT, as shells expect."""

LOST = 75
"""Exit code of a worker that lost another one: EX_TEMPFAIL, try again."""


def install(extra: str) -> str:
    """How to install an optional part. corefed is not published yet, so it is from a checkout."""
    return f"in a checkout of corefed, pip install -e '.[{extra}]'"
