"""Flower's programs with what we need and Flower has no setting for."""
