"""A real federation: separate machines that train together through Flower.

May import show and the rooms below it.

    protocol.py   what is asked of a client and what it answers: the whole wire contract
    client.py     the client's half: data, private state (store.py), one answer a task
    server.py     the server's half: rounds with deadlines, quorum, checks, checkpoints
                  (joining.py: before the first round; answers.py: figures that clients claim)
    rules.py      what the server's operator decides (settings.py: tables of TOML files)
    events.py     who was missing, refused or late
    trust/        checks, the metric between posteriors, robust rules, privacy
    reading/      a client's files, and what all clients agree on
    operate/      folders, keys, commands: what the operator does
    engine/       Flower's programs, fenced and warmed

flower.py, with records.py and flower_link.py, ties the two halves to Flower's ClientApp and
ServerApp; nothing else of the training knows about Flower.
"""
