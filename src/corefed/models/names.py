"""The name of what has no name of its own."""

MEMORY = "memory"
"""What `data` is, or `model`, of a run of `corefed.Federation` that was handed arrays, or a network
that no module:factory names."""
