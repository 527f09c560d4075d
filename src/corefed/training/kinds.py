"""Kinds of models, and which of them a method is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MODELS = ("personal", "global", "localized", "others")
"""Kinds of models; the first that a method has is its main model."""


def main_model(metrics: Mapping[str, Any]) -> str:
    """The first kind in MODELS that has metrics."""
    return next((m for m in MODELS if any(name.startswith(f"{m}_") for name in metrics)), MODELS[0])
