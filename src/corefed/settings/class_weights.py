"""The setting `class_weights`: none, balanced, or one number per class."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.base.errors import UserError

NONE, BALANCED = "none", "balanced"


def check(text: str) -> None:
    """Refuse a text that is no such setting."""
    if text not in (NONE, BALANCED):
        _numbers(text)


def weights(text: str, classes: int) -> tuple[float, ...]:
    """One weight per class; empty: all are 1."""
    if text == NONE:
        return ()
    if classes == 0:
        raise UserError("class_weights are for classes, and these data are a regression.")
    if text == BALANCED:
        raise UserError(
            "class_weights=balanced needs the number of points of every class, which the sites of "
            "a federation do not tell; give the weights as numbers, one per class."
        )
    found = _numbers(text)
    if len(found) != classes:
        raise UserError(f"class_weights has {len(found)} numbers, and there are {classes} classes.")
    return found


def balance(counts: Sequence[int]) -> str:
    """n / (classes n_c) as a setting: every class counts as much, and a point 1 on average."""
    present = [count for count in counts if count]
    each = [sum(present) / (len(present) * count) if count else 1.0 for count in counts]
    return ",".join(f"{weight:.6g}" for weight in each)


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(each) for each in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(math.isfinite(each) and each > 0 for each in found):
        raise UserError(
            f"class_weights is {text!r}; it must be none, balanced, or one number above 0 for each "
            "class, in the order of the classes, such as 1,5."
        )
    return found
