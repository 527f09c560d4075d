"""`build`: a coreset for any PyTorch model, from one pass over the data."""

from __future__ import annotations

from pathlib import Path

import torch

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.coreset import grow, modules, options, passes, pilot, solvers, sources
from corefed.coreset.coreset import Coreset
from corefed.coreset.draws import Posterior, interpret
from corefed.coreset.likelihoods import LogLikelihood
from corefed.coreset.making import Recipe, Resample, make
from corefed.coreset.passes import Progress


def build(
    log_likelihood: object,
    draws: object = None,
    data: object = None,
    size: int | float | str = "auto",
    *,
    posterior: str | None = None,
    theta0: object = None,
    log_prior: pilot.LogPrior | None = None,
    target: float = grow.TARGET,
    solver: str = solvers.DEFAULT,
    samples: int = 0,
    likelihood: object = "auto",
    noise: float = 1.0,
    shrink: float | str = "auto",
    seed: int = 0,
    device: str | torch.device | None = None,
    chunk: int = 0,
    memory_mb: int = 1024,
    store: str = "auto",
    scratch: str | Path | None = None,
    iterations: int = 0,
    progress: Progress | None = None,
    resample: Resample | None = None,
    pool: int | str = "auto",
) -> Coreset:
    """A weighted subset of `data` whose log-likelihood follows that of all data over `draws`.

    log_likelihood  a function of (theta, x, y) with one value per point, or an nn.Module, whose
                    output is read by `likelihood`: "categorical", "gaussian" (with `noise`), a
                    function of (output, y), or "auto": categorical where y are whole numbers
    draws           the posterior, see `draws.py`; or instead
    posterior       "laplace": one made from a pilot (`pilot.py`) that starts at `theta0`, a theta
                    or the number of parameters, with `log_prior`, a function of theta, if there is
                    one
    data            (x, y), a Dataset or a DataLoader, see `sources.py`
    size            points to keep, or a float in (0, 1): the part to keep; "auto" grows until the
                    error on fresh draws is at most `target` (`grow.py`)
    solver          one of `SOLVERS`; "sparse-vi" also needs `resample`
    samples         draws to fit on (S); 0 takes max(4k, 400), or of a list of draws all but the
                    last fifth, which is held out
    shrink          pull of the weights towards n/k, k the points kept: 0 none; "auto" none if
                    S >= 2k, else chosen by cross-validation over the draws
    device          where to compute; None is where the draws are
    chunk           points of a pass at once; 0 chooses by `memory_mb`
    store           where potentials are kept: "memory", "disk" (a file in `scratch`), "recompute"
                    (nowhere), or "auto": memory within half of `memory_mb`, else disk
    iterations      the solver's bound; 0 takes its own
    progress        called with (stage, done, total)
    pool            candidates drawn by importance from which the solver chooses (`pool.py`); 0 lets
                    it choose from all points; "auto": max(20k, 10000) where there are 100,000
                    points and five times as many, else 0
    """
    options.check(solver, samples, shrink, chunk, memory_mb, store, iterations, resample)
    if data is None:
        raise UserError("Give data: (x, y), a Dataset or a DataLoader.")
    place = device_for(device) if isinstance(device, str) else device
    call = modules.as_log_likelihood(log_likelihood, likelihood, noise)
    found, dtype = None, torch.float32
    if posterior is None:
        if theta0 is not None or log_prior is not None:
            raise UserError("theta0 and log_prior are for posterior='laplace'.")
        found = interpret(draws)
        _, dtype = options.place(found, place)
    elif draws is not None:
        raise UserError("Give draws, or posterior='laplace', which makes them; not both.")
    elif posterior != "laplace":
        raise UserError(f"posterior is {posterior!r}; it must be 'laplace', or give draws.")
    else:
        dtype = pilot.start_at(theta0)[2]
    source = sources.adapt(data, dtype)
    k = None if size == "auto" else options.number(size, source.n)  # refuses other words
    recipe = Recipe(
        call=call,
        source=source,
        solver=solver,
        samples=samples,
        shrink=shrink,
        seed=seed,
        device=place,
        chunk=chunk,
        memory=memory_mb << 20,
        store=store,
        scratch=Path(scratch) if scratch is not None else None,
        iterations=iterations,
        show=progress or (lambda stage, done, total: None),
        resample=resample,
        pool=pool,
        threads=_threads(log_likelihood),
    )
    if found is None:
        found = _pilot(call, recipe, theta0, log_prior)
    return grow.grown(recipe, found, target) if k is None else make(recipe, found, [k])


def _pilot(
    call: LogLikelihood, recipe: Recipe, theta0: object, log_prior: pilot.LogPrior | None
) -> Posterior:
    where = None if recipe.device is None else torch.device(recipe.device)
    with passes.exact_products():
        return interpret(pilot.laplace(call, recipe.source, theta0, log_prior, recipe.seed, where))


def _threads(log_likelihood: object) -> int:
    """A module's parameters are swapped for a draw's while it is called: one call at a time. The
    same for a function that uses threads of its own."""
    alone = isinstance(log_likelihood, torch.nn.Module) or getattr(log_likelihood, "alone", False)
    return 1 if alone else torch.get_num_threads()
