"""Functions of a given smoothness on a curved surface: what `data/hoelder.py` promises of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from commands import corefed
from scipy.integrate import quad

from corefed.base.errors import UserError
from corefed.data import datasets, hoelder, partition
from corefed.data.hoelder import HoelderSetting, Scales, Surface
from corefed.settings.config import resolve
from corefed.training import rounds


def function(beta: float, dimension: int, seed: int) -> Scales:
    return Scales.draw(beta, dimension, np.random.default_rng(seed))


def test_the_first_points_are_the_same_whatever_their_number() -> None:
    """So errors at several n are of the same functions and points."""
    few, many = (hoelder.draw(HoelderSetting(points=n, test=7), 3, seed=2) for n in (5, 50))
    one, more = hoelder.draw(HoelderSetting(points=5, test=7), 1, seed=2), few
    for field in ("x", "y", "signal"):
        small, large = getattr(few, field), getattr(many, field)
        for client in range(3):
            mine, theirs = small[few.groups == client], large[many.groups == client]
            assert torch.equal(mine[:5], theirs[:5])
            assert torch.equal(mine[-7:], theirs[-7:])
        assert torch.equal(getattr(one, field), getattr(more, field)[:12])
    assert few.held_out.view(3, 12).sum(-1).tolist() == [7, 7, 7]


def test_clients_and_seeds_differ_and_share() -> None:
    setting = HoelderSetting(points=400, test=2, own=0.0)
    shared = hoelder.draw(setting, 2, seed=0)
    x, signal = shared.x.view(2, -1, 10), shared.signal.view(2, -1)
    assert not torch.equal(x[0], x[1])
    # With nothing of their own both have one function: signals at the nearest points agree.
    gap, near = torch.cdist(x[0], x[1]).min(1)
    close = gap < 0.1
    assert int(close.sum()) > 50
    off = (signal[0] - signal[1][near])[close].abs().mean()
    mixed = (signal[0] - signal[1])[close].abs().mean()
    assert off < 0.3 * mixed
    own = hoelder.draw(setting._replace(own=1.0), 2, seed=0).signal.view(2, -1)
    assert (own[0] - own[1][near])[close].abs().mean() > 0.5 * mixed
    assert not torch.equal(hoelder.draw(setting, 1, seed=1).x, shared.x[:402])


def test_noise_is_as_said() -> None:
    setting = HoelderSetting(points=3000, test=1000, noise=0.25)
    drawn = hoelder.draw(setting, 2, seed=5)
    off = (drawn.y - drawn.signal).double().view(-1)
    n = len(off)
    assert abs(off.mean()) < 4 * 0.25 / n**0.5
    assert abs(off.std() - 0.25) < 4 * 0.25 / (2 * n) ** 0.5
    assert drawn.signal.abs().max() <= drawn.bound


@pytest.mark.parametrize(("beta", "dimension"), [(0.5, 1), (1.0, 2), (2.0, 3)])
def test_variance_is_one_over_functions(beta: float, dimension: int) -> None:
    """At a random u: the mean square over functions, within its Monte-Carlo error."""
    rng = np.random.default_rng(0)
    u = rng.uniform(0, 1, (40, dimension))
    values = np.array([(function(beta, dimension, seed).at(u) ** 2).mean() for seed in range(100)])
    assert abs(values.mean() - 1) < 4 * values.std(ddof=1) / 10
    assert np.abs(function(beta, dimension, 0).at(u)).max() <= function(beta, dimension, 0).bound


def test_the_constant_of_one_coordinate() -> None:
    def square(t: float) -> float:
        step = float(hoelder._step(np.array(t)))
        return step**2 + (1 - step) ** 2

    assert pytest.approx(quad(square, 0, 1)[0], abs=1e-12) == hoelder.MEAN_SQUARE


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.8])
def test_functions_are_exactly_as_smooth_as_said(beta: float) -> None:
    """Increments over h have the size h^beta: neither larger (Hoelder) nor smaller.

    Over 30 functions the slope has a standard error of 0.015; that scales end at 1 and 1/1024 moves
    it by up to 0.06.
    """
    sizes = np.array([2.0**-j for j in range(3, 8)])
    u = np.random.default_rng(1).uniform(0, 0.8, (200, 1))
    functions = [function(beta, 1, seed) for seed in range(30)]
    moved = [np.mean([np.mean((f.at(u + h) - f.at(u)) ** 2) for f in functions]) for h in sizes]
    slope = np.polyfit(np.log(sizes), np.log(moved), 1)[0] / 2
    assert abs(slope - beta) < 0.06 + 4 * 0.015

    # |f(u + h) - f(u)| <= H h^beta: each scale moves by min(2, L ratio^j h) of its amplitude.
    f = functions[0]
    lipschitz = 2 * 1.875  # two signs apart, the steepest slope of the step
    sides = np.array(hoelder.sides(1))
    for h in sizes:
        bound = float((f.amplitudes * np.minimum(2.0, lipschitz * sides * h)).sum())
        assert np.abs(f.at(u + h) - f.at(u)).max() <= bound
        assert bound <= 12 * f.amplitudes[0] / (1 - 1.5**-beta) * h**beta / (1 - 1.5 ** (beta - 1))


def test_a_smoother_function_has_a_derivative() -> None:
    """beta = 1.6: first derivatives exist and move as h^0.6."""
    f, step = function(1.6, 1, 0), 1e-6
    u = np.random.default_rng(2).uniform(0.1, 0.8, (400, 1))

    def slope(at: np.ndarray) -> np.ndarray:
        return (f.at(at + step) - f.at(at - step)) / (2 * step)

    sizes = np.array([2.0**-j for j in range(3, 8)])
    moved = [float(np.mean((slope(u + h) - slope(u)) ** 2) ** 0.5) for h in sizes]
    assert abs(np.polyfit(np.log(sizes), np.log(moved), 1)[0] - 0.6) < 0.15


@pytest.mark.parametrize("dimension", [1, 2, 4])
def test_the_surface_has_its_dimension(dimension: int) -> None:
    """Pairs within r are r^dimension in number (correlation dimension), inside R^10."""
    surface = Surface.draw(dimension, 10, np.random.default_rng(0))
    u = np.random.default_rng(1).uniform(0, 1, (3000, dimension))
    x = torch.from_numpy(surface.at(u))
    assert x.shape == (3000, 10)
    assert torch.linalg.matrix_rank(x - x.mean(0)) == 10  # it is curved into all directions
    apart = torch.pdist(x).numpy()
    near = np.quantile(apart, [0.0005, 0.005])
    estimate = math.log(10) / math.log(near[1] / near[0])
    assert abs(estimate - dimension) < 0.15 * dimension


def test_names_say_the_setting_and_are_read_back() -> None:
    setting = HoelderSetting(beta=0.5, dimension=1, points=250, noise=0.3)
    assert hoelder.name_of(setting) == "synthetic-hoelder:beta=0.5,dimension=1,points=250"
    assert hoelder.parse(hoelder.name_of(setting)) == setting
    assert hoelder.parse("synthetic-hoelder") == HoelderSetting()
    assert hoelder.name_of(HoelderSetting()) == "synthetic-hoelder"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("synthetic-hoelder:smooth=1", "no setting 'smooth'"),
        ("synthetic-hoelder:beta=rough", "beta is 'rough'"),
        ("synthetic-hoelder:points=1.5", "must be a whole number"),
        ("synthetic-hoelder:beta=0", "above 0 and at most 3"),
        ("synthetic-hoelder:beta=nan", "above 0 and at most 3"),
        ("synthetic-hoelder:dimension=11", "from 1 to ambient, 10"),
        ("synthetic-hoelder:dimension=9,ambient=20", "at most 8"),
        ("synthetic-hoelder:points=1", "at least 2"),
        ("synthetic-hoelder:noise=0", "positive"),
        ("synthetic-hoelder:noise=inf", "positive"),
        ("synthetic-hoelder:own=2", "from 0 to 1"),
    ],
)
def test_a_wrong_setting_is_one_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        datasets.load(name, clients=2)


def test_too_many_points_are_refused_before_they_are_drawn() -> None:
    with pytest.raises(UserError, match="too many to draw"):
        hoelder.draw(HoelderSetting(points=1 << 40), 1, 0)
    with pytest.raises(UserError, match="at least 1 client"):
        hoelder.draw(HoelderSetting(), 0, 0)


def test_a_run_keeps_train_and_test_apart() -> None:
    name = "synthetic-hoelder:points=30,test=11"
    dataset = datasets.load(name, clients=3, seed=1)
    splits = partition.split(partition.default_for(name), dataset, 3, 1)
    assert [(len(one.train), len(one.test)) for one in splits] == [(30, 11)] * 3
    flags = {"data": name, "clients": 3, "rounds": 2, "seeds": (0, 1), "hidden": (8,), "noise": 0.3}
    trained = rounds.train(resolve(flags={"method": "pfedbayes", **flags}))
    assert trained.setup.data.test.weight.sum(-1).tolist() == [11.0] * 6
    assert 0 < trained.summary["metrics"]["personal_rmse"]["mean"] < 2


def test_the_command_line_shows_it() -> None:
    done = corefed("datasets", "--show", "synthetic-hoelder:points=30", "--clients", "2")
    assert done.code == 0 and "30" in done.out
    wrong = corefed("datasets", "--show", "synthetic-hoelder:points=x")
    assert wrong.code == 2 and "whole number" in wrong.err
