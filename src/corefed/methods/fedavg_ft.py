"""FedAvg with fine-tuning: FedAvg's model, made personal by some steps on a client's own data.

Training is FedAvg's. The personal model is the current broadcast after `adapt_steps` gradient steps
on the client's training data (`fine_tuning.py`), made when it is evaluated, exported or joined.
Many papers on personal models are no better than this, so it belongs beside them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from corefed.base.settings import (
    PER_RUN,
    LearningRate,
    Positive,
    PositiveInt,
    Start,
    Times,
    Usual,
)
from corefed.base.types import ClientData, Method, Tree
from corefed.methods import fedavg
from corefed.methods.fine_tuning import fine_tune
from corefed.models.network import Model


@dataclass(frozen=True)
class Config(fedavg.Config):
    """Settings of FedAvg with fine-tuning: those of FedAvg, and of the steps that follow."""

    learning_rate: LearningRate = Usual(0.07)
    """Step size of the clients in training."""
    adapt_rate: Annotated[Positive, PER_RUN, Times(1 / 8, 4)] = Usual(0.07)
    """Step size of fine-tuning, which is plain SGD."""
    adapt_steps: PositiveInt = 20
    """Steps of fine-tuning to a personal model."""
    adapt_points: PositiveInt = 100
    """Training points in a step of fine-tuning."""
    initial_std: Start = 0.1
    """Standard deviation of the initial weights of an MLP, as those of the Bayesian methods."""


check = fedavg.check


def with_steps(config: Config, steps: int | None) -> tuple[Config, int]:
    """Settings of a client that joins later and adapts for `steps` steps; None: as in the run."""
    config = config if steps is None else replace(config, adapt_steps=steps)
    return config, config.adapt_steps


def build(config: Config, model: Model) -> Method:
    def models(broadcast: Tree, private: Tree, data: ClientData) -> dict[str, Tree]:
        theta = broadcast["theta"]
        tuned = fine_tune(
            model, theta, data, config.adapt_rate, config.adapt_steps, config.adapt_points
        )
        return {
            "personal": {"theta": tuned},
            "global": {"theta": theta},
            "localized": {"theta": private["theta"]},
        }

    return fedavg.build(config, model)._replace(name="fedavg-ft", models=models)
