"""When a coreset is reselected, what that costs, and what is kept of it between rounds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL, corefed
from rounding import RELATIVE
from torch import Tensor

from corefed import selectors
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.types import ClientData, Tree, Work
from corefed.bayes import gaussian
from corefed.methods import coreset_pfedbayes
from corefed.methods.coreset_pfedbayes import Config
from corefed.models.likelihood import Categorical
from corefed.models.network import mlp
from corefed.selectors import matching, potentials, quality, renewal, sketches
from corefed.selectors.settings import Renewal, Selection
from corefed.selectors.subset import subset_size
from corefed.settings.config import resolve
from corefed.settings.fields import from_flat
from corefed.training import rounds
from corefed.training.local import LocalClients

SIZES = (40, 25, 33)
MODEL = mlp((6, 8, 3), Categorical(3))  # 56 weights below the last layer, 27 in it
CHOICE = 2 + 64 * 27 / 83
"""Forward passes of a point that the default selector takes here."""
CHECK = 8
"""And a look at its error, at 8 draws of all layers."""


class Federation:
    """Three clients that train with CoreSet-PFedBayes, round by round."""

    def __init__(
        self, work: Work, *, sizes: tuple[int, ...] = SIZES, chunk: int = 3, **config: Any
    ):
        draws = torch.Generator().manual_seed(0)
        n = max(sizes)
        x = torch.randn(len(sizes), n, 6, generator=draws)
        y = (x @ torch.randn(6, 3, generator=draws)).argmax(-1)
        weight = (torch.arange(n) < torch.tensor(sizes).unsqueeze(-1)).float()
        slow = {"eta_1": 0.001, "eta_2": 0.001, "initial_rho": -3.0}
        self.config = from_flat(Config, {"fraction": 0.3, **slow, **config})
        self.method = coreset_pfedbayes.build(self.config, MODEL)
        self.server = self.method.init_server(Streams([Who(0, SERVER)], 0))
        self.data = ClientData(x, y, weight)
        self.clients = LocalClients(self.method, self.data, [0], [self.server], work, chunk)
        self.round = 0

    @property
    def private(self) -> Tree:
        return self.clients.private

    def train(self, many: int = 1) -> Federation:
        everyone = range(len(self.data.weight))
        for _ in range(many):
            updates, _, _ = self.clients.train(self.round, [self.server], [everyone])
            self.server = self.method.aggregate(self.server, updates[0])
            self.round += 1
        return self

    @property
    def refreshes(self) -> list[int]:
        return [int(r) for r in self.private["subset.refreshes"].tolist()]


# How often


PASSES = 2 + 64 * 1010 / 79510
"""Of a network 784-100-10 with the default selector."""


def interval(n: Tensor, work: Work, draws: int, **changed: Any) -> list[int]:
    return renewal.interval(Renewal(**changed), PASSES, n, work, draws).tolist()


def test_the_interval_follows_the_budget() -> None:
    """2.813 n / (0.5 * 3 * 100 K) to the nearest 20: 18.75 and 84.4 for K = 1."""
    n, work = torch.tensor([1000, 4500, 1]), Work(20, 100)
    assert interval(n, work, 1) == [20, 80, 20]
    assert interval(n, work, 1, budget=0.25) == [40, 160, 20]
    assert interval(n, work, 1, budget=0.125) == [80, 340, 20]
    assert interval(n, work, 2) == [20, 40, 20]
    assert interval(n, Work(20, 50), 1) == [40, 160, 20]
    assert interval(n, work, 1, refresh_every=37) == [37] * 3
    model = mlp((784, 100, 10), Categorical(10))
    assert renewal.selection_cost("calibrated", model, Selection()) == pytest.approx(PASSES)


def test_choosing_costs_the_budget_as_a_part_of_training_on_all_data() -> None:
    """Where the interval is not rounded: n a multiple of what makes 20 steps."""
    n = torch.tensor([1000, 2000, 5000])
    every = renewal.interval(Renewal(), 3.0, n, Work(20, 100), 1)
    assert torch.equal(3.0 * n / (every * renewal.STEP * 100), torch.full((3,), 0.5))


def test_how_often_the_question_is_asked() -> None:
    assert renewal.question_interval(Renewal()) == 20
    assert renewal.question_interval(Renewal(refresh_every=150)) == 150
    assert renewal.question_interval(Renewal(refresh_every=150, moved=1.0)) == 20
    assert renewal.question_interval(Renewal(refresh_every=10, moved=1.0)) == 10
    assert renewal.question_interval(Renewal(refresh_every=150, stale=0.5, check_every=50)) == 50
    assert renewal.question_interval(Renewal(check_every=5)) == 20  # nobody looks between choices
    assert renewal.question_interval(Renewal(stale=0.5, check_every=5)) == 5


def test_what_is_only_recorded_costs_a_twentieth_of_training_at_most() -> None:
    """32 passes of n points, over three of 100 points a step; a limit on staleness has its own."""
    n = torch.tensor([100, 375, 1000, 4500])
    found = renewal.check_interval(Renewal(), 32, n, Work(20, 100), 1)
    assert found.tolist() == [220, 800, 2140, 9600]
    assert (32 * n / (found * 300)).tolist() == pytest.approx([0.05] * 4, rel=0.04)
    strict = renewal.check_interval(Renewal(stale=0.5), 32, n, Work(20, 100), 1)
    assert strict.tolist() == [200] * 4


def test_movement_by_hand() -> None:
    """sigma = 0.5; means moved by (1, 0) and (0.1, 0.1): 2 / sqrt 2 and 0.2 of it on average."""
    rho = gaussian.rho_of(torch.tensor(0.5))
    before = torch.stack([torch.zeros(2, 2), rho.expand(2, 2)], 1)
    q = before.clone()
    q[:, 0] = torch.tensor([[1.0, 0.0], [0.1, -0.1]])
    q[:, 1] = 7.0  # sigma now does not enter
    state = {"before": before, "age": torch.zeros(2)}

    def moved(limit: float) -> list[bool]:
        return renewal.has_moved(Renewal(moved=limit), state, q).tolist()

    assert moved(0.19) == [True, True] and moved(0.21) == [True, False]
    assert moved(1.41) == [True, False] and moved(1.42) == [False, False]
    assert renewal.has_moved(Renewal(), {"age": torch.zeros(2)}, q).tolist() == [False, False]


@pytest.mark.parametrize(("work", "many"), [(Work(240, 10), 1), (Work(20, 10), 12)])
def test_choices_by_budget_inside_a_round_and_across_rounds(work: Work, many: int) -> None:
    """22.8 n / 15 = 61, 38 and 50.2 to the nearest 20: 60, 40 and 60 of 240 steps."""
    federation = Federation(work).train(many)
    assert federation.refreshes == [4, 6, 4]


def test_choices_where_rounds_end_before_a_coreset_is_due() -> None:
    """Rounds of 7 steps and a bound of 20: asked at the start of each, due at 0, 21, 42, 63."""
    federation = Federation(Work(7, 10), refresh_every=20).train(9)
    assert federation.refreshes == [3] * 3
    assert federation.train().refreshes == [4] * 3


def test_a_posterior_that_moved_has_a_new_coreset_before_its_time() -> None:
    still: Any = {"refresh_every": 10**6, "moved": 1.0, "eta_1": 1e-6, "eta_2": 1e-6}
    federation = Federation(Work(20, 10), **still).train(3)
    assert federation.refreshes == [1, 1, 1]
    q = federation.private["q"]
    q[1, 0] += 2 * gaussian.sigma(q[1, 1])  # one client, by two of its sigmas
    assert federation.train(2).refreshes == [1, 2, 1]  # once, and then it is where it was chosen
    assert federation.private["subset.age"].tolist() == [100] * 3  # the schedule stays
    restless = Federation(Work(20, 10), refresh_every=10**6, moved=1e-9).train(3)
    assert restless.refreshes == [3, 3, 3]


def test_where_the_path_is_matched_the_last_choice_is_kept() -> None:
    federation = Federation(Work(20, 10), refresh_every=40, around="path")
    start = federation.private["q"].clone()
    assert torch.equal(federation.train(2).private["subset.before"], start)
    chosen_at = federation.private["q"].clone()
    assert torch.equal(federation.train().private["subset.before"], chosen_at)
    assert "subset.before" not in Federation(Work(20, 10)).private


# What it costs, and how good it is


def test_what_was_looked_at_is_counted() -> None:
    """By hand: 22.8 passes of each point a choice, 8 a look; a look at the first choice, and at
    that which follows 200 steps: of the second client alone, at its sixth."""
    federation = Federation(Work(20, 10), check_draws=CHECK).train()
    n = torch.tensor(SIZES).float()
    torch.testing.assert_close(federation.private["subset.looked"], (CHOICE + CHECK) * n)
    federation.train(11)
    times, looks = torch.tensor([4.0, 6.0, 4.0]), torch.tensor([1.0, 2.0, 1.0])
    torch.testing.assert_close(
        federation.private["subset.looked"], (CHOICE * times + CHECK * looks) * n
    )
    settings = federation.config.selection
    assert renewal.selection_cost("calibrated", MODEL, settings) == pytest.approx(CHOICE)
    assert sketches.passes(MODEL, settings) == pytest.approx(CHOICE)
    assert [renewal.selection_cost(name, MODEL, settings) for name in ("craig", "random")] == [
        1.0,
        0.0,
    ]


def test_the_error_is_looked_at_first_and_every_so_often() -> None:
    """A choice every 20 steps, a look every 60: the figure changes in rounds 0, 3, 6."""
    federation = Federation(Work(20, 10), refresh_every=20, check_every=60, check_draws=2)
    assert federation.private["subset.held_out_error"].isnan().all()
    seen: list[Tensor] = []
    for _ in range(7):
        seen.append(federation.train().private["subset.held_out_error"].clone())
    assert all(bool(figure.isfinite().all() and (figure > 0).all()) for figure in seen)
    changes = [t for t in range(1, 7) if not torch.equal(seen[t], seen[t - 1])]
    assert changes == [3, 6]
    assert federation.refreshes == [7] * 3


def test_the_recorded_error_is_that_of_the_coreset_on_fresh_draws() -> None:
    federation = Federation(Work(1, 10), chunk=1)
    q = federation.private["q"].clone()
    federation.train()
    for row, size in enumerate(SIZES):
        own = ClientData(*(field[row : row + 1, :size] for field in federation.data))
        w = federation.private["subset.weight"][row : row + 1, :size]
        places = potentials.widen(q[row : row + 1], (1.0,), "check")
        streams = Streams([Who(0, row)], 0)
        g = potentials.stack(MODEL, places, own, 32, 32, streams, scaled=False)
        k = subset_size(own.size, 0.3)
        error, uniform = quality.judge(g, w, k, own.weight > 0)
        assert float(federation.private["subset.held_out_error"][row]) == pytest.approx(
            float(error)
        )
        ratio = float(federation.private["subset.over_uniform"][row])
        assert ratio == pytest.approx(float(error / uniform))
        settings = (federation.config.selection, federation.config.renewal)
        streams, due = Streams([Who(0, row)], 0), torch.tensor([True])
        again = quality.measure(MODEL, q[row : row + 1], w, own, k, streams, settings, due)
        assert float(again.error) == pytest.approx(float(error))


def test_a_client_whose_coreset_is_all_its_data_is_never_looked_at() -> None:
    federation = Federation(Work(20, 10), sizes=(40, 1, 3), fraction=0.7, stale=0.5, check_every=5)
    private = federation.train(3).private
    weight = private["subset.weight"]
    assert torch.equal(weight[1:], federation.data.weight[1:])  # 0.7 of 3 is 3 points
    for name in ("refreshes", "looked", "held_out_error", "over_uniform"):
        first, *others = private[f"subset.{name}"].tolist()
        assert others == [0, 0] and first > 0


# Every selector, and both runtimes


@pytest.mark.parametrize("name", list(selectors.SELECTORS))
def test_every_selector_trains(name: str) -> None:
    federation = Federation(
        Work(21, 10), selector=name, refresh_every=10, check_draws=CHECK
    ).train()
    private = federation.private
    assert federation.refreshes == [3] * 3
    size = (private["subset.weight"] > 0).sum(-1)
    assert (size >= 1).all() and (size <= subset_size(federation.data.size, 0.3)).all()
    assert private["q"].isfinite().all()
    settings = federation.config.selection
    if name == "matching":  # max(2k, 200) draws
        settings = replace(settings, draws=matching.draws_for(12, 40, 0, 2048))
    if name == "seen":  # 2 % of training, and its error is not measured; test_seen.py
        trained = 3 * 20 * subset_size(federation.data.size, 0.3).clamp_max(10)  # forward passes
        assert (private["subset.looked"] <= 0.02 * trained).all()
        return
    passes = 3 * renewal.selection_cost(name, MODEL, settings) + CHECK
    torch.testing.assert_close(private["subset.looked"], passes * torch.tensor(SIZES).float())


def test_clients_alone_and_together_choose_alike() -> None:
    """Sums over stacked clients add up in another order, and leave roundings: of the first choice
    few. Training adds its own; the points taken are the same after 240 steps."""
    together, alone = Federation(Work(20, 10)).train(), Federation(Work(20, 10), chunk=1).train()
    for name in ("weight", "owed", "held_out_error", "looked", "age", "refreshes"):
        mine, theirs = (each.private[f"subset.{name}"] for each in (together, alone))
        torch.testing.assert_close(mine, theirs, rtol=RELATIVE, atol=0)
    one, other = together.train(11).private, alone.train(11).private
    assert torch.equal(one["subset.weight"] > 0, other["subset.weight"] > 0)
    torch.testing.assert_close(one["subset.weight"], other["subset.weight"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(one["q"], other["q"], rtol=1e-4, atol=1e-5)


# As a user meets it


def test_what_was_looked_at_is_recorded(tmp_path: Path) -> None:
    flags = {"method": "coreset-pfedbayes", "clients": 3, "rounds": 3, "local_steps": 20,
             "hidden": "4", "evaluate_draws": 2, "refresh_every": 20, "seeds": "0,1"}  # fmt: skip
    trained = rounds.train(resolve(flags=flags), tmp_path / "run")
    lines = [json.loads(s) for s in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    looked = trained.setup.clients.private["subset.looked"].double().view(2, -1).sum(-1)
    for seed in range(2):
        each = [line["selection_examples"][seed] for line in lines]
        assert sum(each) == pytest.approx(float(looked[seed]))
        assert each[0] > each[1] == pytest.approx(each[2])  # the first has the look beside it
    assert trained.summary["cost"]["selection_examples"] == pytest.approx(float(looked.sum()))
    assert "selection_examples" not in rounds.train(
        resolve(flags={"method": "pfedbayes", "clients": 3, "rounds": 1, "hidden": "4",
                       "local_steps": 1, "evaluate_draws": 2})
    ).summary["cost"]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("selector=calibrate",), ("selector", "calibrate")),
        (("floor=0",), ("floor is 0", "above 0")),
        (("bound=0.5",), ("bound is 0.5", "at least 1")),
        (("pool=0",), ("pool is 0", "above 0")),
        (("budget=0", "refresh_every=0"), ("budget", "refresh_every")),
        (("budget=-1",), ("budget is -1", "0 or more")),
        (("widths=0",), ("widths",)),
        (("around=prior",), ("around", "posterior")),
        (("check_draws=1",), ("check_draws is 1", "at least 2")),
        (("preset=paper", "zeta=0"), ("zeta is 0", "kl_weight=0")),
    ],
)
def test_settings_that_cannot_be(
    tmp_path: Path, settings: tuple[str, ...], words: tuple[str, ...]
) -> None:
    out = tmp_path / "run"
    given = [f"--set={setting}" for setting in settings]
    result = corefed("run", *SMALL, "--method=coreset-pfedbayes", *given, "--out", out)
    assert result.code == 2 and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    assert all(word in result.err for word in words), result.err
    assert not out.exists()
