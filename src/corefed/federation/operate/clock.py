"""How far a client's clock is from the server's.

A SuperNode signs the time with each request. SuperLink refuses (401) a request that was signed more
than 305 s ago by its own clock, or more than 5 s in the future, and SuperNode then ends with no
word about time. The server's answers carry its time, so that the difference can be named.
"""

from __future__ import annotations

import http.client
import ssl
import time
from email.utils import parsedate_to_datetime

from corefed.base.errors import UserError
from corefed.federation.operate.folder import ClientFolder
from corefed.federation.operate.program import say

AHEAD, BEHIND = 5.0, 305.0
"""Seconds by which a client's clock may differ; Flower's own."""
ERROR = 1.0
"""Seconds of error: the server's time comes in whole seconds."""
NEAR = 0.5
"""Share of what is allowed from which a difference is worth a note."""


def refuse_skew(client: ClientFolder) -> None:
    """Measure the difference. A UserError if the server will refuse it, a note if it nearly will;
    nothing where the server does not tell its time."""
    ahead = measure(client)
    if ahead is None:
        return
    if ahead > AHEAD + ERROR or -ahead > BEHIND + ERROR:
        raise UserError(f"{describe(ahead)} Set the clock, with NTP for instance.")
    if ahead > NEAR * AHEAD + ERROR or -ahead > NEAR * BEHIND + ERROR:
        say(f"note: {describe(ahead)}")


def measure(client: ClientFolder) -> float | None:
    """Seconds that this machine's clock is ahead of the server's; None where that is unknown."""
    context = ssl.create_default_context(cafile=str(client.path / "ca.crt"))
    host, port = client.address
    connection = http.client.HTTPSConnection(host, port, timeout=10, context=context)
    try:
        connection.connect()
        sent = time.time()
        connection.request("GET", "/health")
        date = connection.getresponse().getheader("Date", "")
        return difference(date, (sent + time.time()) / 2)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def difference(date: str, here: float) -> float | None:
    """From the header Date and this machine's own time when it was written, or None."""
    try:
        there = parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError):
        return None
    return here - (there + 0.5)  # a second is cut off


def describe(ahead: float) -> str:
    side = "ahead of" if ahead > 0 else "behind"
    return (
        f"This machine's clock is {abs(ahead):.0f} s {side} the server's, and the server refuses a "
        f"client whose clock is more than {AHEAD:.0f} s ahead or {BEHIND:.0f} s behind."
    )


def hint(problem: str) -> str:
    """What the clock has to do with a certificate that is refused, if it may."""
    if "not yet valid" not in problem and "expired" not in problem:
        return ""
    return f" This machine's clock says {time.strftime('%Y-%m-%d %H:%M %Z')}; is it right?"
