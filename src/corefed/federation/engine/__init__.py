"""Flower's programs as we run them: by its own flags, and changed where it has none.

patches.py        the tables of all names of Flower that are replaced, and why; checked at start
gate.py           the server's open port: what comes through to SuperLink, and how much (security)
conversation.py   one connection to the gate: how it is read, and how slowly (security)
replies.py        what clients may push: their own replies, of the expected length (security)
sandbox.py        one task, done by the installed corefed, not by code that was sent (security)
warm.py           SuperExec: takes tasks by a secret (security), and forks them from a process with
                  all imports done (speed)
node.py           SuperNode: quicker polling, one answer per message, rejoining after kill -9
stock.py          a program of Flower's as it is, which ends with its parent
signals.py        between processes of one machine: there is a task; the parent has ended
"""
