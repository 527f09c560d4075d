"""Errors, the contract of methods, settings, random streams, files, devices.

Imports nothing else of corefed.
"""
