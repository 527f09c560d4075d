"""The folder of a search of settings.

    search.toml                 every setting as the search was given them; written first
    tune.json                   space, candidates, rungs, scores, cost; while the search goes on,
                                also where it stands
    checkpoint/                 the state of each group of candidates, while the search goes on
    experiment.toml             the settings that were found, for `corefed run --config`; written
                                last, so the search is complete where it exists

A checkpoint's file never changes. tune.json names the files that belong to it, and is replaced when
they are all there; then the others are removed.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.settings.config import differences, fingerprint, to_toml
from corefed.settings.run import Experiment
from corefed.training import record

SETTINGS, RESULT, CHECKPOINTS = "search.toml", "tune.json", "checkpoint"

SCHEMA = 1
"""Of tune.json; increase it when a key changes its meaning."""


class SearchFolder(record.Folder):
    """A failing write is a UserError that says what is left."""

    def refuse_existing(self, hint: str = "") -> None:
        hint = hint or f"choose another --out, or go on with a search by --resume {self.path}"
        files.refuse_existing(self.path, hint, among=(SETTINGS, RESULT))
        super().refuse_existing(hint)

    def refuse_missing(self) -> None:
        if not (self.path / SETTINGS).exists():
            raise UserError(
                f"{self.path} holds no search to resume, it has no {SETTINGS}; start one by --out."
            )

    def settings_file(self) -> Path:
        """search.toml, which must be there and be what was written."""
        self.refuse_missing()
        try:
            digests.check_toml(self.path / SETTINGS)
        except OSError as error:
            raise UserError(f"Cannot read {self.path / SETTINGS}: {error.strerror}.") from error
        except digests.DamagedError as error:
            raise UserError(
                f"{self.path / SETTINGS} was changed or damaged after the search wrote it; put it "
                "back as it was, or start a new search."
            ) from error
        return self.path / SETTINGS

    def begin(self, experiment: Experiment, report: Mapping[str, Any]) -> None:
        files.write_folder(
            self.path,
            [(RESULT, digests.to_json(report)), (SETTINGS, digests.to_toml(to_toml(experiment)))],
        )

    def read(self) -> dict[str, Any]:
        """The content of tune.json."""
        self.refuse_missing()
        try:
            found = digests.read_json(self.path / RESULT)
            schema = found["schema"]
        except OSError as error:
            raise UserError(f"Cannot read {self.path / RESULT}: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path / RESULT} is damaged: {error!r}.") from error
        if schema != SCHEMA:
            raise UserError(f"{self.path / RESULT} has schema {schema}, not {SCHEMA}.")
        return found

    def state(self, name: str) -> bytes:
        """The content of a checkpoint."""
        path = self.path / CHECKPOINTS / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(f"Cannot read {path}: {error.strerror}; start a new search.") from error

    def commit(self, report: Mapping[str, Any], states: Mapping[str, bytes | None]) -> None:
        """Replace tune.json; `states` are its checkpoints, None for one that is there already."""
        folder = self.path / CHECKPOINTS
        with self._writing("The search is kept as it stood before"):
            folder.mkdir(exist_ok=True)
            files.replace_all(folder, ((k, v) for k, v in states.items() if v is not None))
            self._replace(RESULT, digests.to_json(report))
            for path in folder.iterdir():
                if path.name not in states:
                    path.unlink(missing_ok=True)

    def end(self, report: Mapping[str, Any], found: Experiment) -> None:
        self.commit(report, {})
        with self._writing("tune.json has the result"):
            self._replace(record.EXPERIMENT, to_toml(found).encode())
        with suppress(OSError):
            (self.path / CHECKPOINTS).rmdir()


def refuse_another(there: Mapping[str, Any], here: Mapping[str, Any], where: Path) -> None:
    """Refuse to go on with a search whose settings, space or data were others."""
    if fingerprint(there) == fingerprint(here):
        return
    changed = [each for each in differences(there, here) if not each.startswith("points ")]
    if not changed:
        raise UserError(
            f"The data have changed since the search in {where} began; start a new search."
        )
    raise UserError(
        f"{where} holds a search with other settings: {', '.join(changed)}; resume it with its "
        "own, or start a new search."
    )
