"""Figures that others published on the same split and network, in percent, with their source.

PFLlib: accuracy on clients' own test points at the best of 2000 rounds. NIID-Bench, as reproduced
by Flower's baselines: accuracy of the shared model on the official test file after 50 rounds of 10
local epochs. Ours: the last round of far fewer steps (`settings.py`).
"""

from __future__ import annotations

from typing import NamedTuple


class Source(NamedTuple):
    words: str
    kind: str  # personal or global: which of our figures it stands beside


PFLLIB = Source(
    "PFLlib's benchmark page (20 clients, Dirichlet 0.1, best of 2000 rounds)", "personal"
)
PFLLIB_ISSUE = Source(
    "PFLlib's issue 22 (CIFAR-10: local training, FedRep and pFedMe 88 to 89, FedAvg 35)",
    "personal",
)
FLOWER = Source("Flower's baseline niid_bench (10 clients, 50 rounds of 10 epochs)", "global")

SOURCES = {
    "pfllib-fashion-mnist": PFLLIB,
    "pfllib-cifar10": PFLLIB_ISSUE,
    **{
        f"{split}-{data}": FLOWER
        for split in ("niid-2", "niid-3", "niid-dir")
        for data in ("fashion-mnist", "cifar10")
    },
}

FIGURES: dict[str, dict[str, str]] = {
    "pfllib-fashion-mnist": {
        "fedavg": "85.85", "fedprox": "85.63", "per-fedavg": "95.10", "pfedme": "97.25",
        "ditto": "97.47", "fedrep": "97.56", "fedbabu": "97.46", "feddbe": "97.69",
    },
    "pfllib-cifar10": {
        "fedavg": "35", "independent": "88 to 89", "fedrep": "88 to 89", "pfedme": "88 to 89",
    },
    "niid-dir-fashion-mnist": {"fedavg": "88.4", "scaffold": "88.4", "fedprox": "88.6"},
    "niid-3-fashion-mnist": {"fedavg": "83.2", "scaffold": "84.2", "fedprox": "82.5"},
    "niid-2-fashion-mnist": {"fedavg": "81.0", "scaffold": "10.0", "fedprox": "78.8"},
    "niid-dir-cifar10": {"fedavg": "63.4", "scaffold": "68.0", "fedprox": "65.6"},
    "niid-3-cifar10": {"fedavg": "58.1", "scaffold": "60.0", "fedprox": "60.0"},
    "niid-2-cifar10": {"fedavg": "49.9", "scaffold": "48.9", "fedprox": "50.0"},
}  # fmt: skip
