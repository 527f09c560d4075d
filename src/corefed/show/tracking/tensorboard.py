"""TensorBoard: event files in RUN/tensorboard, by `torch.utils.tensorboard`.

The step of a scalar is its round; a tag with a slash is a group on TensorBoard's page. Settings are
logged as text at the start, and as hyper-parameters beside the final metrics at the end. A resumed
run adds a file that starts with the round after the last one logged. Its `purge_step` makes
TensorBoard drop what an interrupted round left behind.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from corefed.base.errors import UserError, install
from corefed.show import curves, report
from corefed.show.tracking import MARKS, LoggedRound, Outcome

FLUSH = 5
"""Seconds until what was logged is on the disk, and so on TensorBoard's page."""


def reach(folder: Path) -> Writer:
    if find_spec("tensorboard") is None:
        raise UserError(f"--track tensorboard needs TensorBoard: {install('tensorboard')}.")
    return Writer()


class Writer:
    """One run's event files."""

    def __init__(self) -> None:
        self._writer: Any = None
        # The library writes in a thread. Its failure is also raised at our next call.
        self._hook = threading.excepthook

    def start(self, folder: Path, values: Mapping[str, Any], points: Sequence[LoggedRound]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # of an extra

        self._folder = folder
        self._settings = {k: _plain(value) for k, value in values.items()}
        self._last = points[-1].round if points else 0
        path = folder / MARKS["tensorboard"]
        logged = _logged(path)
        threading.excepthook = self._thread_failed
        purge = None if logged is None else min(logged, self._last) + 1
        with self._writing():
            self._writer = SummaryWriter(str(path), purge_step=purge, flush_secs=FLUSH)
            rows = "".join(f"| {k} | {value} |\n" for k, value in self._settings.items())
            self._writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", self._last)
            for point in points:
                if point.round >= (purge or 0):
                    self.round(point)
            self._writer.flush()

    def round(self, point: LoggedRound) -> None:
        with self._writing():
            for name, mean in point.means.items():
                self._writer.add_scalar(name, mean, point.round)
            for name, each in point.by_seed.items():
                for seed, value in each.items():
                    self._writer.add_scalar(f"{name}/seed-{seed}", value, point.round)
        self._last = point.round

    def finish(self, summary: Mapping[str, Any] | None, outcome: Outcome) -> None:
        with self._writing():
            if summary is not None and summary["metrics"]:
                self._draw()
                if outcome == "finished":
                    self._compare(summary)
            self._writer.flush()
        self._close()

    def _draw(self) -> None:
        """The learning curves, as `corefed compare --plot` draws them."""
        from matplotlib.image import imread  # matplotlib takes half a second

        with TemporaryDirectory() as folder:
            picture = Path(folder) / "curves.png"
            curves.plot(report.load([self._folder]), picture)
            pixels = imread(picture)
        self._writer.add_image("learning_curves", pixels, self._last, dataformats="HWC")

    def _compare(self, summary: Mapping[str, Any]) -> None:
        """A row on TensorBoard's page of hyper-parameters."""
        from torch.utils.tensorboard.summary import hparams  # of an extra

        metrics = dict.fromkeys(summary["metrics"], 0.0)  # only the names count
        for part in hparams(self._settings, metrics):
            self._writer.file_writer.add_summary(part)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        if self._writer is not None:
            with suppress(Exception):  # what failed before fails again
                self._writer.close()
        if threading.excepthook == self._thread_failed:
            threading.excepthook = self._hook

    def _thread_failed(self, failure: threading.ExceptHookArgs) -> None:
        if not type(failure.thread).__module__.startswith("tensorboard."):
            self._hook(failure)


def _plain(value: object) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _logged(path: Path) -> int | None:
    """The last round in the event files of a folder; None if there are none."""
    if not any(path.glob("events.out.tfevents.*")):
        return None
    module = import_module("tensorboard.backend.event_processing.event_accumulator")
    events = module.EventAccumulator(str(path), {module.SCALARS: 1})
    events.Reload()
    if "cost/seconds_per_round" not in events.Tags()["scalars"]:
        return 0
    return int(events.Scalars("cost/seconds_per_round")[-1].step)
