"""Flower's programs, changed where Flower has no setting for what we need.

patches.py   the table of all names of Flower that are replaced, and why; checked at start
fence.py     SuperLink: who may ask it for what, and how much (security)
sandbox.py   one task, done by the installed corefed and not by code that was sent (security)
node.py      SuperNode: quicker polling, one answer per message, rejoining after kill -9
warm.py      SuperExec: tasks are forked from a process with all imports done (speed)
signals.py   between processes of one machine: there is a task; the parent has ended
"""
