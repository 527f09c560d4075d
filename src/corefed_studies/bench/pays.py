"""`corefed bench pays`: where a coreset pays, a part per promise (`parted.py` runs them).

nuts       NUTS on all data, against building a coreset and NUTS on it (`pays_nuts.py`)
passes     passes and seconds of training, against minibatches of all data (`pays_passes.py`)
memory     points that stay in their files, against points in memory (`pays_memory.py`)
deadlines  slow clients under a deadline (`deadlines.py`, also `corefed bench deadlines`)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from corefed_studies.bench.parted import Part, Parted, Shown

PAYS = Parted(
    "pays",
    {
        "nuts": Part("pays_nuts", "bench pays"),
        "passes": Part("pays_passes", "bench pays passes"),
        "memory": Part("pays_memory", "bench pays memory"),
        "deadlines": Part("deadlines", "bench deadlines"),
    },
)


def main(
    scale: str,
    out: Path | None,
    console: Shown,
    device_name: str,
    *,
    page: Path | None = None,
    source: Path | None = None,
    parts: Sequence[str] = (),
) -> None:
    PAYS.main(scale, out, console, page=page, source=source, parts=parts)
