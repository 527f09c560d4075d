"""The problems of the study of defaults.

Defaults are chosen on validation points of the tuning problems. The held-out problems judge them,
and no default may be chosen on those. A problem fixes data, split, network and length of a run, and
nothing that a method could be tuned by.

MNIST, Fashion-MNIST and CIFAR-10 are corefed's own data sets. All other data are files in one
folder, which `prepare.prepare` makes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from corefed.base.errors import UserError, did_you_mean
from corefed_studies.reproduce.cells import Flags

TUNING: Literal["tuning"] = "tuning"
HELD_OUT: Literal["held-out"] = "held-out"
Role = Literal["tuning", "held-out"]

LOCAL_STEPS = 20
SHORT, LONG = 30, 50
"""Rounds. 30 are corefed's default. The aims of the study are for at most 50, which larger data and
networks need."""


class DefaultsProblem(NamedTuple):
    """Data, split, network and length of a run. The method is up to the study."""

    name: str
    role: Role
    flags: Flags  # for `resolve`; `flags` adds the folder of the files
    description: str  # one sentence
    regression: bool = False

    @property
    def file(self) -> str:
        """The file that the data lie in; empty for corefed's own data sets."""
        return str(self.flags["data"]).partition(":")[2]


def _problem(
    name: str, role: Role, rounds: int, description: str, regression: bool = False, **flags: object
) -> DefaultsProblem:
    length: Flags = {"rounds": rounds, "local_steps": LOCAL_STEPS}
    return DefaultsProblem(name, role, {**flags, **length}, description, regression)


# Features of a frozen network have one scale for all of them, as docs/data.md shows it for images.
PROBLEMS = (
    _problem(
        "digits", TUNING, SHORT,
        "The 8 x 8 digits of scikit-learn, ten clients with five labels each.",
        data="digits", clients=10,
    ),
    _problem(
        "mnist-small", TUNING, LONG,
        "MNIST, ten clients with five labels and 250 training points each.",
        data="mnist", partition="shards-small", clients=10,
    ),
    _problem(
        "mnist-medium", TUNING, LONG,
        "MNIST, ten clients with five labels and 1000 training points each.",
        data="mnist", partition="shards-medium", clients=10,
    ),
    _problem(
        "breast-cancer", TUNING, SHORT,
        "Malignant or benign from 30 measurements of cells, five clients with skewed labels.",
        data="table:breast-cancer.csv", target="diagnosis", partition="dirichlet:1", clients=5,
    ),
    _problem(
        "ofp", TUNING, SHORT,
        "Whether an elderly patient has private insurance, in four regions of the United States.",
        data="table:ofp.csv", target="privins", client_column="region",
    ),
    # No column of this table is a site: `premium` and `trend` describe a computer and a month.
    _problem(
        "computers", TUNING, SHORT,
        "The price of a personal computer from its parts, eight clients of different sizes.",
        regression=True,
        data="table:computers.csv", target="price", partition="quantity:1", clients=8,
    ),
    _problem(
        "fashion-medium", HELD_OUT, LONG,
        "Fashion-MNIST, ten clients with five labels and 1000 training points each.",
        data="fashion-mnist", partition="shards-medium", clients=10,
    ),
    # Four clients, as on docs/selectors.md: with ten, a run takes two and a half times as long.
    _problem(
        "cifar10-cnn", HELD_OUT, LONG,
        "CIFAR-10 and a convolutional network, four clients with five labels and 2375 training "
        "points each.",
        data="cifar10", partition="shards-large", clients=4, model="cnn",
    ),
    _problem(
        "cifar10-features", HELD_OUT, LONG,
        "5000 images of CIFAR-10 as features of a frozen network, ten clients with skewed labels.",
        data="npz:cifar10-features.npz", partition="dirichlet:0.5", clients=10, scale="standard",
    ),
    _problem(
        "chest-xray", HELD_OUT, LONG,
        "Chest X-rays as features of a frozen network, two clients with one kind of pneumonia "
        "each and half of the normal images.",
        data="npz:chest-xray-features.npz", partition="shared-normal", clients=2, scale="standard",
    ),
    _problem(
        "housing", HELD_OUT, LONG,
        "The median house value of a block in California, ten clients alike.",
        regression=True,
        data="table:housing.csv", target="median_house_value", partition="iid", clients=10,
    ),
    _problem(
        "chile", HELD_OUT, SHORT,
        "How a Chilean intends to vote in the plebiscite of 1988, in five regions.",
        data="table:chile.csv", target="vote", client_column="region",
    ),
    _problem(
        "aids2", HELD_OUT, SHORT,
        "Whether an Australian AIDS patient is alive in July 1991, in four groups of states.",
        data="table:aids2.csv", target="status", client_column="state",
    ),
)  # fmt: skip


def by_role(role: Role) -> tuple[DefaultsProblem, ...]:
    return tuple(problem for problem in PROBLEMS if problem.role == role)


def problem_of(name: str) -> DefaultsProblem:
    """The problem of that name."""
    known = {problem.name: problem for problem in PROBLEMS}
    if name not in known:
        hint = did_you_mean(name, known, otherwise=f"there are {', '.join(known)}")
        raise UserError(f"There is no problem {name!r}{hint}")
    return known[name]


def flags(problem: DefaultsProblem, folder: Path) -> Flags:
    """The problem's flags, with the folder that its files lie in.

    The folder is `data_dir`, which is no part of a run's fingerprint: a run has the same settings
    wherever the folder is. A path is first looked for in the working directory, so another file of
    the same name there is refused.
    """
    here = Path(problem.file)
    if problem.file and here.exists() and not _same(here, folder / problem.file):
        raise UserError(
            f"{here.absolute()} would be read in place of {folder / problem.file}; rename it, or "
            "start the study in another folder."
        )
    return {**problem.flags, "data_dir": str(folder.absolute())}


def _same(one: Path, other: Path) -> bool:
    return other.exists() and one.samefile(other)
