"""`corefed bench`, `reproduce` and `theory` where the studies are not installed, as in a wheel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from commands import corefed

from corefed.commands import cli, studies


@pytest.mark.parametrize("arguments", [("bench", "runtime"), ("reproduce", "table1"), ("theory",)])
def test_without_the_studies_a_sentence_says_where_they_are(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(studies, "find_spec", lambda name: None)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    studies.add_to(app)
    monkeypatch.setattr(cli, "command", lambda: typer.main.get_command(app))
    done = corefed(*arguments, "--scale", "quick", "--json")
    assert done.code == 2 and done.out == ""
    assert done.err == (
        f"error: corefed {arguments[0]} belongs to the studies, which the installed package does "
        "not have: type it in a checkout of the repository, after `make install`.\n"
    )


def test_the_studies_commands_are_hidden_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(studies, "find_spec", lambda name: None)
    app = typer.Typer(add_completion=False)
    studies.add_to(app)
    assert {command.name: command.hidden for command in app.registered_commands} == dict.fromkeys(
        ("bench", "reproduce", "theory"), True
    )


def test_a_process_that_cannot_import_them_says_so(tmp_path: Path) -> None:
    """corefed alone on the path, as a wheel has it: a link to the package and to nothing beside."""
    (tmp_path / "corefed").symlink_to(Path(cli.__file__).parents[1])
    program = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)];"
        f"sys.path = [{str(tmp_path)!r}, *(p for p in sys.path if not p.endswith('src'))];"
        "from corefed.commands.cli import main; main(['theory', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "belongs to the studies" in done.stderr
