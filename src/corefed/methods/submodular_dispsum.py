"""FedAvg on points chosen greedily by the sum of their distances; see `submodular.py`."""

from __future__ import annotations

from corefed.base.types import Method
from corefed.methods import submodular
from corefed.models.network import Model

Config = submodular.Config
check = submodular.check


def build(config: Config, model: Model) -> Method:
    return submodular.build("dispsum", config, model)
