"""Images of minibatches, shifted and mirrored at random: for all clients at once, on the device.

    crops    shifted by up to an eighth of a side; what comes in from outside is the reflected image
    flips    mirrored from left to right, every second image

One word of random bits per image and step decides (`draw`), so an image's changes depend on seed,
round, client, step and place in the minibatch, and on nothing else. `apply` is plain operations on
tensors, which a compiled step records as well. Only minibatches of local steps are changed: points
are selected, and models are tested, as the points are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from corefed.base.rng import Streams
from corefed.base.types import Augment

PURPOSE = "augment"
PART = 8
"""A side's pixels for one pixel of shift: 4 of 32, as is usual for CIFAR-10, and 3 of 28."""

LOW = 0xFFFF
"""16 bits decide on a shift: of 9 shifts one is more likely than another by 1 in 7000 at most."""


def draw(streams: Streams, count: int, width: int) -> Tensor:
    """[C, count, width] words for so many minibatches; a call each, so others' widths are free."""
    return streams.words(PURPOSE, width, calls=count)


def apply(how: Augment, x: Tensor, words: Tensor) -> Tensor:
    """Points x [C, b, ...] after what the words [C, b] say."""
    channels, height, width = how.image
    bits = words.reshape(-1, 1)
    rows, columns = (
        torch.arange(side, device=x.device).expand(len(bits), -1) for side in (height, width)
    )
    if how.crops:
        rows = _shifted(rows, bits & LOW, height)
        columns = _shifted(columns, (bits >> 16) & LOW, width)
    if how.flips:
        columns = torch.where(((bits >> 32) & 1) == 1, width - 1 - columns, columns)
    at = (rows.unsqueeze(-1) * width + columns.unsqueeze(-2)).flatten(1)  # [C b, pixels]
    images = x.reshape(len(bits), channels, height * width)
    return images.gather(-1, at.unsqueeze(1).expand_as(images)).view_as(x)


def _shifted(places: Tensor, bits: Tensor, side: int) -> Tensor:
    """Places along a side after a shift; those outside are reflected at the border pixels."""
    most = max(1, side // PART)
    places = (places + bits % (2 * most + 1) - most).abs()
    return side - 1 - (side - 1 - places).abs()
