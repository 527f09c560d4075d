"""A network of one's own by package.module:factory: found, made, checked, trained, found again."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL, corefed
from federation_calls import Call
from method_rows import cuda, proper_float32
from torch import Tensor, nn

from corefed import Federation, train
from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData
from corefed.federation import client, server, task_context
from corefed.federation.operate.folder import ClientFolder
from corefed.federation.protocol import Task
from corefed.federation.rules import Rules
from corefed.models import network, own
from corefed.models.attention import PlainAttention
from corefed.models.likelihood import Categorical, Gaussian
from corefed.models.network import Model, mlp
from corefed.selectors.potentials import draw
from corefed.settings import config
from corefed.training import fitted, record
from corefed.training.setup import prepare

NETS = """
import torch
import torch.nn.functional as F
from torch import nn


def make(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, outputs))


def everything(**given):
    assert sorted(given) == ["inputs", "outputs", "shape"], given
    assert given["shape"] == (4,) and given["inputs"] == 4
    return nn.Linear(4, given["outputs"])


def ends_with_softmax(outputs):
    return nn.Sequential(nn.Linear(4, outputs), nn.Softmax(-1))


def ends_with_sigmoid(outputs):
    return nn.Sequential(nn.Linear(4, outputs), nn.Sigmoid())


def ends_with_log_softmax(outputs):
    return nn.Sequential(nn.Linear(4, outputs), nn.LogSoftmax(-1))


class Probabilities(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.last = nn.Linear(4, outputs)

    def forward(self, x):
        return F.softmax(self.last(x), -1).clamp_min(1e-9)


def nothing(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def lazy(outputs):
    return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(outputs))


def frozen():
    module = nothing()
    module[0].requires_grad_(False)
    return module


class Net(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 8), nn.Linear(8, outputs)

    def hidden(self, x):
        return F.silu(self.first(x))

    def forward(self, x):
        return self.last(self.hidden(x))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.layer(x.unsqueeze(1)).mean(1))


class Double(Net):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.double()


# What cannot be used


def unknown_argument(depth):
    return nn.Linear(4, 3)


def broken():
    raise RuntimeError("first line\\nsecond line")


def leaves():
    raise SystemExit(3)


def number():
    return 3


thing = 3
instance = nn.Linear(4, 3)


def empty():
    return nn.Identity()


def all_frozen():
    return nn.Linear(4, 3).requires_grad_(False)


def complex_numbers():
    return nn.Linear(4, 3, dtype=torch.complex64)


def other_classes():
    return nn.Linear(4, 7)


def other_inputs():
    return nn.Linear(5, 3)


def normed(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Linear(8, outputs))


def enormous():
    return nn.Linear(4, 3, bias=False) if torch.is_inference_mode_enabled() else Large()


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4).expand(200_000, 3, 4).contiguous())

    def forward(self, x):
        return x @ self.weight[0].T


class ByHand(Net):
    def hidden(self, x):
        h = self.first(x)
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1)


class Alone(Net):
    def hidden(self, x):
        return F.batch_norm(self.first(x), None, None, training=True)


class Chance(Net):
    def hidden(self, x):
        return F.dropout(self.first(x), 0.5)


class Decides(Net):
    def hidden(self, x):
        h = self.first(x)
        return h if h.sum() > 0 else h * 1


class Item(Net):
    def hidden(self, x):
        h = self.first(x)
        return h if h.max().item() > 0 else h * 1


class Adds(Net):
    def hidden(self, x):
        h = x.new_zeros(len(x), 8)
        h += self.first(x)
        return h


class Assigns(Net):
    def hidden(self, x):
        h = x.new_zeros(len(x), 8)
        h[:, :4] = self.first(x)[:, :4]
        return h


class Overwrites(Net):
    def hidden(self, x):
        return self.first(x.sub_(0.5))


class Counts(Net):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.register_buffer("calls", torch.zeros(()))

    def hidden(self, x):
        self.calls += 1
        return self.first(x)


class Two(Net):
    def forward(self, x):
        return super().forward(x), x


class Flat(Net):
    def forward(self, x):
        return super().forward(x)[:, 0]


class Detached(Net):
    def forward(self, x):
        return super().forward(x).detach()


class Shared(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.middle = nn.Linear(inputs, inputs), nn.Tanh()
        self.again, self.last = self.first, nn.Linear(inputs, outputs)

    def forward(self, x):
        return self.last(self.middle(self.again(self.middle(self.first(x)))))


class SharedWeight(Shared):
    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.again = nn.Linear(inputs, inputs)
        self.again.weight = self.first.weight
        self.gain = nn.Parameter(torch.ones(inputs))
        self.shift = nn.Parameter(torch.zeros(inputs))

    def forward(self, x):
        return super().forward(x * self.gain + self.shift)


class NoCopy(Net):
    def __deepcopy__(self, memo):
        raise TypeError("no copies")


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, slope):
        raise RuntimeError("none")


class NoGradient(Net):
    def hidden(self, x):
        return Breaks.apply(self.first(x))


def bare_lstm():
    return nn.LSTM(4, 3, batch_first=True)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.layer(x.unsqueeze(1))[0][:, -1])
"""

FILES = {
    "own_nets.py": NETS,
    "own_missing.py": "import a_module_that_is_nowhere\n",
    "own_syntax.py": "def make(:\n",
    "own_quits.py": "import sys\nsys.exit('no GPU here')\n",
}


@pytest.fixture
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the modules above, which is the working folder."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def build(name: str, **more: Any) -> Model:
    given: dict[str, Any] = {"memory_mb": 64, "batch": 10, "factory": own.named(name), **more}
    return own.build(name, (4,), Categorical(3), **given)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- what can be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "size"),
    [("make", 67), ("everything", 15), ("nothing", 67), ("lazy", 67), ("Net", 67), ("Double", 67),
     ("frozen", 27), ("Attention", 187), ("Decides", 67), ("Item", 67), ("Adds", 67),
     ("Assigns", 67), ("Recurrent", 475), ("Shared", 35), ("SharedWeight", 47)],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", "other"])
def test_networks_that_can_be_used(
    nets: Path, name: str, size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each network as the module itself with these weights. On other devices than a CPU vmap
    applies, where it can: it takes no recurrent layers and no writing in place."""
    if device == "other":
        monkeypatch.setattr(network, "IN_TURN", frozenset())
    model = build(f"own_nets:{name}")
    mu = model.init(torch.Generator().manual_seed(0), 0.1)
    assert (model.size, mu.shape, mu.dtype) == (size, (size,), torch.float32)
    theta, x = normal(2, 5, size), normal(2, 6, 4, seed=1)
    found = model.forward(theta.requires_grad_(), x)
    (slope,) = torch.autograd.grad(found.square().sum(), theta)
    module = own.make_module(own.find(f"own_nets:{name}"), own.Point(name, (4,), 3), seed=0)
    trained = [p for p in module.parameters() if p.requires_grad]
    for c in range(2):
        for k in range(5):
            torch.nn.utils.vector_to_parameters(theta[c, k].detach(), trained)
            alone = module(x[c])
            torch.testing.assert_close(found[c, k], alone)
            wanted = torch.autograd.grad(alone.square().sum(), trained)
            flat = torch.cat([each.reshape(-1) for each in wanted])
            torch.testing.assert_close(slope[c, k], flat, rtol=1e-4, atol=1e-4)
    assert str(nets) not in sys.path


def test_a_module_of_linear_layers_is_the_mlp(nets: Path) -> None:
    module, by_hand = build("own_nets:make"), mlp((4, 8, 3), Categorical(3))
    theta, x = normal(2, 5, module.size), normal(2, 6, 4, seed=1)
    torch.testing.assert_close(module.forward(theta, x), by_hand.forward(theta, x))
    assert module.head is not None and by_hand.head is not None
    assert module.head[1:4] == by_hand.head[1:4]
    ours, theirs = module.head.features(theta, x), by_hand.head.features(theta, x)
    torch.testing.assert_close(ours, theirs)
    assert module.head.both is not None and by_hand.head.both is not None
    torch.testing.assert_close(module.head.both(theta, x), by_hand.head.both(theta, x))
    data = ClientData(x, torch.zeros(2, 6).long(), torch.ones(2, 6))
    pi = torch.stack([normal(2, module.size), normal(2, module.size, seed=3)], 1)
    one, other = (
        draw(each, pi, data, 12, Streams([Who(0, 0), Who(0, 1)], 0), "coreset", 3)
        for each in (module, by_hand)
    )
    torch.testing.assert_close(one, other)


def test_a_head_is_claimed_only_where_the_network_ends_in_it(nets: Path) -> None:
    text = (
        "class Scaled(Net):\n    def forward(self, x):\n        return super().forward(x) * 2\n"
        "class Twice(Net):\n    def forward(self, x):\n"
        "        return self.last(self.hidden(x) + 0 * self.last(self.hidden(x)).sum(-1, True))\n"
        "class Tied(Net):\n    def __init__(self, inputs, outputs):\n"
        "        super().__init__(inputs, outputs)\n"
        "        self.first = nn.Linear(inputs, 8)\n        self.a = self.last.weight\n"
    )
    (nets / "own_nets.py").write_text(f"{NETS}\n{text}")
    assert build("own_nets:Scaled").head is None
    assert build("own_nets:Twice").head is None
    assert build("own_nets:Tied").head is None


def test_points_without_gradients_go_through_in_blocks(
    nets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta, x = normal(2, 5, 67), normal(2, 30, 4, seed=1)
    whole = build("own_nets:Net").forward(theta, x)
    monkeypatch.setattr(network, "BLOCK", 500)  # a few points at a time
    monkeypatch.setattr(network, "BLOCK_ONE", 100)
    model = build("own_nets:Net")
    torch.testing.assert_close(model.forward(theta, x), whole)
    monkeypatch.setattr(network, "IN_TURN", frozenset())
    torch.testing.assert_close(model.forward(theta, x), whole)
    assert model.activation > 0


def test_a_seed_is_a_start(nets: Path) -> None:
    model = build("own_nets:make")
    state = torch.get_rng_state()
    one, again, other = (model.init(torch.Generator().manual_seed(s), 0.1) for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), state)
    noisy = own.build(
        "own_nets:make", (4,), Gaussian(3, 0.5, learn_noise=True), memory_mb=64, batch=10,
        factory=own.find("own_nets:make"),
    )  # fmt: skip
    mu = noisy.init(torch.Generator().manual_seed(0), 0.1)
    assert torch.equal(mu[:-1], one) and mu[-1] == pytest.approx(-0.6931, abs=1e-4)


def test_every_seed_of_a_run_has_its_own_start(nets: Path) -> None:
    flags = {"method": "fedavg", "clients": 2, "model": "own_digits:make", "seeds": "3,4"}
    (nets / "own_digits.py").write_text(
        "from torch import nn\ndef make():\n    return nn.Linear(64, 10)\n"
    )
    make = own.find("own_digits:make")
    both = prepare(config.resolve(flags=flags), factory=make).servers
    alone = prepare(config.resolve(flags={**flags, "seeds": "4"}), factory=make).servers
    sys.modules.pop("own_digits")
    assert torch.equal(both[1]["theta"], alone[0]["theta"])
    assert not torch.equal(both[0]["theta"], both[1]["theta"])


def test_frozen_weights_stay_and_are_made_alike_each_time(nets: Path) -> None:
    model, again = build("own_nets:frozen"), build("own_nets:frozen")
    theta, x = normal(1, 1, model.size), normal(1, 6, 4)
    assert torch.equal(model.forward(theta, x), again.forward(theta, x))


def test_dropout_is_off_and_said(nets: Path) -> None:
    (note,) = build("own_nets:make").notes
    assert note.startswith("dropout is off in '2' (Dropout) of the model own_nets:make")
    assert build("own_nets:Net").notes == ()
    (note,) = build("own_nets:Attention").notes
    assert "'layer.self_attn' (MultiheadAttention)" in note


def test_a_final_log_softmax_or_a_regression_through_a_sigmoid_stays(nets: Path) -> None:
    """The softmax of a log-softmax is the softmax; a target may lie between 0 and 1."""
    build("own_nets:ends_with_log_softmax")
    name = "own_nets:ends_with_sigmoid"
    own.build(name, (4,), Gaussian(3), factory=own.find(name), memory_mb=64, batch=10)


# --- what cannot ----------------------------------------------------------------------------------

REFUSED = {
    "own_nowhere:make": "needs a module 'own_nowhere': looked in ",
    "own_nets.py:make": "write the module's name, own_nets, and not the file's",
    "own_missing:make": "fails: ModuleNotFoundError: No module named 'a_module_that_is_nowhere'",
    "own_syntax:make": "fails: SyntaxError: ",
    "own_quits:make": "fails: SystemExit: no GPU here",
    "own_nets:mak": "own_nets has no 'mak'; did you mean 'make'?",
    "own_nets:zzzz": "own_nets has no 'zzzz'; it has make, everything",
    "own_nets:thing": "is of type int; it must be a function that makes an nn.Module",
    "own_nets:instance": "is of type Linear; it must be a function",
    "own_nets:unknown_argument": "wants an argument 'depth'; it is given inputs, shape and outputs",
    "own_nets:broken": "cannot be made: RuntimeError: first line second line",
    "own_nets:leaves": "cannot be made: SystemExit: 3",
    "own_nets:number": "made a int value, not an nn.Module",
    "own_nets:empty": "has no parameters to train",
    "own_nets:all_frozen": "has no parameters to train",
    "own_nets:complex_numbers": "'weight' of the model own_nets:complex_numbers is of type torch.c",
    "own_nets:other_classes": "gives float32 of shape [4, 7] for 4 points; the data need",
    "own_nets:other_inputs": "fails for 4 points of shape (4,): RuntimeError: mat1 and mat2",
    "own_nets:normed": "Layer '1' (BatchNorm1d) keeps statistics of its batches",
    "own_nets:enormous": "has 2,400,000 parameters; training one client takes about 146 MB",
    "own_nets:ByHand": "gives another output for a point when others are in its batch",
    "own_nets:Alone": "fails for one point alone of shape (4,): ValueError",
    "own_nets:Chance": "draws random numbers: the same points give another output each time",
    "own_nets:Overwrites": "changes its input in place",
    "own_nets:Counts": "changes its buffer 'calls' when it is called",
    "own_nets:Two": "gives a tuple; it must give one tensor [points, 3]",
    "own_nets:Flat": "gives float32 of shape [4] for 4 points; the data need floating-point number",
    "own_nets:Detached": "depends on no parameter",
    "own_nets:ends_with_softmax": "ends with a softmax, so it gives probabilities where",
    "own_nets:ends_with_sigmoid": "ends with a sigmoid, so it gives probabilities where",
    "own_nets:Probabilities": "class scores (logits), to which it applies a softmax itself",
    "own_nets:bare_lstm": "gives a tuple; it must give one tensor [points, 3]",
    "own_nets:NoCopy": "cannot be copied for each thread: TypeError: no copies",
    "own_nets:NoGradient": "has no gradient: RuntimeError: none",
}


@pytest.mark.parametrize("name", REFUSED)
def test_networks_that_cannot_be_used(nets: Path, name: str) -> None:
    with pytest.raises(UserError) as refused:
        build(name)
    sentence = str(refused.value)
    assert REFUSED[name] in sentence
    assert "\n" not in sentence and len(sentence) < 400


@pytest.mark.parametrize("name", ["mpl", "cnm", "nets", "nets:", ":make", "../nets:make", "a b:c"])
def test_text_that_names_no_network(name: str) -> None:
    with pytest.raises(UserError, match=r"must be auto, mlp, cnn, .*or package.module:factory"):
        config.resolve(flags={"model": name})


def test_a_misspelt_network(nets: Path) -> None:
    result = corefed("run", *SMALL, "--model", "mpl", "--out", nets / "run")
    assert result.code == 2 and "Did you mean 'mlp'?" in result.err
    result = corefed("run", *SMALL, "--model", "own_nets:other_classes", "--out", nets / "run")
    assert result.code == 2 and result.err.count("\n") == 1 and "error: The model" in result.err
    assert not (nets / "run").exists()


def test_widths_from_the_command_line(tmp_path: Path) -> None:
    small = [word for word in SMALL if "hidden" not in word]
    given = ("--hidden", "7,5", "--channels", "3,4", "--model", "mlp")
    assert corefed("run", *small, *given, "--out", tmp_path / "run", "-q").code == 0
    run = config.resolve(tmp_path / "run" / record.EXPERIMENT).run
    assert (run.hidden, run.channels, run.model) == ((7, 5), (3, 4), "mlp")


# --- the rest of the program ----------------------------------------------------------------------

DIGITS = """
from torch import nn


def make(inputs, outputs):
    first, last = nn.Linear(inputs, {width}), nn.Linear({width}, outputs)
    return nn.Sequential(first, nn.Tanh(), nn.Dropout(), last)
"""


def test_trained_resumed_and_found_again(nets: Path) -> None:
    (nets / "own_digits.py").write_text(DIGITS.format(width=8))
    given = (*SMALL, "--method=coreset-pfedbayes", "--fraction=0.2", "--model=own_digits:make")
    whole = corefed("run", *given, "--out", "whole")
    assert whole.code == 0 and "note: dropout is off in '2' (Dropout)" in whole.err
    short = ("--rounds=1", "--set=planned_rounds=2")
    assert corefed("run", *given, *short, "--out", "part", "-q").code == 0
    named = "--model=own_digits:make"
    assert corefed("run", "--resume", "part", "--rounds=2", named, "-q").code == 0

    def load(name: str) -> fitted.Fitted:
        return fitted.load(nets / name, own.named("own_digits:make"))

    one, other = load("whole"), load("part")
    for name, value in one.models.items():
        assert torch.equal(value, other.models[name])
    said = one.predict("client 1", normal(5, 64))
    assert torch.equal(said.mean, other.predict("client 1", normal(5, 64)).mean)
    summary = json.loads((nets / "whole" / record.SUMMARY).read_text())
    assert any("dropout is off" in note for note in summary["environment"]["notes"])

    sys.modules.pop("own_digits")
    (nets / "own_digits.py").write_text(DIGITS.format(width=9))
    with pytest.raises(UserError, match="has 685 parameters now and had 610"):
        load("whole")
    sys.modules.pop("own_digits")
    (nets / "own_digits.py").unlink()
    with pytest.raises(UserError, match="needs a module 'own_digits'"):
        load("whole")
    result = corefed("run", "--resume", "part", "--rounds=3", named)
    assert result.code == 2 and "needs a module 'own_digits'" in result.err


# --- a stranger's folder --------------------------------------------------------------------------

STRANGER = """
import pathlib
pathlib.Path("ran").touch()
from torch import nn


def make(inputs, outputs):
    return nn.Linear(inputs, outputs)
"""


@pytest.fixture
def strange(nets: Path) -> Iterator[Path]:
    """A run of a network of its own; its module says when it is imported."""
    import numpy as np

    (nets / "own_strange.py").write_text(STRANGER)
    given = (*SMALL, "--rounds=1", "--model=own_strange:make", "--out", "run", "-q")
    assert corefed("run", *given).code == 0
    x = normal(30, 64).numpy()
    np.savez(nets / "new.npz", X=x, y=np.arange(30) % 10)
    (nets / "ran").unlink()
    sys.modules.pop("own_strange")
    yield nets
    sys.modules.pop("own_strange", None)


COMMANDS = {
    "predict": ("predict", "run", "--client", "client 1", "--input", "new.npz"),
    "predict the shared": ("predict", "run", "--client", "client 1", "--input", "new.npz",
                           "--model", "global"),
    "export": ("export", "run", "--out", "model", "--client", "client 1", "--no-program"),
    "personalize": ("personalize", "run", "--data", "new.npz", "--name", "new", "--steps", "2"),
    "resume": ("run", "--resume", "run", "--rounds", "2"),
    "run": ("run", "--config", "run/experiment.toml", "--out", "again"),
    "tune": ("tune", "--config", "run/experiment.toml", "--out", "tuned", "--rounds", "1",
             "--candidates", "2"),
}  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS.values(), ids=list(COMMANDS))
def test_code_that_only_a_file_names_is_not_run(strange: Path, words: tuple[str, ...]) -> None:
    before = sorted(strange.rglob("*"))
    refused = corefed(*words)
    assert refused.code == 2
    assert "own_strange:make, which a file names" in refused.err
    assert "If you trust it, add --model own_strange:make" in refused.err
    assert not (strange / "ran").exists() and "own_strange" not in sys.modules
    assert sorted(strange.rglob("*")) == before
    done = corefed(*words, "--model", "own_strange:make")
    assert done.code == 0, done.err
    assert (strange / "ran").exists()


def test_folders_are_compared_and_shown_without_their_code(strange: Path) -> None:
    for words in (("compare", "run"), ("report", "run"), ("watch", "run", "--once")):
        done = corefed(*words)
        assert done.code == 0, done.err
    assert not (strange / "ran").exists() and "own_strange" not in sys.modules
    with pytest.raises(UserError, match="which a file names"):
        Federation.load(strange / "run")
    with pytest.raises(UserError, match="which a file names"):
        train(config.resolve(strange / "run" / record.EXPERIMENT))
    assert not (strange / "ran").exists()
    assert Federation.load(strange / "run", model="own_strange:make").evaluate()


# --- a server's word ------------------------------------------------------------------------------

TRACE = """
import pathlib

pathlib.Path("trace").touch()
""" + DIGITS.format(width=8)

LOCAL: dict[str, Any] = {
    "method": "pfedbayes", "data": "local", "clients": 1, "rounds": 1, "local_steps": 2,
    "evaluate_draws": 2, "model": "own_trace:make",
}  # fmt: skip


@pytest.fixture
def served(nets: Path) -> Iterator[Path]:
    import numpy as np

    (nets / "own_trace.py").write_text(TRACE)
    x = normal(40, 6).numpy()
    np.savez(nets / "data.npz", X=x, y=(x.sum(1) > 0).astype(int))
    record.Folder(nets / "first").create(config.resolve(flags=LOCAL))
    yield nets
    sys.modules.pop("own_trace", None)


@pytest.mark.parametrize("listed", ["", "own_trace:other", "own_trace", "own_nets:make"])
def test_a_client_imports_no_code_that_the_server_names(served: Path, listed: str) -> None:
    place = task_context.ClientSettings(
        "north", served / "state", str(served / "data.npz"), model=listed
    )
    settings = 'method = "pfedbayes"\nmodel = "own_trace:make"\n'
    for kind in ("join", "train", "evaluate"):
        task = Task(kind, "first", 0, 0, settings, None, "float32", False, 0.0, 0.0, {})  # type: ignore[arg-type]
        reply = client.answer(task, place)
        assert "This client runs no code that a server names" in reply.error
        assert 'must write model = "own_trace:make" into client.toml' in reply.error
    assert not (served / "trace").exists()
    assert "own_trace" not in sys.modules


def test_a_client_runs_the_code_that_it_lists(served: Path) -> None:
    place = task_context.ClientSettings(
        "north", served / "state", str(served / "data.npz"), model="own_trace:make"
    )
    run = served / "first"
    summary = server.federate(run, ["north"], Rules(join_wait=0.0), Call({"north": place}))
    assert summary["config"]["model"] == "own_trace:make"
    assert (served / "trace").exists()


def test_client_toml_lists_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COREFED_CLIENT_DATA", "data.npz")
    (tmp_path / "ca.crt").touch()
    (tmp_path / "key").touch(mode=0o600)
    text = 'name = "north"\naddress = "localhost:8000"\n'
    (tmp_path / "client.toml").write_text(text)
    assert ClientFolder.read(tmp_path).settings().model == ""
    (tmp_path / "client.toml").write_text(f'{text}model = "own_trace:make"\n')
    assert ClientFolder.read(tmp_path).settings().model == "own_trace:make"


# Where posteriors start


class Mixed(nn.Module):
    """Layers as torch draws them, one that the factory sets, one that is trained already."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.drawn, self.norm = nn.Linear(inputs, 40), nn.LayerNorm(40)
        self.set, self.known = nn.Linear(40, 40), nn.Linear(40, 40)
        nn.init.xavier_normal_(self.set.weight)
        g = torch.Generator().manual_seed(7)
        bound = 40**-0.5
        self.known.weight.data = (2 * torch.rand(40, 40, generator=g) - 1) * bound
        self.last = nn.Linear(40, outputs)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.drawn(x).relu())
        output: Tensor = self.last(self.known(self.set(h).relu()).relu())
        return output


def test_weights_of_torchs_default_size_start_at_hes() -> None:
    model = own.build("a:b", (20,), Categorical(3), memory_mb=100, batch=8, factory=Mixed)
    g = torch.Generator().manual_seed(3)
    seed = int(torch.randint(1 << 62, (), generator=torch.Generator().manual_seed(3)))
    made = own.make_module(Mixed, own.Point("a:b", (20,), 3), seed)
    parts = model.init(g, 0.1).split([p.numel() for p in made.parameters()])
    for (name, p), part in zip(made.named_parameters(), parts, strict=True):
        factor = 6**0.5 if name in ("drawn.weight", "last.weight") else 1.0
        torch.testing.assert_close(part, factor * p.detach().reshape(-1), msg=name)


# On a GPU


@cuda
@pytest.mark.parametrize("name", ["make", "Attention", "Item", "Adds", "Recurrent", "Shared"])
def test_networks_on_cuda(nets: Path, name: str) -> None:
    """As on a CPU; in turn where vmap does not take them; trained with recorded steps or not."""
    model = build(f"own_nets:{name}")
    theta, x = normal(2, 3, model.size), normal(2, 6, 4, seed=1)
    found = []
    with proper_float32():
        for device in ("cpu", "cuda"):
            at = theta.to(device).requires_grad_()
            output = model.forward(at, x.to(device))
            (slope,) = torch.autograd.grad(output.square().sum(), at)
            found.append((output.detach().cpu(), slope.cpu()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    g = torch.Generator().manual_seed(0)
    points = torch.rand(60, 4, generator=g).numpy(), torch.arange(60).numpy() % 3
    for compile_ in ("off", "auto"):
        federation = Federation(
            method="pfedbayes", model=own.find(f"own_nets:{name}"), device="cuda", rounds=2,
            local_steps=3, compile=compile_,
        )  # fmt: skip
        federation.fit(*points, groups=["a", "b"] * 30)
        assert federation.personal["a"].predict_proba(points[0]).shape == (60, 3)


# Attention


@pytest.mark.parametrize("mask", ["none", "causal", "boolean", "added", "grouped"])
def test_attention_in_plain_operations(mask: str) -> None:
    """As torch's kernels have it, and with the second derivative that they have not."""
    heads = 2 if mask == "grouped" else 4
    q, k, v = normal(3, 4, 6, 8), normal(3, heads, 5, 8, seed=1), normal(3, heads, 5, 8, seed=2)
    given: dict[str, Any] = {
        "none": {}, "causal": {"is_causal": True}, "grouped": {"enable_gqa": True, "scale": 0.3},
        "boolean": {"attn_mask": normal(6, 5, seed=3) > -1},
        "added": {"attn_mask": normal(3, 1, 6, 5, seed=3)},
    }[mask]  # fmt: skip
    wanted = nn.functional.scaled_dot_product_attention(q, k, v, **given)
    with PlainAttention():
        found = nn.functional.scaled_dot_product_attention(q.requires_grad_(), k, v, **given)
    torch.testing.assert_close(found, wanted)
    (slope,) = torch.autograd.grad(found.square().sum(), q, create_graph=True)
    torch.autograd.grad(slope.square().sum(), q)


def test_attention_layers_have_second_derivatives(nets: Path) -> None:
    model = build("own_nets:Attention")
    theta, x = normal(1, 1, model.size).requires_grad_(), normal(1, 6, 4, seed=1)
    wanted = model.forward(theta, x)
    with PlainAttention():
        found = model.forward(theta, x)
    torch.testing.assert_close(found, wanted)
    (slope,) = torch.autograd.grad(found.square().sum(), theta, create_graph=True)
    torch.autograd.grad(slope.square().sum(), theta)
