"""Under which noise an upload is sent: the client's own settings first, then the server's rules.

    noise   the larger of the client's `min_noise` and the server's `dp_noise`
    clip    the client's `clip`, or else the server's `dp_clip`

So a server can ask for more noise than a client wants, never for less. A client whose settings ask
for privacy sends no upload without noise, and no exact number at all (`client.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from corefed.base.errors import UserError

if TYPE_CHECKING:
    from corefed.federation.protocol import Task
    from corefed.federation.task_context import ClientSettings

LEAST, MOST = 1e-6, 1e6
"""Of noise and clip: beyond, floating-point numbers lose one beside the other."""


class Terms(NamedTuple):
    """Of one upload; what `privacy.privatise` adds."""

    noise: float  # standard deviation in units of the clip
    clip: float


class TermsError(UserError):
    """Why there is no upload. It speaks of settings, never of data."""


def terms_of(task: Task, settings: ClientSettings) -> Terms | None:
    """The terms of an upload; None where neither side asks for noise."""
    asked = task.dp_noise if task.dp_clip > 0 else 0.0
    noise = asked if asked > settings.min_noise else settings.min_noise
    if not noise:
        if settings.max_epsilon:
            raise TermsError(
                "This client bounds what its uploads spend (max_epsilon), and an upload without "
                "noise spends everything; switch on differential privacy by dp_clip, or set "
                "min_noise and clip in its client.toml."
            )
        return None
    clip = settings.clip or task.dp_clip
    if not clip > 0:
        raise TermsError(
            f"This client adds noise of {settings.min_noise:g} times the clip to its uploads, and "
            "there is no clip; set dp_clip in federation.toml, or clip in its client.toml."
        )
    for name, value in (("noise", noise), ("clip", clip)):
        if not LEAST <= value <= MOST:
            raise TermsError(f"dp_{name} is {value:g}; it must be between {LEAST:g} and {MOST:g}.")
    return Terms(noise, clip)
