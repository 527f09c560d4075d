"""A simulated federation: from settings to clients, rounds, evaluation, and the folder of a run.

May import data and the rooms below it.
"""
