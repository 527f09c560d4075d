"""Server and private state in one safetensors file, as a search keeps it for a group of candidates.

Its header says which experiment it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed.base import tensor_file
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.training import segments

NAME = "state.safetensors"
"""The checkpoint of a run, until schema 2."""
SCHEMA = 2
"""Increase it when names or meanings of tensors change."""


class State(NamedTuple):
    """A run after `round` rounds."""

    round: int
    tensors: Tree  # server.G.NAME and private.NAME


def encode(
    values: Mapping[str, object], round_: int, servers: Sequence[Tree], private: Tree
) -> bytes:
    """The bytes of a checkpoint of the experiment whose settings are `values`."""
    tensors = segments.pack_server(servers) | {f"private.{k}": v for k, v in private.items()}
    about = {**segments.about(values, SCHEMA), "round": round_}
    return tensor_file.save(tensors, {"corefed": json.dumps(about)})


def decode(content: bytes, values: Mapping[str, object], where: str) -> State:
    """The state in a checkpoint; refused unless this run can resume from it."""
    try:
        tensors = tensor_file.load(content, where)
        about = _about(content)
    except (ValueError, KeyError) as error:
        raise segments.damaged(where, error) from error
    segments.refuse_foreign(about, values, SCHEMA, where)
    # Tensors in the file's memory may be misaligned, which can change the last bit of a sum.
    return State(about["round"], {k: v.clone() for k, v in tensors.items()})


def refuse(path: Path, values: Mapping[str, object], schema: int) -> None:
    """Refuse a file of an older version by what its header says."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            length = min(int.from_bytes(head, "little"), path.stat().st_size)
            about = _about(head + file.read(length))
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, KeyError) as error:
        raise segments.damaged(path, error) from error
    segments.refuse_foreign(about, values, schema, path)


def unpack(state: State, servers: Sequence[Tree], private: Tree) -> tuple[list[Tree], Tree]:
    """The state's trees, with the names, shapes and devices of the fresh ones."""
    return (
        [like(_part(state.tensors, f"server.{g}."), fresh) for g, fresh in enumerate(servers)],
        like(_part(state.tensors, "private."), private),
    )


def like(found: Tree, fresh: Tree) -> Tree:
    """`found` on the devices of `fresh`; refused unless names, shapes and types are the same."""
    if _shapes(found) != _shapes(fresh):
        raise UserError(
            "The checkpoint's tensors are not those of this run's method and data; the data may "
            "have changed since it was written."
        )
    return {k: found[k].to(v.device) for k, v in fresh.items()}


def _about(content: bytes) -> dict[str, Any]:
    """The metadata of `encode`."""
    about: dict[str, Any] = json.loads(tensor_file.metadata_of(content)["corefed"])
    return about


def _part(tensors: Tree, prefix: str) -> Tree:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tree.items()}
