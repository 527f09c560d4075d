"""What a client with noise tells when it joins: the outline of its data, and no value of them.

It has the fields of a description (`local_data.describe`), with what the client's own file says in
place of what the data say:

    train, test     the number `examples` of client.toml, and 0
    classes         those that client.toml names; none: a regression
    shape, columns  the shape of a point, or the names of the columns
    count, mean, m2 0: no scale is told. A column counts as one without values

The server's settings choose which columns are left out. None of its other settings is looked at,
since whether a file can be read under them may depend on a single row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from corefed.base.errors import UserError
from corefed.data import sources
from corefed.data.table import Settings
from corefed.federation.reading import local_data

if TYPE_CHECKING:
    from corefed.settings.run import Embedding


def outline(
    spec: str,
    *,
    target: str,
    classes: Sequence[str],
    examples: int,
    ignored: Sequence[str] = (),
    embedding: Embedding = "auto",
    memory_mb: int = 4096,
) -> dict[str, Any]:
    """The description of the data that is told under noise."""
    found: dict[str, Any] = {"train": examples, "test": 0, "classes": list(classes)}
    kind, path = local_data.kind_of(spec)
    if kind == "table":
        left_out = {target, *ignored}
        names = [each for each in sources.find(path, memory_mb).columns if each not in left_out]
        columns = [_column(name, examples) for name in sorted(names)]
        return {**found, "targets": 0 if classes else 1, "columns": columns, "target": []}
    data = local_data.read(
        spec,
        test_fraction=0.0,
        seed=0,
        reading=Settings(),
        embedding=embedding,
        bad_images="skip",
        memory_mb=memory_mb,
    )
    check_classes(data.labels, classes)
    width = 0 if classes else data.y_train.shape[1]
    shape = {"shape": list(data.shape), "count": 0, "mean": 0.0, "m2": 0.0}
    return {**found, "targets": width, **shape}


def check_classes(own: Sequence[str], named: Sequence[str]) -> None:
    """Refuse data with classes of which client.toml names none, and the other way around."""
    if own and not named:
        raise UserError(
            "With noise the server is told only the classes that client.toml names, and it names "
            "none; write classes = [...] under [data]."
        )
    if named and not own:
        raise UserError("client.toml names classes under [data], but the data are a regression.")


def _column(name: str, examples: int) -> dict[str, Any]:
    untold = {"kind": "empty", "categories": [], "missing": examples, "mean": 0.0, "m2": 0.0}
    return {"name": name, **untold}
