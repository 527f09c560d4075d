"""The settings of the study: data, split, network and length of a run, and what is judged.

Published benchmarks train longer: PFLlib 2000 rounds of one epoch in minibatches of 10, and it
shows the best round; NIID-Bench 50 rounds of 10 epochs. Here a round is 20 or 40 steps, and the
last round is shown. Every method has the same rounds, steps and minibatches.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Flags = dict[str, Any]

SEEDS = (0, 1, 2)
"""That are shown."""
TUNING_SEED = 100
"""Splits, weights and minibatches that settings are chosen on: another seed than those shown."""
CANDIDATES = 8
"""Of every method on every setting, its defaults among them."""
VALIDATION = 0.2
"""Share of the training points that candidates are compared by."""
MEMORY_MB = 24_000
"""Every candidate has a copy of the data."""


class LeadersSetting(NamedTuple):
    name: str
    study: str  # the command that it belongs to
    title: str
    judged: Literal["personal", "global"]  # the model that candidates are compared by
    flags: Flags
    tuning_rounds: int
    rows: tuple[str, ...] = ()  # that are compared; empty: all
    candidates: int = CANDIDATES
    seeds: tuple[int, ...] = SEEDS
    more: tuple[str, ...] = ()  # rows beside those

    @property
    def short(self) -> str:
        """The title without how many clients there are, and which network."""
        head, _, rest = self.title.partition(": ")
        return f"{head}, {rest.split(', ')[-1]}" if self.study == "niid-bench" else head


_NIID_SPLITS = {"niid-2": "2 labels", "niid-3": "3 labels", "niid-dir": "Dirichlet 0.5"}
_NAMES = {"mnist": "MNIST", "fashion-mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
_CHEST = {
    "data": "npz:chest-xray-features.npz", "partition": "shared-normal", "clients": 2,
    "scale": "standard", "rounds": 50, "local_steps": 20,
}  # fmt: skip
CIFAR_ROWS = (
    "pfedbayes", "coreset, 50 %", "coreset, 30 %", "coreset, 15 %", "coreset, 10 %",
    "coreset, 10 %, seen", "random, 50 %", "pfedme", "per-fedavg", "shared-start",
    "shared-start, coreset 10 %", "shared-start, plain", "shared-start, plain, global", "fedavg",
    "fedavg, momentum", "fedavg-ft", "fedavg-ft, momentum", "scaffold", "independent",
)  # fmt: skip
POSTERIOR_ROWS = (
    "pfedbayes, ivon", "shared-start, ivon", "pfedbayes, last layer", "shared-start, last layer",
)  # fmt: skip
"""Other ways to train a posterior, on our own problems."""
NIID_ROWS = (
    "shared-start", "shared-start, coreset 10 %", "shared-start, plain", "shared-start, control",
    "shared-start, plain, coreset 10 %", "pfedbayes", "coreset, 10 %", "fedavg",
    "fedavg, momentum", "fedprox", "scaffold", "ditto", "independent",
)  # fmt: skip


def _pfllib(data: str) -> LeadersSetting:
    flags: Flags = {
        "data": data, "partition": "pfllib", "clients": 20, "model": "cnn-pfllib",
        "rounds": 50, "local_steps": 40, "batch_size": 50,
    }  # fmt: skip
    title = f"PFLlib, {_NAMES[data]}: 20 clients, Dirichlet 0.1, 4-layer CNN"
    return LeadersSetting(f"pfllib-{data}", "pfllib", title, "personal", flags, 20)


def _niid(data: str, split: str) -> LeadersSetting:
    flags: Flags = {
        "data": data, "partition": split, "clients": 10, "model": "cnn-niid",
        "rounds": 50, "local_steps": 40, "batch_size": 64,
    }  # fmt: skip
    title = f"NIID-Bench, {_NAMES[data]}: 10 clients, {_NIID_SPLITS[split]}"
    name = f"{split}-{data}"
    return LeadersSetting(name, "niid-bench", title, "global", flags, 20, NIID_ROWS)


def _shards(data: str) -> LeadersSetting:
    flags: Flags = {
        "data": data, "partition": "shards-medium", "clients": 10,
        "rounds": 100, "local_steps": 20,
    }  # fmt: skip
    title = f"{_NAMES[data]}, shards-medium: 10 clients, 5 labels each, an MLP"
    return LeadersSetting(
        f"shards-{data}", "own-problems", title, "personal", flags, 50, more=POSTERIOR_ROWS
    )


PAPER = (
    _pfllib("fashion-mnist"),
    _shards("fashion-mnist"),
    _niid("fashion-mnist", "niid-2"),
    _pfllib("cifar10"),
    _niid("cifar10", "niid-2"),
    LeadersSetting(
        "chest-xray", "own-problems", "Chest X-rays as features: 2 clients, one disease each",
        "personal", _CHEST, 25, more=POSTERIOR_ROWS,
    ),
    _shards("mnist"),
    _niid("fashion-mnist", "niid-dir"),
    _niid("cifar10", "niid-dir"),
    _pfllib("mnist"),
    _niid("fashion-mnist", "niid-3"),
    _niid("cifar10", "niid-3"),
    LeadersSetting(
        "cifar10-shards-large", "cifar10",
        "CIFAR-10, shards-large: 10 clients, a residual network, crops and flips, 300 rounds",
        "personal",
        {
            "data": "cifar10", "partition": "shards-large", "clients": 10, "model": "resnet",
            "augment": "crops+flips", "rounds": 300, "local_steps": 20,
        },
        60, CIFAR_ROWS, candidates=6,
    ),
)  # fmt: skip
"""Most telling first."""


def _quick(
    name: str,
    study: str,
    judged: Literal["personal", "global"],
    rows: tuple[str, ...] = ("pfedbayes", "coreset, 10 %", "fedavg", "fedavg-ft", "independent"),
    **flags: Any,
) -> LeadersSetting:
    short: Flags = {"data": "digits", "rounds": 4, "local_steps": 5, "clients": 5}
    return LeadersSetting(
        name, study, f"Digits, {name}: to try the command", judged, {**short, **flags}, 2, rows,
        candidates=3, seeds=(0, 1),
    )  # fmt: skip


_FEW = ("pfedbayes", "fedavg", "independent")

QUICK: tuple[LeadersSetting, ...] = (
    _quick("pfllib-digits", "pfllib", "personal", partition="pfllib"),
    _quick("niid-3-digits", "niid-bench", "global", _FEW, partition="niid-3", clients=10),
    _quick("shards-digits", "own-problems", "personal", _FEW, partition="shards-medium"),
    _quick(
        "augmented-digits", "cifar10", "personal", ("pfedbayes", "fedavg"), partition="iid",
        model="resnet", channels=(4, 4), augment="crops+flips", rounds=2, local_steps=2,
        batch_size=20, clients=2, keep=0.2,
    ),
)  # fmt: skip

STUDIES = ("pfllib", "niid-bench", "own-problems", "cifar10")


def settings_of(scale: str, studies: tuple[str, ...] = STUDIES) -> list[LeadersSetting]:
    """The settings of some studies, most telling first."""
    return [each for each in (QUICK if scale == "quick" else PAPER) if each.study in studies]
