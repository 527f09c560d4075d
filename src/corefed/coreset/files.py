"""A few files written together: every moment finds each of them whole, the old one or the new.

All temporary files are on the disk before the first of them takes its name, so a full disk changes
nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from corefed.errors import UserError


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write `contents`, name -> bytes, into `folder`, which is made where it is missing."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    temporary = {name: folder / f".{name}.tmp" for name in contents}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            with temporary[name].open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for name, path in temporary.items():
            os.replace(path, folder / name)
    except OSError as error:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink(missing_ok=True)
        for path in made:
            with suppress(OSError):
                path.rmdir()
        raise UserError(
            f"Cannot write into {folder}: {error.strerror}. What was there before is as it was."
        ) from error
