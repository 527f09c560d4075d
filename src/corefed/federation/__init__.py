"""A real federation: separate machines that train together through Flower.

May import show and the rooms below it.

    protocol.py   what is asked of a client and what it answers: the whole wire contract
    client.py     the client's half: data, private state (store.py), one answer per task
    server.py     the server's half: rounds with deadlines, quorum, checks, checkpoints
                  (joining.py: before the first round; answers.py: numbers that clients claim)
    rules.py      what the server's operator decides
    events.py     who was missing, refused or late
    trust/        checks, the metric between posteriors, robust rules, privacy
    reading/      a client's files, and what all clients agree on
    operate/      folders, keys, commands: what the operator does
    flower/       Flower's ClientApp and ServerApp, and messages through it
    engine/       Flower's programs, behind a gate and warmed

Nothing of the training outside flower/ knows about Flower.
"""
