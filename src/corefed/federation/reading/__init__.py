"""What a client reads on its own machine, and what all clients' data have in common."""
