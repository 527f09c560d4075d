"""All files that the problems need, in one folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from corefed.data import datasets
from corefed_studies.defaults import files
from corefed_studies.defaults.features import FEATURES
from corefed_studies.defaults.problems import PROBLEMS, DefaultsProblem
from corefed_studies.defaults.tables import TABLES

FILES = {file.name: file for file in (*TABLES, *FEATURES)}


def prepare(folder: Path, console: Console, problems: Sequence[DefaultsProblem] = PROBLEMS) -> None:
    """Make the files that are missing, check those that are there, and look for the data sets.

    corefed's own data sets stay where they are: in the folder, under $COREFED_DATA or in the user's
    cache. One that is missing is downloaded.
    """
    for name in dict.fromkeys(problem.file for problem in problems if problem.file):
        file = FILES[name]
        if not (folder / name).exists():
            console.print(f"{name}: made of {file.source}", highlight=False, soft_wrap=True)
        if not files.ensure(file, folder):
            console.print(f"{name}: already there", highlight=False)
    for data in dict.fromkeys(str(each.flags["data"]) for each in problems if not each.file):
        console.print(f"{data}: looking for its files", highlight=False)
        datasets.load(data, folder if folder.is_dir() else None)
