"""The one hint for a misspelt name."""

from __future__ import annotations

import pytest

from corefed.base.errors import did_you_mean

KNOWN = ("labels", "shards", "Site", "match", "batch_size")


@pytest.mark.parametrize(
    ("name", "sentence", "ending"),
    [
        ("label", " Did you mean 'labels'?", "; did you mean 'labels'?"),
        ("SITE", " Did you mean 'Site'?", "; did you mean 'Site'?"),
        ("batch", " Did you mean 'batch_size'?", "; did you mean 'batch_size'?"),
        ("q", "", "; there are three."),
    ],
)
def test_a_sentence_of_its_own_or_the_end_of_one(name: str, sentence: str, ending: str) -> None:
    assert did_you_mean(name, KNOWN) == sentence
    assert did_you_mean(name, KNOWN, otherwise="there are three") == ending


def test_a_name_may_be_shown_in_another_form() -> None:
    assert did_you_mean("label", KNOWN, written={"labels": "labels:C"}) == (
        " Did you mean 'labels:C'?"
    )
