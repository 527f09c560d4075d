"""FedAvg on points chosen greedily by their smallest distance; see `submodular.py`."""

from __future__ import annotations

from corefed.base.types import Method
from corefed.methods import submodular
from corefed.models.network import Model

Config = submodular.Config
check = submodular.check


def build(config: Config, model: Model) -> Method:
    return submodular.build("dispmin", config, model)
