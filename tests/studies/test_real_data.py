"""`corefed bench real-data`: scores by hand, the same rows for all, and the page and its file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from corefed.base.types import ClientData
from corefed.data.clients import FederatedData
from corefed.data.preparation import Preparation
from corefed_studies import pages, result_file
from corefed_studies.bench import real_data, real_data_tables
from corefed_studies.bench.real_data import RealSet

ROOT = Path(__file__).parents[2]
CLASSES = RealSet("made", "made.csv", "y", "site", "b")
TARGETS = CLASSES._replace(regression=True)


def test_scores_by_hand() -> None:
    p, y = np.array([[0.8, 0.2], [0.0, 1.0], [1.0, 0.0]]), np.array([0, 1, 1])
    found = real_data._scores([(p, y)], CLASSES)
    assert found["accuracy"] == [pytest.approx(2 / 3)]
    # The third row is certain and wrong: its probability counts as a millionth.
    assert found["nll"] == [pytest.approx(-(math.log(0.8) + math.log(1e-6)) / 3, rel=1e-5)]
    errors = real_data._scores([(np.array([[1.0], [3.0]]), np.array([[1.0], [5.0]]))], TARGETS)
    assert errors == {"rmse": [pytest.approx(math.sqrt(2))]}


class Remembers:
    """Predicts the mean of the targets that it was fitted on, in the unit of training."""

    def fit(self, x: np.ndarray, y: np.ndarray) -> Remembers:
        self.mean = float(y.mean())
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        return np.full(len(x), self.mean)


@pytest.mark.parametrize(("pooled", "expected"), [(True, [2.0, 2.0]), (False, [1.0, 3.0])])
def test_models_see_the_rows_of_all_sites_or_of_one(pooled: bool, expected: list[float]) -> None:
    """Two sites whose targets are 1 and 3; the unit of targets is 10 + 5 t. Padding is left out."""
    y = torch.tensor([[1.0, 1.0, 0.0], [3.0, 3.0, 3.0]]).unsqueeze(-1)
    weight = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    train = ClientData(torch.zeros(2, 3, 1), y, weight)
    if pooled:  # two rows of 1 and two of 3
        train = train._replace(weight=torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]))
    truth = 10 + 5 * torch.tensor(expected).view(2, 1, 1)
    test = ClientData(torch.zeros(2, 1, 1), truth, torch.ones(2, 1))
    unit = Preparation((1,), targets=("y",), target_mean=(10.0,), target_std=(5.0,))
    data = FederatedData(train, test, 0, 1, ["a", "b"], preparations=(unit,))
    found = real_data._scikit(data, 2, TARGETS, Remembers, pooled=pooled)
    assert found == {"rmse": [pytest.approx(0.0, abs=1e-6)]}


def test_a_site_without_a_class_gives_it_no_probability() -> None:
    from sklearn.linear_model import LogisticRegression

    x, at = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([[0.5]])
    found = real_data._predict(LogisticRegression, x, np.array([0, 0, 2, 2]), at, 3)
    assert found.shape == (1, 3) and found[0, 1] == 0 and found.sum() == pytest.approx(1)
    alone = real_data._predict(LogisticRegression, x, np.array([1, 1, 1, 1]), at, 3)
    assert alone.tolist() == [[0.0, 1.0, 0.0]]


def test_the_newcomer_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "made.csv").write_text("site,x,y\na,1,0\nb,2,1\na,3,1\nb,4,0\nb,5,1\n")
    rest, own = tmp_path / "rest.csv", tmp_path / "own.csv"
    assert real_data._divide(tmp_path / "made.csv", CLASSES, rest, own) == 3
    assert rest.read_text() == "site,x,y\na,1,0\na,3,1\n"
    assert own.read_text() == "site,x,y\nb,2,1\nb,4,0\nb,5,1\n"


def test_a_gain_has_the_sign_of_better_and_its_interval() -> None:
    assert real_data_tables._gain([0.9, 0.92], [0.8, 0.81], "accuracy").startswith("+10.5 ± 6.4")
    assert real_data_tables._gain([0.3, 0.31], [0.5, 0.52], "nll").startswith("+0.205 ±")
    assert real_data_tables._gain([110.0], [100.0], "rmse") == "-10 %"


def test_the_page_is_made_from_the_file() -> None:
    study = result_file.read(ROOT / "results/real-data.json", real_data.NAME, real_data.SCHEMA)
    marked = pages.Marked(ROOT / "docs/real-data-study.md", f"bench {real_data.NAME}")
    assert marked.part.strip() == pages.markdown(real_data_tables.tables(study)).strip()
    assert list(study["sets"]) == [each.name for each in real_data.SETS]
    assert len(study["seeds"]) == real_data.SEEDS["paper"]
