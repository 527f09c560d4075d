"""Coresets in probabilistic programming libraries: one module each, and an extra of that name.

    numpyro    a model of (x, y): its own coreset, and weights on its observed sites
    blackjax   a log-density from a log-likelihood in JAX
    pymc       a weighted likelihood in place of an observed variable

Each imports its library when it is imported, and nothing else imports it.
"""
