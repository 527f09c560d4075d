"""What a client does in a round of a run: its steps, its minibatches, and what changes images."""

from __future__ import annotations

import math
from collections.abc import Sequence

from corefed.base.errors import UserError
from corefed.base.types import Augment, Work
from corefed.data.idx import IDX_SOURCES
from corefed.models import cnn
from corefed.settings.run import CONVOLUTIONAL, Run

FLAT = ("digits", *IDX_SOURCES)
"""Data sets whose points are rows of the pixels of square images."""


def work_of(run: Run, shape: Sequence[int], data: str = "") -> Work:
    """The work of a round, for points of a shape; `data` is the set's name if the run has another.

    A run that is to augment what are no images is refused.
    """
    if run.augment == "off":
        return Work(run.local_steps, run.batch_size)
    if not _are_images(run, shape, data or run.data):
        raise UserError(
            f"augment is {run.augment}, which shifts or mirrors images; points of "
            f"{data or run.data} have {math.prod(shape)} features that are no pixels. Use "
            "augment=off; folders of images have pixels with embedding=none."
        )
    kinds = run.augment.split("+")
    image = cnn.image_shape(shape, data or run.data)
    augment = Augment(image, crops="crops" in kinds, flips="flips" in kinds)
    return Work(run.local_steps, run.batch_size, augment)


def _are_images(run: Run, shape: Sequence[int], data: str) -> bool:
    if data.startswith(("table:", "synthetic-")):
        return False
    if len(shape) == 3:
        return True
    folded = data in FLAT or run.model in CONVOLUTIONAL
    return folded and len(shape) == 1 and math.isqrt(shape[0]) ** 2 == shape[0]
