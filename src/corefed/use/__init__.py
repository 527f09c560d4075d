"""What a trained model is for: predictions with a review flag, export, the scikit-learn face.

May import training and the rooms below it.
"""
