"""Read new rows of a table, before scaling; the columns may be in any order.

A row's id comes from the first column without a role in training whose values are all different;
otherwise it is the row number.
"""

from __future__ import annotations

from collections import Counter
from math import isfinite
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import columns, sources, values
from corefed.data.cells import is_number, shorten
from corefed.data.preparation import Preparation
from corefed.data.raw import Raw, indices, read_optional
from corefed.data.sources import Source
from corefed.data.values import Numbers


def read(path: Path, preparation: Preparation, target_wanted: bool, memory_mb: int) -> Raw:
    source = sources.find(path, memory_mb)
    target = preparation.target if preparation.target in source.columns else ""
    extra = _check_columns(source, preparation, target_wanted)
    layout = preparation.columns
    wanted = [column.name for column in layout]
    named = [each for each in (*preparation.ignored, *extra) if each in source.columns]
    parts: list[Numbers] = []
    cells: list[str] = []
    owner = preparation.client if preparation.client in source.columns else ""
    owners: list[str] = []
    identities: dict[str, list[str]] = {name: [] for name in named if name not in source.unfit}
    unknown: Counter[tuple[str, str]] = Counter()
    most = memory_mb * 2**20 // (16 * columns.width(layout))
    special = [name for name in (target, owner) if name]
    for block in source.blocks([*wanted, *special, *identities]):
        x, foreign = columns.encode(layout, block, source.at)
        parts.append(x)
        unknown += foreign
        cells += values.names(block.cells[target]) if target else []
        owners += values.names(block.cells[owner]) if owner else []
        for name, own in identities.items():
            own += [str(each) for each in values.names(block.cells[name])]
        if sum(map(len, parts)) > most:
            raise UserError(
                f"{path} has more than {most} rows, which need more than the {memory_mb} MB of "
                "memory allowed; divide it into several files."
            )
    if not parts:
        raise UserError(f"{path} has a header but no rows.")
    raw = torch.from_numpy(np.concatenate(parts))
    kept = list(range(len(raw)))
    notes: list[str] = []
    y: Tensor | None = None
    if target_wanted:
        kept = [row for row, cell in enumerate(cells) if cell]
        lacking = len(raw) - len(kept)
        if lacking:
            notes.append(f"{lacking} of {len(raw)} rows have no target; they are left out.")
    if target:
        own = [cells[row] for row in kept]
        y, more = read_optional(lambda: _table_targets(source, own, preparation), target_wanted)
        notes += more
    if extra:
        notes.append(f"{path} also has {shorten(extra, 5)}, not among training's columns.")
    notes += _foreign(unknown)
    ids = next(
        (own for own in identities.values() if all(own) and len(set(own)) == len(own)),
        [str(row) for row in range(len(raw))],
    )
    clients = tuple(owners[row] for row in kept) if owner else ()
    return Raw(raw[kept], y, [ids[row] for row in kept], notes, clients)


def _check_columns(source: Source, preparation: Preparation, target_wanted: bool) -> list[str]:
    """Refuse a table that lacks columns; returns the columns that training did not have."""
    needed = [column.name for column in preparation.columns]
    needed += [preparation.target] if target_wanted else []
    known = {*needed, preparation.target, preparation.client, *preparation.ignored}
    missing = [name for name in needed if name not in source.columns]
    extra = [name for name in source.columns if name not in known]
    if missing:
        more = f"; it has {shorten(extra, 5)} instead" if extra else ""
        raise UserError(
            f"{source.path} has no {'column' if len(missing) == 1 else 'columns'} "
            f"{shorten(missing, 5)}, which training had{more}."
        )
    unfit = next((name for name in needed if name in source.unfit), None)
    if unfit is not None:
        raise UserError(
            f"Column {unfit!r} of {source.path} has {source.unfit[unfit]}, where training had "
            "numbers or text."
        )
    return extra


def _table_targets(source: Source, cells: list[str], preparation: Preparation) -> Tensor:
    where = f"Column {preparation.target!r} of {source.path}"
    if not all(cells) or not cells:
        raise UserError(f"{where} is {'not filled in everywhere' if any(cells) else 'empty'}.")
    if preparation.labels:
        return indices(where, cells, preparation)
    wrong = next((each for each in cells if not is_number(each) or not isfinite(float(each))), None)
    if wrong is not None:
        raise UserError(f"{where} has {wrong[:40]!r}; a regression needs numbers.")
    y = torch.tensor([float(each) for each in cells], dtype=torch.float64)
    return y.to(torch.float32).unsqueeze(1)


def _foreign(unknown: Counter[tuple[str, str]]) -> list[str]:
    if not unknown:
        return []
    found = [f"{name} {each!r} ({count})" for (name, each), count in unknown.most_common()]
    return [f"Categories that training did not have count as none of them: {shorten(found, 5)}."]
