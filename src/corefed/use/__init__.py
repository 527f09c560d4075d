"""Use of trained models: predictions with a review flag, newcomers, the scikit-learn interface.

May import training and the rooms below it.
"""
