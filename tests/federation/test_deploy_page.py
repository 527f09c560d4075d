"""docs/deploy.md: what it shows is typed, and its table of rules is the rules."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from corefed.base.tables import markdown_table
from corefed.federation.operate.processes import free_port
from corefed.federation.rules import Rules
from corefed.settings.fields import list_settings
from corefed.training import record

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def between(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", PAGE.read_text(), re.DOTALL)
    assert found is not None, mark
    return found.group(1).strip()


def end(group: int) -> None:
    """The programs that the page leaves in the background: asked to end, and waited for."""
    with suppress(ProcessLookupError):
        for sign in (signal.SIGTERM, *[0] * 100, signal.SIGKILL):
            os.killpg(group, sign)
            time.sleep(0.1)


@pytest.mark.federation
def test_the_commands_as_they_stand_there(tmp_path: Path) -> None:
    found = re.search(r"<!-- executed by \S+ -->\n```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    script = found.group(1).replace("18000", str(free_port()))
    assert script.count("corefed federation") == 8
    words = tmp_path / "words.txt"
    with words.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-e", "-c", f'corefed() {{ "$PYTHON" -m corefed "$@"; }}\n{script}'],
            cwd=tmp_path,
            env={**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = shell.wait(600)
        finally:
            end(shell.pid)
    said = words.read_text()
    assert code == 0, said
    run = tmp_path / "trial" / "server" / "runs" / "first"
    assert len(record.read_lines(run / record.ROUNDS)[0]) == 4
    assert "alice" in said and "connected" in said
    assert len((tmp_path / "alice.csv").read_text().splitlines()) > 100


def test_every_rule_is_listed_with_what_it_does() -> None:
    """The table is made from the code: paste what this test expects."""
    rules = list_settings(Rules)
    rows = [[f"`{rule.name}`", f"`{rule.default_words}`", rule.help] for rule in rules]
    assert between("rules") == "\n".join(markdown_table(["rule", "default", "what it does"], rows))
