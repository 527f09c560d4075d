"""The unit of cost: one pass of a point through the network, forward and backward.

Work is counted in passes, not in seconds, where it must be the same on every machine.
"""

from __future__ import annotations

STEP = 3
"""Cost of a point in training, in forward passes: one forward, and the way back takes two."""
FORWARD = 1 / STEP
"""What a forward pass alone counts."""
