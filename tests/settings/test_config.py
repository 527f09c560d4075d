"""Layers, parsing, ranges, and the round trip through experiment.toml."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corefed.base.errors import UserError
from corefed.base.settings import Positive
from corefed.coreset.solvers import SOLVERS
from corefed.methods import registry
from corefed.selectors import SELECTORS
from corefed.selectors.settings import Selection
from corefed.settings import config
from corefed.settings.config import differences, fingerprint, resolve, to_dict, to_toml
from corefed.settings.fields import list_settings
from corefed.settings.run import Run
from corefed.settings.values import parse


@dataclass(frozen=True)
class Step:
    """A group of settings."""

    rate: Positive = 0.5
    """A number with a range."""
    halve: bool = False
    """Whether to halve it."""


@dataclass(frozen=True)
class ToyConfig:
    """Settings of a method that exists here only."""

    preset: Literal["fast", "paper"] = "fast"
    """Named values."""
    zeta: float = 1.0
    """A number."""
    tries: int = 1
    """Another."""
    proximal: Positive = 0.1
    """One that has a range."""
    step: Step = field(default_factory=lambda: Step(rate=0.25))
    """A group, with a default of its own."""


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("toy_method")
    module.Config = ToyConfig  # type: ignore[attr-defined]
    module.PRESETS = {"fast": {}, "paper": {"zeta": 10, "rounds": 7}}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_method", module)
    monkeypatch.setitem(registry.METHODS, "toy", registry.Entry("toy_method", "for tests"))
    return module


def test_defaults_are_the_digits() -> None:
    run = resolve().run
    assert (run.method, run.data, run.seeds) == ("coreset-pfedbayes", "digits", (0,))


def test_layers_in_order(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text('method = "pfedbayes"\nrounds = 1\nlocal-steps = 1\nclients = 1\n')
    run = resolve(file, {"local_steps": 2, "clients": 2}, ["clients=3"]).run
    assert (run.method, run.rounds, run.local_steps, run.clients) == ("pfedbayes", 1, 2, 3)


def test_preset_lies_over_defaults_and_under_everything_else(
    toy: ModuleType, tmp_path: Path
) -> None:
    plain = resolve(flags={"method": "toy", "preset": "paper"})
    assert (plain.settings.zeta, plain.run.rounds) == (10.0, 7)  # type: ignore[attr-defined]
    file = tmp_path / "e.toml"
    file.write_text('method = "toy"\nzeta = 3\n')
    over = resolve(file, assignments=["preset=paper"])
    assert (over.settings.zeta, over.run.rounds) == (3.0, 7)  # type: ignore[attr-defined]


def test_two_presets_are_refused_rather_than_one_ignored(toy: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(to_toml(resolve(flags={"method": "toy"})))
    with pytest.raises(UserError, match="asks for preset 'fast'"):
        resolve(file, assignments=["preset=paper"])


def test_a_method_may_check_its_own_settings(toy: ModuleType) -> None:
    def refuse(settings: ToyConfig) -> None:
        raise UserError(f"tries is {settings.tries}")

    toy.check = refuse  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="tries is 5"):
        resolve(flags={"method": "toy", "tries": 5})


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        ("3", int, 3),
        (3, int, 3),
        ("0.5", float, 0.5),
        (2, float, 2.0),
        ("true", bool, True),
        (False, bool, False),
        ("100,50", tuple[int, ...], (100, 50)),
        ([100, 50], tuple[int, ...], (100, 50)),
        (7, tuple[int, ...], (7,)),
        ("", tuple[int, ...], ()),
        ("loop", Literal["vmap", "loop"], "loop"),
        ("x", str, "x"),
    ],
)
def test_parse(value: object, kind: Any, expected: object) -> None:
    result = parse("key", value, kind, "--set")
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("3.5", int),
        (3.0, int),
        (True, int),
        ("x", float),
        (True, float),
        ("1", bool),
        (1, bool),
        ("1,x", tuple[int, ...]),
        ("lop", Literal["vmap", "loop"]),
        (1, str),
    ],
)
def test_parse_refuses(value: object, kind: Any) -> None:
    with pytest.raises(UserError, match=r"^key \(--set\) "):
        parse("key", value, kind, "--set")


def test_unknown_keys_name_the_nearest_and_the_place(tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text("local_step = 3\n")
    with pytest.raises(UserError, match=r"'local_step' \(.*e\.toml\).*did you mean 'local_steps'"):
        resolve(file)
    with pytest.raises(UserError, match=r"'zetta' \(--set\).*did you mean 'zeta'"):
        resolve(assignments=["zetta=1"])


def test_a_key_of_another_method_says_whose_it_is() -> None:
    with pytest.raises(UserError, match=r"is a setting of .*random-subset, not of pfedbayes"):
        resolve(flags={"method": "pfedbayes"}, assignments=["redraw_every=5"])
    with pytest.raises(UserError, match="trains on all data and takes no fraction"):
        resolve(flags={"method": "pfedbayes", "fraction": 0.5})


@pytest.mark.parametrize("text", ["zeta", "=3", ""])
def test_an_assignment_needs_key_and_value(text: str) -> None:
    with pytest.raises(UserError, match="is not written key=value"):
        resolve(assignments=[text])


@pytest.mark.parametrize(
    ("method", "text", "words"),
    [
        ("pfedbayes", "lr=0.1", "no setting 'lr' .* did you mean 'eta_1'"),
        ("fedavg", "lr=0.1", "no setting 'lr' .* did you mean 'learning_rate'"),
        ("per-fedavg", "lr=0.1", "did you mean 'alpha'"),
        ("fedavg", "epochs=3", "did you mean 'rounds' or 'local_steps'"),
        ("fedavg", "lr", "--set 'lr' is not written key=value; write --set lr=VALUE"),
    ],
)
def test_what_other_libraries_call_a_setting(method: str, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve(flags={"method": method}, assignments=[text])


@pytest.mark.parametrize("content", ["a = [", "[run]\nrounds = 3\n", "rounds = 1\nrounds = 2\n"])
def test_bad_toml(content: str, tmp_path: Path) -> None:
    file = tmp_path / "e.toml"
    file.write_text(content)
    with pytest.raises(UserError, match=r"e\.toml"):
        resolve(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction", 0.0), ("fraction", 1.5), ("fraction", float("nan")), ("rounds", 0),
        ("local_steps", 0), ("batch_size", 0), ("clients", 0), ("cohort", 11), ("cohort", -1),
        ("eta_1", 0.0), ("eta_2", -1.0), ("zeta", -1.0), ("zeta", float("inf")), ("beta", 0.0),
        ("beta", 1.1), ("monte_carlo", 0), ("seeds", "1,1"), ("seeds", ""), ("seeds", "-1"),
        ("hidden", "0"), ("noise", 0.0), ("memory_mb", 0), ("evaluate_draws", 0),
    ],
)  # fmt: skip
def test_ranges(key: str, value: object) -> None:
    with pytest.raises(UserError, match=f"^{key} is .*; it must be "):
        resolve(flags={"method": "random-subset", key: value})


@pytest.mark.parametrize("method", registry.METHODS)
def test_every_number_has_a_range_and_every_setting_a_text(method: str) -> None:
    own = registry.config_class(method)
    for setting in (*list_settings(Run), *list_settings(own)):
        assert setting.help.endswith("."), setting
        if setting.kind in (int, float, tuple[int, ...], tuple[float, ...]):
            assert setting.range is not None, setting


@pytest.mark.parametrize("method", registry.METHODS)
def test_experiment_toml_gives_the_experiment_back(method: str, tmp_path: Path) -> None:
    experiment = resolve(flags={"method": method}, assignments=["hidden=3,4", "noise=1e-05"])
    file = tmp_path / "e.toml"
    file.write_text(to_toml(experiment))
    assert resolve(file) == experiment


@given(text=st.text(st.characters(exclude_categories=["Cs"])), zeta=st.floats(0, 1e300))
def test_any_text_and_number_survive_toml(
    tmp_path_factory: pytest.TempPathFactory, text: str, zeta: float
) -> None:
    experiment = resolve(flags={"method": "pfedbayes", "data_dir": text, "zeta": zeta})
    file = tmp_path_factory.mktemp("toml") / "e.toml"
    file.write_text(to_toml(experiment), encoding="utf-8", newline="")
    assert resolve(file) == experiment


def test_fingerprint_moves_with_everything_that_changes_results() -> None:
    values = to_dict(resolve())
    for key in values:
        moved = fingerprint({**values, key: "other"}) != fingerprint(values)
        assert moved == (key not in config.RESULTS_UNCHANGED_BY), key
    assert differences(values, {**values, "clients": 3}) == ["clients (10 there, 3 here)"]


def test_run_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        resolve().run.rounds = 3  # type: ignore[misc]


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'pfedbayes'"):
        resolve(flags={"method": "pfedbays"})


def test_settings_of_the_coreset_may_say_so(tmp_path: Path) -> None:
    plain = resolve(assignments=["preset=matching", "solver=giga", "draws=300"])
    grouped = ["preset=matching", "coreset.solver=giga", "coreset.draws=300"]
    assert resolve(assignments=grouped) == plain
    file = tmp_path / "experiment.toml"
    file.write_text('preset = "matching"\n[coreset]\nsolver = "giga"\ndraws = 300\n')
    assert resolve(file) == plain


def test_a_group_may_be_named_or_left_out(toy: ModuleType, tmp_path: Path) -> None:
    plain = resolve(flags={"method": "toy"}, assignments=["rate=2", "halve=true"])
    assert plain.settings == ToyConfig(step=Step(2.0, True))
    named = ["step.rate=2", "step.halve=true"]
    assert resolve(flags={"method": "toy"}, assignments=named) == plain
    file = tmp_path / "e.toml"
    file.write_text('method = "toy"\n[step]\nrate = 2\nhalve = true\n')
    assert resolve(file) == plain
    assert to_dict(plain)["rate"] == 2.0 and "step" not in to_dict(plain)
    file.write_text(to_toml(plain))
    assert "[" not in file.read_text().replace("[]", "").replace("= [", "")
    assert resolve(file) == plain
    assert resolve(flags={"method": "toy"}).settings == ToyConfig()  # rate is the group's 0.25


def test_a_preset_names_settings_of_groups_flatly(toy: ModuleType) -> None:
    toy.PRESETS["paper"]["rate"] = 3
    assert resolve(flags={"method": "toy", "preset": "paper"}).settings.step.rate == 3.0  # type: ignore[attr-defined]


def test_groups_of_the_default_method(tmp_path: Path) -> None:
    plain = resolve(assignments=["draws=32", "budget=0.25"])
    assert resolve(assignments=["selection.draws=32", "renewal.budget=0.25"]) == plain
    file = tmp_path / "e.toml"
    file.write_text("[selection]\ndraws = 32\n[renewal]\nbudget = 0.25\n")
    assert resolve(file) == plain


def test_a_group_is_no_setting() -> None:
    with pytest.raises(UserError, match=r"'renewal' \(--set\) is a group.* NAME is refresh_every"):
        resolve(assignments=["renewal=3"])
    with pytest.raises(UserError, match=r"no setting 'run.rounds'.*; did you mean 'rounds'\?"):
        resolve(assignments=["run.rounds=3"])


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("proximal=-5", "proximal is -5.0; it must be above 0."),
        ("proximal=nan", "proximal is nan; it must be a finite number."),
        ("zeta=inf", "zeta is inf; it must be a finite number."),
        ("rate=0", "rate is 0.0; it must be above 0."),
        ("step.rate=-1", "rate is -1.0; it must be above 0."),
    ],
)
def test_a_new_method_only_declares_its_settings(
    toy: ModuleType, given: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        resolve(flags={"method": "toy"}, assignments=[given])
    assert str(caught.value) == sentence


def test_a_method_has_no_setting_that_every_run_has(toy: ModuleType) -> None:
    @dataclass(frozen=True)
    class Config:
        rounds: int = 1

    toy.Config = Config  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="Run has a field 'rounds' already"):
        resolve(flags={"method": "toy"})


@pytest.mark.parametrize(
    "key", ["coreset.zeta", "coreset.rounds", "coreset.nought", "other.draws", "renewal.draws"]
)
def test_but_not_those_of_anything_else(key: str) -> None:
    with pytest.raises(UserError, match="There is no setting"):
        resolve(assignments=[f"{key}=1"])


@pytest.mark.parametrize(
    ("given", "mended"),
    [
        (["solver=giga"], "preset=matching"),
        (["max_iterations=5"], "preset=matching"),
        (["preset=matching", "floor=0.5"], "selector=calibrated"),
        (["selector=craig", "bound=2"], "selector=calibrated"),
        (["selector=seen", "bound=2"], "selector=calibrated"),
        (["selector=random", "floor=0.5"], "selector=calibrated"),
    ],
)
def test_a_setting_of_another_selector_is_refused(given: list[str], mended: str) -> None:
    with pytest.raises(UserError, match=f"does not use it; leave it out, or take {mended}"):
        resolve(assignments=given)


@pytest.mark.parametrize("name", SELECTORS)
def test_every_selector_can_be_set(name: str) -> None:
    assert resolve(assignments=[f"selector={name}"]).settings.selector == name


def test_a_misspelt_selector_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no selector 'k-center'\. Did you mean 'k-centre'\?"):
        resolve(assignments=["selector=k-center"])


def test_every_solver_but_the_one_that_needs_posteriors_runs_in_a_federation() -> None:
    kind = get_type_hints(Selection)["solver"]
    assert set(get_args(kind)) == set(SOLVERS) - {"sparse-vi"}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("fedavg", ("learning_rate",)), ("fedavg-ft", ("learning_rate", "adapt_rate")),
        ("ditto", ("learning_rate", "personal_rate")), ("independent", ("learning_rate",)),
        ("fedprox", ("learning_rate",)), ("scaffold", ("learning_rate",)),
        ("fedrep", ("learning_rate",)), ("fedbabu", ("learning_rate", "adapt_rate")),
        ("feddbe", ("learning_rate",)),
    ],
)  # fmt: skip
def test_default_rates_fall_with_the_batch_where_networks_are_convolutional(
    method: str, names: tuple[str, ...]
) -> None:
    """By sqrt(10 / 100) on 10 points; given rates, other networks and 100 points change nothing."""

    def rates(**flags: object) -> list[float]:
        found = config.fit_rates(resolve(flags={"method": method, **flags})).settings
        return [getattr(found, name) for name in names]

    usual = rates(model="cnn")
    assert rates(model="cnn", batch_size=10) == pytest.approx([0.1**0.5 * r for r in usual])
    assert rates(model="mlp", batch_size=10) == rates(model="cnn", batch_size=200) == usual
    given = dict.fromkeys(names, 0.07)
    assert rates(model="cnn", batch_size=10, **given) == [0.07] * len(names)


def test_a_rate_that_is_not_used_stays_as_it_is() -> None:
    """That of random-subset is for base=fedavg; a run's own file must be read again."""
    for base in ("fedavg", "pfedbayes"):
        flags = {"method": "random-subset", "model": "cnn", "batch_size": 25, "base": base}
        found = config.fit_rates(resolve(flags=flags))
        rate = 0.035 if base == "fedavg" else 0.07
        assert to_dict(found)["learning_rate"] == pytest.approx(rate)
        config.check(found)
