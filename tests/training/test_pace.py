"""When a checkpoint is due, by a clock of the test's own."""

from __future__ import annotations

from corefed.training.pace import AUTO, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(
    pace: Pace, clock: Clock, rounds: int, seconds: float, held: float, writing: float
) -> list[int]:
    """The rounds that are saved, if each round takes so long."""
    saved = []
    end: tuple[float, float] | None = None  # when the save under way began, and when it ends
    for t in range(1, rounds + 1):
        clock.now += seconds
        if end is not None and clock.now >= end[1]:
            pace.end(end[0], held, writing, end[1])
            end = None
        if pace.due(t, t == rounds, end is not None):
            if end is not None:  # a save waits for the one before
                clock.now = max(clock.now, end[1])
                pace.end(end[0], held, writing, end[1])
            saved.append(t)
            began = pace.begin()
            clock.now += held
            end = began, began + held + writing
    if end is not None:
        clock.now = max(clock.now, end[1])
        pace.end(end[0], held, writing, end[1])
    return saved


def test_every_so_many_rounds_and_never() -> None:
    clock = Clock()
    assert run(Pace(3, 0.1, 5.0, clock), clock, 10, 1.0, 0.1, 1.0) == [3, 6, 9, 10]
    assert run(Pace(0, 0.1, 5.0, clock), clock, 10, 1.0, 0.1, 1.0) == []


def test_cheap_saves_are_made_after_every_round() -> None:
    clock = Clock()
    pace = Pace(AUTO, 0.1, 5.0, clock)
    assert run(pace, clock, 20, 1.0, 0.01, 0.05) == list(range(1, 21))
    assert pace.notes == []


def test_saves_take_a_share_of_the_time() -> None:
    """Each costs 1 + 4 s; a tenth of the time is one in 50 s, 5 rounds of 10 s."""
    clock = Clock()
    pace = Pace(AUTO, 0.1, 5.0, clock)
    saved = run(pace, clock, 21, 10.0, 1.0, 4.0)
    assert saved == [1, 6, 11, 16, 21]
    about = pace.summary()
    assert about["written"] == 5
    assert about["seconds"] == 25.0
    # from the state of one save until the next is on the disk: 50 s and a hold-up, and its 5 s
    assert about["longest_gap_seconds"] == 1.0 + 50.0 + 5.0
    assert pace.notes == []


def test_an_interval_is_kept_whatever_it_costs() -> None:
    """Saves of 60 s would be 600 s apart; they are made after 2 minutes, which is said once."""
    clock = Clock()
    pace = Pace(AUTO, 0.1, 2.0, clock)
    assert run(pace, clock, 30, 10.0, 0.0, 60.0) == [1, 13, 25, 30]
    assert len(pace.notes) == 1
    assert "checkpoint_minutes" in pace.notes[0]


def test_a_writer_that_is_behind_is_left_to_work() -> None:
    clock = Clock()
    pace = Pace(AUTO, 1.0, 5.0, clock)
    saved = run(pace, clock, 30, 1.0, 0.0, 9.5)
    assert saved == [1, 11, 21, 30]
