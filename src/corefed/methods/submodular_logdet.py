"""FedAvg on points chosen greedily by the log-determinant; see `submodular.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from corefed.base.settings import at_least
from corefed.base.types import Method
from corefed.methods import submodular
from corefed.models.network import Model


@dataclass(frozen=True)
class Config(submodular.Config):
    """Settings of submodular-logdet, beside those of the other two objectives."""

    regulariser: Annotated[float, at_least(1e-6)] = 1.0
    """lambda of log det(S + lambda I): the larger, the less similar points shut each other out."""


check = submodular.check


def build(config: Config, model: Model) -> Method:
    return submodular.build("logdet", config, model, config.regulariser)
