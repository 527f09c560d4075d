"""Settings of a run: declared in dataclasses, read from files, flags and `--set`, checked once.

May import methods and the rooms below it.
"""
