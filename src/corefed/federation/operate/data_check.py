"""Check a client's device and data before it connects, in a subprocess.

Prints one line about the data, or the sentence why they cannot be used and ends with code 2.
"""

from __future__ import annotations

import sys

from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.shown import say, say_note
from corefed.data.table import Settings
from corefed.federation.operate.folder import ClientFolder
from corefed.federation.reading import local_data
from corefed.federation.reading.outline import check_classes
from corefed.federation.task_context import SPLIT_SEED


def main() -> int:
    try:
        settings = ClientFolder.from_environment().settings()
        device_for(settings.device)
        data = local_data.read(
            settings.data,
            test_fraction=settings.test_fraction,
            seed=SPLIT_SEED,
            reading=Settings(settings.target),
            labels_only=True,  # of a table: which columns are features is the run's to say
            embedding="none",  # images must be readable; what they become is the run's to say
            classes=settings.classes,
            memory_mb=settings.limits.memory_mb,
        )
        if not settings.tells_all:
            check_classes(data.labels, settings.classes)
    except UserError as error:
        say(error)
        return 2
    for note in data.notes:
        say_note(note)
    what = f"{len(data.labels)} classes" if data.labels else "a regression"
    points = f"{len(data.y_train)} points to train on and {len(data.y_test)} to test on"
    say(f"{settings.name}: {what}, {points}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
