"""Folders of images whose sites are the clients: SITE/CLASS/, or a file that names the sites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import corefed

from corefed.base.errors import UserError
from corefed.data import load
from corefed.data.dataset import Dataset
from corefed.data.images import find
from corefed.data.table import Settings

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")

SITES, CLASSES = ("north", "south"), ("ill", "well")


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may see or fill the cache of whoever runs it."""
    monkeypatch.setenv("COREFED_CACHE", str(tmp_path / "cache"))


def save(path: Path, level: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), level).save(path)
    return path


def by_site(root: Path, count: int = 8) -> Path:
    for place, site in enumerate(SITES):
        for at, label in enumerate(CLASSES):
            for number in range(count):
                save(root / site / label / f"{number}.png", 100 * at + 50 * place + number)
    return root


def read(root: Path, clients: str) -> Dataset:
    return load(f"image-folder:{root}", embedding="none", reading=Settings(client_column=clients))


def test_first_folders_are_sites(tmp_path: Path) -> None:
    data = read(by_site(tmp_path / "x"), "folder")
    assert data.labels == CLASSES and data.group_names == SITES
    assert data.groups is not None and data.groups.tolist() == [0] * 16 + [1] * 16
    assert data.y.tolist() == ([0] * 8 + [1] * 8) * 2
    assert data.notes[:2] == ("Classes: ill (16), well (16).", "Clients: north (16), south (16).")


def test_sites_that_look_like_classes_are_not_taken_for_them(tmp_path: Path) -> None:
    """The sites became the classes, and nothing said so."""
    root = by_site(tmp_path / "x")
    with pytest.raises(UserError) as refused:
        find(root)
    sentence = str(refused.value)
    assert "has folders north, south with the same folders ill, well in them" in sentence
    assert "add --client folder" in sentence and "--set classes=north,south" in sentence
    named = find(root, classes=("north", "south"))
    assert named.labels == SITES and named.groups is None
    (note,) = (each for each in find(root, partial=True).notes if "sites" in each)
    assert note.endswith("if the first are sites, give the folder of one site.")


def test_other_folders_in_classes_are_as_before(tmp_path: Path) -> None:
    """Another one in each class, images beside them, or one name that all have."""
    for names in (
        ("a/p1/1.png", "a/p2/1.png", "b/p3/1.png", "b/p4/1.png"),
        ("a/left/1.png", "a/right/1.png", "b/left/1.png", "b/right/1.png", "b/2.png"),
        ("a/png/1.png", "a/p1/1.png", "b/png/1.png", "b/p2/1.png"),
    ):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            save(root / name)
        assert find(root).labels == ("a", "b")


def test_sites_inside_train_and_test(tmp_path: Path) -> None:
    for part, count in (("train", 5), ("test", 2)):
        by_site(tmp_path / "x" / part, count)
    data = read(tmp_path / "x", "folder")
    assert data.group_names == SITES and data.labels == CLASSES
    assert data.held_out is not None and data.held_out.tolist() == [False] * 20 + [True] * 8
    with pytest.raises(UserError, match="add --client folder"):
        find(tmp_path / "x")


def test_a_site_may_lack_a_class(tmp_path: Path) -> None:
    root = by_site(tmp_path / "x")
    save(root / "east" / "ill" / "1.png")
    assert find(root, clients="folder").group_names == ("east", "north", "south")


@pytest.mark.parametrize(
    ("name", "words"),
    [("east/1.png", "has images outside of class folders"), ("east/.x", "has no class folders")],
)
def test_sites_that_cannot_be_read(tmp_path: Path, name: str, words: str) -> None:
    root = by_site(tmp_path / "x")
    (root / "east").mkdir()
    save(root / name) if name.endswith("png") else (root / name).write_text("")
    with pytest.raises(UserError, match=f"The site .*east {words}"):
        find(root, clients="folder")


# --- a file ---------------------------------------------------------------------------------------


def plain(root: Path) -> Path:
    """ill/0.png to well/7.png."""
    for at, label in enumerate(CLASSES):
        for number in range(8):
            save(root / label / f"{number}.png", 100 * at + number)
    return root


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_file_names_the_sites(tmp_path: Path) -> None:
    root = plain(tmp_path / "x")
    lines = [f"{label}/{n}.png,{SITES[n % 2]}" for label in CLASSES for n in range(7)]
    write(root / "sites.csv", ["file,site", *lines])
    for written in ("sites.csv", str(root / "sites.csv")):
        data = read(root, written)
        assert data.labels == CLASSES and data.group_names == SITES
        assert data.groups is not None and data.groups.tolist() == [0, 1, 0, 1, 0, 1, 0] * 2
        assert data.y.tolist() == [0] * 7 + [1] * 7
        assert f"2 images in {root} are not in {written}; they are left out." in data.notes


def test_a_file_names_the_classes_too(tmp_path: Path) -> None:
    root = tmp_path / "x"
    for number in range(6):
        save(root / f"{number}.png", number)
    lines = [f"{number}.png,{CLASSES[number // 3]},{SITES[number % 2]}" for number in range(6)]
    write(root / "sites.csv", ["file,class,site", *lines])
    data = read(root, "sites.csv")
    assert data.labels == CLASSES and data.group_names == SITES
    assert data.y.tolist() == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["image,site", "ill/0.png,a"], "has no column 'file'; it needs 'file' and 'site'"),
        (["file,site", "ill/0.png,a", "ill/99.png,a"], "Line 3 of .* names 'ill/99.png', which is"),
        (["file,site", "ill/0.png,a", "ill/1.png,"], "Line 3 of .* has no site; fill it in"),
        (["file,site", "ill/0.png,a", "ill/0.png,b"], "names ill/0.png 2 times; name it once"),
        (["file,site", "ill/0.png,a", "loose.png,b"], "names loose.png, which is no image in a cl"),
        (["file,site", "ill/0.png,a", "ill/1.png,b"], "have one class only"),
        (["file,site"], "names no images"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    root = plain(tmp_path / "x")
    save(root / "loose.png")
    write(root / "sites.csv", lines)
    with pytest.raises(UserError, match=words):
        find(root, clients="sites.csv")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"There is no file site, nor one in .* --client is 'folder'"
    ):
        find(plain(tmp_path / "x"), clients="site")


# --- by commands ----------------------------------------------------------------------------------


def test_commands(tmp_path: Path) -> None:
    root = by_site(tmp_path / "x")
    shown = corefed("datasets", f"--show=image-folder:{root}", "--client=folder")
    assert shown.code == 0, shown.err
    assert "north" in shown.out and "ill" in shown.out and "natural" in shown.out
    out = tmp_path / "out"
    options = (
        f"--data=image-folder:{root}", "--method=fedavg", "--rounds=1", "--local-steps=1",
        "--set=embedding=none", "--model=mlp", "--hidden=4", "--device=cpu",
    )  # fmt: skip
    refused = corefed("run", *options, f"--out={out}")
    assert refused.code == 2 and "add --client folder" in refused.err and not out.exists()
    result = corefed("run", *options, "--client=folder", f"--out={out}")
    assert result.code == 0, result.err
    assert "note: Clients: north (16), south (16)." in result.err
    kept = json.loads((out / "data.json").read_text())
    assert [each["name"] for each in kept["clients"][0]] == list(SITES)
    assert kept["preparations"][0]["labels"] == list(CLASSES)
