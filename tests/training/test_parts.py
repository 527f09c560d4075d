"""Checkpoints in parts: which round all have, who reads what, and what is removed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from saved_state import Stacked

from corefed.base.errors import UserError
from corefed.base.place import share
from corefed.base.types import Tree
from corefed.training import checkpoint, parts, segments

VALUES: dict[str, object] = {"method": "x", "rounds": 9}
CLIENTS, RUNS = 5, 2
EVERYONE = range(RUNS * CLIENTS)


def rows(size: int, rank: int) -> list[int]:
    return [g * CLIENTS + i for g in range(RUNS) for i in share(CLIENTS, size, rank)]


def blank(size: int, rank: int) -> parts.Shard:
    mine = rows(size, rank)
    return parts.Shard(Stacked({"q": torch.zeros(len(mine), 3)}), mine)


def value(row: int, round_: int) -> list[float]:
    """Of a client whose last cohort was that of a round."""
    return [100.0 * round_ + row] * 3


class Worker:
    """One that saves after the rounds it is told to, where some clients took part."""

    def __init__(self, folder: Path, size: int, rank: int) -> None:
        self.shard = blank(size, rank)
        part = parts.name(rank, size) if size > 1 else ""
        self.saves = checkpoint.Checkpoints(folder, VALUES, 1, 1.0, 1.0, part=part)

    def save(self, round_: int, cohort: Sequence[int] = EVERYONE) -> None:
        mine = [row for row in cohort if row in self.shard.rows]
        self.shard.put(mine, {"q": torch.tensor([value(row, round_) for row in mine]).view(-1, 3)})
        self.saves.mark(mine)
        servers: list[Tree] = [{"v": torch.full((2,), float(round_ + g))} for g in range(RUNS)]
        self.saves.save(round_, servers, self.shard.take)
        self.saves.close()


def restored(folder: Path, size: int, rank: int, written: parts.Written) -> list[list[float]]:
    """The clients of a worker; the servers are checked here."""
    shard, fresh = blank(size, rank), [{"v": torch.zeros(2)} for _ in range(RUNS)]
    servers = parts.restore(folder, VALUES, written, fresh, shard, CLIENTS)
    assert [each["v"].tolist() for each in servers] == [[written[1] + g] * 2 for g in range(RUNS)]
    found: list[list[float]] = shard.take(shard.rows)["q"].tolist()
    return found


def newest(folder: Path) -> parts.Written:
    return parts.newest([parts.find(folder, VALUES)])


@pytest.mark.parametrize("size", [2, 3, 5])
def test_any_number_of_workers_goes_on_from_the_parts(tmp_path: Path, size: int) -> None:
    both = [Worker(tmp_path, 2, rank) for rank in range(2)]
    last = {1: [0, 2, 5, 6], 2: [1, 4, 6, 9], 3: [2, 4, 7]}  # clients 3 and 8 never take part
    for round_, cohort in last.items():
        for worker in both:
            worker.save(round_, cohort)
    both[0].save(4)  # and the other was killed before it could
    assert newest(tmp_path) == (2, 3)
    when = {row: round_ for round_, cohort in last.items() for row in cohort}
    for rank in range(size):
        expected = [value(row, when[row]) if row in when else [0.0] * 3 for row in rows(size, rank)]
        assert restored(tmp_path, size, rank, (2, 3)) == expected
    with pytest.raises(UserError, match="was trained by 2 workers"):
        parts.refuse(tmp_path)


def test_workers_go_on_from_the_checkpoint_of_one_process(tmp_path: Path) -> None:
    Worker(tmp_path, 1, 0).save(6, [0, 4, 8])
    for rank in range(2):
        Worker(tmp_path, 2, rank).save(5)
    assert newest(tmp_path) == (1, 6)
    nobody = [0.0] * 3
    expected = [nobody, nobody, value(4, 6), nobody, value(8, 6), nobody]
    assert restored(tmp_path, 2, 1, (1, 6)) == expected


def test_parts_that_have_no_round_in_common_are_not_used(tmp_path: Path) -> None:
    assert newest(tmp_path) == (1, 0)
    Worker(tmp_path, 2, 0).save(1)
    assert newest(tmp_path) == (1, 0)
    parts.refuse(tmp_path / "elsewhere")


def test_parts_of_another_number_of_workers_stay_until_all_have_saved(tmp_path: Path) -> None:
    Worker(tmp_path, 1, 0).save(1)
    for rank in range(3):
        Worker(tmp_path, 3, rank).save(2)
    both = [Worker(tmp_path, 2, rank) for rank in range(2)]
    both[0].save(3)
    parts.remove_others(tmp_path, VALUES, 2)
    assert newest(tmp_path) == (3, 2)
    both[1].save(3)
    assert newest(tmp_path) == (2, 3)
    parts.remove_others(tmp_path, VALUES, 2)
    left = sorted(path.name for path in (tmp_path / checkpoint.FOLDER).iterdir())
    assert left == ["0-of-2", "1-of-2"]
    assert newest(tmp_path) == (2, 3)
    assert restored(tmp_path, 2, 0, (2, 3)) == [value(row, 3) for row in rows(2, 0)]


def test_workers_may_have_folders_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        Worker(tmp_path / str(rank), 2, rank).save(1)
    views = [parts.find(tmp_path / str(rank), VALUES) for rank in range(2)]
    assert parts.newest(views) == (2, 1)
    assert restored(tmp_path / "1", 2, 1, (2, 1)) == [value(row, 1) for row in rows(2, 1)]
    with pytest.raises(UserError, match="has no checkpoint of round 1; all workers need"):
        restored(tmp_path / "1", 2, 0, (2, 1))


def test_a_part_that_is_damaged_or_cannot_be_written(tmp_path: Path) -> None:
    part = tmp_path / checkpoint.FOLDER / parts.name(0, 2)
    worker = Worker(tmp_path, 2, 0)
    part.parent.mkdir()
    part.write_text("a file where a folder should be")
    with pytest.raises(UserError, match="The checkpoint before round 1 is kept"):
        worker.save(1)
    part.unlink()
    worker.save(1)
    (part / segments.MANIFEST).write_text("{")
    with pytest.raises(UserError, match="is truncated or damaged"):
        newest(tmp_path)
