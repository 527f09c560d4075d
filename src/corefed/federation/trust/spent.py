"""The privacy that a run's uploads have spent so far, from its own record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from corefed.federation.rules import Rules
from corefed.federation.trust import privacy


def privacy_spent(
    lines: Sequence[Mapping[str, Any]], rules: Rules, weights: str | None
) -> dict[str, float | None]:
    """epsilon at the rules' delta, for the client with the largest.

    `server`: against whoever sees uploads, refused ones included. `average`: against those who see
    only the averaged model, such as the other clients. It is None if the server forms no average
    with known `weights` (equal or examples). It is None too if an upload was refused for its
    content, since the average then reveals something about it.
    """
    uploads = Counter(name for line in lines for name in line["federation"]["released"])
    most = max(uploads.values(), default=0)
    seen = privacy.compose([1 / rules.dp_noise] * most)
    average = None
    refused = any(
        reason.startswith("refused")
        for line in lines
        for reason in line["federation"]["lost"].values()
    )
    if weights is not None and rules.aggregation == "plain" and not refused:
        rounds = [line["federation"]["examples"] for line in lines]
        shares = [n if weights == "examples" else [1] * len(n) for n in rounds]
        mu = privacy.compose([privacy.average_mu(rules.dp_noise, each) for each in shares])
        average = privacy.epsilon(mu, rules.dp_delta)
    return {
        "server": privacy.epsilon(seen, rules.dp_delta),
        "average": average,
        "delta": rules.dp_delta,
    }
