"""The command line: one file per command.

May import every other room of corefed.
"""
