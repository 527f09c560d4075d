"""Save the server and private state of a run in one safetensors file, and load it.

The file is replaced in one step, so that a killed run leaves the old checkpoint or the new one. Its
header says which experiment it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from corefed import __version__
from corefed.base.errors import UserError
from corefed.base.types import Tree
from corefed.settings.config import differences, fingerprint

SCHEMA = 2
"""Increase it when names or meanings of tensors change."""


class State(NamedTuple):
    """A run after `round` rounds."""

    round: int
    tensors: Tree  # server.G.NAME and private.NAME


def require_library() -> None:
    """Refuse before the first round, not after it, if checkpoints cannot be written."""
    if find_spec("safetensors") is None:
        raise UserError(
            "Checkpoints need safetensors, which is not installed: pip install safetensors, or "
            "run without them by --set checkpoint_every=0."
        )


def encode(
    values: Mapping[str, object], round_: int, servers: Sequence[Tree], private: Tree
) -> bytes:
    """The bytes of a checkpoint of the experiment whose settings are `values`."""
    from safetensors.torch import save  # checked by `require_library`

    tensors = {f"server.{g}.{k}": v for g, server in enumerate(servers) for k, v in server.items()}
    tensors |= {f"private.{k}": v for k, v in private.items()}
    about = {
        "schema": SCHEMA,
        "version": __version__,
        "round": round_,
        "fingerprint": fingerprint(values),
        "config": dict(values),
    }
    host = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
    return save(host, metadata={"corefed": json.dumps(about)})


def decode(content: bytes, values: Mapping[str, object], where: str) -> State:
    """The state in a checkpoint; refused unless this run can resume from it."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        about = _about(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(
            f"{where} is truncated or damaged ({error}); the run cannot be resumed from it."
        ) from error
    if (about["schema"], about["version"]) != (SCHEMA, __version__):
        raise UserError(
            f"{where} was written by corefed {about['version']} (checkpoint schema "
            f"{about['schema']}) and this is {__version__} (schema {SCHEMA}); resume with that "
            "version, or start a new run."
        )
    if about["fingerprint"] != fingerprint(values):
        changed = ", ".join(differences(about["config"], values)) or "unknown settings"
        raise UserError(
            f"{where} belongs to another experiment: {changed}; resume with the settings it was "
            "written with, or start a new run."
        )
    # Tensors in the file's memory may be misaligned, which can change the last bit of a sum.
    return State(about["round"], {k: v.clone() for k, v in tensors.items()})


def round_of(path: Path) -> int:
    """The round of a checkpoint, from its header alone; 0 if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.read(8)
            about = _about(size + file.read(int.from_bytes(size, "little")))
        return int(about["round"])
    except (OSError, ValueError, KeyError):
        return 0


def unpack(state: State, servers: Sequence[Tree], private: Tree) -> tuple[list[Tree], Tree]:
    """The state's trees, with the names, shapes and devices of the fresh ones."""
    return (
        [_like(state.tensors, f"server.{g}.", server) for g, server in enumerate(servers)],
        _like(state.tensors, "private.", private),
    )


def _about(content: bytes) -> dict[str, Any]:
    """The metadata of `encode` in the header: 8 bytes of length, then JSON."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    about: dict[str, Any] = json.loads(header["__metadata__"]["corefed"])
    return about


def _like(tensors: Tree, prefix: str, fresh: Tree) -> Tree:
    found = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if _shapes(found) != _shapes(fresh):
        raise UserError(
            "The checkpoint's tensors are not those of this run's method and data; the data may "
            "have changed since it was written."
        )
    return {k: found[k].to(v.device) for k, v in fresh.items()}


def _shapes(tree: Tree) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tree.items()}
