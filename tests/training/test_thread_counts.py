"""One thread or two: every network, preset and selector gives the same models.

Clients train in threads from `WORTH_THREADS` numbers on, which all runs here have. The same run
again, on as many threads, is equal to the bit. With another number of threads other clients share
a product, which adds in another order: models agree up to rounding.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import corefed
from torch import Tensor

from corefed import Federation, selectors
from corefed.base.threads import WORTH_THREADS
from corefed.models import own, resnet
from corefed.models.series import SERIES
from corefed.training import fitted

NETS = """
import torch
from torch import nn
from torch.nn import functional as F


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, outputs))


class Images(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3), nn.Conv2d(16, 64, 3)
        self.last = nn.Linear(256, outputs)

    def forward(self, x):
        h = F.max_pool2d(self.second(self.first(x.view(-1, 1, 8, 8)).relu()).relu(), 2)
        return self.last(h.flatten(1))


class Series(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer, self.last = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, outputs)

    def forward(self, x):
        return self.last(self.layer(x.view(-1, 8, 8))[0][:, -1])


class Attention(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 512, batch_first=True)
        self.last = nn.Linear(8, outputs)

    def forward(self, x):
        return self.last(self.layer(x.view(-1, 8, 8)).mean(1))


ONE = mlp(64, 10)


def shared():
    return ONE
"""

OWN = [f"own_threads:{name}" for name in ("mlp", "Images", "Series", "Attention", "shared")]
SIZES = {
    "cnn": "channels=16,32", "cnn1d": "channels=16,32", "transformer": "hidden=32,32",
    resnet.NAME: "channels=16,16", "lstm": "hidden=64", "gru": "hidden=64",
}  # fmt: skip
ROUNDING, RARE, STEP = 1e-4, 1e-4, 0.01
"""A rounding of float32 is 1e-7, and four steps of hundreds of sums leave 1e-5. Adam divides by the
size of a gradient, so where that is nearly 0 rounding decides: seen for 2 of 140,000 entries, by
0.0005. One step of Adam is 0.01 at most."""

NETWORKS = ["mlp", "cnn", resnet.NAME, *SERIES, *OWN]
"""Networks of published benchmarks need larger images, and are `cnn` with other sizes."""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_threads.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    sys.modules.pop("own_threads", None)


def run(threads: int, name: str, *words: str) -> dict[str, Tensor]:
    torch.set_num_threads(threads)
    done = corefed(
        "run", "--data=digits", "--clients=4", "--rounds=2", "--local-steps=2", "--set=keep=0.5",
        "--set=evaluate_draws=1", "--set=evaluate_every=2", "--set=batch_size=16", "--device=cpu",
        "--out", name, "-q", *words,
    )  # fmt: skip
    assert done.code == 0, done.err
    model = next((word.partition("=")[2] for word in words if word.startswith("--model=")), "mlp")
    found = fitted.load(Path(name), own.named(model)).models
    sent = sum(value[0].numel() for key, value in found.items() if key.startswith("server"))
    assert 4 * sent >= 2 * WORTH_THREADS
    return found


def compare(*words: str) -> None:
    alone = run(1, "one", *words)
    two, again = run(2, "two", *words), run(2, "again", *words)
    for name, value in alone.items():
        assert torch.equal(two[name], again[name]), name
        off = (two[name] - value).abs()
        assert off.max() < STEP, name
        assert (off > ROUNDING * (1 + value.abs())).float().mean() <= RARE, name


@pytest.mark.parametrize("method", ["fedavg", "coreset-pfedbayes"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_network(network: str, method: str) -> None:
    sizes = f"--set={SIZES.get(network, 'hidden=128')}"
    compare(f"--model={network}", f"--method={method}", sizes)


@pytest.mark.parametrize("preset", ["fast", "matching", "paper"])
def test_every_preset(preset: str) -> None:
    small = ("--set=kl_rows=2", "--set=outer=2", "--set=max_iterations=10")
    small = small if preset == "paper" else ()
    compare("--method=coreset-pfedbayes", f"--set=preset={preset}", "--set=hidden=128", *small)


@pytest.mark.parametrize("selector", list(selectors.SELECTORS))
def test_every_selector(selector: str) -> None:
    compare("--method=coreset-pfedbayes", f"--set=selector={selector}", "--set=hidden=128")


# Python threads that train at the same time


def fit(**given: object) -> Tensor:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 64, generator=g).numpy(), torch.arange(240).numpy() % 10
    sites = [f"site {i % 4}" for i in range(240)]
    settings = {"rounds": 1, "local_steps": 3, "hidden": 128, "batch_size": 16, **given}
    federation = Federation(**settings).fit(x, y, groups=sites)
    return torch.from_numpy(federation.predict_proba(x, groups=sites))


@pytest.mark.parametrize(
    "given",
    [
        {"method": "pfedbayes", "model": "own_threads:shared"},
        {"method": "pfedbayes", "model": "own_threads:Attention"},
        {"method": "pfedbayes", "model": "lstm", "hidden": 64},
        {"preset": "paper", "fraction": 0.2, "kl_rows": 2, "outer": 2, "max_iterations": 10},
    ],
    ids=lambda given: str(given.get("model", "paper")),
)
def test_two_python_threads_fit_as_one_does(given: dict[str, object]) -> None:
    """Their factories give the same module; what torch has set is afterwards as before."""
    torch.set_num_threads(2)
    fast, flash = (torch.backends.mha.get_fastpath_enabled, torch.backends.cuda.flash_sdp_enabled)
    before = (fast(), flash(), torch.get_num_threads())
    alone, found = fit(**given), [torch.empty(0)] * 2

    def work(place: int) -> None:
        found[place] = fit(**given)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=1e-4)
    assert (fast(), flash(), torch.get_num_threads()) == before
