"""Ditto (Li, Hu, Beirami, Smith, ICML 2021): a personal model beside FedAvg's, held near it.

Client i seeks, with w the solution of the global problem,

    v_i = argmin_v f_i(v) + (lambda / 2) ||v - w||^2.

Both are solved at once. In each of the R local steps of a round a client makes one step of FedAvg
from the broadcast w^t, which is uploaded, and on the same minibatch one of its personal model,

    v_i <- v_i - eta (grad f_i(v_i) + lambda (v_i - w^t)),

which goes on from round to round and never leaves the client. The server averages the uploads, each
client in proportion to its number of points: `global` is exactly FedAvg's model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.settings import PER_RUN, LearningRate, Positive, Start, Times, Usual
from corefed.base.types import Batch, ClientData, Method, Traits, Tree
from corefed.bayes import optim
from corefed.methods import fedavg
from corefed.methods.fedavg import gradient
from corefed.models.network import Model

OWN = "personal."
"""Prefix of the state of the personal model's optimiser."""


@dataclass(frozen=True)
class Config(fedavg.Steps):
    """Settings of Ditto; the paper's symbol in brackets."""

    penalty: Annotated[Positive, PER_RUN, Times(1 / 16, 16)] = 0.1
    """Weight of ||v - w||^2 / 2 (lambda): more means less personal."""
    personal_rate: LearningRate = Usual(0.07)
    """Step size of the personal model."""
    learning_rate: LearningRate = Usual(0.07)
    """Step size of the shared model's training, as FedAvg's."""
    optimizer: optim.Rule = "sgd"
    """Update rule of both models: the shared model's restarts in each round, the personal one's
    goes on. momentum needs about a tenth of sgd's rates, adam 0.005."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


def check(config: Config) -> None:
    fedavg.check(config)
    optim.refuse_large_steps(config.optimizer, "personal_rate", config.personal_rate)


def build(config: Config, model: Model) -> Method:
    shared = optim.of_weights(config.optimizer, config.learning_rate, model.scale())
    own = optim.of_weights(config.optimizer, config.personal_rate, model.scale())
    base = fedavg.plain(config, model)

    def init_client(broadcast: Tree, data: ClientData) -> Tree:
        w = broadcast["theta"]
        return {"theta": w.clone(), "personal": w.clone(), **optim.prefixed(OWN, own.init(w))}

    def begin(broadcast: Tree, private: Tree, data: ClientData, streams: Streams) -> Tree:
        kept = {name: value.clone() for name, value in private.items() if name != "theta"}
        theta = broadcast["theta"].clone()
        return {**kept, "theta": theta, "w": broadcast["theta"], **shared.init(theta)}

    def step(working: Tree, batch: Batch, noise: Tensor) -> tuple[Tree, Tree]:
        _, slope = gradient(model, working["theta"], batch)
        shared.update(working["theta"], slope, working)
        v = working["personal"]
        loss, slope = gradient(model, v, batch)
        slope += optim.scaled(config.penalty, v - working["w"])
        own.update(v, slope, optim.under(OWN, working))
        return working, {"loss": loss}

    def end(broadcast: Tree, working: Tree) -> tuple[Tree, Tree]:
        kept = {k: v for k, v in working.items() if k in ("theta", "personal") or k.startswith(OWN)}
        return {"theta": working["theta"]}, kept

    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        return {
            "personal": {"theta": private["personal"]},
            "global": {"theta": broadcast["theta"]},
            "localized": {"theta": private["theta"]},
        }

    return base._replace(
        name="ditto",
        init_client=init_client,
        begin=begin,
        step=step,
        end=end,
        models=models,
        traits=Traits(passes=2, mean="examples"),
    )
