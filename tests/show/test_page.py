"""The page of `corefed report`: what it holds, that it is whole and safe, and how it behaves."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import math
import re
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import OVERFLOW, PROGRAM
from commands import SMALL, corefed
from PIL import Image
from report_pages import BASE, NASTY, Made, Page
from sklearn.datasets import load_digits

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")

from corefed.data.columns import Column
from corefed.data.preparation import Preparation
from corefed.settings.config import resolve
from corefed.show import pairs
from corefed.show.contrast import Comparisons
from corefed.show.page import gather, html, making, paired, points
from corefed.show.page.content import Missing
from corefed.show.page.sections import chosen, clients, comparison, trust
from corefed.training import fitted, setup
from corefed.training.calibration import chance_ece

# --- structure, without a browser -----------------------------------------------------------------


@pytest.mark.parametrize("which", ["page", "many"])
def test_page_is_whole_and_in_order(made: Made, which: str) -> None:
    text = getattr(made, which).read_text(encoding="utf-8")
    page = Page(text)
    assert text.startswith("<!doctype html>") and '<html lang="en">' in text
    assert len(text.encode()) < making.LARGEST
    assert len(set(page.ids)) == len(page.ids)
    assert page.levels[0] == 1 and page.levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(page.levels))
    assert {"header", "nav", "main", "footer", "noscript"} <= set(page.tags)
    inside = [a.removeprefix("#") for a in page.addresses if a.startswith("#")]
    assert "main" in inside and set(inside) <= set(page.ids)


@pytest.mark.parametrize("which", ["page", "many"])
def test_every_chart_has_words_and_a_table(made: Made, which: str) -> None:
    text = getattr(made, which).read_text(encoding="utf-8")
    page = Page(text)
    assert {chart["data-chart"] for chart in page.charts} == set(page.specs)
    assert len(page.charts) == len(page.specs) >= 9
    for chart in page.charts:
        assert chart["role"] == "img" and re.search(r"\d", chart["aria-label"] or "")
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    assert sum("data-chart" in figure for figure in figures) == len(page.charts)
    for figure in figures:  # also where a chart would have one place on its axis
        assert figure.count("<table") == 1 and "<caption>" in figure and 'scope="row"' in figure
    assert all(image["alt"] for image in page.images)


def test_nothing_is_asked_of_the_network(made: Made) -> None:
    for path in (made.page, made.many):
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert all(a.startswith(("#", "data:image/")) for a in page.addresses)
        assert page.policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "connect-src" not in page.policy  # so that it is default-src's 'none'
        assert not re.search(r"@import|url\(", html.read_asset("style.css"))


def test_names_are_shown_as_text(made: Made) -> None:
    text = made.page.read_text(encoding="utf-8")
    page = Page(text)
    assert NASTY not in text
    assert page.tags.count("script") == 3  # the specifications, Vega, and the page's own
    assert f"A & B {NASTY}" in "".join(page.words)
    assert any(NASTY in json.dumps(spec) for spec in page.specs.values())
    assert "<" not in re.search(r'id="specs">(.*?)</script>', text, re.DOTALL).group(1)  # type: ignore[union-attr]


def test_inlined_script_cannot_end_its_element() -> None:
    assert html.inside_script("a='</script><!--<SCRIPT>'") == (
        r"a='\x3C/script>\x3C!--\x3CSCRIPT>'"
    )


def test_sections_of_one_run(made: Made) -> None:
    page = Page(made.page.read_text(encoding="utf-8"))
    wanted = ["in-short", "overview", "curves", "trust", "cost", "clients", "classes", "examples"]
    wanted.append("coreset")
    assert [i for i in page.ids if i in wanted] == wanted
    assert len(page.images) >= 4 * 5 + 12  # some points of each class of each client, and tests
    words = " ".join(page.words)
    assert f"corefed run --config {made.one / 'experiment.toml'}" in words
    for said in ("AURC", "ECE", "effective points", "Thresholds for review", "epistemic"):
        assert said in words


def test_no_images_shows_no_points(made: Made, tmp_path: Path) -> None:
    out = tmp_path / "bare.html"
    assert corefed("report", made.one, "--out", out, "--no-images").code == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert not page.images and "--no-images" in " ".join(page.words)


# --- what is missing is said ----------------------------------------------------------------------


def test_older_run_without_models(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(made.one, folder)
    for name in ("data.json", "fitted.safetensors", "held_out.safetensors"):
        (folder / name).unlink()
    out = tmp_path / "old.html"
    assert corefed("report", folder, "--out", out).code == 0
    page = Page(out.read_text(encoding="utf-8"))
    assert " ".join(page.words).count("made without (checkpoint_every = 0), or by an older") == 5
    assert {"curves-round", "clients-scores"} <= set(page.specs)


def test_unfinished_run(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "part"
    shutil.copytree(made.runs[2], folder)
    (folder / "summary.json").unlink()
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:2]))
    out = tmp_path / "part.html"
    assert corefed("report", folder, made.runs[1], "--out", out).code == 0
    words = " ".join(Page(out.read_text(encoding="utf-8")).words)
    assert "not finished: it has 2 of 3 rounds" in words and "2 of 3" in words


def without_digest(folder: Path) -> str:
    """The settings of a run, whose first line would show that they were changed."""
    return (folder / "experiment.toml").read_text().partition("\n")[2]


def test_changed_data_are_not_shown(made: Made, tmp_path: Path) -> None:
    folder = tmp_path / "changed"
    shutil.copytree(made.one, folder)
    toml = without_digest(folder).replace("keep = 1.0", "keep = 0.5")
    (folder / "experiment.toml").write_text(toml)
    found = points.load(gather.read([folder])[0])
    assert isinstance(found, Missing) and "have changed" in found


def test_data_that_are_gone_are_not_fetched(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(made.one, folder)
    toml = without_digest(folder).replace('"digits"', '"mnist"')
    (folder / "experiment.toml").write_text(toml)
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("COREFED_DATA", raising=False)
    found = points.load(gather.read([folder])[0])
    assert isinstance(found, Missing) and "downloading is off" in found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere holds no run of corefed"),
        (("{one}", "{one}"), "is named twice"),
        (("{one}", "--out", "{one}"), "is a folder; --out needs a file"),
        (("{one}", "--baseline", "nowhere"), "nowhere holds no run of corefed"),
        ((), "Missing argument"),
    ],
)
def test_mistakes_are_one_sentence(made: Made, arguments: tuple[str, ...], said: str) -> None:
    result = corefed("report", *(a.format(one=made.one) for a in arguments))
    assert result.code == 2 and said in result.err and result.err.count("\n") == 1


def test_without_the_extra(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    from corefed.show.page import charts

    monkeypatch.setattr(charts, "find_spec", lambda name: None)
    result = corefed("report", made.one)
    assert result.code == 2 and "pip install -e '.[report]'" in result.err


def test_too_large_a_page_is_thinned(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, out = made.page.stat().st_size, tmp_path / "thin.html"
    monkeypatch.setattr(making, "LARGEST", whole - 10_000)
    assert making.write([made.one], out) < whole - 10_000
    page = Page(out.read_text(encoding="utf-8"))
    assert "To keep this page small" in " ".join(page.words)
    assert 0 < len(page.images) < len(Page(made.page.read_text(encoding="utf-8")).images)
    monkeypatch.setattr(making, "LARGEST", 1_000)
    result = corefed("report", made.one, "--out", out, "--force")
    assert result.code == 2 and "name fewer runs" in result.err


# --- other kinds of data --------------------------------------------------------------------------


def table(folder: Path) -> str:
    """Sixty patients of two wards, some without a weight."""
    rng = np.random.default_rng(0)
    lines = ["ward,age,weight,sex,ill"]
    for i in range(60):
        age, weight = rng.integers(20, 90), "" if i % 7 == 0 else f"{rng.normal(70, 9):.1f}"
        lines.append(f"{'north' if i % 2 else 'south'},{age},{weight},{'fm'[i % 3 > 0]},{age > 55}")
    path = folder / "patients.csv"
    path.write_text("\n".join(lines) + "\n")
    return f"table:{path}"


@pytest.mark.parametrize("kind", ["regression", "table"])
def test_rows_in_place_of_pictures(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    flags = ["--method=coreset-pfedbayes", "--fraction=0.3", "--set=draws=8"]
    if kind == "regression":
        flags += ["--data=synthetic-regression"]
    else:
        flags += [f"--data={table(tmp_path)}", "--target=ill", "--client=ward"]
    base = [flag for flag in BASE if kind == "regression" or "clients" not in flag]
    ran = corefed("run", *base, *flags, "--quiet", f"--out={tmp_path / 'run'}")
    assert ran.code == 0, ran.err
    out = tmp_path / "report.html"
    made = corefed("report", tmp_path / "run", "--out", out)
    assert made.code == 0, made.err
    page = Page(out.read_text(encoding="utf-8"))
    words = " ".join(page.words)
    assert not page.images and "Chosen rows with the largest weights" in words
    if kind == "regression":
        assert {"trust-coverage", "trust-against"} <= set(page.specs)
        assert "Largest errors relative to the predicted uncertainty" in words
        assert "Personal RMSE" in words
    else:
        assert {"trust-reliability", "trust-risk"} <= set(page.specs)
        assert {"north", "south", "age", "weight", "sex", "True"} <= set(page.words)
    if PROGRAM is not None:
        browser = request.getfixturevalue("browser")
        browser.media("light", "print")
        browser.width(703)
        browser.open(out)
        assert browser.errors == [] and browser.evaluate(OVERFLOW) == 0
        browser.media("light")


# --- the points behind a run ----------------------------------------------------------------------


@pytest.mark.parametrize("data", ["digits", "synthetic-regression"])
def test_calibration_before_and_after(data: str, tmp_path: Path) -> None:
    """Both pictures, their numbers, and how much of an ECE is chance."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    flags = (f"--data={data}", "--set=validation=0.2", "--quiet", f"--out={run}")
    assert corefed("run", *SMALL, *flags).code == 0
    assert corefed("report", run, "--out", page).code == 0
    (read,) = gather.read([run])
    figure = "reliability" if data == "digits" else "coverage"
    specs, text = Page(page.read_text()).specs, " ".join(Page(page.read_text()).words)
    assert {f"trust-{figure}", f"trust-raw-{figure}"} <= set(specs)
    assert "before calibration" in text and "after calibration" in text
    assert "personal temperature" in text.lower()
    raw = trust._without_temperature(read, ["personal", "global"])
    held = read.held_out
    assert raw is not None and not isinstance(held, Missing)
    model = fitted.load(run)
    plain = model._replace(models={k: v for k, v in model.models.items() if "temp" not in k})
    data_now = setup.load(model.experiment.run)
    mine = held["row"] == 1
    for kind in ("personal", "global"):
        x = data_now.test.x[1][data_now.test.weight[1] > 0]
        said = plain.predict(model.names[1], x, kind=kind)
        for part in ("mean",) if data == "digits" else ("mean", "total"):
            torch.testing.assert_close(
                raw[f"{kind}.{part}"][mine].double(), getattr(said, part), rtol=1e-3, atol=1e-4
            )
    if data == "digits":
        assert "is expected from chance" in text or "are expected from chance" in text
        before = read.summary["calibration"]["personal"]["test"]["before"]["ece"]["mean"]
        assert f"{before:.3f} before calibration" in text


def test_images_in_files_are_split_as_in_training(tmp_path: Path) -> None:
    """Those that are held back for validation are not among the training points."""
    for place in range(24):
        folder = tmp_path / "ab"[place % 2]
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (4, 4), (place, 0, 0)).save(folder / f"{place}.png")
    flags = {"data": f"image-folder:{tmp_path}", "partition": "iid", "clients": 2}
    sizes = []
    for share in (0.0, 0.25):
        run = resolve(flags={**flags, "validation": share, "embedding": "resnet18"}).run
        found = points._files(run)
        sizes.append([(len(a), len(b)) for a, b in zip(*found.y, strict=True)])
    for (train, test), (fewer, same) in zip(*sizes, strict=True):
        assert same == test and 0 < train - fewer <= math.ceil(0.25 * train)


@pytest.mark.parametrize("right", [0.8, 0.6])
def test_an_ece_is_told_apart_from_chance(right: float) -> None:
    """100 points of confidence 0.8: chance alone gives an ECE of about 0.032."""
    chance = chance_ece(torch.full((100,), 0.8))
    assert chance == pytest.approx(0.032, abs=0.006)
    ece = abs(right - 0.8)
    words = trust.ece_words(ece, chance)
    assert words.startswith(f"{ece:.3f}") and f"{chance:.3f}" in words
    assert ("no more than" in words) == (right == 0.8)


def test_chosen_points_are_those_of_the_data(made: Made) -> None:
    """The pictures' labels are the data's, and the weights' places are training points."""
    run = gather.read([made.one])[0]
    found = points.load(run)
    assert not isinstance(found, Missing) and not isinstance(run.models, Missing)
    images, labels = load_digits(return_X_y=True)
    known = {
        image.astype(int).tobytes(): label for image, label in zip(images, labels, strict=True)
    }
    for client, weight in enumerate(run.models["weight"]):
        for place in chosen.largest(weight, found.y.train[client], 2):
            picture = found.picture("train", client, place)
            assert picture is not None and picture.size == (8, 8)
            content = base64.b64decode(picture.source.partition(",")[2])
            pixels = np.asarray(Image.open(io.BytesIO(content))).astype(float)
            levels = np.round(pixels / 255 * 16).astype(int)  # grey levels are 0..16
            assert known[levels.flatten().tobytes()] == found.y.train[client][place]
            assert weight[place] > 0


def test_largest_weights_by_class() -> None:
    w = torch.tensor([0.0, 3.0, 1.0, 2.0, 5.0, 0.0, 9.0])
    y = torch.tensor([0, 0, 0, 0, 1, 1])  # a place of padding is left out
    assert chosen.largest(w, y, 2) == [1, 3, 4]
    assert chosen.largest(torch.zeros(6), y, 2) == []


def test_rows_of_a_table_are_decoded() -> None:
    columns = (Column("age", lacking=True), Column("sex", ("f", "m")), Column("bmi"))
    preparation = Preparation(
        (5,), ("0", "1"), mean=(50.0, 0, 0, 0, 20.0), std=(10.0, 1, 1, 1, 2.0), columns=columns
    )
    raw = points._raw(preparation, "", torch.tensor([1.0, 0, 0, 1, -0.5]))
    assert [getattr(c, "text", c) for c in points.cells(preparation, raw)] == ["60", "m", "19"]
    lost = points._raw(preparation, "", torch.tensor([0.0, 1, 0, 0, 0]))
    assert [getattr(c, "text", c) for c in points.cells(preparation, lost)] == ["", "", "20"]
    assert points.names(preparation) == ("age", "sex", "bmi")
    plain = dataclasses.replace(preparation, columns=(), shape=(2,))
    assert points.names(plain) == ("x0", "x1")


# --- paired tests ---------------------------------------------------------------------------------


def test_seeds_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, std 1, t of 2 degrees at 97.5 % is 4.3027."""
    found = pairs.by_seed([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    reach = 4.302652729911275 / math.sqrt(3)
    assert found.mean == pytest.approx(2) and found.pairs == "3 seeds"
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))
    # P(|t_2| > 2 sqrt 3) = 1 - t / sqrt(2 + t^2) in closed form
    t = 2 * math.sqrt(3)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_seeds_without_spread_are_no_test() -> None:
    found = pairs.by_seed([0.9, 0.8, 0.7], [0.8, 0.7, 0.6])
    assert found.mean == pytest.approx(0.1) and math.isnan(found.p) and math.isnan(found.low)


def test_holm_by_hand() -> None:
    assert pairs.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    found = pairs.holm([0.5, math.nan, 0.9])
    assert found[0] == 1.0 and math.isnan(found[1]) and found[2] == 1.0
    assert pairs.holm([]) == []


def test_holm_steps_down_and_stops() -> None:
    """Against 0.05 / 4, / 3, / 2: 0.005 and 0.01 pass, 0.03 does not, nor does what follows."""
    cases = {
        (0.01, 0.04, 0.03, 0.005): [True, False, False, True],
        (0.0125, 0.5, 0.5, 0.5): [True, False, False, False],
    }
    for values, rejected in cases.items():
        assert [p <= 0.05 for p in pairs.holm(values)] == rejected


def test_all_that_is_compared_is_of_one_set_of_predictions(made: Made) -> None:
    """The difference is that of the scores in the table, and of the predictions that are kept."""
    coreset, full, fedavg = gather.read(made.runs)
    found = paired.compare(full, coreset, Comparisons())
    assert not isinstance(found, Missing)
    assert [each.metric.key for each in found] == ["accuracy", "nll", "auroc"]
    assert not isinstance(full.held_out, Missing) and not isinstance(coreset.held_out, Missing)
    right = [
        (run.held_out["personal.mean"].argmax(-1) == run.held_out["y"]).double().mean()  # type: ignore[index]
        for run in (full, coreset)
    ]
    shown = [run.metrics["personal_accuracy"]["mean"] for run in (full, coreset)]
    assert shown == pytest.approx([float(each) for each in right])
    assert found[0].difference == pytest.approx(shown[0] - shown[1])
    nll = [run.metrics["personal_nll"]["mean"] for run in (full, coreset)]
    assert found[1].difference == pytest.approx(nll[0] - nll[1])
    assert found[1].low < found[1].difference < found[1].high
    for each in found:  # one seed: an interval at most, and no test
        assert math.isnan(each.p) and each.outcome in ("open", "same")
    assert full.lines[-1]["metrics"]["personal_accuracy"] == shown[:1], "curves end there"
    assert paired.compare(coreset, coreset, Comparisons()) is not None
    other = fedavg._replace(summary={**fedavg.summary, "seeds": [7]})
    assert paired.compare(other, coreset, Comparisons()) == "not comparable: no seed that both have"
    config = {**fedavg.summary["config"], "data": "mnist"}
    other = fedavg._replace(summary={**fedavg.summary, "config": config})
    assert paired.compare(other, coreset, Comparisons()) == "not comparable: data differs"


def test_one_seed_has_no_p_value(made: Made) -> None:
    page = made.many.read_text(encoding="utf-8")
    assert "one seed: run three" in page and "&lt; 0.001" not in page
    assert "Differences from" in page and "AUROC" in page


def test_front_by_hand() -> None:
    cost_and_score = [(3.0, 0.9), (1.0, 0.5), (2.0, 0.4), (1.0, 0.7), (4.0, 0.9)]
    assert comparison.front(cost_and_score, higher=True) == [(1.0, 0.7), (3.0, 0.9)]
    assert comparison.front(cost_and_score, higher=False) == [(1.0, 0.5), (2.0, 0.4)]


def test_many_clients_show_their_ends() -> None:
    scores = [i / 250 for i in range(250)]
    half = clients.MOST // 2
    assert clients.shown_clients(scores, "accuracy") == [*range(half), *range(250 - half, 250)]
    assert clients.shown_clients(scores[:3], "rmse") == [0, 1, 2]


def test_labels_tell_runs_apart(made: Made, tmp_path: Path) -> None:
    twin = tmp_path / "coreset"
    shutil.copytree(made.one, twin)
    labels = [run.label for run in gather.read([made.one, twin, made.runs[1]])]
    assert labels[2] == "pfedbayes" and len(set(labels)) == 3 and str(twin) in labels[1]
