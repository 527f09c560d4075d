"""Networks as functions of one flat parameter vector, and the likelihoods on top of them.

May import base.
"""
