"""Simulated devices: epochs, speeds, deadlines, and what late clients do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from corefed import UserError, resolve, train
from corefed.methods import registry
from corefed.models.likelihood import Categorical
from corefed.models.network import PIXELS, mlp
from corefed.settings import devices as settings
from corefed.training import candidates
from corefed.training.devices import Devices, draw_speeds, plan
from corefed.training.rounds import Result

SMALL: dict[str, Any] = {
    "method": "pfedbayes", "clients": 4, "hidden": "8", "keep": 0.2, "partition": "quantity:2",
    "device": "cpu", "rounds": 3, "evaluate_every": 3, "batch_size": 10, "local_epochs": 2,
    "checkpoint_every": 0, "speeds": "50,100,100,400", "evaluate_draws": 2, "seeds": "0,1",
}  # fmt: skip
CORESET: dict[str, Any] = {
    "fraction": 1.0, "local_epochs": 6, "deadline": 2.0, "late": "fit", "refresh_every": 5,
    "draws": 8, "feature_draws": 1,
}  # fmt: skip
"""Some of the late clients have time for a selection, some have not."""
MODEL = mlp((64, 8, 10), Categorical(10), PIXELS)


def devices(sizes: list[int], **changes: Any) -> Devices:
    """The devices of clients with so many points."""
    flags = {"clients": len(sizes), "batch_size": 10, "local_epochs": 2, "speeds": "10", **changes}
    wanted = resolve(flags={"method": "pfedbayes", **flags})
    method = registry.build(wanted.run.method, wanted.settings, MODEL)
    found = plan(wanted.run, wanted.settings, method, sizes)
    assert found is not None
    return found


def fit(**changes: Any) -> tuple[Result, list[dict[str, Any]]]:
    lines: list[dict[str, Any]] = []
    return train(resolve(flags=SMALL | changes), on_round=lines.append), lines


def test_speeds_are_those_of_the_seed_and_of_no_other_client() -> None:
    for text in ("uniform:50,100", "lognormal:50,1"):
        assert draw_speeds(text, 3, 5) == draw_speeds(text, 3, 9)[:5] != draw_speeds(text, 4, 5)
    assert draw_speeds("7", 0, 3) == [7.0] * 3 and draw_speeds("1,2,4", 9, 3) == [1.0, 2.0, 4.0]
    logs = torch.tensor(draw_speeds("lognormal:50,0.5", 0, 4000)).log()
    assert abs(float(logs.mean()) - math.log(50)) < 4 * 0.5 / math.sqrt(4000)
    assert abs(float(logs.std()) - 0.5) < 4 * 0.5 / math.sqrt(2 * 4000)
    flat = torch.tensor(draw_speeds("uniform:50,100", 0, 4000))
    assert abs(float(flat.mean()) - 75) < 4 * 50 / math.sqrt(12 * 4000)
    assert float(flat.min()) >= 50 and float(flat.max()) <= 100


def test_steps_are_epochs_over_what_a_client_trains_on() -> None:
    found = devices([5, 10, 11, 95])
    assert [task.steps for task in found.tasks] == [2, 2, 4, 20]
    assert found.needed == [10, 20, 40, 200] and not any(found.late)
    part = devices([5, 10, 11, 95], method="random-subset", fraction=0.5)
    assert [task.steps for task in part.tasks] == [2, 2, 2, 10]
    assert [task.points for task in part.tasks] == [3, 5, 6, 48]


def test_late_clients_do_what_fits() -> None:
    late = devices([10, 95], deadline=5)  # 50 passes for 20 and 200
    assert late.late == [False, True] and [task.steps for task in late.tasks] == [2, 5]
    fits = devices([10, 95], deadline=5, method="random-subset", fraction=1.0, late="fit")
    assert [task[:2] for task in fits.tasks] == [(2, 10), (5, 25)]  # two epochs of 25 points
    less = devices([10, 95], deadline=5, method="random-subset", fraction=0.1, late="fit")
    assert [task[:2] for task in less.tasks] == [(2, 1), (2, 10)] and not any(less.late)
    drop = devices([10, 95, 90], deadline=5, late="drop")
    assert drop.in_time([0, 1, 2]) == [0] and drop.in_time([1, 2]) == [2]  # one is waited for


def test_selection_is_part_of_the_time() -> None:
    kind = {"method": "coreset-pfedbayes", "fraction": 1.0, "late": "fit", "local_epochs": 10}
    kind |= {"selector": "loss"}  # one forward pass per point: 30 passes of 90 points
    quick, tight, slow = (devices([90], deadline=d, **kind).tasks[0] for d in (30, 3.5, 2))
    assert quick[:2] == (30, 30) and quick.passes == 300  # ten epochs of 30 points
    assert tight[:2] == (10, 3) and tight.passes == 35  # a selection, and a step after it
    assert slow[:2] == (2, 90) and math.isinf(slow.passes)  # no time to select: some steps on all


@pytest.mark.parametrize(
    ("method", "late"),
    [("pfedbayes", "partial"), ("random-subset", "fit"), ("coreset-pfedbayes", "fit")],
)
def test_no_round_is_longer_than_its_deadline(method: str, late: str) -> None:
    own = {} if method == "pfedbayes" else {"fraction": 1.0}
    own |= CORESET if "core" in method else {}
    result, lines = fit(**{"method": method, "late": late, "deadline": 0.6, **own})
    clients = result.setup.clients
    assert clients.devices is not None and 0 < sum(clients.devices.late) < 8
    seconds = [x for line in lines for x in line["simulated_seconds"]]
    assert max(seconds) <= result.setup.experiment.run.deadline * (1 + 1e-9)
    assert result.summary["simulated"]["seconds"]["mean"] == pytest.approx(sum(seconds) / 2)
    if "core" in method:
        chosen = clients.report()
        mine = [task.points for task in clients.devices.tasks]
        assert any(math.isfinite(task.passes) for task in clients.devices.tasks)
        assert chosen["size"].tolist() == mine and float(chosen["refreshes"].max()) > 1
        spent = sum(sum(line["selection_examples"]) for line in lines)
        assert spent > 0


def test_time_without_a_deadline_is_that_of_the_slowest() -> None:
    result, lines = fit(rounds=1)
    sizes, speeds = result.setup.clients.points, [50, 100, 100, 400] * 2
    needed = [2 * math.ceil(n / 10) * min(10, n) / s for n, s in zip(sizes, speeds, strict=True)]
    assert lines[0]["simulated_seconds"] == pytest.approx([max(needed[:4]), max(needed[4:])])
    assert lines[0]["late"] == [0, 0] and len(set(sizes)) > 2


@pytest.mark.parametrize("method", ["pfedbayes", "coreset-pfedbayes"])
def test_clients_that_stop_at_different_steps_are_as_if_alone(method: str) -> None:
    own = CORESET if "core" in method else {"deadline": 0.6}
    flags = {"method": method, "rounds": 2, "evaluate_every": 2, **own}
    stacked, alone = (fit(runtime=r, **flags)[0] for r in ("vmap", "loop"))
    for one, other in zip(stacked.servers, alone.servers, strict=True):
        for name, value in one.items():
            assert torch.allclose(value, other[name], rtol=1e-3, atol=1e-4)
    first, second = (each.setup.clients.private for each in (stacked, alone))
    assert all(torch.allclose(v, second[k], atol=1e-3, equal_nan=True) for k, v in first.items())


def test_speeds_alone_change_no_result() -> None:
    plain, timed = (fit(local_epochs=0, local_steps=3, speeds=s)[0] for s in ("", "10"))
    assert "simulated" in timed.summary and "simulated" not in plain.summary
    assert plain.summary["metrics"] == timed.summary["metrics"]


def test_dropped_clients_send_nothing() -> None:
    result, lines = fit(deadline=0.6, late="drop", rounds=1, evaluate_every=1)
    late = result.setup.clients.devices.late  # type: ignore[union-attr]
    assert lines[0]["late"] == [sum(late[:4]), sum(late[4:])]
    everybody = fit(rounds=1, evaluate_every=1)[1][0]["bytes_up"]
    sent = [4 - n for n in lines[0]["late"]]
    assert lines[0]["bytes_up"] == [b * k // 4 for b, k in zip(everybody, sent, strict=True)]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"speeds": "0"}, "speeds is '0'; every speed must be above 0"),
        ({"speeds": "10,-1"}, "every speed must be above 0"),
        ({"speeds": "lognormal:0,1"}, "every speed must be above 0"),
        ({"speeds": "uniform:5,1"}, "the first number must be the smaller one"),
        ({"speeds": "fast"}, "speeds is 'fast'; write 500,"),
        ({"speeds": "uniform:1"}, "write 500,"),
        ({"speeds": "nan"}, "write 500,"),
        ({"deadline": -1}, "deadline is -1.0; it must be 0 or more"),
        ({"late": "never"}, "late .* is 'never'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(flags={"speeds": "10", **flags})


def test_a_simulated_deadline_takes_speeds(tmp_path: Path) -> None:
    wanted = resolve(flags={"deadline": 3})  # on machines it has a meaning without
    with pytest.raises(UserError, match="deadline is 3, in simulated seconds; these take speeds"):
        train(wanted, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"deadline": 0.5}, "client 1 of speed 10 cannot finish one minibatch: that takes 1 s"),
        ({"deadline": 0.5, "late": "drop"}, "no client of seed 0 takes part.* needs 1 s"),
        ({"deadline": 5, "late": "fit"}, "late=fit takes a method that trains on a part"),
        ({"speeds": "1,2,3"}, "speeds has 3 numbers and the run 2 clients"),
        ({"method": "submodular-logdet"}, "does not count what selecting its points takes"),
    ],
)
def test_devices_that_cannot_be_are_refused(flags: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        devices([5, 95], **flags)


def test_where_devices_are_not_simulated_yet() -> None:
    wanted = resolve(flags={"local_epochs": 2, "speeds": "5", "validation": 0.2})
    with pytest.raises(UserError, match=r"A search cannot simulate .*local_epochs and speeds"):
        candidates.plan(wanted)
    settings.refuse(resolve().run, "A search")
    with pytest.raises(UserError, match="compile=on is for clients that take the same number"):
        fit(compile="on")
