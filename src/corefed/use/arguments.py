"""From the arguments of `Federation` to settings, and from a folder back to arguments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from corefed.base import digests
from corefed.base.errors import UserError
from corefed.data.memory import GivenPoints
from corefed.models.own import Factory, name_of
from corefed.settings.config import resolve, to_dict
from corefed.settings.run import MEMORY, Experiment

FILE = "estimator.json"
"""An extra file in the folder of a run: names and classes in their Python types."""

FROM_FIT = {
    *("data", "classes", "embedding", "bad_images", "target", "client_column", "categorical"),
    *("ignore", "missing", "smallest_client", "partition", "clients", "keep", "data_dir"),
    "test_fraction",
}
"""Settings that follow from the arguments of `fit`."""


def model_name(model: str | Factory | None) -> str:
    if model is None:
        return "auto"
    return model if isinstance(model, str) else name_of(model) or MEMORY


def settings_from_data(
    pool: GivenPoints, model: str | Factory | None, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings that follow from the data."""
    shape = pool.dataset.x.shape[1:]
    found: dict[str, Any] = {"partition": "natural", "clients": len(pool.names)}
    if model is None and len(shape) == 3:
        found["model"] = "cnn"
    if settings.get("scale") in (None, "auto") and len(shape) == 1:
        found["scale"] = "features"  # as for rows of numbers in a file
    return found


def read_about(path: Path) -> dict[str, Any]:
    """estimator.json; empty for a run of a command."""
    file = path / FILE
    if not file.exists():
        return {}
    try:
        found = digests.read_json(file)
        return {name: found[name] for name in ("clients", "classes", "dtype", "test_fraction")}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"{file} cannot be read: {error!r}.") from error


def parameters(
    experiment: Experiment, model: str | Factory | None, fraction: float
) -> dict[str, Any]:
    """Arguments that would repeat the run: what differs from the defaults."""
    values = to_dict(experiment)
    named = {key: value for key, value in values.items() if key in ("method", "preset")}
    defaults = to_dict(resolve(flags={"data": MEMORY, **named}))
    seeds = values.pop("seeds")
    other = {k: v for k, v in values.items() if k not in FROM_FIT and v != defaults[k]}
    seed = seeds[0] if len(seeds) == 1 else seeds
    model = model or values["model"]
    return {**named, **other, "seed": seed, "model": model, "test_fraction": fraction}
