"""corefed: personalised Bayesian federated learning on coresets.

Importing the package costs nothing: the names below are fetched, and torch with them, when they are
first used, so that `corefed --help` answers at once.
"""

from importlib import import_module

__version__ = "0.2.0"

_EXPORTS = {
    "Experiment": "corefed.settings.run",
    "Federation": "corefed.use.estimator",
    "Run": "corefed.settings.run",
    "UserError": "corefed.base.errors",
    "prepare": "corefed.training.setup",
    "report": "corefed.show.page.from_python",
    "resolve": "corefed.settings.config",
    "train": "corefed.training.rounds",
}

__all__ = ["__version__", *_EXPORTS]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'corefed' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
