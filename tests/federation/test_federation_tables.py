"""Tables of several sites: what each says of its own, what they agree on, and how points come out.

One table that holds all sites is simulated; its rows, one file per site, are federated.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import corefed
from federation_calls import AS_SIMULATED, Call

from corefed.base.errors import UserError
from corefed.data import clients, held_out, inputs, table
from corefed.data.columns import Column
from corefed.data.partition import Split
from corefed.data.preparation import Preparation
from corefed.data.table import Settings
from corefed.federation import client, joining, server, task_context
from corefed.federation.protocol import Agreement, Task
from corefed.federation.reading import agreement as agreements
from corefed.federation.reading import local_data
from corefed.federation.reading.agreement import agree
from corefed.federation.reading.fitting import fit
from corefed.federation.reading.local_data import LocalData, describe, fingerprint
from corefed.federation.rules import Rules
from corefed.settings import config
from corefed.training import fitted, record, rounds

PAGE = Path(__file__).parents[2] / "docs" / "privacy.md"
SITES = ("east", "north", "south")


def rows(number: int = 150) -> list[dict[str, str]]:
    """Numbers and text with gaps, codes, a constant, and what only some sites have."""
    draw = np.random.default_rng(5)
    found = []
    for i in range(number):
        site = SITES[i % 3]
        age, dose = draw.normal(50 + 5 * (i % 3), 10), draw.normal(1e6, 3)
        ill = age + 10 * draw.normal() > 55
        found.append({
            "patient": f"p{i}",
            "site": site,
            "age": "" if draw.random() < 0.1 else f"{age:.4g}",
            "dose": f"{dose:.9g}",
            "kind": ["a", "b", "c"][i % 2] if site != "south" else "c",  # c is at one site only
            "sex": ["f", "m", ""][int(draw.integers(3))] if site == "north" else "fm"[i % 2],
            "ward": str(int(draw.integers(1, 4))),  # codes
            "same": "7.1",
            "new": "" if site == "south" else f"{draw.normal():.5g}",  # never measured there
            "ill": "" if i == 20 else ["well", "ill"][int(ill)],
            "cost": f"{100 + 3 * age + draw.normal():.6g}",
        })  # fmt: skip
    return found


def write(path: Path, found: Sequence[dict[str, str]], names: Sequence[str] = ()) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, names or list(found[0]), extrasaction="ignore")
        out.writeheader()
        out.writerows(found)
    return path


def apart(folder: Path, found: Sequence[dict[str, str]]) -> dict[str, Path]:
    """One file per site, each with its columns in another order."""
    names = list(found[0])
    return {
        site: write(
            folder / f"{site}.csv",
            [row for row in found if row["site"] == site],
            names[turn:] + names[:turn],
        )
        for turn, site in enumerate(SITES)
    }


READING = Settings("ill", "", ("ward",), ("patient", "site", "cost"))


def reading_of(target: str) -> Settings:
    other = "cost" if target == "ill" else "ill"
    return READING._replace(target=target, ignore=("patient", "site", other))


def read(path: object, reading: Settings = READING, **more: Any) -> LocalData:
    return local_data.read(
        str(path),
        **{"test_fraction": 0.2, "seed": task_context.SPLIT_SEED, "reading": reading, **more},
    )


def simulated(
    whole: Path, parts: dict[str, Path], reading: Settings, scale: str
) -> clients.FederatedData:
    """All sites in one table, with the test rows that the sites hold out."""
    own = reading._replace(
        client_column="site", ignore=tuple(each for each in reading.ignore if each != "site")
    )
    dataset = table.read(whole, own, 4096)
    assert dataset.groups is not None and dataset.group_names == SITES
    splits = []
    for number, path in enumerate(parts.values()):
        part = table.read(path, reading._replace(partial=True), 4096)
        test = held_out.draw(part, 0.2, task_context.SPLIT_SEED)
        places = (dataset.groups == number).nonzero().flatten()
        splits.append(Split(places[~test], places[test]))
    return clients.federate(dataset, splits, scale=scale, names=SITES)


def close(one: Sequence[float], two: Sequence[float]) -> bool:
    return len(one) == len(two) and one == pytest.approx(two, rel=1e-6, abs=1e-9)


# --- the same as in a simulation ------------------------------------------------------------------


@pytest.mark.parametrize("target", ["ill", "cost"])
@pytest.mark.parametrize("scale", agreements.TABLE_SCALES)
def test_sites_have_the_features_of_a_simulation(tmp_path: Path, scale: str, target: str) -> None:
    found = rows()
    whole, parts = write(tmp_path / "whole.csv", found), apart(tmp_path, found)
    reading = reading_of(target)
    pooled = simulated(whole, parts, reading, scale)
    (expected,) = pooled.preparations
    own = {site: read(path, reading) for site, path in parts.items()}
    said = {site: json.loads(json.dumps(describe(data))) for site, data in own.items()}
    agreement = Agreement.from_json(agree(said, (), scale).to_json())
    assert agreement.columns == expected.columns and not expected.unseen
    assert agreement.classes == pooled.labels and agreement.targets == pooled.targets
    for key in ("mean", "std", "fill", "target_mean", "target_std"):
        assert close(getattr(agreement, key), getattr(expected, key)), key
    for number, (site, data) in enumerate(own.items()):
        train, test, preparation = fit(data, agreement, site)
        for one, stacked in ((train, pooled.train), (test, pooled.test)):
            n = int(stacked.size[number])
            assert one.x.dtype == torch.float32 and one.x.shape[1] == n > 5
            assert torch.allclose(one.x[0], stacked.x[number, :n], rtol=1e-4, atol=1e-5)
            assert torch.allclose(one.y[0], stacked.y[number, :n], rtol=1e-4, atol=1e-5)
        # Later points are prepared as they are by the folder of a simulation.
        kept = Preparation.from_dict(json.loads(json.dumps(preparation.to_dict())))
        later = [
            inputs.read(parts[site], each, site, target_wanted=True) for each in (kept, expected)
        ]
        assert torch.allclose(later[0].x, later[1].x, rtol=1e-4, atol=1e-5)
        assert torch.equal(later[0].y, later[1].y)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "method"), [("ill", "coreset-pfedbayes"), ("cost", "pfedbayes")]
)
def test_a_federation_trains_as_its_simulation(tmp_path: Path, target: str, method: str) -> None:
    """From one file per site to predictions, with the numbers of a simulation of one table."""
    found = rows()
    whole, parts = write(tmp_path / "whole.csv", found), apart(tmp_path, found)
    reading = reading_of(target)
    flags: dict[str, Any] = {
        "method": method, "clients": 3, "rounds": 2, "local_steps": 10, "hidden": "8",
        "ignore": ",".join(each for each in reading.ignore if each != "site"),
        "categorical": "ward", "client_column": "site", "evaluate_draws": 100,
    }  # fmt: skip
    places = {
        site: task_context.ClientSettings(
            site, tmp_path / f"state-{site}", str(path), target=target, models=tmp_path / site
        )
        for site, path in parts.items()
    }
    run = tmp_path / "run"
    record.Folder(run).create(config.resolve(flags={**flags, "data": "local"}))
    summary = server.federate(run, list(places), AS_SIMULATED, Call(places))
    assert summary["config"]["scale"] == "features"
    experiment = config.resolve(
        flags={**flags, "data": f"table:{whole}", "target": target, "runtime": "loop"}
    )
    data = simulated(whole, parts, reading, "features")
    wanted = rounds.train(experiment, data=data).summary["metrics"]
    assert wanted.keys() == summary["metrics"].keys()
    for name, value in wanted.items():
        assert summary["metrics"][name]["mean"] == pytest.approx(value["mean"], rel=1e-3), name
    new = write(tmp_path / "new.csv", [{**row, "kind": "z", "age": "NA"} for row in found[:9]])
    for number, site in enumerate(SITES):
        folder = tmp_path / site / "run"
        assert fitted.load(folder).preparations[0].columns == data.preparations[0].columns
        result = corefed(
            "predict",
            folder,
            "--client",
            site,
            "--input",
            new,
            "--out",
            tmp_path / "said.csv",
            "--force",
        )
        assert result.code == 0, result.err
        assert "Categories that training did not have" in result.err + result.out
        said = list(csv.DictReader((tmp_path / "said.csv").read_text().splitlines()))
        assert len(said) == 9
        kept = record.read(folder)[0]["metrics"]
        score = "personal_accuracy" if target == "ill" else "personal_rmse"
        mean = record.read_lines(run / record.ROUNDS)[0][-1]["clients"][0][number]
        assert kept[score]["mean"] == pytest.approx(mean, rel=0.05)  # other draws of the weights


def test_a_site_may_lack_classes_values_and_columns_to_ignore(tmp_path: Path) -> None:
    """In a table of all sites these would be mistakes."""
    (tmp_path / "a.csv").write_text("x,s,y\n" + ",u,ill\n" * 4)
    data = read(tmp_path / "a.csv", Settings("y", ignore=("patient",)))
    assert data.labels == ("ill",) and describe(data)["columns"][0]["kind"] == "empty"
    (tmp_path / "b.csv").write_text("s,y\n" + "u,3\nu,3\nu,5\n")
    assert read(tmp_path / "b.csv", Settings("y"), test_fraction=0).labels == ("3", "5")
    (tmp_path / "c.csv").write_text("s,y\n" + "u,3\nu,4\nu,5\n")
    assert read(tmp_path / "c.csv", Settings("y")).labels == ()  # all different: numbers
    forced = read(tmp_path / "b.csv", Settings("y", task="regression"), test_fraction=0)
    assert forced.y_train.flatten().tolist() == [3, 3, 5]


def test_settings_of_the_experiment_hold_for_tables(tmp_path: Path) -> None:
    """The server's ignore, categorical, missing, task and scale, and the client's own target."""
    (tmp_path / "a.csv").write_text(
        "id,site,c,x,y\n" + "".join(f"p{i},s,{i % 2},{i},{i % 3}\n" for i in range(12))
    )
    place = task_context.ClientSettings(
        "a", tmp_path / "state", str(tmp_path / "a.csv"), target="y"
    )

    def joined(**flags: Any) -> dict[str, Any]:
        wanted = config.resolve(flags={"data": "local", **flags})
        settings = joining.settings_as_toml(wanted)
        run = f"r{len(list(tmp_path.glob('state/*/')))}"  # a run is told once
        task = Task("join", run, -1, 0, settings, None, "float32", False, 0.0, 0.0, {})
        reply = client.answer(task, place)
        return reply.figures if not reply.error else {"error": reply.error}

    assert "its own log says why" in joined()["error"]  # an identifier
    said = joined(ignore="id", client_column="site", categorical="c")
    assert [(each["name"], each["kind"]) for each in said["columns"]] == [
        ("c", "category"), ("x", "number"),
    ]  # fmt: skip
    assert said["classes"] == ["0", "1", "2"] and said["target"] == []
    other = joined(ignore="id,site", task="regression")
    assert other["classes"] == [] and len(other["target"]) == 2
    (tmp_path / "a.csv").write_text("c,x,y\n1,2,3\n4,,5\n1,3,3\n4,2,5\n")
    assert "columns" in joined()
    assert "its own log says why" in joined(missing="refuse")["error"]


def test_a_look_at_a_table_does_not_judge_its_features(tmp_path: Path) -> None:
    """Which columns are ignored is the experiment's to say, later."""
    path = write(tmp_path / "a.csv", rows(30))
    data = read(path, Settings("ill"), labels_only=True)
    assert data.shape == (0,) and len(data.y_train) + len(data.y_test) == 29
    with pytest.raises(UserError, match=r"'patient' of .* has another value in every row"):
        read(path, Settings("ill"))
    with pytest.raises(UserError, match=r"to predict as target in client\.toml; it has patient"):
        read(path, Settings(), labels_only=True)
    with pytest.raises(UserError, match="has no column 'il' to predict; did you mean 'ill'"):
        read(path, Settings("il"), labels_only=True)


def test_identifiers_stay_at_the_site_whatever_the_server_asks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", rows(40))
    with pytest.raises(UserError, match=r"'patient' of .* has another value in every row"):
        read(path, READING._replace(categorical=("patient",), ignore=("site",)))


def test_fingerprints_tell_names_of_categories_apart(tmp_path: Path) -> None:
    found = []
    for name, text in (("a", "s,y\nu,1\nv,2\nu,1\n"), ("b", "s,y\nu,1\nw,2\nu,1\n")):
        (tmp_path / f"{name}.csv").write_text(text)
        found.append(fingerprint(read(tmp_path / f"{name}.csv", Settings("y"))))
    assert len(set(found)) == 2


# --- what travels ---------------------------------------------------------------------------------


def listed() -> dict[str, set[str]]:
    """The fields of docs/privacy.md, by what they are of."""
    text = PAGE.read_text()
    part = text[text.index("<!-- join: begin -->") : text.index("<!-- join: end -->")]
    found: dict[str, set[str]] = {}
    for line in part.splitlines()[3:]:
        fields, of, _ = (cell.strip() for cell in line.strip("|").split("|"))
        found.setdefault(of, set()).update(re.findall(r"`(\w+)`", fields))
    return found


def test_what_travels_is_what_the_page_says(tmp_path: Path) -> None:
    """A server that asks a client to join sees these fields, of these kinds, and no others."""
    fields = listed()
    assert fields.keys() == {"all data", "arrays", "tables", "columns"}
    parts = apart(tmp_path, rows())
    np.savez(tmp_path / "a.npz", X=np.arange(24.0).reshape(8, 3), y=np.arange(8) % 2)
    flags = {"data": "local", "ignore": "patient,site", "categorical": "ward"}
    settings = joining.settings_as_toml(config.resolve(flags=flags))
    task = Task("join", "r", -1, 0, settings, None, "float32", False, 0.0, 0.0, {})
    place = task_context.ClientSettings("north", tmp_path / "state", str(tmp_path / "a.npz"))
    reply = client.answer(task, place)
    assert not reply.error and not reply.tree
    assert reply.figures.keys() == fields["all data"] | fields["arrays"]
    path = parts["north"]
    again = task._replace(run="s")
    reply = client.answer(again, place._replace(data=str(path), target="cost"))
    assert not reply.error and not reply.tree
    said = reply.figures
    assert said.keys() == fields["all data"] | fields["tables"]
    data = read(path, Settings("cost", "", ("ward",), ("patient", "site")))
    assert (said["train"], said["test"]) == (len(data.y_train), len(data.y_test)) == (40, 10)
    assert said["classes"] == [] and said["targets"] == 1 and len(said["target"]) == 2
    kinds = {
        "age": "number", "dose": "number", "ill": "category", "kind": "category", "new": "number",
        "same": "number", "sex": "category", "ward": "category",
    }  # fmt: skip
    assert {each["name"]: each["kind"] for each in said["columns"]} == kinds
    for each in said["columns"]:
        assert each.keys() == fields["columns"]
        assert type(each["missing"]) is int
        if each["kind"] == "category":
            assert each["mean"] == each["m2"] == 0 and each["categories"]
        else:
            assert type(each["mean"]) is type(each["m2"]) is float and not each["categories"]


def test_descriptions_by_hand(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("s,x,e,y\nu,1,,0.5\n,3,,1.5\nv,,,2.5\nu,5,,3.5\n")
    said = describe(read(tmp_path / "a.csv", Settings("y"), test_fraction=0))
    nothing = {"categories": [], "mean": 0.0, "m2": 0.0}
    assert said == {
        "train": 4, "test": 0, "classes": [], "targets": 1, "target": [2.0, 5.0],
        "columns": [
            {**nothing, "name": "s", "kind": "category", "missing": 1, "categories": ["u", "v"]},
            {**nothing, "name": "x", "kind": "number", "missing": 1, "mean": 3.0, "m2": 8.0},
            {"name": "e", "kind": "empty", "missing": 4, **nothing},
        ],
    }  # fmt: skip


def test_nothing_of_test_rows_is_described(tmp_path: Path) -> None:
    found = rows()
    path = write(tmp_path / "a.csv", found)
    data = read(path)
    part = table.read(path, READING._replace(partial=True), 4096)
    test = held_out.draw(part, 0.2, task_context.SPLIT_SEED).tolist()
    known = [row for row in found if row["ill"]]
    for row, held in zip(known, test, strict=True):
        if held:
            row |= {"age": "", "dose": "12345", "kind": "secret"}
    other = read(write(tmp_path / "b.csv", found))
    assert describe(other) == describe(data)
    assert not torch.equal(other.x_test[:, 0], data.x_test[:, 0])
    agreement = agree([describe(other)], (), "features")
    assert "secret" not in agreement.to_json()
    assert fit(other, agreement)[1].x.isfinite().all()


def test_a_description_that_is_too_long_is_not_sent(tmp_path: Path) -> None:
    names = [f"column {'x' * 150} {i}" for i in range(3000)]
    (tmp_path / "a.csv").write_text(",".join([*names, "y"]) + "\n" + ("1," * 3000 + "2\n") * 3)
    with pytest.raises(UserError, match="is too long to be sent; leave out columns"):
        describe(read(tmp_path / "a.csv", Settings("y")))
    (tmp_path / "a.csv").write_text("x,y\n" + ("a" * 300 + ",2\nb,3\n") * 3)
    with pytest.raises(UserError, match="'x' with names of categories that are not 1 to 200"):
        describe(read(tmp_path / "a.csv", Settings("y"), test_fraction=0))


# --- what sites agree on --------------------------------------------------------------------------


def column(name: str, **more: Any) -> dict[str, Any]:
    plain = {"kind": "number", "categories": [], "missing": 0, "mean": 1.0, "m2": 2.0}
    if more.get("categories"):
        plain |= {"kind": "category", "mean": 0.0, "m2": 0.0}
    if more.get("kind") == "empty":
        plain |= {"missing": 100, "mean": 0.0, "m2": 0.0}
    return {"name": name, **plain, **more}


def site(*columns: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "train": 100, "test": 3, "classes": ["a", "b"], "targets": 0, "target": [],
        "columns": list(columns), **more,
    }  # fmt: skip


def test_columns_and_categories_of_all_sites_in_one_order() -> None:
    """Columns as in the table of the first client, categories by the alphabet."""
    north = site(column("s", categories=["v", "é"]), column("x", missing=4))
    south = site(column("x"), column("s", categories=["u", "v"]))
    east = site(column("s", kind="empty"), column("x", kind="empty"))
    wanted = (Column("s", ("u", "v", "é")), Column("x", (), True))
    assert agree([north, south], (), "features").columns == wanted
    assert agree([south, north], (), "features").columns == wanted[::-1]
    empty = agree([east, north, south], (), "features")
    assert empty.columns == (Column("s", ("u", "v", "é"), True), Column("x", (), True))
    assert empty.shape == (6,)


def test_columns_that_do_not_vary_are_centred_only() -> None:
    two = [site(column("x", mean=0.1, m2=0.0)), site(column("x", mean=0.1, m2=0.0))]
    found = agree(two, (), "features")
    assert (found.mean, found.std) == ((0.1,), (1.0,))
    found = agree([two[0], site(column("x", mean=0.3, m2=0.0))], (), "features")
    assert found.mean == pytest.approx((0.2,)) and found.std == pytest.approx((0.1,))


def test_class_numbers_are_names_in_tables() -> None:
    """As in a simulation: classes 1 to 3 are three, not four."""
    two = [site(column("x"), classes=["3", "1"]), site(column("x"), classes=["10"])]
    assert agree(two, (), "unit").classes == ("1", "3", "10")
    assert agree(two, ("10", "3", "1"), "unit").classes == ("10", "3", "1")


MANY = [f"c{i}" for i in range(60)]


@pytest.mark.parametrize(
    ("north", "south", "words"),
    [
        (site(column("x")), site(column("x", categories=["u"])),
         "Column 'x' has numbers at north but text at south; .*categorical=x, .*ignore=x"),
        (site(column("x", categories=["u"])), site(column("x")),
         "Column 'x' has numbers at south but text at north"),
        (site(column("x"), column("z")), site(column("x")),
         r"table of south has no column 'z', which that of north has; add it \(its cells may"),
        (site(column("x")), site(column("x"), column("z")),
         "table of north has no column 'z', which that of south has"),
        (site(column("x", categories=MANY[:40])), site(column("x", categories=MANY[20:])),
         "Column 'x' has 60 different categories over all clients, more than 50; join rare"),
        (site(column("x", kind="empty")), site(column("x", kind="empty")),
         "Column 'x' has no value in any client's training rows; leave it out by ignore=x"),
        (site(column("x"), classes=[], targets=1, target=[0.0, 1.0]), site(column("x")),
         "north has as target a number but south has classes; set task to classification or"),
        (site(column("x")), describe(LocalData(
            torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64), torch.zeros(0, 1),
            torch.zeros(0, dtype=torch.int64), ("a",))),
         "north has as data a table but south has arrays"),
    ],
)  # fmt: skip
def test_sites_that_do_not_agree(north: Any, south: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        agree({"north": north, "south": south}, (), "features")


def test_scales_of_arrays_and_tables() -> None:
    with pytest.raises(UserError, match=r"no scale 'auto' for a table .*; use unit or standard or"):
        agree([site(column("x"))], (), "auto")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda said: said.update(columns=[]), "0 columns"),
        (lambda said: said.update(columns=[column(str(i)) for i in range(10_001)]), "10001"),
        (lambda said: said.update(columns={"x": 1}), "dict as 'columns'"),
        (lambda said: said.update(columns=["x"]), "no tables of values"),
        (lambda said: said.update(columns=[column("x"), column("x")]), "twice"),
        (lambda said: said.update(train=10**400), "absurd"),
        (lambda said: said.update(more=1), "more fields"),
        (lambda said: said.update(target=[1.0, 2.0]), "number of targets"),
        (lambda said: said.update(classes=[], targets=2, target=[1.0] * 4), "number of targets"),
        (lambda said: said.update(classes=[], targets=1, target=["1", 2]), "target whose scale"),
        (lambda said: said.update(classes=[], targets=1, target=[1.0, -1]), "target whose scale"),
        (lambda said: said.update(classes=[], targets=1, target=[math.nan, 1]), "target whose"),
        (lambda said: said["columns"][0].pop("m2"), "lacks 'm2'"),
        (lambda said: said["columns"][0].update(rows=[1, 2, 3]), "more fields"),
        *[
            (lambda said, key=key, value=value: said["columns"][0].update({key: value}), words)
            for key, value, words in [
                ("name", "", "names of columns"), ("name", "x" * 201, "names of columns"),
                ("name", 3, "int as 'name'"), ("kind", "text", "no kind"), ("kind", None, "kind"),
                ("missing", -1, "gaps"), ("missing", 101, "gaps"), ("missing", True, "bool"),
                ("missing", 10**400, "gaps"), ("mean", math.inf, "scale"), ("mean", 10**400, "sc"),
                ("mean", math.nan, "scale"), ("mean", 1e39, "scale"), ("m2", -1, "scale"),
                ("m2", 1e80, "scale"), ("m2", math.nan, "scale"), ("mean", "1", "str as 'mean'"),
                ("categories", ["u"], "more categories"), ("categories", "uv", "str as"),
                ("kind", "empty", "gaps"), ("kind", "category", "no categories"),
            ]
        ],
        *[
            (lambda said, names=names: said.update(columns=[column("x", categories=names)]), words)
            for names, words in [
                (MANY, "more categories"), (["u", "u"], "twice"), (["u", 3], "1 to 200"),
                (["u" * 201], "1 to 200"), ([""], "1 to 200"), ([["u"]], "1 to 200"),
            ]
        ],
        (lambda said: said.update(train=1, columns=[column("x", categories=["u", "v"])]), "rows"),
    ],
)  # fmt: skip
def test_descriptions_of_tables_that_nobody_honest_sends(
    change: Callable[[dict[str, Any]], object], words: str
) -> None:
    """They come from another machine: each is refused alone, before it meets the others."""
    good, bad = site(column("x")), site(column("x"))
    change(bad)
    assert words in joining._check_answer(bad, Rules())
    with pytest.raises(UserError, match="The description of bad's data"):
        agree({"good": good, "bad": bad}, (), "features")


def test_names_are_data() -> None:
    """Whatever a client writes into a name comes out of the agreement as that name."""
    names = ["'; DROP TABLE", "<script>", "\x1b[31m", "a\nb", "../../x", "\u202e"]
    found = agree([site(column(name, categories=names)) for name in names[:1]], (), "features")
    again = Agreement.from_json(found.to_json())
    assert again == found and set(found.columns[0].categories) == set(names)
    with pytest.raises(UserError) as caught:
        agree([site(column("\x1b[31m")), site(column("x"))], (), "features")
    assert "\x1b" not in str(caught.value).replace("\\x1b", "").split("ignore=")[0]


# --- fit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s,x,z,y\nu,1,2,a\nu,1,2,b\n", "client has the column 'z', unlike those of this run"),
        ("x,y\n1,a\n1,b\n", "client lacks the column 's'"),
        ("s,x,y\nu,k,a\nu,k,b\n", "Column 'x' has text here, but numbers in this run"),
        ("s,x,y\n1,2,a\n1,2,b\n", "Column 's' has numbers here, but text in this run"),
    ],
)
def test_tables_that_do_not_fit(tmp_path: Path, text: str, words: str) -> None:
    """Such as that of a client that was not there when the others agreed."""
    (tmp_path / "a.csv").write_text(text)
    agreement = agree([site(column("s", categories=["u", "v"]), column("x"))], (), "features")
    with pytest.raises(UserError, match=words):
        fit(read(tmp_path / "a.csv", Settings("y"), test_fraction=0), agreement)


def test_a_site_that_comes_later(tmp_path: Path) -> None:
    """A category that was not agreed on is none of them; a gap is the mean."""
    agreement = agree(
        [site(column("s", categories=["u", "v"]), column("x", m2=400.0))], (), "features"
    )
    (tmp_path / "a.csv").write_text("x,s,y\n3,w,a\n,v,b\n3,v,b\n1,w,b\n")
    train, _, _ = fit(read(tmp_path / "a.csv", Settings("y"), test_fraction=0), agreement)
    assert train.x[0].tolist() == [[0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 0]]
    arrays = LocalData(
        torch.zeros(1, 3),
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(0, 3),
        torch.zeros(0, dtype=torch.int64),
        ("a",),
    )
    with pytest.raises(UserError, match="The data are arrays here, but tables in this run"):
        fit(arrays, agreement)


def test_agreements_of_another_version_are_refused() -> None:
    old = {"shape": [2], "classes": [], "targets": 1, "mean": 0.0, "std": 1.0, "columns": ""}
    with pytest.raises(UserError, match="another version of corefed; start a new run"):
        Agreement.from_json(json.dumps(old))
