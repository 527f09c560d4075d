"""Data: load a pool of points, split it between clients, stack the clients.

May import settings and the rooms below it.
"""

from corefed.data.clients import FederatedData, federate, stack
from corefed.data.dataset import Dataset
from corefed.data.datasets import load
from corefed.data.partition import Split, split

__all__ = ["Dataset", "FederatedData", "Split", "federate", "load", "split", "stack"]
