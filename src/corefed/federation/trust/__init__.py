"""How a server guards against bad clients, and how a client protects its data."""
