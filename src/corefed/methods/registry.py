"""Every method by name. A new method is one new file and one new row in `METHODS`.

A method outside the package is made known by `register` instead.

The modules are imported when asked for, so that listing the names needs no torch. A method's module
has `Config`, a frozen dataclass, and `build(config, model) -> Method`; it may have
`PRESETS: dict[str, dict[str, object]]` (for a Config with a field `preset`),
`check(config) -> None`, which raises UserError, and `idle(config) -> set[str]`, the settings that
have no effect beside the others.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from corefed.base.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from corefed.base.types import Method
    from corefed.models.network import Model


class Entry(NamedTuple):
    module: str  # where it is, as import_module takes it
    description: str


METHODS: dict[str, Entry] = {
    "coreset-pfedbayes": Entry(
        "corefed.methods.coreset_pfedbayes",
        "personal Bayesian models, each trained on a weighted coreset of its client's data",
    ),
    "pfedbayes": Entry(
        "corefed.methods.pfedbayes",
        "personal Bayesian models trained on all data",
    ),
    "random-subset": Entry(
        "corefed.methods.random_subset",
        "pfedbayes or fedavg on a uniformly drawn subset, chosen once or redrawn",
    ),
    "fedavg": Entry(
        "corefed.methods.fedavg",
        "one model for all, the average of what clients train (McMahan 2017)",
    ),
    "shared-start": Entry(
        "corefed.methods.shared_start",
        "one Bayesian model for all, whose local steps start from it and make personal models",
    ),
    "coreset-shared-start": Entry(
        "corefed.methods.coreset_shared_start",
        "shared-start, each client on a weighted coreset of its data",
    ),
    "pfedme": Entry(
        "corefed.methods.pfedme",
        "personal models near a global one, by Moreau envelopes (Dinh 2020)",
    ),
    "per-fedavg": Entry(
        "corefed.methods.per_fedavg",
        "a global model that one gradient step makes personal (Fallah 2020)",
    ),
    "bnfed": Entry(
        "corefed.methods.bnfed",
        "neurons matched across clients by a Beta-Bernoulli process (PFNM, Yurochkin 2019)",
    ),
    "fedavg-ft": Entry(
        "corefed.methods.fedavg_ft",
        "fedavg, whose model each client fine-tunes on its own data",
    ),
    "fedprox": Entry(
        "corefed.methods.fedprox",
        "fedavg with clients that stay near the broadcast (Li 2020)",
    ),
    "scaffold": Entry(
        "corefed.methods.scaffold",
        "fedavg without client drift, by control variates (Karimireddy 2020)",
    ),
    "ditto": Entry(
        "corefed.methods.ditto",
        "a personal model beside fedavg's, held near it (Li 2021)",
    ),
    "fedrep": Entry(
        "corefed.methods.fedrep",
        "a shared body, and a last layer of its own per client (Collins 2021)",
    ),
    "fedbabu": Entry(
        "corefed.methods.fedbabu",
        "a shared body under a fixed last layer, fine-tuned per client (Oh 2022)",
    ),
    "feddbe": Entry(
        "corefed.methods.feddbe",
        "fedavg with a vector per client that keeps its bias out of the features (Zhang 2023)",
    ),
    "independent": Entry(
        "corefed.methods.independent",
        "every client alone, and tried on the others' test data",
    ),
    "submodular-logdet": Entry(
        "corefed.methods.submodular_logdet",
        "fedavg on points chosen greedily by the log-determinant of their similarities",
    ),
    "submodular-dispsum": Entry(
        "corefed.methods.submodular_dispsum",
        "fedavg on points chosen greedily by the sum of their distances",
    ),
    "submodular-dispmin": Entry(
        "corefed.methods.submodular_dispmin",
        "fedavg on points chosen greedily by their smallest distance",
    ),
}


def register(name: str, entry: Entry) -> None:
    """Make a method known that is not part of the package, for as long as this process runs.

    In the method's own file, `register("fedavgm", Entry(__name__, "what it is"))` does it.
    """
    if METHODS.get(name, entry).module != entry.module:
        raise UserError(f"There is a method {name!r} already; give yours another name.")
    METHODS[name] = entry


def module(name: str) -> ModuleType:
    """The module of a method, imported now."""
    if name not in METHODS:
        hint = did_you_mean(name, METHODS)
        raise UserError(f"There is no method {name!r}.{hint} Known: {', '.join(METHODS)}.")
    return import_module(METHODS[name].module)


def config_class(name: str) -> type[Any]:
    """The dataclass of a method's settings."""
    return cast("type[Any]", module(name).Config)


def presets(name: str) -> dict[str, dict[str, object]]:
    """Named sets of values a method offers; empty where it has none."""
    return cast("dict[str, dict[str, object]]", getattr(module(name), "PRESETS", {}))


def idle(name: str, config: Any) -> set[str]:
    """Settings that have no effect beside the others."""
    own = getattr(module(name), "idle", None)
    return set() if own is None else cast("set[str]", own(config))


def adaptation_steps(name: str, config: Any, steps: int | None) -> tuple[Any, int] | None:
    """Settings and steps of a client that joins later, for a method that adapts at evaluation.

    A method whose personal models are made by `models`, not by training, has a function
    `with_steps(config, steps)` in its module. None for every other method.
    """
    own = getattr(module(name), "with_steps", None)
    return None if own is None else cast("tuple[Any, int]", own(config, steps))


def build(name: str, config: object, model: Model) -> Method:
    """The method with its settings bound."""
    return cast("Method", module(name).build(config, model))
