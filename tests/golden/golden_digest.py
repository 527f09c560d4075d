"""What the golden cases leave, what is recorded of it, and how that is compared.

A case gives fields: a flat dict of numbers, lists and tensors, without seconds, memory and
versions. `same.py` compares them whole. What is recorded is a digest, in which a tensor is

    [dtype, shape, L2 norm, four sums with signs of a fixed draw]

of its finite values, and a digest is compared within tolerances: kinds of processors and numbers of
threads round differently.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

DIGESTS = Path(__file__).parent / "digests"

Fields = dict[str, Any]

ERRORS = ("fitted_error", "held_out_error", "uniform_error", "weight_sum", "shrink")
MACHINE = re.compile(r"seconds|memory|sha256")
"""Parts of a round's line that are of the machine."""

# --- making ---------------------------------------------------------------------------------------


def of_run(folder: Path, prefix: str = "") -> Fields:
    """Of a folder as `corefed run`, `personalize` or a federation leaves it."""
    fields: Fields = {}
    summary = json.loads((folder / "summary.json").read_text())
    for name, value in summary["metrics"].items():
        fields[f"metrics/{name}"] = [value["mean"], value["std"], *value["per_seed"]]
    rounds = folder / "rounds.jsonl"
    text = rounds.read_text() if rounds.exists() else ""  # a client of a federation has none
    lines = [dict(_flat(json.loads(line))) for line in text.splitlines()]
    for name in sorted({name for line in lines for name in line if not MACHINE.search(name)}):
        fields[f"rounds/{name}"] = [line.get(name) for line in lines]
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load(path.read_bytes())
        fields |= {f"{path.stem}/{key}": value for key, value in tensors.items()}
    if (folder / "checkpoint").exists():
        fields |= {f"state/{key}": value for key, value in checkpoint(folder).items()}
    return {f"{prefix}{key}": value for key, value in fields.items()}


def _flat(line: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in line.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """The state in the last checkpoint of a run; clients that it leaves out are as they began.

    Nothing else here names modules of the package: for another commit, `same.py` takes this
    function from that commit's own file.
    """
    from corefed.settings.config import resolve, to_dict
    from corefed.training import segments
    from corefed.training.checkpoint import load as load_checkpoint
    from corefed.training.checkpoint import restore
    from corefed.training.setup import prepare

    experiment = resolve(folder / "experiment.toml")
    found = load_checkpoint(folder, to_dict(experiment))
    if found is None:
        return {}
    tensors = dict(segments.pack_server(found.servers))
    if found.segments:
        with contextlib.redirect_stderr(io.StringIO()):  # notes that the run has given already
            setup = prepare(experiment)
        restore(found, setup.servers, setup.clients)
        tensors |= {f"private.{k}": v for k, v in setup.clients.private.items()}
    return tensors


def of_csv(name: str, path: Path) -> Fields:
    """Of a table of predictions: its header, and each column, of numbers or of words."""
    header, *rows = csv.reader(path.read_text().splitlines())
    fields: Fields = {f"{name}/header": header, f"{name}/rows": len(rows)}
    for title, *column in zip(header, *rows, strict=True):
        try:
            fields[f"{name}/{title}"] = torch.tensor(list(map(float, column)), dtype=torch.float64)
        except ValueError:
            fields[f"{name}/{title}"] = list(column)
    return fields


def of_coreset(coreset: Any) -> Fields:
    """Of what `corefed.coreset.build` gives."""
    about = coreset.diagnostics
    return {
        "indices": coreset.indices.tolist(),
        "weights": coreset.weights,
        "diagnostics": [getattr(about, name) for name in ERRORS],
    }


# --- recording ------------------------------------------------------------------------------------

LEFT_OUT = re.compile(
    r"(^|/)(reach/|rounds/(round|clients|late|metrics\.|classes\.|overconfidence\.))"
)
"""Fields that follow from others, or say the same of each class: not recorded."""
SIGNS = 4
"""Sums of a tensor's values, each with signs of its own, that stand for it."""


def digest(fields: Fields) -> Fields:
    """What is recorded of a case."""
    kept = {key: value for key, value in fields.items() if not LEFT_OUT.search(key)}
    return {
        key: of_tensor(value) if isinstance(value, Tensor) else value for key, value in kept.items()
    }


def of_tensor(value: Tensor) -> list[Any]:
    """Its type, shape, L2 norm and `SIGNS` sums of all its finite values, with signs of a fixed
    draw: two tensors whose difference has the norm d have sums that differ by about d."""
    flat = value.detach().cpu().double().flatten()
    flat = torch.where(flat.isfinite(), flat, 0.0)
    draw = torch.Generator().manual_seed(len(flat))
    signs = 2.0 * torch.randint(0, 2, (SIGNS, len(flat)), generator=draw) - 1
    rows = (flat * signs).tolist()
    sums = [float(f"{math.fsum(row):.7g}") for row in rows]  # fsum: the same in any order
    norm = float(f"{math.sqrt(math.fsum(flat.square().tolist())):.7g}")
    return [str(value.dtype).removeprefix("torch."), list(value.shape), norm, *sums]


def read(group: str) -> dict[str, Fields]:
    """The recorded digests of a group by case; none where it was not recorded."""
    path = DIGESTS / f"{group}.json"
    found: dict[str, Fields] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(group: str, cases: Mapping[str, Fields]) -> None:
    """One line a field, sorted: a change of one number is one line of a diff."""
    parts = []
    for name, fields in sorted(cases.items()):
        rows = [f"  {json.dumps(key)}: {json.dumps(fields[key])}" for key in sorted(fields)]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n }")
    DIGESTS.mkdir(exist_ok=True)
    (DIGESTS / f"{group}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n")


# --- comparing ------------------------------------------------------------------------------------

# Tolerances. Other kinds of processors and numbers of threads add sums in another order, so that
# float32 values differ in the last of seven digits; draws are the same everywhere. Measured on one
# machine against itself with the arithmetic of SSE4.2, of AVX2 and of MKL's common path, and with 2
# and 4 threads: the same points were chosen everywhere; tensors moved by up to 3e-3 of their norm,
# in newcomers, whose Adam makes a whole step of a gradient that is all rounding; Adam's own moments
# by 4e-2; losses and scores by 6e-4. A point that is predicted otherwise is more: one of ten, for a
# newcomer. `make same` shows what is smaller.
TENSOR, MOMENT, NUMBER, SHARE = 0.01, 0.2, 3e-3, 0.11
ABSOLUTE = 1e-6
MOMENTS = re.compile(r"state/private\..+\.[mv]$")
SHARES = re.compile(r"_accuracy|_ece")


def differences(case: str, recorded: Fields, now: Fields) -> list[str]:
    """A sentence for every field of two digests that differs by more than the tolerances allow."""
    found = []
    for field in sorted(recorded.keys() | now.keys()):
        if field not in now:
            found.append(f"{case}: {field} is gone; it was {recorded[field]}")
        elif field not in recorded:
            found.append(f"{case}: {field} is new; it is {now[field]}")
        elif not _near(field, recorded[field], now[field]):
            found.append(f"{case}: {field}: recorded {recorded[field]}, now {now[field]}")
    return found


def _near(field: str, a: Any, b: Any) -> bool:
    if _is_tensor(a) and _is_tensor(b) and a[0].startswith("float"):
        bound = (MOMENT if MOMENTS.search(field) else TENSOR) * a[2] + ABSOLUTE
        return a[:2] == b[:2] and all(
            abs(x - y) <= bound for x, y in zip(a[2:], b[2:], strict=True)
        )
    return _near_values(a, b, SHARE if SHARES.search(field) else NUMBER)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 + SIGNS and isinstance(value[0], str)


def _near_values(a: Any, b: Any, bound: float) -> bool:
    """Numbers within the bound, or within that part of the value where it is above 1; whole numbers
    and words the same."""
    if isinstance(a, list) and isinstance(b, list):
        pairs = zip(a, b, strict=False)
        return len(a) == len(b) and all(_near_values(x, y, bound) for x, y in pairs)
    if isinstance(a, float) and isinstance(b, float) and not math.isnan(a):
        return abs(a - b) <= bound * max(1.0, abs(a))
    return repr(a) == repr(b)  # NaN is NaN
