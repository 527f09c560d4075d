"""What is asked of a client and what it answers: the whole wire contract, free of Flower.

A task carries everything a client needs except its data and its private state, so that a restarted
client can answer the next one. All that leaves a client's machine is a field of `Reply`;
`docs/deploy.md` lists them.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from corefed.base.errors import UserError

if TYPE_CHECKING:  # programs of Flower start without torch, which takes a second
    from corefed.base.types import Tree
    from corefed.data.columns import Column

VERSION = 4
"""A client and a server with different versions of the protocol refuse each other."""

ENVELOPE = 1 << 20
"""Bytes of a message beside its tensors: numbers, names, Flower's own records."""

Kind = Literal["join", "train", "evaluate"]


@dataclass(frozen=True)
class Agreement:
    """What all clients' data have in common, found once before the first round."""

    shape: tuple[int, ...]  # of one point
    classes: tuple[str, ...]  # names of the classes in their order; empty for regression
    targets: int  # width of the regression target; 0 for classification
    mean: tuple[float, ...] = (0.0,)  # features are (x - mean) / std, over all clients together:
    std: tuple[float, ...] = (1.0,)  # one of each for all features, or one per feature
    columns: tuple[Column, ...] = ()  # of tables: what features are made of, in their order
    fill: tuple[float, ...] = ()  # of missing values, one per feature; empty: the mean
    own_scale: bool = False  # each client scales features by its own training points
    target_mean: tuple[float, ...] = ()  # the network learns (y - target_mean) / target_std;
    target_std: tuple[float, ...] = ()  # empty: y itself

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Agreement:
        values: dict[str, Any] = json.loads(text)
        if values.keys() != cls.__dataclass_fields__.keys():
            raise UserError(
                "The agreement about the data is that of another version of corefed; start a new "
                "run."
            )
        from corefed.data.columns import from_dicts  # torch takes a second

        values["columns"] = from_dicts(values["columns"])
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**values)


class Task(NamedTuple):
    """Server to client."""

    kind: Kind
    run: str  # name of the training run
    round: int  # from 0; of join: -1
    client: int  # the client's number, on which its random draws depend
    settings: str  # the experiment's settings that are not defaults, as TOML
    agreement: Agreement | None  # None in a join
    upload: str  # float32, float16 or bfloat16
    difference: bool
    dp_clip: float
    dp_noise: float
    tree: Tree  # the part of the server's state that is sent; empty in a join
    temperature: str = ""  # of the second evaluation of a calibrated run's last round: the
    # temperatures of all clients' validation points, as JSON by kind of model


class Reply(NamedTuple):
    """Client to server. `figures` are named numbers or short lists of them."""

    kind: Kind
    run: str
    round: int
    client: int
    figures: dict[str, Any]
    tree: Tree  # of a train task: the method's message, without the client axis
    error: str = ""  # why the client could not do the task; then there is no tree


RUN = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
CURRENT = "current"
"""Not the name of a run: at a client it is the link to the model in use."""


def check_run(name: str) -> str:
    """Refuse a bad name of a run: it names a folder, on the server and on every client."""
    if not RUN.fullmatch(name) or name == CURRENT:
        raise UserError(
            f"{name[:80]!r} is no name for a run: up to 63 of a-z, 0-9 and '-', the first a letter "
            f"or digit, and not {CURRENT!r}."
        )
    return name
