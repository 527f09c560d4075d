"""Clients' files hold, bit for bit, what a simulation trains on."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import corefed

from corefed.base.errors import UserError
from corefed.data import clients, datasets, export, partition
from corefed.federation.reading import fitting, local_data
from corefed.federation.reading.agreement import agree
from corefed.settings import config
from corefed.training import setup


@pytest.mark.parametrize("spec", ["iid", "labels:2", "shards-small"])
@pytest.mark.parametrize("scale", ["unit", "standard"])
def test_a_client_reads_what_a_simulation_deals(tmp_path: Path, spec: str, scale: str) -> None:
    shown = corefed(
        "datasets", "--show=digits", f"--partition={spec}", "--clients=3", "--seed=4",
        f"--write={tmp_path / 'new' / 'folder'}",
    )  # fmt: skip
    assert shown.code == 0 and "wrote 3 files" in shown.err and "training points" in shown.out
    run = config.resolve(flags={"partition": spec, "clients": 3, "seeds": "4"}).run
    simulated = setup.load(dataclasses.replace(run, scale=scale))
    folder = tmp_path / "new" / "folder"
    assert sorted(os.listdir(folder)) == [f"client-{i}.npz" for i in range(3)]
    own = [
        local_data.read(str(folder / f"client-{i}.npz"), test_fraction=0.5, seed=9)
        for i in range(3)
    ]
    agreement = agree([local_data.describe(data) for data in own], (), scale)
    if scale == "standard":
        # Equal up to the rounding of torch's own sum in float32; the rows with its very numbers.
        dataset = datasets.load("digits")
        splits = partition.split(spec, dataset, 3, 4)
        (found,) = clients.federate(dataset, splits, scale="standard").preparations
        (mean,), (std,) = found.mean, found.std
        assert (*agreement.mean, *agreement.std) == pytest.approx((mean, std), rel=1e-6)
        agreement = dataclasses.replace(agreement, mean=(mean,), std=(std,))
    if spec != "labels:2":
        assert agreement.classes == simulated.labels
    for i, data in enumerate(own):
        for fitted, stacked in zip(
            fitting.fit(data, agreement)[:2], (simulated.train, simulated.test), strict=True
        ):
            n = int(stacked.size[i])
            assert fitted.x.dtype == torch.float32 and fitted.y.dtype == torch.int64
            assert torch.equal(fitted.x[0], stacked.x[i, :n])
            assert torch.equal(fitted.y[0], stacked.y[i, :n])
            assert torch.equal(fitted.weight[0], stacked.weight[i, :n])


def test_a_regression_and_its_targets(tmp_path: Path) -> None:
    dataset = datasets.load("synthetic-regression", clients=2, seed=1)
    splits = partition.split("natural", dataset, 2, 1)
    export.write(dataset, splits, tmp_path / "out")
    simulated = clients.federate(dataset, splits)
    own = [
        local_data.read(f"npz:{tmp_path / 'out'}/client-{i}.npz", test_fraction=0, seed=0)
        for i in range(2)
    ]
    agreement = agree([local_data.describe(data) for data in own], (), "unit")
    assert agreement.classes == () and agreement.targets == simulated.targets
    for i, data in enumerate(own):
        train, test, _ = fitting.fit(data, agreement)
        assert torch.equal(train.x[0], simulated.train.x[i][: train.x.shape[1]])
        assert torch.equal(train.y[0], simulated.train.y[i][: train.y.shape[1]])
        assert torch.equal(test.y[0], simulated.test.y[i][: test.y.shape[1]])


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    refused = corefed("datasets", "--show=digits", "--clients=2", f"--write={tmp_path}")
    assert refused.code == 2 and "is not empty" in refused.err
    refused = corefed("datasets", "--show=digits", "--clients=2", f"--write={tmp_path / 'mine'}")
    assert refused.code == 2 and "is a file" in refused.err
    assert os.listdir(tmp_path) == ["mine"]
    refused = corefed("datasets", f"--write={tmp_path / 'new'}")
    assert refused.code == 2 and "--write needs --show" in refused.err


def test_all_files_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.load("digits")
    splits = partition.split("iid", dataset, 3, 0)
    real, calls = os.write, []

    def full(handle: int, content: Any) -> int:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(handle, content)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(UserError, match="No space left on device"):
            export.write(dataset, splits, tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".client-0.npz.tmp").write_text("of an attempt that was killed")
    export.write(dataset, splits, tmp_path / "a")
    assert sorted(os.listdir(tmp_path / "a")) == [f"client-{i}.npz" for i in range(3)]


@pytest.mark.parametrize("scale", ["features", "client"])
def test_a_client_has_the_numbers_of_a_table_that_a_simulation_trains_on(
    scale: str, tmp_path: Path
) -> None:
    """Counts around 1e9 are one number in float32, where arrays are read; a simulation tells them
    apart."""
    path = tmp_path / "own.csv"
    rows = [(10**9 + i % 3 - 1, "" if i % 9 == 0 else i / 7, i % 2) for i in range(60)]
    path.write_text("\n".join(["count,dose,ill", *(",".join(map(str, row)) for row in rows)]))
    flags = {"data": f"table:{path}", "target": "ill", "partition": "iid", "clients": 2}
    shown = corefed(
        "datasets", f"--show=table:{path}", "--target=ill", "--partition=iid", "--clients=2",
        f"--set=scale={scale}", f"--write={tmp_path / 'dealt'}",
    )  # fmt: skip
    assert shown.code == 0, shown.err
    simulated = setup.load(setup.concrete(config.resolve(flags={**flags, "scale": scale})).run)
    own = [
        local_data.read(str(tmp_path / "dealt" / f"client-{i}.npz"), test_fraction=0.5, seed=9)
        for i in range(2)
    ]
    agreement = agree([local_data.describe(data) for data in own], (), "unit")
    for i, data in enumerate(own):
        assert len(data.x_train[:, 0].unique()) == 3
        train, test, _ = fitting.fit(data, agreement)
        assert torch.equal(train.x[0], simulated.train.x[i, : train.x.shape[1]])
        assert torch.equal(test.x[0], simulated.test.x[i, : test.x.shape[1]])
