"""The points of a run, loaded again: their images, or their columns.

A run records which points it selected and tested, not the points themselves. The data are loaded
and split again. If labels or numbers of points differ from the record, nothing is shown.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import math
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.data import datasets, embedding, held_out, images, medmnist, partition
from corefed.data.dataset import Dataset, select
from corefed.data.fetch import find_path
from corefed.data.pictures import ImageSet, UnreadableError
from corefed.data.preparation import Preparation, Scale
from corefed.settings.run import LOCAL, MEMORY, Run
from corefed.show.page.content import Missing, Row, TableCell, number
from corefed.show.page.gather import RunFolder
from corefed.training import setup

if TYPE_CHECKING:
    from PIL import Image

Part = Literal["train", "test"]
SQUARES = {"digits": 8, "mnist": 28, "fashion-mnist": 28}
"""Sets of flat grey images, by the length of their side."""
THUMBNAIL = 96
"""Pixels of the longer side of an image from a file."""


class Picture(NamedTuple):
    source: str  # a data: address
    size: tuple[int, int]


class Labels(NamedTuple):
    """Labels [n] or targets [n, d] of every client's points."""

    train: list[Tensor]
    test: list[Tensor]


class ShownPoints(NamedTuple):
    """The first seed's points, by client and place."""

    y: Labels
    columns: tuple[str, ...]  # of rows; empty: points are pictures
    picture: Callable[[Part, int, int], Picture | None]  # None: it can no longer be read
    row: Callable[[Part, int, int], Row]


def load(run: RunFolder) -> ShownPoints | Missing:
    """Load and split the data of a run again."""
    if isinstance(run.experiment, Missing):
        return run.experiment
    settings = dataclasses.replace(run.experiment.run, seeds=run.experiment.run.seeds[:1])
    if settings.data in (LOCAL, MEMORY):
        return Missing(
            "The points are not shown: they are on the clients' own machines."
            if settings.data == LOCAL
            else "The points are not shown: they were in memory when the run was made."
        )
    if isinstance(run.clients, Missing):
        return run.clients
    try:
        with redirect_stderr(io.StringIO()):  # its notes are in the run's record already
            embedded = settings.data.startswith(datasets.IMAGES) and settings.embedding != "none"
            points = (_files if embedded else _stacked)(settings)
    except UserError as error:
        return Missing(f"The points are not shown, because the data cannot be loaded: {error}")
    return points if _same(run, points.y) else Missing(
        "The points are not shown: the data have changed since the run was made."
    )  # fmt: skip


def _same(run: RunFolder, found: Labels) -> bool:
    assert not isinstance(run.clients, Missing)
    clients = run.clients[0]
    if [(c["train"], c["test"]) for c in clients] != [
        (len(a), len(b)) for a, b in zip(found.train, found.test, strict=True)
    ]:
        return False
    counts = [torch.bincount(y, minlength=len(run.labels)).tolist() for y in found.train
              if run.labels]  # fmt: skip
    if run.labels and counts != [c["classes"] for c in clients]:
        return False
    if isinstance(run.held_out, Missing):
        return True
    mine = run.held_out["row"] < len(clients)
    kept = run.held_out["row"][mine].unique().tolist()  # in a large run not all clients
    tested = [found.test[row] for row in kept]
    return not tested or bool(torch.allclose(torch.cat(tested), run.held_out["y"][mine]))


# --- points that are tensors ----------------------------------------------------------------------


def _stacked(settings: Run) -> ShownPoints:
    data = setup.load(settings, download=False)
    preparation = data.preparations[0]
    real = data.train.weight > 0, data.test.weight > 0
    labels = Labels(
        *(
            [y[mask] for y, mask in zip(part.y, own, strict=True)]
            for part, own in zip((data.train, data.test), real, strict=True)
        )
    )

    if preparation.target_mean:  # training targets are standardised
        mean, std = preparation.unit
        labels = labels._replace(train=[y.double() * std + mean for y in labels.train])

    def values(part: Part, client: int, point: int) -> Tensor:
        x = (data.train if part == "train" else data.test).x[client, point]
        return _raw(preparation, data.names[client], x)

    def picture(part: Part, client: int, point: int) -> Picture | None:
        return png(_levels(settings.data, values(part, client, point)))

    def row(part: Part, client: int, point: int) -> Row:
        return cells(preparation, values(part, client, point))

    shape = preparation.shape
    drawn = settings.data in SQUARES or (len(shape) == 3 and shape[0] in (1, 3))
    return ShownPoints(labels, () if drawn else names(preparation), picture, row)


def _raw(preparation: Preparation, client: str, x: Tensor) -> Tensor:
    """A point in its original units, from what the network sees."""
    scale = preparation.clients.get(client, Scale(preparation.mean, preparation.std))
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (scale.mean, scale.std))
    if len(mean) > 1:
        mean, std = mean.view(preparation.shape), std.view(preparation.shape)
    return x.double() * std + mean


def names(preparation: Preparation) -> tuple[str, ...]:
    """Names of the columns; features without names are numbered."""
    if preparation.columns:
        return tuple(column.name for column in preparation.columns)
    return tuple(f"x{i}" for i in range(math.prod(preparation.shape)))


def cells(preparation: Preparation, x: Tensor) -> Row:
    """A point's values, one per column: categories by name, a missing value empty."""
    flat = x.flatten().tolist()
    if not preparation.columns:
        return [number(value, ".4g") for value in flat]
    found: list[str | TableCell] = []
    start = 0
    for column in preparation.columns:
        own = flat[start : start + column.width]
        if column.lacking and own[-1] > 0.5:
            found.append("")
        elif column.categories:
            place = int(np.argmax(own[: len(column.categories)]))
            found.append(column.categories[place] if own[place] > 0.5 else "")
        else:
            found.append(number(own[0], ".6g"))
        start += column.width
    return found


def _levels(data: str, x: Tensor) -> Tensor:
    """[h, w] or [3, h, w] in 0..255."""
    side = SQUARES.get(data)
    image = x.reshape(side, side) if side else x.squeeze(0)
    return image.mul(255).round().clamp(0, 255).to(torch.uint8)


def png(levels: Tensor) -> Picture:
    from PIL import Image  # a tenth of a second

    array = levels.numpy()
    image = Image.fromarray(array if array.ndim == 2 else array.transpose(1, 2, 0))
    return _encoded(image, "PNG", optimize=True)


def _encoded(image: Image.Image, kind: str, **options: bool) -> Picture:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    text = base64.b64encode(stream.getvalue()).decode()
    return Picture(f"data:image/{kind.lower()};base64,{text}", image.size)


# --- images in files, whose features the network saw ----------------------------------------------


def _files(settings: Run) -> ShownPoints:
    """Split the images as the run split their features, which are not needed."""
    found = _image_set(settings)
    numbers = torch.arange(len(found.y))
    pool = Dataset(
        settings.data,
        numbers.unsqueeze(1),
        torch.from_numpy(found.y),
        len(found.labels),
        held_out=None if found.held_out is None else torch.from_numpy(found.held_out),
        labels=found.labels,
        keep_split=found.held_out is not None,
    )
    if settings.bad_images == "skip":  # unreadable images were left out
        kept = embedding.features(found.pictures, settings.embedding, refuse=False).readable
        apart = None if pool.held_out is None else pool.held_out[kept]
        pool = pool._replace(x=pool.x[kept], y=pool.y[kept], held_out=apart)
    if settings.classes:
        pool = select(pool, settings.classes)
    seed = settings.seeds[0]
    spec = settings.partition or partition.default_for(settings.data)
    splits = partition.split(spec, pool, settings.clients, seed)
    splits = partition.thin(splits, settings.keep, seed)
    splits = held_out.with_validation(pool, splits, settings.validation, seed)
    labels = Labels([pool.y[one.train] for one in splits], [pool.y[one.test] for one in splits])

    def picture(part: Part, client: int, point: int) -> Picture | None:
        place = int(pool.x[getattr(splits[client], part)[point], 0])
        try:
            image = found.pictures.read(place)
        except UnreadableError:
            return None
        image.thumbnail((THUMBNAIL, THUMBNAIL))
        red, green, blue = image.split()
        grey = red.tobytes() == green.tobytes() == blue.tobytes()
        return _encoded(red if grey else image, "JPEG", optimize=True)

    return ShownPoints(labels, (), picture, lambda part, client, point: [])


def _image_set(settings: Run) -> ImageSet:
    kind, _, written = settings.data.partition(":")
    path = find_path(written, Path(settings.data_dir) if settings.data_dir else None)
    return images.find(path) if kind == "image-folder" else medmnist.find(path, settings.memory_mb)
