"""The command line in this process, as a user meets it: exit code, stdout, stderr."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from corefed.commands import cli

SMALL = (
    "--method=pfedbayes", "--clients=4", "--rounds=2", "--local-steps=2",
    "--set=hidden=8", "--set=evaluate_draws=2", "--device=cpu",
)  # fmt: skip
"""A run of well under a second."""


class Result(NamedTuple):
    code: int
    out: str
    err: str


def corefed(*arguments: object) -> Result:
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main([str(a) for a in arguments])
        except SystemExit as stop:
            code = stop.code
    assert isinstance(code, int)
    return Result(code, out.getvalue(), err.getvalue())
