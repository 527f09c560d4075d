"""The digits are read from scikit-learn's file, and are what it would return."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from corefed.base.errors import UserError
from corefed.data import digits


@pytest.mark.parametrize("place", [digits.PLACE, Path("elsewhere")])
def test_they_are_scikit_learns(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "PLACE", place)
    for found, expected in zip(digits.read(), load_digits(return_X_y=True), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="come with scikit-learn"):
        digits.load()
