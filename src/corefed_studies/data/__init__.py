"""Data sets that only the studies read: house prices with positions, small regression sets."""
