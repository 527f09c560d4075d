"""Selections as recorded programs: what they give, draw and refuse."""

from __future__ import annotations

import pytest
import torch
from method_rows import WORK, Row, assert_same, build, compile_steps, cuda, federation, on, run
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Tree
from corefed.selectors.subset import subset_size, subset_sizes
from corefed.training.compiled import Steps
from corefed.training.local import Compiled
from corefed.training.replayed import Replays

DEVICES = ["cpu", pytest.param("cuda", marks=cuda)]
AGAIN = Row("coreset-pfedbayes", (("fraction", 0.3), ("refresh_every", WORK.steps)))
"""Reselects in every round."""


def larger(data: ClientData) -> ClientData:
    """Only clients that leave some of their points out; one has padding."""
    return data.of([0, 1, 2])


def replaying(row: Row) -> tuple[Compiled, Replays]:
    replays = Replays()
    compiled = compile_steps(row)
    return compiled._replace(steps=Steps(WORK, fuse=False, replays=replays)), replays


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("score", ["gradient", "potential", "loss", "none"])
def test_a_replayed_selection_is_the_plain_one(device: str, score: str) -> None:
    row = AGAIN._replace(settings=(*AGAIN.settings, ("score", score)))
    method, data = build(row), on(device, larger(federation()))
    compiled, replays = replaying(row)
    found = run(method, data, rounds=5, compiled=compiled)
    assert not replays.given_up
    assert {key[0] for key in replays._programs} == {"due", ("select", 9)}  # type: ignore[index]
    assert found.private["subset.refreshes"].tolist() == [5, 5, 5]
    assert_same(found, run(method, data, rounds=5), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_clients_that_keep_all_points_or_are_not_due_are_not_replayed(device: str) -> None:
    row = Row("coreset-pfedbayes", (("fraction", 0.3), ("refresh_every", 2 * WORK.steps)))
    for data in (federation(), larger(federation())):
        method, here = build(row), on(device, data)
        compiled, replays = replaying(row)
        cohorts = [[0, 1]]  # a part of them
        for who in (None, cohorts):
            found = run(method, here, rounds=4, compiled=compiled, cohorts=who)
            assert not replays.given_up
            expected = run(method, here, rounds=4, cohorts=who)
            assert_same(found, expected, rtol=1e-8, atol=1e-8)


def streams(round_: int, device: str = "cpu") -> Streams:
    return Streams([Who(0, client) for client in range(3)], round_, device)


def drawing(given: Tree, draws: Streams) -> Tree:
    first = draws.normal("a", 2, 5)
    second = draws.uniform("b", 6)
    third = draws.normal("a", 3)
    return {"x": given["x"] + first.sum((1, 2)) * given["y"], "u": second, "n": third}


@pytest.mark.parametrize("device", DEVICES)
def test_a_replay_draws_what_the_function_draws(device: str) -> None:
    replays = Replays()
    fixed = {"y": torch.tensor([1.0, 2.0, 3.0], device=device)}
    for round_ in range(3):
        given = {"x": torch.full((3,), float(round_), device=device)}
        one, other = streams(round_, device), streams(round_, device)
        for _ in range(2):  # the second time further along the streams
            found = {k: v.clone() for k, v in replays("key", drawing, given, fixed, one).items()}
            expected = drawing({**given, **fixed}, other)
            torch.testing.assert_close(found, expected)
    assert len(replays._programs) == 1
    assert not replays.given_up


def test_other_shapes_and_other_fixed_tensors_have_programs_of_their_own() -> None:
    replays = Replays()

    def twice(given: Tree, draws: Streams) -> Tree:
        return {"z": 2 * given["x"] + given["y"]}

    held: list[Tensor] = []
    for size in (2, 3, 3):
        x, y = torch.randn(size), torch.randn(size)
        held.append(y)  # so that the next one lies elsewhere
        found = replays("key", twice, {"x": x}, {"y": y}, streams(0))
        torch.testing.assert_close(found["z"], 2 * x + y)
    assert len(replays._programs) == 3


def test_a_function_that_looks_at_numbers_is_called_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replays = Replays()

    def looks(given: Tree, draws: Streams) -> Tree:
        drawn = draws.normal("a", 1)
        return {"z": given["x"][: int(given["x"].sum())] + drawn.sum()}

    for _ in range(2):
        found = replays("key", looks, {"x": torch.ones(3)}, {}, streams(0))
        assert found["z"].equal(1 + streams(0).normal("a", 1).sum().expand(3))
    assert replays.given_up
    assert capsys.readouterr().err.count("could not be recorded") == 1


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.3, 1 / 3, 0.5, 1.0])
def test_sizes_on_the_host_are_those_on_the_device(fraction: float) -> None:
    sizes = list(range(400))
    on_device = subset_size(torch.tensor(sizes), fraction).minimum(torch.tensor(sizes))
    assert subset_sizes(sizes, fraction) == on_device.tolist()
