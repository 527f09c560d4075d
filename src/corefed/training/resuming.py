"""Refuse to go on with a run on other data than it began with."""

from __future__ import annotations

from pathlib import Path

from corefed.base.errors import UserError
from corefed.data import fingerprint
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed.training import fitted


def refuse_other_data(folder: Path, data: FederatedData) -> None:
    """`data` are those of now; data.json in the run's folder says what they were.

    A run that was killed before it wrote data.json starts again, and runs of older versions have no
    fingerprint there; theirs are compared by the columns alone.
    """
    if not (folder / fitted.DATA).exists():
        return
    kept = fitted.read_data(folder)
    changed = ""
    if kept.get("fingerprint") and data.fingerprint:
        changed = fingerprint.difference(kept["fingerprint"], data.fingerprint)
    else:
        before = Preparation.from_dict(kept["preparations"][0]).columns
        if before != data.preparations[0].columns:
            changed = "their columns, or the order of these, are others"
    if changed:
        raise UserError(
            f"The data of the run in {folder} have changed since it began: {changed}. Restore them "
            "to go on, or start a new run with --out."
        )
