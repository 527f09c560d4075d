"""What is digested of a run, and how two digests are compared.

A digest is a flat dict. Numbers are exact: JSON has the repr of a float, which reads back to the
same bits. Seconds, memory and versions are left out. A tensor is

    [dtype, shape, first 16 hex digits of the sha256 of its bytes, sum, L2 norm]

where the last two are of its finite values, and serve to compare on another kind of CPU.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import platform
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import scipy
import torch
from safetensors.torch import load
from threadpoolctl import threadpool_limits
from torch import Tensor

from corefed.settings.config import resolve, to_dict
from corefed.training import segments
from corefed.training.checkpoint import load as load_checkpoint
from corefed.training.checkpoint import restore
from corefed.training.setup import prepare

HERE = Path(__file__).parent
DIGESTS, ENVIRONMENT = HERE / "digests", HERE / "environment.json"

Fields = dict[str, Any]

RENAMED: dict[str, str] = {}
"""Recorded field -> its name now, such as "state/private.q": "state/private.posterior".

The one place where a rename of a tensor or a figure is declared. It holds for all cases; the part
before the file ("newcomer/", "server/", "alice/") is left out.
"""

FILES = {
    "fitted": "fitted.safetensors",
    "held_out": "held_out.safetensors",
}
EACH_ROUND = ("loss", "examples", "selection_examples", "bytes_up", "bytes_down")
ERRORS = ("fitted_error", "held_out_error", "uniform_error", "weight_sum", "shrink")


# --- making ---------------------------------------------------------------------------------------


def of_run(folder: Path, prefix: str = "") -> Fields:
    """Of a folder as `corefed run`, `personalize` or a federation leaves it."""
    fields: Fields = {}
    summary = json.loads((folder / "summary.json").read_text())
    for name, value in summary["metrics"].items():
        fields[f"metrics/{name}"] = [value["mean"], value["std"], *value["per_seed"]]
    rounds = folder / "rounds.jsonl"
    text = rounds.read_text() if rounds.exists() else ""  # a client of a federation has none
    lines = [json.loads(line) for line in text.splitlines()]
    for name in EACH_ROUND:
        if any(name in line for line in lines):
            fields[f"rounds/{name}"] = [line.get(name) for line in lines]
    for name in sorted({name for line in lines for name in line.get("coreset", {})}):
        fields[f"rounds/coreset.{name}"] = [line["coreset"].get(name) for line in lines]
    for short, name in FILES.items():
        if (folder / name).exists():
            tensors = load((folder / name).read_bytes())
            fields |= {f"{short}/{key}": of_tensor(value) for key, value in tensors.items()}
    if (folder / "checkpoint").exists():
        state = checkpoint(folder)
        fields |= {f"state/{key}": of_tensor(value) for key, value in state.items()}
    return {f"{prefix}{key}": value for key, value in fields.items()}


def checkpoint(folder: Path) -> dict[str, Tensor]:
    """The state in the last checkpoint of a run; clients that it leaves out are as they began."""
    experiment = resolve(folder / "experiment.toml")
    found = load_checkpoint(folder, to_dict(experiment))
    if found is None:
        return {}
    tensors = segments.pack_server(found.servers)
    if found.segments:
        with contextlib.redirect_stderr(io.StringIO()):  # notes that the run has given already
            setup = prepare(experiment)
        restore(found, setup.servers, setup.clients)
        tensors |= {f"private.{k}": v for k, v in setup.clients.private.items()}
    return tensors


def of_tensor(value: Tensor) -> list[Any]:
    value = value.detach().cpu().contiguous()
    content = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    finite = value.double()[value.double().isfinite()]
    # fsum rounds once, so that both numbers are the same in whatever order they are added.
    total = math.fsum(finite.tolist())
    norm = math.sqrt(math.fsum(finite.square().tolist()))
    sha = hashlib.sha256(content).hexdigest()[:16]
    dtype = str(value.dtype).removeprefix("torch.")
    return [dtype, list(value.shape), sha, float(f"{total:.7g}"), float(f"{norm:.7g}")]


def of_csv(name: str, path: Path) -> Fields:
    """Of a table of predictions: its bytes, its header, and sums of its columns of numbers.

    The column `outside` is left out: it is younger than the recordings, and all points are inside.
    """
    header, *rows = csv.reader(path.read_text().splitlines())
    at = header.index("outside")
    assert {row[at] for row in rows} == {"no"}
    header, *rows = ([*row[:at], *row[at + 1 :]] for row in (header, *rows))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    content = text.getvalue().encode()
    sums = {}
    for title, *column in zip(header, *rows, strict=True):
        with contextlib.suppress(ValueError):
            sums[title] = float(f"{math.fsum(map(float, column)):.7g}")
    return {
        f"{name}/sha256": hashlib.sha256(content).hexdigest()[:16],
        f"{name}/header": header,
        f"{name}/rows": len(rows),
        f"{name}/sums": [sums.get(title) for title in header],
    }


def of_coreset(coreset: Any) -> Fields:
    """Of what `corefed.coreset.build` gives."""
    about = coreset.diagnostics
    return {
        "indices": coreset.indices.tolist(),
        "weights": coreset.weights.tolist(),
        "weights/tensor": of_tensor(coreset.weights),
        "diagnostics": {name: getattr(about, name) for name in ERRORS},
    }


# --- files ----------------------------------------------------------------------------------------


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


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """torch and numpy on one thread: more would add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


def environment() -> dict[str, Any]:
    """What bits depend on beside the program: kinds of CPU and versions round differently.

    Two machines whose CPUs have the same name, family and model gave other last digits. Libraries
    also choose their blocks by the caches that a machine shows, so these count, and so do the bits
    of some products and solutions.
    """
    return {
        "caches": _caches(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": _cpu(),
        "products": _products(),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "threads": 1,  # see `one_thread`
        "torch": torch.__version__,
    }


def write_environment() -> None:
    ENVIRONMENT.write_text(json.dumps(environment(), indent=1, sort_keys=True) + "\n")


def same_environment() -> bool:
    """Whether digests must be equal bit for bit here."""
    return bool(json.loads(ENVIRONMENT.read_text()) == environment())


def _cpu() -> str:
    """Its name with family and model: machines in clouds have names that say little."""
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    wanted = ("model name", "cpu family", "model")
    found = [re.search(rf"^{name}\s*: (.*)$", text, re.MULTILINE) for name in wanted]
    said = [match[1].strip() for match in found if match]
    return ", ".join(said) or platform.processor() or platform.machine()


def _caches() -> list[str]:
    """Level and size of each cache of the first core; none where the system does not say."""
    places = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    parts = [[(place / name).read_text().strip() for name in ("level", "size")] for place in places]
    return [" ".join(each) for each in parts]


def _products() -> str:
    """Digest of matrix products and solutions of several shapes, by torch and by numpy."""
    draw, digest = numpy.random.default_rng(0), hashlib.sha256()
    with one_thread():
        for n, k, m in ((1, 64, 10), (50, 100, 10), (300, 700, 1), (200, 200, 200), (33, 1000, 65)):
            for kind in (numpy.float32, numpy.float64):
                a, b = (draw.normal(size=size).astype(kind) for size in ((n, k), (k, m)))
                left, right = torch.from_numpy(a), torch.from_numpy(b)
                square = left @ left.mT + k * torch.eye(n, dtype=left.dtype)
                solved = torch.linalg.solve(square, left @ right)
                for found in (
                    a @ b,
                    (left @ right).numpy(),
                    solved.numpy(),
                    a.sum(0),
                    numpy.exp(b),
                ):
                    digest.update(numpy.ascontiguousarray(found).tobytes())
    return digest.hexdigest()[:16]


# --- comparing ------------------------------------------------------------------------------------


def differences(
    case: str, recorded: Fields, now: Fields, *, exact: bool, discrete: bool
) -> list[str]:
    """A sentence for every field that differs, with the case, the field and both values."""
    wanted = {_renamed(field): value for field, value in recorded.items()}
    found = []
    for field in sorted(wanted.keys() | now.keys()):
        if field not in now:
            found.append(f"{case}: {field} is gone; it was {wanted[field]}")
        elif field not in wanted:
            found.append(f"{case}: {field} is new; it is {now[field]}")
        elif not (
            json.dumps(wanted[field]) == json.dumps(now[field])  # NaN equals NaN
            if exact
            else _near(field, wanted[field], now[field], discrete)
        ):
            found.append(f"{case}: {field}: recorded {wanted[field]}, now {now[field]}")
    return found


def _renamed(field: str) -> str:
    for old, new in RENAMED.items():
        if field == old or field.endswith(f"/{old}"):
            return field.removesuffix(old) + new
    return field


# Tolerances on another kind of CPU or another version of torch. There, sums are added in another
# order, and float32 values differ in the last of seven digits. Adam divides by the size of a
# gradient, so an entry whose gradient is nearly 0 can step the other way. With the plain kernels
# of torch (ATEN_CPU_CAPABILITY=default) in place of AVX512, norms moved by up to 2e-4 of
# themselves: 1e-3 leaves room and still shows a changed formula. Random draws are made by torch's
# generators, which are the same everywhere.
# Where points or neurons are chosen by comparing computed floats, a tie that turns gives another
# choice, and training goes another way from there. Then only names, shapes and what is sent can be
# held to, the number of examples and the metrics within what another choice may change.
NORM, SUM = 1e-3, 1e-2
METRIC, METRIC_CHOSEN = 0.05, 0.3
COUNTS = ("rounds/bytes_up", "rounds/bytes_down", "/rows", "/header")
CHOSEN = ("metrics/", "rounds/examples")
"""Fields whose numbers are compared even where choices may differ."""


def _near(field: str, a: Any, b: Any, discrete: bool) -> bool:
    if field.endswith("/sha256"):
        return True  # the sums of the same table are compared
    if field in ("indices", "weights"):
        return bool(b)  # a coreset may have fewer points than were asked for
    if field.endswith(COUNTS):
        return bool(a == b)
    if _is_tensor(a):
        if field == "weights/tensor":
            return bool(a[0] == b[0])
        return _is_tensor(b) and a[:2] == b[:2] and (discrete or _near_tensor(a, b))
    if _shape(a) != _shape(b):
        return False
    if discrete:
        return not any(part in field for part in CHOSEN) or _near_numbers(a, b, METRIC_CHOSEN)
    return _near_numbers(a, b, METRIC)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 5 and isinstance(value[0], str)


def _near_tensor(a: list[Any], b: list[Any]) -> bool:
    """Vectors that differ by a part of their norm have sums that differ by sqrt(size) times it."""
    size = math.prod(a[1])
    near_norm = abs(a[4] - b[4]) <= NORM * a[4] + 1e-7
    return near_norm and abs(a[3] - b[3]) <= (SUM * a[4] + 1e-7) * math.sqrt(size)


def _shape(value: Any) -> Any:
    """Lengths and kinds: which are lists, numbers or nothing."""
    if isinstance(value, dict):
        return {key: _shape(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shape(each) for each in value]
    if isinstance(value, (int, float)):
        return "nan" if math.isnan(value) else "number"
    return type(value).__name__


def _near_numbers(a: Any, b: Any, bound: float) -> bool:
    """Within the bound, or within that part of the value where it is above 1."""
    if isinstance(a, list):
        return all(_near_numbers(x, y, bound) for x, y in zip(a, b, strict=True))
    if isinstance(a, (int, float)) and not math.isnan(a):
        return abs(a - b) <= bound * max(1.0, abs(a))
    return True
