"""FedAvg on points chosen greedily by the sum of their distances; see `submodular.py`."""

from __future__ import annotations

from corefed.methods import submodular
from corefed.models import Model
from corefed.types import Method

Config = submodular.Config


def build(config: Config, model: Model) -> Method:
    return submodular.build("dispsum", config, model)
