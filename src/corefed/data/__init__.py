"""Data: load a pool of points, deal it to clients, stack the clients."""

from corefed.data.clients import FederatedData, federate, stack
from corefed.data.dataset import Dataset
from corefed.data.datasets import load
from corefed.data.partition import Split, split

__all__ = ["Dataset", "FederatedData", "Split", "federate", "load", "split", "stack"]
