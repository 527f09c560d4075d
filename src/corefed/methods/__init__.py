"""Federated methods, one per file; `registry` names them all.

May import selectors and the rooms below it.
"""
