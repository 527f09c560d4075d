"""`Federation` among scikit-learn's estimators: DataFrames, groups, searches, its own checks."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from corefed import Federation, UserError
from corefed.use import notebook

QUICK: dict[str, Any] = {
    "rounds": 4, "local_steps": 10, "hidden": (8,), "evaluate_draws": 3, "device": "cpu",
    "method": "pfedbayes", "eta_1": 0.02,
}  # fmt: skip


def patients(n: int = 120, seed: int = 0) -> pd.DataFrame:
    """Numbers, a category, a gap, and the site."""
    rng = np.random.default_rng(seed)
    found = pd.DataFrame(
        {
            "weight": rng.normal(70, 10, n),
            "age": rng.uniform(20, 80, n),
            "sex": rng.choice(["f", "m"], n),
            "stage": pd.Categorical(rng.choice([1, 2, 3], n)),
            "site": rng.choice(["north", "south"], n),
        }
    )
    found.loc[::10, "weight"] = np.nan
    return found


def ill(x: pd.DataFrame) -> pd.Series:
    return pd.Series(np.where(x["age"] > 50, "ill", "well"), name="diagnosis")


@pytest.fixture(scope="module")
def fitted() -> Federation:
    x = patients()
    return Federation(groups="site", **QUICK).fit(x, ill(x))


# --- DataFrames -----------------------------------------------------------------------------------


def test_columns_go_by_name(fitted: Federation) -> None:
    """In another order they are the same points; a missing one is an error."""
    assert fitted.feature_names_in_.tolist() == ["weight", "age", "sex", "stage"]
    assert fitted.n_features_in_ == 4
    x = patients(30, 1)
    p = fitted.predict_proba(x)
    other = x[["site", "stage", "sex", "age", "weight"]]
    np.testing.assert_array_equal(fitted.predict_proba(other), p)
    model = fitted.personal["north"]
    np.testing.assert_array_equal(model.predict_proba(other), model.predict_proba(x))
    with pytest.raises(UserError, match="X has no column age, which training had"):
        model.predict(x.drop(columns="age"))
    with pytest.raises(ValueError, match="no column age"):
        fitted.predict(x.drop(columns="age"))


def test_columns_in_another_order_at_another_client() -> None:
    x = patients().drop(columns="site")
    y = ill(x)
    one = Federation(**QUICK).fit({"a": (x[:60], y[:60]), "b": (x[60:], y[60:])})
    turned = x[list(reversed(x.columns))]
    two = Federation(**QUICK).fit({"a": (x[:60], y[:60]), "b": (turned[60:], y[60:])})
    np.testing.assert_array_equal(one.global_.predict_proba(x), two.global_.predict_proba(x))
    with pytest.raises(UserError, match=r"X of client 'b' has no column age"):
        Federation(**QUICK).fit({"a": (x, y), "b": (x.drop(columns="age"), y)})
    with pytest.raises(UserError, match=r"X of client 'b' also has column more"):
        Federation(**QUICK).fit({"a": (x, y), "b": (x.assign(more=1), y)})
    with pytest.raises(UserError, match=r"X of client 'b' is no DataFrame"):
        Federation(**QUICK).fit({"a": (x, y), "b": (np.zeros((120, 4)), y)})


def test_a_frame_is_encoded_as_its_file_is(tmp_path: Path, fitted: Federation) -> None:
    """Categories, gaps and numbers: the CSV of the frame gives the same predictions."""
    x = patients(40, 2)
    x.to_csv(tmp_path / "x.csv", index=False)
    model = fitted.personal["south"]
    np.testing.assert_allclose(model.predict_proba(x), model.predict_proba(tmp_path / "x.csv"))
    assert [column.categories for column in fitted._ready().preparations[0].columns] == [
        (), (), ("f", "m"), ("1", "2", "3"),
    ]  # fmt: skip


def test_points_outside(fitted: Federation) -> None:
    x = patients(3, 3)
    x.loc[1, "age"] = 900.0
    x.loc[2, "sex"] = "x"
    model = fitted.personal["north"]
    why = model.outside(x)
    assert why[0] == ""
    assert why[1].startswith("age 900 (training: ")
    assert why[2] == "sex is no category of training"
    np.testing.assert_allclose(model.uncertainty(x).total[1:], np.log(2))


def test_gaps_of_every_kind_and_dates() -> None:
    x = pd.DataFrame(
        {
            "whole": pd.array([1, None, 3] * 20, dtype="Int64"),
            "flag": [True, False, True] * 20,
            "word": pd.array(["a", None, "b"] * 20, dtype="string"),
        }
    )
    y = np.arange(60) % 2
    found = Federation(**QUICK).fit(x, y)
    assert [column.lacking for column in found._ready().preparations[0].columns] == [
        True, False, True,
    ]  # fmt: skip
    assert found.predict(x[:2]).dtype == y.dtype
    dated = x.assign(born=pd.Timestamp("1970-01-01"))
    with pytest.raises(UserError, match=r"born.*dates"):
        Federation(**QUICK).fit(dated, y)


def test_an_array_for_a_frame_of_numbers_goes_by_place() -> None:
    x = patients()[["age"]].assign(other=1.5)
    found = Federation(**QUICK).fit(x, ill(x))
    np.testing.assert_array_equal(found.predict(x.to_numpy()), found.predict(x))


def test_an_array_cannot_stand_for_categories(fitted: Federation) -> None:
    with pytest.raises(UserError, match="give a DataFrame"):
        fitted.personal["north"].predict(np.zeros((2, 4)))


# --- groups ---------------------------------------------------------------------------------------


def test_groups_are_the_clients_of_a_dictionary() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    y = (x[:, 0] > 0).astype(int)
    site = rng.choice(["a", "b"], 90)
    names = list(dict.fromkeys(site.tolist()))
    by_groups = Federation(**QUICK).fit(x, y, groups=site)
    by_name = Federation(**QUICK).fit({name: (x[site == name], y[site == name]) for name in names})
    assert list(by_groups.personal) == names
    p = by_groups.predict_proba(x, groups=site)
    for name in names:
        mine = site == name
        expected = by_name.personal[name].predict_proba(x[mine])
        np.testing.assert_array_equal(p[mine], expected)
    said = by_groups.predict(x, groups=site)
    assert said.dtype == y.dtype
    score = by_groups.score(x, y, groups=site)
    assert score == (said == y).mean()
    assert score == by_groups.score({n: (x[site == n], y[site == n]) for n in names})
    shared = by_groups.global_.predict_proba(x)
    np.testing.assert_array_equal(by_groups.predict_proba(x, groups=["new"] * 90), shared)


def test_without_groups_it_is_refused_where_several_models_can_be_meant() -> None:
    """One client's own model and a method's only one need no name."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    plain = {k: v for k, v in QUICK.items() if k not in ("method", "eta_1")}
    y, site = (x[:, 0] > 0).astype(int), ["a", "b", "b"] * 30
    several = Federation(**QUICK).fit(x, y, groups=site)
    for name, given in (("predict", ()), ("predict_proba", ()), ("score", (y,))):
        with pytest.raises(ValueError, match="2 clients have models of their own") as refused:
            getattr(several, name)(x, *given)
        assert "groups=..." in str(refused.value) and "global_." in str(refused.value)
    alone = Federation(**plain, method="independent").fit(x, y, groups=site)
    with pytest.raises(UserError, match="name the client of each point") as refused:
        alone.predict(x)
    assert "global_" not in str(refused.value)
    shared = Federation(**plain, method="fedavg").fit(x, y, groups=site)
    np.testing.assert_array_equal(shared.predict(x), shared.global_.predict(x))
    one = Federation(**QUICK).fit(x, y)
    np.testing.assert_array_equal(one.predict(x), one.personal["all"].predict(x))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"groups": ["a"] * 5}, "groups names the clients of 5 points; X has 40"),
        ({"groups": ["a"] * 39 + [None]}, "points without a client"),
        ({"groups": "site"}, "X is no DataFrame"),
        ({"y": np.zeros(3)}, "y has 3 targets for 40 points"),
    ],
)
def test_groups_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2))
    arguments = {"y": np.arange(40) % 2, **given}
    with pytest.raises(UserError, match=words):
        Federation(**QUICK).fit(x, **arguments)


def test_a_regression_scores_r2() -> None:
    x = np.random.default_rng(0).normal(size=(80, 2))
    y = 3 * x[:, 0] + 1.0
    found = Federation(**{**QUICK, "rounds": 20}).fit(x, y)
    assert 0 < found.score(x, y) <= 1
    assert found.__sklearn_tags__().estimator_type == "regressor"


# --- searches, pipelines, pickles -----------------------------------------------------------------


def test_a_grid_search_and_a_pipeline() -> None:
    """The column of sites travels with X, so that every fold knows its clients."""
    x = patients()
    grid = GridSearchCV(Federation(groups="site", **QUICK), {"eta_1": [0.001, 0.02]}, cv=2)
    grid.fit(x, ill(x))
    assert set(grid.best_params_) == {"eta_1"}
    assert np.isfinite(grid.cv_results_["mean_test_score"]).all()
    assert grid.score(x, ill(x)) == grid.best_estimator_.score(x, ill(x)) > 0.5
    scores = cross_val_score(
        Federation(groups="site", **QUICK), x, ill(x), groups=x["site"], cv=GroupKFold(2)
    )
    assert np.isfinite(scores).all()  # one site is left out, and has the shared model
    numbers = x[["age"]].to_numpy()
    pipe = make_pipeline(StandardScaler(), Federation(**QUICK)).fit(numbers, ill(x))
    assert pipe.score(numbers, ill(x)) > 0.5


def test_pickles(fitted: Federation) -> None:
    fresh = clone(fitted)
    again = pickle.loads(pickle.dumps(fresh))
    assert again.get_params() == fitted.get_params()
    with pytest.raises(UserError, match=r"save\(folder\).*Federation\.load\(folder\)"):
        pickle.dumps(fitted)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        fresh.predict(patients(2))


def test_it_shows_itself(fitted: Federation) -> None:
    shown = Federation(groups="<site>", eta_2=None, zeta=1.0, **QUICK)._repr_html_()
    assert "not fitted" in shown and "&lt;site&gt;" in shown and "<site>" not in shown
    assert names(shown) == [
        *("method", "groups", "rounds", "local_steps", "hidden", "evaluate_draws", "device"),
        "eta_1",
    ]  # not what is the default, or None
    assert names(Federation()._repr_html_()) == ["method"]

    shown, found = fitted._repr_html_(), fitted.evaluate()
    assert names(shown) == [
        *("Method", "Clients", "Accuracy", "NLL", "Calibration error (ECE)", "Weakest site")
    ]
    weakest = min(found["clients"], key=found["clients"].get)
    for text in (
        "pfedbayes",
        f"2 ({', '.join(found['clients'])})",
        f"{100 * found['metrics']['personal_accuracy']:.2f} %",
        f"{found['metrics']['personal_nll']:.3f}",
        f"{weakest}: {100 * found['clients'][weakest]:.2f} %",
    ):
        assert f">{text}</td>" in shown


def names(shown: str) -> list[str]:
    """The first column of a table."""
    return re.findall(r"<th[^>]*>([^<]+)</th>", shown)


def test_what_it_shows_is_text() -> None:
    found = {
        "metrics": {"personal_rmse": 1234.5, "personal_nll": 7.25},
        "clients": {"<b>": 1.0, "far & away": 2.0, "untested": None},
    }
    shown = notebook.after("pfedbayes", found["clients"], found, joined=1)
    assert "<b>:" not in shown and "far &amp; away: 2</td>" in shown  # the largest error
    assert ">1,234</td>" in shown and "3 (&lt;b&gt;, far &amp; away, untested), and 1" in shown
    without = notebook.after("pfedbayes", ["a"], {"metrics": {}, "clients": {"a": None}})
    assert "Not tested" in without and "Accuracy" not in without
    assert "http" not in shown and "<style" not in shown and "<script" not in shown


# --- newcomers ------------------------------------------------------------------------------------


def test_a_client_joins(fitted: Federation, tmp_path: Path) -> None:
    folder = fitted.save(tmp_path / "run")
    found = Federation.load(folder)
    assert found.groups == "site"
    x = patients(40, 5).assign(site="west")
    metrics = found.personalize("west", x, ill(x), steps=4)
    assert 0 <= metrics["personal_accuracy"] <= 1 and "global_nll" in metrics
    assert set(found.personal) == {"north", "south", "west"}
    p = found.predict_proba(x)
    np.testing.assert_array_equal(p, found.personal["west"].predict_proba(x))
    assert not np.array_equal(p, found.global_.predict_proba(x))
    again = Federation.load(found.save(tmp_path / "again"))
    np.testing.assert_array_equal(again.predict_proba(x), p)
    with pytest.raises(UserError, match="a client 'west' already"):
        found.personalize("west", x, ill(x))


def test_a_client_that_joined_is_saved(tmp_path: Path) -> None:
    x = patients()
    found = Federation(groups="site", **QUICK).fit(x, ill(x))
    new = patients(40, 5).assign(site="west")
    found.personalize("west", new, ill(new), steps=4, test_fraction=0)
    p = found.predict_proba(new)
    again = Federation.load(found.save(tmp_path / "run"))
    np.testing.assert_array_equal(again.predict_proba(new), p)


# --- scikit-learn's own checks --------------------------------------------------------------------

EXPECTED = {
    "check_do_not_raise_errors_in_init_or_set_params": "misspelt settings are refused at once",
    "check_set_params": "as above: set_params changes all settings or none",
    "check_n_features_in_after_fitting": "refused, in other words",
    "check_complex_data": "refused, in other words",
    "check_dtype_object": "text in an array is refused; categories come in a DataFrame",
    "check_estimators_empty_data_messages": "refused, in other words",
    "check_estimators_pickle": "a fitted federation is saved, not pickled",
    "check_classifiers_train": "two steps do not reach the accuracy it asks for; 20 rounds do",
    "check_classifiers_regression_target": "floating-point targets make a regression",
    "check_supervised_y_2d": "a column of targets is taken without a warning",
    "check_fit2d_1sample": "refused, in other words",
    "check_fit2d_predict1d": "refused, in other words",
    "check_requires_y_none": "without y, clients are a mapping",
}


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks() -> None:
    """All pass but those above, each for its reason."""
    estimator = Federation(**{**QUICK, "rounds": 1, "local_steps": 2, "hidden": (4,)})
    found = check_estimator(estimator, on_fail=None, on_skip=None)
    failed = {each["check_name"]: each["exception"] for each in found if each["status"] == "failed"}
    assert failed.keys() == EXPECTED.keys(), failed
    assert sum(each["status"] == "passed" for each in found) > 30
