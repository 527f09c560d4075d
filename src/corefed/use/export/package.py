"""Write a client's model as files for use without corefed, and a model card.

weights.safetensors   the posterior by layer: NAME.mean and NAME.std for every parameter NAME of
                      the network; a point estimate has NAME.mean alone
mean.safetensors      its mean as a state_dict: load_state_dict takes it as it is
predictive.pt2        a program of torch.export, from raw numbers to probabilities (or means) and
                      uncertainties; it needs torch and nothing else (`use/export/program.py`)
predictive.onnx       the same for ONNX runtimes, where it is asked for (`onnx_program.py`)
preparation.json      how points are made ready; the program does that itself
example_input.npy, example_output.json   made-up points, and what the program says of them
model_card.md         data, method, metrics, calibration, intended use, limits, how to run it
"""

from __future__ import annotations

import dataclasses
import io
import json as jsonlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed import __version__
from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import Tree
from corefed.bayes import gaussian, uncertainty
from corefed.data.preparation import Preparation
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.settings.config import to_dict
from corefed.training.fitted import Fitted
from corefed.use import review
from corefed.use.export import card, onnx_program, program
from corefed.use.export.encoder import made_up
from corefed.use.export.network import ExportedNetwork, network

WEIGHTS, MEAN, PROGRAM = "weights.safetensors", "mean.safetensors", "predictive.pt2"
ONNX = "predictive.onnx"
PREPARATION, CARD = "preparation.json", "model_card.md"
EXAMPLE, ANSWER = "example_input.npy", "example_output.json"
EXAMPLES = 3


class Export(NamedTuple):
    """One model, taken out of its run."""

    model: Fitted
    kind: str  # personal or global
    client: str  # whose posterior samples and scale it has
    g: int
    network: ExportedNetwork
    likelihood: Likelihood
    preparation: Preparation
    mean: Tensor  # [P]
    std: Tensor | None  # [P]; None for a point estimate
    draws: Tensor  # [K, P]
    temperature: float  # of its predictions; 1: the run was not calibrated


def take(model: Fitted, client: str | None, *, shared: bool, seed: int | None) -> Export:
    """A client's personal model, or the global one (by default as the first client sees it)."""
    if client is None and not shared:
        some = ", ".join(model.names[:5]) + (", ..." if len(model.names) > 5 else "")
        raise UserError(f"Say whose model by --client ({some}), or --global for the shared one.")
    name = model.names[0] if client is None else client
    g, i = model.place(name, seed)
    preparation = model.preparations[g]
    if client is None and preparation.clients:
        raise UserError(
            "The clients of this run scale their points each in its own way; say by --client whose "
            "scale the shared model shall have."
        )
    kind = review.kind_of(model, "global" if shared else "")
    own = {k: v for k, v in preparation.clients.items() if k == name}
    preparation = dataclasses.replace(preparation, clients=own)
    kind, row, T = model.kept(name, g, i, kind)
    values = _values(model, kind, row)
    mean, std = values, None
    draws = values.unsqueeze(0)
    if model.method.noise[-1]:
        mean, std = values[0], gaussian.sigma(values[1])
        run = model.experiment.run
        streams = Streams([Who(run.seeds[g], i)], run.rounds)
        noise = uncertainty.draws_for(model.method, streams, run.evaluate_draws)
        draws = gaussian.sample(values.unsqueeze(0), noise)[0]
    likelihood = _likelihood(model, preparation)
    made = _network(model, preparation, likelihood, len(mean))
    return Export(model, kind, name, g, made, likelihood, preparation, mean, std, draws, T)


def _values(model: Fitted, kind: str, row: int) -> Tensor:
    """[2, P] of a posterior, [P] of a point estimate."""
    (values,) = (v for k, v in model.models.items() if k.startswith(f"{kind}."))
    return values[row].clone()


def _likelihood(model: Fitted, preparation: Preparation) -> Likelihood:
    run = model.experiment.run
    if preparation.labels:
        return Categorical(len(preparation.labels))
    return Gaussian(len(preparation.targets), run.noise, run.learn_noise)


def _network(
    model: Fitted, preparation: Preparation, likelihood: Likelihood, size: int
) -> ExportedNetwork:
    """A network of the size of the weights: matched neurons make the global one wider."""
    run, settings = model.experiment.run, to_dict(model.experiment)
    made = network(run, preparation.shape, likelihood.outputs, factory=model.factory)
    if made.size + likelihood.extra != size and "growth" in settings:
        made = network(run, preparation.shape, likelihood.outputs, settings["growth"])
    if made.size + likelihood.extra != size:
        raise UserError(
            f"The network of {model.folder} has {made.size:,} weights now and had "
            f"{size - likelihood.extra:,} when it was trained."
        )
    return made


# --- contents -------------------------------------------------------------------------------------


def contents(
    taken: Export, *, whole: bool, with_program: bool, with_onnx: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file; `whole`: held-out metrics are of all clients."""
    from safetensors.torch import save

    about = _about(taken)
    yield WEIGHTS, save(posterior(taken), metadata={"corefed": jsonlib.dumps(about)})
    state = {k: v.clone() for k, v in taken.network.with_weights(taken.mean).state_dict().items()}
    yield MEAN, save(state, metadata={"corefed": jsonlib.dumps(about)})
    values = taken.preparation.to_dict()
    yield PREPARATION, (jsonlib.dumps(values, indent=1) + "\n").encode()
    if with_program:
        made = program.predictive(
            taken.network, taken.draws, taken.likelihood, taken.preparation, taken.client,
            taken.temperature,
        )  # fmt: skip
        yield PROGRAM, program.compiled(made)
        x = example(taken.preparation, taken.client)
        with torch.no_grad():
            answer = {name: value.tolist() for name, value in made(x).items()}
        if with_onnx:
            yield ONNX, onnx_program.converted(made, x)
        content = io.BytesIO()
        np.save(content, x.numpy())
        yield EXAMPLE, content.getvalue()
        yield ANSWER, (jsonlib.dumps(answer, indent=1) + "\n").encode()
    text = card.write(
        taken.model,
        taken.kind,
        taken.g,
        None if whole else taken.client,
        taken.preparation,
        taken.network,
        about,
        with_program=with_program,
    )
    yield CARD, text.encode()


def posterior(taken: Export) -> Tree:
    """Weights by name; learnt noise is likelihood.log_noise."""

    def named(theta: Tensor, end: str) -> Tree:
        parts = taken.network.split(theta)
        rest = theta[taken.network.size :]
        if len(rest):
            parts["likelihood.log_noise"] = rest.clone()
        return {f"{name}.{end}": value.clone() for name, value in parts.items()}

    return named(taken.mean, "mean") | ({} if taken.std is None else named(taken.std, "std"))


def example(preparation: Preparation, client: str) -> Tensor:
    """Random points around the features' means, in their unit; no real data."""
    own = preparation.clients.get(client)
    mean, std = (own.mean, own.std) if own else (preparation.mean, preparation.std)
    z = torch.randn(EXAMPLES, *preparation.shape, generator=torch.Generator().manual_seed(0))
    wide = preparation.shape if len(mean) > 1 else (1,) * len(preparation.shape)
    m, s = (torch.tensor(each, dtype=torch.float64).view(wide) for each in (mean, std))
    x = m + s * z.double()
    if preparation.kind == "table":
        x = made_up(preparation.columns, x)
    return x.to(program.dtype_of(preparation))


def _about(taken: Export) -> dict[str, Any]:
    run = taken.model.experiment.run
    return {
        "what": f"the {taken.kind} model of {taken.client}",
        "method": run.method,
        "data": run.data,
        "seed": run.seeds[taken.g],
        "draws": len(taken.draws),
        "parameters": len(taken.mean),
        "temperature": taken.temperature,
        "corefed": __version__,
        "torch": torch.__version__,
    }
