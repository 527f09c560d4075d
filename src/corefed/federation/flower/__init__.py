"""Flower as the transport: what carries tasks and replies between the two halves of a federation.

    app.py       `client_app` and `server_app`, which Flower's programs run
    link.py      the server's way to its clients, with deadlines and bounds
    records.py   tasks and replies as Flower's records, and back

Flower carries messages and starts processes. What is trained, checked and kept is decided outside
this folder, and nothing there knows about Flower.
"""
