"""What a server believes of its clients, and what a client keeps from its server."""
