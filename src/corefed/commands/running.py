"""What `corefed run` does around training: folder, progress, Ctrl-C, the table at the end."""

from __future__ import annotations

import json as jsonlib
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from corefed.base.errors import INTERRUPTED, UserError
from corefed.settings.config import resolve
from corefed.show import report, tracking
from corefed.training import record, rounds
from corefed.training.progress import progress


def execute(
    config: Path | None,
    flags: Mapping[str, object],
    assignments: Sequence[str],
    *,
    out: Path | None,
    resume: Path | None,
    quiet: bool,
    json: bool,
    track: Sequence[str] = (),
) -> int:
    """Resolve, train, print; the exit code, 130 after Ctrl-C."""
    followers = tracking.names(track)
    if resume is not None:
        if out is not None:
            raise UserError("--resume goes on in its own folder; leave out --out.")
        record.Folder(resume).refuse_missing()
        config = config or resume / record.EXPERIMENT
    experiment = resolve(config, flags, assignments)
    run = experiment.run
    folder = resume or out or record.default_folder(run.data, run.method)

    if run.checkpoint_every:
        hint = f"go on with: corefed run --resume {shlex.quote(str(folder))}"
    else:
        hint = "it has no checkpoint (checkpoint_every = 0) to go on from"
    try:
        with (
            tracking.following(followers, folder) as trackers,
            stop_on_interrupt(folder) as stop,
            progress(run.rounds) as show,
        ):
            for name in tracking.forgotten(followers, folder) if resume is not None else []:
                print(f"note: {name} followed this run; --track {name} goes on", file=sys.stderr)

            def on_round(line: dict[str, Any]) -> None:
                if not (quiet or json):
                    show(line)
                trackers.round(line)

            trained = rounds.train(
                experiment,
                folder,
                resume=resume is not None,
                on_begin=trackers.start,
                on_round=on_round,
                stop=lambda: bool(stop),
            )
            trackers.finish(trained.summary, "finished" if trained.finished else "stopped")
    except KeyboardInterrupt:
        begun = record.begun(folder)
        print(f"stopped inside a round; {hint}" if begun else "nothing written", file=sys.stderr)
        return INTERRUPTED
    if not trained.finished:
        print(f"stopped after round {trained.summary['rounds']}; {hint}", file=sys.stderr)
        return INTERRUPTED
    if json:
        print(jsonlib.dumps(trained.summary, indent=1))
    elif quiet:
        print(folder)
    else:
        report.console().print(report.metrics_table(trained.summary))
        print(f"written to {folder}")
    return 0


@contextmanager
def stop_on_interrupt(folder: Path) -> Iterator[list[int]]:
    """Collects the first Ctrl-C, so that a round is not cut in two; a second one aborts.

    While data are still being loaded there is nothing to finish, and the first one aborts.
    """
    caught: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        if not record.begun(folder):
            raise KeyboardInterrupt
        caught.append(number)
        print("\nfinishing this round; Ctrl-C again stops at once", file=sys.stderr)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)
