"""Mean-field Gaussian posteriors: sampling, KL, the weighted objective, the predictive."""
