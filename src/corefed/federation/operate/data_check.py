"""Check a client's device and data before it connects, in a subprocess.

Prints one line about the data, or the sentence why they cannot be used and ends with code 2.
"""

from __future__ import annotations

import sys

from corefed.base.errors import UserError


def main() -> int:
    from corefed.base.device import device_for
    from corefed.data.table import Settings
    from corefed.federation.client import SPLIT_SEED
    from corefed.federation.operate import folder
    from corefed.federation.reading import local_data

    try:
        place = folder.ClientFolder.from_environment().place()
        device_for(place.device)
        data = local_data.read(
            place.data,
            test_fraction=place.test_fraction,
            seed=SPLIT_SEED,
            reading=Settings(place.target),
            labels_only=True,  # of a table: which columns are features is the run's to say
            embedding="none",  # images must be readable; what they become is the run's to say
        )
    except UserError as error:
        print(error)
        return 2
    for note in data.notes:
        print(f"note: {note}", file=sys.stderr)
    what = f"{len(data.labels)} classes" if data.labels else "a regression"
    points = f"{len(data.y_train)} points to train on and {len(data.y_test)} to test on"
    print(f"{place.name}: {what}, {points}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
