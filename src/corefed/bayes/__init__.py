"""Mean-field Gaussian posteriors: sampling, KL, the weighted objective, predictions.

May import models and base.
"""
