"""Bayesian coresets: small weighted subsets whose log-likelihood stands in for that of all data.

May import bayes and the rooms below it.

`build` makes a `Coreset` for any PyTorch model with one of the `SOLVERS`. The names below, and
torch, are imported when they are first used. (`build` is in `engine.py`: a module of the same name
would shadow it.)
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from corefed.coreset.coreset import Coreset as Coreset
    from corefed.coreset.coreset import Diagnostics as Diagnostics
    from corefed.coreset.coreset import WeightedSubset as WeightedSubset
    from corefed.coreset.draws import MeanField as MeanField
    from corefed.coreset.engine import build as build
    from corefed.coreset.solvers import DEFAULT as DEFAULT
    from corefed.coreset.solvers import SOLVERS as SOLVERS

_EXPORTS = {
    "Coreset": "corefed.coreset.coreset",
    "Diagnostics": "corefed.coreset.coreset",
    "WeightedSubset": "corefed.coreset.coreset",
    "MeanField": "corefed.coreset.draws",
    "build": "corefed.coreset.engine",
    "DEFAULT": "corefed.coreset.solvers",
    "SOLVERS": "corefed.coreset.solvers",
}


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'corefed.coreset' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
