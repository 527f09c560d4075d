"""What every room uses: errors, the contract of methods, random streams, files, devices.

Imports nothing else of corefed.
"""
