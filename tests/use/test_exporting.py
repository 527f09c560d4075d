"""Exported models: the same numbers as the run's, where there is torch and no corefed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from commands import corefed
from safetensors.torch import load_file
from torch import nn

from corefed.base.errors import UserError
from corefed.bayes import gaussian
from corefed.models import own
from corefed.training import fitted
from corefed.training.fitted import Fitted
from corefed.training.setup import network
from corefed.use.export import measures, onnx_program, package
from corefed.use.export.encoder import input_shape

SMALL = ("--rounds=1", "--local-steps=2", "--clients=2", "--device=cpu", "--set=evaluate_draws=2",
         "--quiet")  # fmt: skip
BATCHES = (1, 7, 1000)
TOLERANCE = 2e-5
"""Both are float32 through a few layers, with sums in another order."""

OWN = '''
import torch
from torch import nn


class Gated(nn.Module):
    """Not a Sequential: two branches, a frozen parameter and a buffer."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.gate, self.value = nn.Linear(inputs, 6), nn.Linear(inputs, 6)
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.ones(6))
        self.last = nn.Linear(6, outputs)

    def forward(self, x):
        h = torch.sigmoid(self.gate(x)) * self.value(x) * self.frozen + self.shift
        return self.last(torch.tanh(h))
'''


class Case(NamedTuple):
    run: tuple[str, ...]
    client: str | None
    options: tuple[str, ...] = ()


CASES = {
    "mlp": Case(("--method=coreset-pfedbayes", "--set=hidden=8,6", "--seed=3,4",
                 "--set=validation=0.2"), "client 1", ("--seed=4",)),
    "cnn": Case(("--method=pfedbayes", "--set=model=cnn", "--set=channels=2,3,2,2",
                 "--set=hidden=5"), "client 0"),
    "point": Case(("--method=fedavg", "--set=hidden=8"), "client 0"),
    "matched": Case(("--method=bnfed", "--set=hidden=4"), None, ("--global",)),
    "regression": Case(("--data=npz:{here}/prices.npz", "--method=pfedbayes", "--set=hidden=5",
                        "--set=client_column=client", "--set=validation=0.2"), "north"),
    "own": Case(("--set=model=own_gated:Gated", "--method=pfedbayes"), "client 1",
                ("--global", "--model=own_gated:Gated")),
    "table": Case(("--data=table:{here}/sites.csv", "--set=target=ill", "--set=client_column=site",
                   "--set=scale=client", "--method=pfedbayes", "--set=hidden=5"), "south"),
}  # fmt: skip


class Made(NamedTuple):
    folder: Path  # of the export
    model: Fitted
    taken: package.Export
    x: torch.Tensor  # raw points
    client: str | None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    here = tmp_path_factory.mktemp("exports")
    g = np.random.default_rng(0)
    x = g.normal(5, 3, (80, 4))
    y = np.stack([x[:, 0] * 100 + 1000, x[:, 1] - 3], 1)
    np.savez(here / "prices.npz", X=x, y=y, client=np.repeat(["north", "south"], 40))
    rows = [
        f"{'north' if i < 40 else 'south'},{'' if i % 7 == 0 else 50 + i},{'abc'[i % 3]},{i % 2}"
        for i in range(80)
    ]
    (here / "sites.csv").write_text("site,age,ward,ill\n" + "\n".join(rows) + "\n")
    (here / "own_gated.py").write_text(OWN)
    before = os.getcwd()
    os.chdir(here)  # where a network of one's own is looked for
    found = {}
    try:
        for name, case in CASES.items():
            options = [each.format(here=here) for each in case.run]
            done = corefed("run", *SMALL, *options, "--out", here / name)
            assert done.code == 0, done.err
            client = () if case.client is None else ("--client", case.client)
            out = here / f"{name}-model"
            done = corefed("export", here / name, *client, *case.options, "--out", out)
            assert done.code == 0, done.err
            make = own.named("own_gated:Gated") if name == "own" else None
            model = fitted.load(here / name, make)
            seed = 4 if "--seed=4" in case.options else None
            shared = "--global" in case.options
            taken = package.take(model, case.client, shared=shared, seed=seed)
            raw = torch.from_numpy(g.uniform(0, 1, (max(BATCHES), *input_shape(taken.preparation))))
            raw = raw.to(package.program.dtype_of(taken.preparation))
            if name == "table":
                raw[::3, 0] = torch.nan
                raw[:, 1] = torch.arange(len(raw)) % 4 - 1  # -1: a ward that training had not
            found[name] = Made(out, model, taken, raw, case.client)
    finally:
        os.chdir(before)
        sys.modules.pop("own_gated", None)
    return found


def features(made: Made) -> torch.Tensor:
    """As `corefed predict` reads them, a row at a time: age, age missing, three wards."""
    if made.taken.preparation.kind != "table":
        return made.x.clone()
    rows = [
        [age, float(age != age), *(float(ward == code) for code in range(3))]
        for age, ward in made.x.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64)


def expected(made: Made) -> dict[str, torch.Tensor]:
    """What `corefed predict` says of the raw points."""
    taken, model = made.taken, made.model
    ready = model.preparations[taken.g].scale(features(made), taken.client)
    seed = model.experiment.run.seeds[taken.g]
    said = model.predict(taken.client, ready, seed=seed, kind=taken.kind)
    first = "probabilities" if taken.preparation.labels else "mean"
    parts = {"total": said.total, "aleatoric": said.aleatoric, "epistemic": said.epistemic}
    return {first: said.mean, **parts}


ELSEWHERE = """
import sys
sys.modules["corefed"] = None  # whoever imports it fails
import json, os, re
import numpy as np
import torch
torch.set_num_threads(1)
for folder in sys.argv[2:]:
    os.chdir(folder)
    program = torch.export.load("predictive.pt2").module()
    x = torch.from_numpy(np.load("x.npy"))
    for n in json.loads(sys.argv[1]):
        said = {name: value.numpy() for name, value in program(x[:n]).items()}
        np.savez(f"said-{n}.npz", **said)
exec(re.search(r"```python\\n(.*?)```", open("model_card.md").read(), re.S)[1])  # of the last
"""


@pytest.fixture(scope="module")
def printed(made: dict[str, Made]) -> str:
    """Of a process of its own, isolated from this one's paths, that runs all programs."""
    for each in made.values():
        np.save(each.folder / "x.npy", each.x.numpy())
    folders = [str(each.folder) for each in made.values()]
    arguments = [sys.executable, "-I", "-c", ELSEWHERE, json.dumps(BATCHES), *folders]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_programs_say_elsewhere_what_the_run_says_here(made: dict[str, Made], printed: str) -> None:
    """With batches of any size."""
    for name, each in made.items():
        wanted = expected(each)
        for n in BATCHES:
            with np.load(each.folder / f"said-{n}.npz") as said:
                assert set(said) == set(wanted)
                for field, value in wanted.items():
                    there = torch.from_numpy(said[field]).double()
                    size = value.abs().max().clamp_min(1.0)  # prices are in hundreds
                    assert there.shape == value[:n].shape, (name, field)
                    gap = (there - value[:n]).abs().max() / size
                    assert gap < TOLERANCE, (name, n, field, float(gap))


def test_the_card_runs_and_prints_the_example(made: dict[str, Made], printed: str) -> None:
    said = literal_eval(printed)  # a dictionary of lists
    wanted = json.loads((list(made.values())[-1].folder / "example_output.json").read_text())
    for name, value in wanted.items():
        assert np.allclose(said[name], value, atol=TOLERANCE), name


def test_the_mean_loads_into_the_network_of_the_card(made: dict[str, Made]) -> None:
    """Logits are those of the run's own network at the mean of the posterior."""
    for name, each in made.items():
        if name in ("own", "matched"):
            continue
        source = re.findall(
            r"```python\n(.*?)```", (each.folder / "model_card.md").read_text(), re.S
        )
        scope: dict[str, nn.Module] = {}
        text = source[1].replace('"mean.safetensors"', repr(str(each.folder / "mean.safetensors")))
        exec(text, scope)  # the card's own lines
        x = torch.rand(9, *each.taken.preparation.shape)
        run, prep = each.model.experiment.run, each.taken.preparation
        ours = network(run, prep.shape, len(prep.labels), len(prep.targets))
        theta = each.taken.mean.view(1, 1, -1)
        wanted = ours.forward(theta, x.unsqueeze(0))[0, 0]
        with torch.no_grad():
            assert torch.allclose(scope["network"](x), wanted, atol=1e-5), name


def test_an_own_network_keeps_its_frozen_parts(made: dict[str, Made]) -> None:
    state = load_file(made["own"].folder / "mean.safetensors")
    assert state["frozen"].tolist() == [0.5] * 6
    assert state["shift"].tolist() == [1.0] * 6
    weights = load_file(made["own"].folder / "weights.safetensors")
    assert "frozen.mean" not in weights and weights["gate.weight.std"].shape == (6, 64)


def test_weights_are_the_posterior_by_layer(made: dict[str, Made]) -> None:
    """Laid end to end they are the flat vectors of fitted.safetensors."""
    weights = load_file(made["mlp"].folder / "weights.safetensors")
    names = ("1.weight", "1.bias", "3.weight", "3.bias", "5.weight", "5.bias")
    q = made["mlp"].model.models["personal.v"][3]  # client 1 of the second seed
    for end, flat in (("mean", q[0]), ("std", gaussian.sigma(q[1]))):
        assert torch.equal(torch.cat([weights[f"{n}.{end}"].flatten() for n in names]), flat)
    assert len(weights) == 12
    point = load_file(made["point"].folder / "weights.safetensors")
    assert {name.rpartition(".")[2] for name in point} == {"mean"}
    noise = load_file(made["regression"].folder / "weights.safetensors")
    assert noise["likelihood.log_noise.mean"].shape == (1,)


def test_the_card_has_the_figures_of_the_held_out_points(made: dict[str, Made]) -> None:
    each = made["mlp"]
    held_out = fitted.read_tensors(each.model.folder, fitted.HELD_OUT)
    mine = held_out["row"] == 3
    p, y = held_out["personal.mean"][mine].double(), held_out["y"][mine]
    n, right = len(y), int((p.argmax(-1) == y).sum())
    text = (each.folder / "model_card.md").read_text()
    assert f"On {n} held-out points" in text
    found = measures.measure(each.model, "personal", 1, "client 1")
    z = 1.959963984540054
    middle = (right + z * z / 2) / (n + z * z)  # Wilson (1927)
    half = z / (n + z * z) * (right * (n - right) / n + z * z / 4) ** 0.5
    assert found["accuracy"]["value"] == right / n
    assert np.allclose(found["accuracy"]["interval"], [middle - half, middle + half])
    assert f"| accuracy | {right / n:.4f} | {middle - half:.4f} to {middle + half:.4f} |" in text
    nll = -p.gather(1, y.unsqueeze(1)).log().mean().item()
    assert f"| NLL, nats a point | {nll:.4f} |" in text
    counts = each.model.clients[1][1]["classes"]
    for label, count in enumerate(counts):
        assert f"| {label} | {count} |" in text


def test_cards_say_the_temperature_where_there_is_one(made: dict[str, Made]) -> None:
    """Of calibrated runs; programs and runs agree in any case (above)."""
    for name, each in made.items():
        text = (each.folder / "model_card.md").read_text()
        calibrated = name in ("mlp", "regression")
        assert (each.taken.temperature != 1) == calibrated, name
        assert (f"Temperature {each.taken.temperature:.3f}, fitted on" in text) == calibrated, name
    T = made["mlp"].taken.temperature
    assert made["mlp"].model.models["temperature.personal"][3].item() == T  # as the weights above


def test_cards_say_what_matters(made: dict[str, Made]) -> None:
    for name, each in made.items():
        text = (each.folder / "model_card.md").read_text()
        for title in ("Data", "Method", "Results on held-out points", "Calibration", "Limits",
                      "Uncertainty and review", "Intended use", "Input", "How to run it",
                      "Versions", "Licence"):  # fmt: skip
            assert f"\n## {title}\n" in text, (name, title)
        assert "no medical device" in text
        assert "None" not in text and "nan" not in text.split("## Input")[0], name
    table = (made["table"].folder / "model_card.md").read_text()
    assert "| 0 | age | a number |" in table and "| 1 | ward | 0 = a, 1 = b, 2 = c |" in table
    assert "all clients" in (made["matched"].folder / "model_card.md").read_text()
    assert "which is not a finding" in (made["point"].folder / "model_card.md").read_text()
    assert "| 95 % |" in (made["regression"].folder / "model_card.md").read_text()


def test_regression_figures_are_in_the_targets_own_unit(made: dict[str, Made]) -> None:
    model = made["regression"].model
    held_out = fitted.read_tensors(model.folder, fitted.HELD_OUT)
    mine = held_out["row"] == 0
    error = (held_out["personal.mean"][mine] - held_out["y"][mine]).double().square().mean().sqrt()
    found = measures.measure(model, "personal", 0, "north")
    assert found["rmse"]["value"] == pytest.approx(error.item(), rel=1e-6)
    assert error > 10  # prices around 1500, after two steps


def test_only_the_clients_own_scale_goes_out(made: dict[str, Made]) -> None:
    kept = json.loads((made["table"].folder / "preparation.json").read_text())
    assert list(kept["clients"]) == ["south"]


# ONNX


def test_onnx_programs_say_what_the_run_says(
    made: dict[str, Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In onnxruntime, with batches of any size; one that answers otherwise is refused."""
    onnxruntime = pytest.importorskip("onnxruntime")
    for name in ("regression", "table"):
        each, wanted = made[name], expected(made[name])
        taken = each.taken
        whole = package.program.predictive(
            taken.network, taken.draws, taken.likelihood, taken.preparation, taken.client,
            taken.temperature,
        )  # fmt: skip
        content = onnx_program.converted(whole, package.example(taken.preparation, taken.client))
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        for n in BATCHES:
            found = session.run(list(wanted), {"x": each.x[:n].numpy()})
            for (field, value), other in zip(wanted.items(), found, strict=True):
                gap = np.abs(other - value[:n].numpy()).max() / value.abs().max().clamp_min(1.0)
                assert gap < TOLERANCE, (name, n, field, float(gap))
    monkeypatch.setattr(onnx_program, "TOLERANCE", -1.0)
    example = package.example(taken.preparation, taken.client)
    with torch.no_grad(), pytest.raises(UserError, match=r"ONNX program's probabilities differs"):
        onnx_program._compare(content, example, whole(example))


def test_onnx_is_asked_for(made: dict[str, Made], tmp_path: Path) -> None:
    run = made["point"].model.folder
    out = tmp_path / "x"
    done = corefed("export", run, "--client=client 0", "--onnx", "--no-program", "--out", out)
    assert done.code == 2 and "--onnx makes a program" in done.err
    done = corefed("export", run, "--client=client 0", "--onnx", "--json", "--out", out)
    assert done.code == 0, done.err
    assert "predictive.onnx" in json.loads(done.out)["files"]
    assert (out / "predictive.onnx").stat().st_size > 1000


def test_onnx_without_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_program, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"needs onnx, onnxruntime, onnxscript: .*'.\[onnx\]'"):
        onnx_program.require()


# What is refused


def test_refusals(made: dict[str, Made], tmp_path: Path) -> None:
    run, table = made["mlp"].model.folder, made["table"].model.folder
    out = tmp_path / "out"
    for folder, options, words in (
        (run, (), "Say whose model by --client (client 0, client 1)"),
        (run, ("--client=client 7",), "did you mean 'client"),
        (run, ("--client=client 0", "--seed=9"), "has no seed 9"),
        (table, ("--global",), "say by --client whose scale"),
        (tmp_path, ("--client=a",), "holds no run"),
    ):
        done = corefed("export", folder, *options, "--no-program", "--out", out)
        assert done.code == 2 and words in done.err, options
        assert not out.exists()
    matched = made["matched"].model.folder  # has one model for all: a client gets that
    assert corefed("export", matched, "--client=client 0", "--no-program", "--out", out).code == 0
    done = corefed("export", run, "--client=client 0", "--out", out)
    assert done.code == 2 and "is not empty" in done.err
    file = tmp_path / "file"
    file.write_text("")
    done = corefed("export", run, "--client=client 0", "--out", file)
    assert done.code == 2 and "is a file" in done.err


def test_json(made: dict[str, Made], tmp_path: Path) -> None:
    run = made["point"].model.folder
    options = ("--client=client 0", "--no-program", "--json")
    done = corefed("export", run, *options, "--out", tmp_path / "x")
    told = json.loads(done.out)
    assert told["files"] == ["weights.safetensors", "mean.safetensors", "preparation.json",
                             "model_card.md"]  # fmt: skip
    assert told["accuracy"]["value"] <= 1
