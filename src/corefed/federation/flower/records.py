"""Tasks and replies as Flower's records, and back.

Each is one ConfigRecord of plain values and one ArrayRecord whose arrays are the raw bytes of
`wire.py`. What comes from a client is checked field by field.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from corefed import __version__
from corefed.federation.protocol import VERSION, Agreement, Reply, Task

if TYPE_CHECKING:
    from corefed.base.types import Tree
    from corefed.federation.wire import Packed

RAW = "corefed.raw"  # the arrays' serialisation: C order, little-endian, nothing else
CLIENT_MOST = 4 << 30
"""Bytes of tensors a client takes from its server, at most."""


def task_to_records(task: Task) -> RecordDict:
    values = task._replace(tree={}, agreement=None)._asdict()
    values["agreement"] = task.agreement.to_json() if task.agreement else ""
    return _records({k: v for k, v in values.items() if k != "tree"}, task.tree)


def task_from(records: RecordDict) -> Task:
    """A server's task; a ValueError with a sentence for anything else."""
    values = _values(records)
    texts = ("kind", "run", "settings", "agreement", "upload", "temperature")
    kinds: dict[str, tuple[type, ...]] = dict.fromkeys(texts, (str,))
    kinds |= {"round": (int,), "client": (int,), "difference": (bool,)}
    kinds |= dict.fromkeys(("dp_clip", "dp_noise"), (int, float))
    if values.keys() != kinds.keys() or any(type(values[k]) not in t for k, t in kinds.items()):
        raise ValueError("the task has other fields than a task has")
    text = str(values.pop("agreement"))
    agreement = Agreement.from_json(text) if text else None
    return Task(**values, agreement=agreement, tree=_tree(records, CLIENT_MOST))


def reply_to_records(reply: Reply) -> RecordDict:
    values = {k: v for k, v in reply._asdict().items() if k != "tree"}
    return _records({**values, "figures": json.dumps(reply.figures)}, reply.tree)


def reply_from(records: RecordDict, most: int) -> Reply:
    """A client's reply; a ValueError with a sentence for anything else."""
    values = _values(records)
    kinds = {"kind": str, "run": str, "round": int, "client": int, "figures": str, "error": str}
    if values.keys() != kinds.keys() or any(type(values[k]) is not t for k, t in kinds.items()):
        raise ValueError("its reply has other fields than a reply has")
    try:
        figures = json.loads(values.pop("figures"))
    except (ValueError, RecursionError) as error:
        raise ValueError("its numbers are no JSON") from error
    if not isinstance(figures, dict):
        raise ValueError("its numbers are no table")
    return Reply(**values, figures=figures, tree=_tree(records, most))


def _records(values: Mapping[str, Any], tree: Tree) -> RecordDict:
    from corefed.federation import wire  # torch takes a second

    about = ConfigRecord({**values, "protocol": VERSION, "version": __version__})
    arrays = {
        name: Array(one.dtype, one.shape, RAW, one.data) for name, one in wire.pack(tree).items()
    }
    return RecordDict({"corefed": about, "tree": ArrayRecord(arrays)})


def _values(records: RecordDict) -> dict[str, Any]:
    """The plain values of a message, once both sides speak the same protocol."""
    about = records.config_records.get("corefed")
    if about is None:
        raise ValueError("it is no message of corefed")
    values = dict(about)
    protocol, version = values.pop("protocol", None), values.pop("version", None)
    if (protocol, version) != (VERSION, __version__):
        raise ValueError(
            f"it speaks protocol {protocol!r} of corefed {version!r}, and this is {VERSION!r} of "
            f"{__version__!r}: install the same version everywhere"
        )
    return values


def _tree(records: RecordDict, most: int) -> Tree:
    from corefed.federation import wire  # torch takes a second

    arrays: Mapping[str, Array] = records.array_records.get("tree", ArrayRecord())
    packed: dict[str, Packed] = {}
    for name, array in arrays.items():
        if array.stype != RAW:
            raise wire.WireError(f"{name!r} is serialised as {array.stype!r}, not as {RAW!r}")
        packed[name] = wire.Packed(array.dtype, tuple(array.shape), array.data)
    return wire.unpack(packed, most)
