"""A coreset: points, weights, and how well they stand in for all data.

On disk (`save`, `load`) it is a folder of

    coreset.safetensors   indices, weights, and the log-likelihoods that the picture shows
    coreset.json          the diagnostics
    coreset.csv           index,weight, for other programs

It never contains data points, which may be private; their indices are enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from corefed import __version__
from corefed.base import digests, files, tensor_file
from corefed.base.errors import UserError
from corefed.coreset import likelihoods, modules, picture, sources
from corefed.coreset.draws import wrap_stacked
from corefed.coreset.likelihoods import LogLikelihood

if TYPE_CHECKING:
    from corefed.coreset.again import Check, Settled
    from corefed.coreset.making import Origin

T = TypeVar("T")

DOMINANT = 0.5
"""A point with more than this part of all weight, of ten or more points, is named."""
CHECKED = 200
"""Draws of a sampler that a check reads all data for."""
TOLERANCE = 0.1
"""Standard deviations by which a check lets a posterior mean be off."""

SCHEMA = 1
TENSORS, ABOUT, TABLE = "coreset.safetensors", "coreset.json", "coreset.csv"


@dataclass(frozen=True)
class Diagnostics:
    """How the coreset was made, and its quality. Errors are ||y - Phi w||^2 / ||y||^2."""

    n: int  # points of the data
    size: int  # points asked for (k)
    kept: int  # points with a positive weight
    solver: str
    draws: int  # S, those the weights were fitted on
    fresh_draws: int  # those the error below is measured on
    fitted_error: float  # on the fitted draws: too small
    held_out_error: float  # on fresh draws: the coreset's quality
    uniform_error: float  # expected on fresh draws for k random points with weights n/k
    ratio: float  # held_out_error / uniform_error
    degenerate: bool  # S - 1 <= k: an exact zero exists, and the fitted error means nothing
    shrink: float  # strength of the pull of the weights towards n/k
    weight_sum: float
    iterations: int
    converged: bool
    store: str  # where the potentials were: memory, disk or recompute
    potentials_seconds: float
    solver_seconds: float
    seed: int
    dtype: str
    pool: int = 0  # candidates drawn from all points, or 0: the solver saw all


@dataclass(frozen=True, repr=False, eq=False)
class Coreset:
    """Points `indices` (ascending) with positive `weights` that stand in for all n."""

    indices: Tensor  # [m] int64
    weights: Tensor  # [m]
    diagnostics: Diagnostics
    full: Tensor  # [F] log-likelihood of all data under each fresh draw, less its mean
    approximate: Tensor  # [F] the same of the coreset
    call: LogLikelihood | None = None
    points: sources.Batch | None = None  # (x, y) of the indices
    origin: Origin | None = None  # how it was made; not saved

    def __len__(self) -> int:
        return len(self.indices)

    def __repr__(self) -> str:
        d = self.diagnostics
        return f"Coreset({d.kept} of {d.n} points, held-out error {d.held_out_error:.3g})"

    def __str__(self) -> str:
        return _describe(self)

    def log_likelihood(self, theta: Any, *, stacked: bool = False) -> Tensor:
        """sum_j w_j log p_theta(D_j), differentiable in theta. With `stacked` theta is a stack of
        draws, and the result has one value per draw, without gradients."""
        if self.call is None or self.points is None:
            raise UserError(
                "This coreset was loaded without its points; attach(log_likelihood, data) first."
            )
        x, y = self.points
        if not stacked:
            values = self.call(theta, x, y)
            return (values * self.weights.to(values)).sum()
        drawn = wrap_stacked(theta)
        with torch.no_grad():
            function = likelihoods.prepare(self.call, drawn, x, y)
            values = likelihoods.evaluate(function, drawn, x, y, _BUDGET)
        return self.weights.to(values) @ values

    def check(self, draws: Any, *, most: int = CHECKED, tolerance: float = TOLERANCE) -> Check:
        """Does it hold where a sampler went? Its log-likelihood against that of all data on these
        draws (`most` of them, at even distances); see `again.py`."""
        from corefed.coreset import again  # it makes coresets

        return again.check(self, draws, most, tolerance)

    def rebuilt_at(self, draws: Any, size: int | None = None) -> Coreset:
        """A coreset of the same data, made in the same way where these draws lie."""
        from corefed.coreset import again

        return again.rebuilt_at(self, draws, size)

    def sample_until_settled(
        self, sampler: Callable[[Coreset], Any], rounds: int = 3, tolerance: float = TOLERANCE
    ) -> Settled:
        """Sample (coreset -> draws), check, and make the coreset anew there until a check holds."""
        from corefed.coreset import again

        return again.sample_until_settled(self, sampler, rounds, tolerance)

    def attach(
        self, log_likelihood: object, data: object, *, likelihood: object = "auto", noise: float = 1
    ) -> Coreset:
        """The same coreset with its points of `data` and a log-likelihood, after `load`."""
        source = sources.adapt(data, self.weights.dtype)
        if source.n != self.diagnostics.n:
            raise UserError(
                f"The data have {source.n} points; the coreset was built from {self.diagnostics.n}."
            )
        call = modules.as_log_likelihood(log_likelihood, likelihood, noise)
        return dataclasses.replace(self, call=call, points=source.take(self.indices.cpu()))

    def subset(self, dataset: Any) -> WeightedSubset:
        """The coreset's items of a data set as (x, y, w), for a DataLoader."""
        subset = WeightedSubset(dataset, self.indices, self.weights)
        if len(subset.dataset) != self.diagnostics.n:
            raise UserError(
                f"The data set has {len(subset.dataset)} items; the coreset was built from "
                f"{self.diagnostics.n}."
            )
        return subset

    def save(self, folder: str | Path, note: Mapping[str, object] | None = None) -> None:
        """Write the three files, with `note` in the JSON. A failure leaves the folder as it was."""
        files.write_folder(Path(folder), encode(self, note).items())

    @staticmethod
    def load(folder: str | Path) -> Coreset:
        """A saved coreset, without its points; see `attach`."""
        return decode(Path(folder))

    def plot(self, path: str | Path) -> None:
        """Draw the three panels of `picture.py` into a file whose suffix names the format."""
        target = Path(path)
        content = picture.render(self, target.suffix.lstrip(".") or "png")
        files.write_folder(target.parent, [(target.name, content)])


class WeightedSubset(Dataset[tuple[Any, Any, Tensor]]):
    """Some items of a map-style data set of (x, y) with their weights: items (x, y, w)."""

    def __init__(self, dataset: Any, indices: Tensor | Sequence[int], weights: Tensor) -> None:
        if isinstance(dataset, tuple | list) and len(dataset) == 2:
            dataset = TensorDataset(*(torch.as_tensor(part) for part in dataset))
        indexed = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not indexed or isinstance(dataset, IterableDataset):
            raise UserError("A weighted subset needs a data set with a length and an index.")
        self.dataset = dataset
        self.indices = torch.as_tensor(indices, dtype=torch.int64).tolist()
        # Tensors, because a DataLoader would collate floats as float64.
        self.weights = torch.as_tensor(weights).detach().cpu().to(torch.float32)
        if len(self.indices) != len(self.weights):
            raise UserError(f"{len(self.indices)} indices but {len(self.weights)} weights.")

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> tuple[Any, Any, Tensor]:
        x, y = self.dataset[self.indices[position]]
        return x, y, self.weights[position]


_BUDGET = 1 << 22
"""Intermediate numbers at once when a stack of draws is evaluated: 16 MiB."""


def _describe(coreset: Coreset) -> str:
    """A few lines for a person, the error on fresh draws first."""
    d = coreset.diagnostics
    least, most = float(coreset.weights.min()), float(coreset.weights.max())
    stop = "converged" if d.converged else "stopped at its bound"
    iterations = f"{d.iterations} iteration{'' if d.iterations == 1 else 's'}"
    share = f"{100 * d.ratio:.2g} % of that" if d.ratio < 1 else f"{d.ratio:.3g} times that"
    lines = [
        f"Coreset of {d.kept:,} of {d.n:,} points ({100 * d.kept / d.n:.3g} %) by {d.solver} on "
        f"{d.draws:,} draws, seed {d.seed}",
        f"  error on {d.fresh_draws} fresh draws   {d.held_out_error:.3g}; a uniform subset of "
        f"{d.size:,} expects {d.uniform_error:.3g} ({share})",
        f"  error on the fitted ones  {d.fitted_error:.3g}",
        f"  weights  sum {d.weight_sum:,.0f}, from {_format(least)} to {_format(most)}; "
        f"n/k is {_format(d.n / d.kept)}" + (f"; shrunk by {d.shrink:g}" if d.shrink > 0 else ""),
        f"  time     {d.potentials_seconds:.1f} s potentials ({d.store}), "
        f"{d.solver_seconds:.1f} s solver ({iterations}, {stop})",
    ]
    if d.degenerate:
        lines.append(
            f"  The fitted error means nothing: with {d.draws} draws and {d.size} points an exact "
            f"zero exists. Give more than {d.size + 1} draws, {4 * d.size} or more if you can."
        )
    if d.weight_sum > 3 * d.n:
        lines.append(
            f"  The weights sum to {d.weight_sum / d.n:.3g} n: points that hardly change over the "
            "draws have weights that are too large. A little shrinkage (shrink=1e-6) helps."
        )
    if d.kept >= 10 and most > DOMINANT * d.weight_sum:
        lines.append(
            f"  Point {int(coreset.indices[coreset.weights.argmax()])} alone has "
            f"{100 * most / d.weight_sum:.0f} % of the weight, and its label decides as much: look "
            "at it, or give shrink=1e-3."
        )
    if d.ratio > 1 and d.solver != "uniform":
        lines.append(
            "  On fresh draws this is worse than a uniform subset: give more draws, or more points."
        )
    return "\n".join(lines)


def _format(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def encode(coreset: Coreset, note: Mapping[str, object] | None = None) -> dict[str, bytes]:
    """The three files: name -> bytes."""
    if find_spec("safetensors") is None:
        raise UserError("Saving a coreset needs safetensors: pip install safetensors.")
    tensors = {name: getattr(coreset, name) for name in _SAVED}
    about = {
        "schema": SCHEMA,
        "version": __version__,
        "note": dict(note or {}),
        **dataclasses.asdict(coreset.diagnostics),
    }
    pairs = zip(coreset.indices.tolist(), coreset.weights.tolist(), strict=True)
    return {
        TENSORS: tensor_file.save(tensors, {}),
        ABOUT: digests.to_json(about),
        TABLE: ("index,weight\n" + "".join(f"{j},{w:.9g}\n" for j, w in pairs)).encode(),
    }


_SAVED = ("indices", "weights", "full", "approximate")


def decode(folder: Path) -> Coreset:
    """The coreset in a folder; a UserError if its files are damaged or do not agree."""
    try:
        about = _whole(folder / ABOUT, digests.read_json)
        tensors = _whole(folder / TENSORS, lambda path: tensor_file.load(path.read_bytes(), path))
        schema = about.pop("schema")
        del about["version"], about["note"]
        if schema != SCHEMA:
            raise UserError(f"{folder / ABOUT} has schema {schema}, not {SCHEMA}.")
        diagnostics = Diagnostics(**about)
        indices, weights, full, approximate = (tensors[name].clone() for name in _SAVED)
        coreset = Coreset(indices, weights, diagnostics, full, approximate)
    except FileNotFoundError as error:
        raise UserError(
            f"{folder} holds no coreset: it has no {Path(error.filename).name}."
        ) from error
    except OSError as error:
        raise UserError(f"Cannot read the coreset in {folder}: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"The coreset in {folder} is damaged: {error}.") from error
    fault = _fault(coreset)
    if fault:
        raise UserError(f"The coreset in {folder} is damaged: {fault}.")
    return coreset


def _whole(path: Path, read: Callable[[Path], T]) -> T:
    """What `read` gives; a damaged file is named."""
    try:
        return read(path)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _fault(coreset: Coreset) -> str:
    """What does not fit together, or nothing."""
    indices, weights, d = coreset.indices, coreset.weights, coreset.diagnostics
    if indices.dtype != torch.int64 or indices.dim() != 1:
        return "its indices are not whole numbers in a row"
    if not len(indices) == len(weights) == d.kept:
        return f"{len(indices)} indices, {len(weights)} weights and {d.kept} points do not agree"
    if len(indices) and (int(indices[0]) < 0 or int(indices[-1]) >= d.n):
        return f"an index lies outside its {d.n} points"
    if bool((indices.diff() <= 0).any()):
        return "its indices are not in ascending order"
    if not bool((weights > 0).all() and torch.isfinite(weights).all()):
        return "a weight is not a positive number"
    return ""
