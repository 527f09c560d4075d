"""Pins and versions are the same wherever they are written. What pages show: `test_pages.py`."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import corefed

ROOT = Path(__file__).parents[2]


def read_pins() -> dict[str, Version]:
    """constraints.txt, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert equals, f"{line!r} is not an exact pin"
            pins[normalised(name)] = Version(version)
    return pins


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, to use corefed, to develop it and to build it."""
    content = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = content["project"]["optional-dependencies"].values()
    lists = [content["project"]["dependencies"], content["build-system"]["requires"], *extras]
    return [Requirement(text) for texts in lists for text in texts]


def test_constraints_satisfy_the_project() -> None:
    pins = read_pins()
    for requirement in declared():
        pin = pins.get(normalised(requirement.name))
        assert pin is not None, f"constraints.txt has no pin of {requirement.name}"
        assert pin in requirement.specifier, f"the pin {pin} does not satisfy {requirement}"


def test_constraints_pin_what_dependencies_pull_in() -> None:
    """Followed through the packages that are installed as pinned.

    Not through torch: what it pulls in (CUDA, say) differs from platform to platform.
    """
    pins = read_pins()
    waiting = [normalised(requirement.name) for requirement in declared()]
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        if name != "torch" and name in pins:
            waiting += pulled_in(name, pins[name])
    assert reached - pins.keys() == set()


def pulled_in(name: str, pin: Version) -> list[str]:
    try:
        package = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return []
    if Version(package.version) != pin:
        return []
    needed = [Requirement(text) for text in package.requires or []]
    return [
        normalised(each.name)
        for each in needed
        if each.marker is None or each.marker.evaluate({"extra": ""})
    ]


def test_constraints_are_for_every_platform() -> None:
    """A local version such as 2.13.0+cpu exists on one index only."""
    assert [name for name, version in read_pins().items() if version.local] == []


@pytest.mark.parametrize(
    ("name", "bound"), [("typer", "<0.21"), ("rich", "<15"), ("packaging", "<26")]
)
def test_constraints_leave_room_for_flower(name: str, bound: str) -> None:
    """flwr 1.41.0 has these bounds, and is to be installed beside corefed."""
    assert read_pins()[name] in SpecifierSet(bound)


def test_version_is_the_same_everywhere() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {corefed.__version__}\n" in citation
    newest = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == corefed.__version__
