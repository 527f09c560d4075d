"""A real federation: separate machines that train together through Flower.

    protocol.py    what is asked of a client and what it answers; the whole wire contract
    client.py      the client's half: data, private state, one answer a task
    server.py      the server's half: rounds with deadlines, quorum, checks, checkpoints
    checks.py      what makes an update unacceptable      metric.py   how far two posteriors are
    robust.py      medians, trimmed means, Krum, clipping  privacy.py  noise and its accountant
    folder.py, certificates.py, processes.py, commands.py, ...   what the operator does

`runtime/flower.py` ties the two halves to Flower's ClientApp and ServerApp; nothing else of the
training knows about Flower.
"""
