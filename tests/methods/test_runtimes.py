"""Three runtimes, one answer: contract tests of every method in the registry.

A new method is a new row without a change here. The loop runtime is chunk = 1, the vmap runtime
chunk = all clients.

How closely they agree. A product over stacked clients adds in another order than one over a single
client, so results differ by roundings, about 1e-16 of a value in float64. Sums of a likelihood's
and a KL's gradient cancel, and Adam divides by the gradient's size, which costs some digits; a
solver that picks points by comparing numbers can turn a rounding into another choice: within 100
iterations A-IHT was seen to come from 1e-15 to another support. Here it makes 10. Hence:

* in float64, 1e-8 after several rounds, all selections included;
* in float32, where one rounding is 1e-7 and the hundreds of a round leave 1e-5: 1e-4 of a value
  plus a hundredth of one step of Adam, after three rounds for methods that do not compare
  likelihoods to select, after one round for those that do.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from method_rows import (
    CLASSES,
    EVERYONE,
    PAPER_CUDA,
    ROWS,
    SINGLE,
    SINGLE_CUDA,
    SIZES,
    TIGHT,
    VARIANTS,
    WORK,
    Row,
    assert_same,
    assert_same_tree,
    build,
    compile_steps,
    cuda,
    equal,
    every_method,
    every_row,
    federation,
    loop,
    on,
    proper_float32,
    run,
)
from torch import Tensor

from corefed.base import philox
from corefed.base.philox import Places
from corefed.base.rng import SERVER, Streams, Who, choose
from corefed.base.types import ClientData, Method, Tree, Update
from corefed.methods import pfedbayes, registry
from corefed.training import client_side
from corefed.training.compiling import missing_for
from corefed.training.local import LocalClients, chunk_for


def test_the_table_covers_the_registry() -> None:
    written = {name for name, entry in registry.METHODS.items() if find_spec(entry.module)}
    assert {parameter.values[0].name for parameter in ROWS} == written
    assert {"pfedbayes", "random-subset"} <= written
    assert set(VARIANTS) <= set(registry.METHODS)


# Chunks, order, company


@every_row
@pytest.mark.parametrize(("kind", "chunk"), [("classes", len(SIZES)), ("targets", 2)])
def test_loop_and_vmap_agree(row: Row, kind: str, chunk: int) -> None:
    method, data = build(row, kind), federation(kind)
    expected = loop(row, row.rounds, kind)
    assert all(v.isfinite().all() for v in expected.messages[-1].values())
    assert_same(run(method, data, chunk=chunk, rounds=row.rounds), expected, **TIGHT)


@every_row
def test_traced_steps_are_the_steps(row: Row) -> None:
    """What is compiled is traced once and run again with other minibatches, noise and clients.

    A method's rows take turns: classes and regressions, stacks of two clients and of all.
    """
    kind, chunk = [("classes", 2), ("targets", len(SIZES))][len(row.settings) % 2]
    if not build(row).traits.stackable:
        pytest.skip("is not compiled: its settings cannot be tensors")
    compiled = compile_steps(row, kind=kind)
    found = run(
        build(row, kind), federation(kind), chunk=chunk, rounds=row.rounds, compiled=compiled
    )
    assert_same(found, loop(row, row.rounds, kind), **TIGHT)


@every_row
def test_loop_and_vmap_agree_in_float32(row: Row) -> None:
    method, data = build(row), federation(dtype=torch.float32)
    one, all_ = (run(method, data, chunk=c, rounds=row.rounds_float32) for c in (1, len(SIZES)))
    assert_same(all_, one, **SINGLE)


@every_method
@pytest.mark.parametrize(("order", "chunk"), [((0, 2, 1, 3, 4), 5), ((4, 3, 1, 2, 0), 2)])
def test_the_order_of_clients_does_not_matter(row: Row, order: tuple[int, ...], chunk: int) -> None:
    """(0, 2, 1, 3, ...) begins and ends like a range and is none."""
    expected = loop(row, 1)
    found = run(build(row), federation(), chunk=chunk, rounds=1, cohorts=[order])
    assert_same_tree(found.private, expected.private, **TIGHT)
    for name, value in expected.messages[0].items():
        torch.testing.assert_close(found.messages[0][name], value[list(order)], **TIGHT)
    assert found.updates[0].clients == order
    assert found.updates[0].examples.tolist() == [SIZES[i] for i in order]
    assert_same_tree(found.servers[0], expected.servers[0], **TIGHT)


@every_method
@pytest.mark.parametrize("chunk", [1, 5])
def test_clients_outside_the_cohort_are_untouched(row: Row, chunk: int) -> None:
    method, data = build(row), federation()
    before, cohort = run(method, data, rounds=0), (1, 4)
    after = run(method, data, chunk=chunk, rounds=1, cohorts=[cohort])
    for i in EVERYONE:
        mine = {k: v[i] for k, v in after.private.items()}
        assert equal(mine, {k: v[i] for k, v in before.private.items()}) == (i not in cohort)
    # What the cohort does is what it does when everyone takes part.
    for name, value in loop(row, 1).messages[0].items():
        torch.testing.assert_close(after.messages[0][name], value[list(cohort)], **TIGHT)


@every_method
def test_clients_come_and_go(row: Row) -> None:
    """Cohorts drawn as a run does: a client that sits out goes on from where it was."""
    method, data = build(row), federation()
    servers = [{k: v.double() for k, v in method.init_server(_server(0)).items()}]
    first, second = (LocalClients(method, data, (0,), servers, WORK, chunk) for chunk in (1, 100))
    for t in range(row.rounds):
        cohort = choose(0, t, len(SIZES), 2)
        (one,), _, _ = first.train(t, servers, [cohort])
        (other,), _, _ = second.train(t, servers, [cohort])
        assert one.clients == other.clients == cohort
        assert_same_tree(other.message, one.message, **TIGHT)
        servers = [method.aggregate(servers[0], one)]
    assert_same_tree(second.private, first.private, **TIGHT)


def lengthened(data: ClientData, n: int) -> ClientData:
    """The same clients padded to n points."""

    def longer(field: Tensor) -> Tensor:
        extra = n - field.shape[1]
        return torch.cat([field, field.new_zeros(len(field), extra, *field.shape[2:])], 1)

    return ClientData(*map(longer, data))


@every_method
def test_padding_does_not_matter(row: Row) -> None:
    """A client on a machine of its own (Flower), or stacked with seeds of larger clients."""
    found = run(build(row), lengthened(federation(), 41), rounds=row.rounds)
    for first, second in zip(found.messages, loop(row, row.rounds).messages, strict=True):
        assert_same_tree(first, second, **TIGHT)


# Seeds


@every_method
def test_seeds_stacked_are_each_seed_alone(row: Row) -> None:
    """Two runs with data and sizes of their own in one pass; rows of both share a chunk."""
    seeds = (0, 4)
    each = [federation(seed=s) for s in seeds]
    n = max(data.weight.shape[1] for data in each)
    fields = zip(*(lengthened(data, n) for data in each), strict=True)
    both = ClientData(*(torch.cat(field) for field in fields))
    together = run(build(row), both, seeds=seeds, chunk=4, rounds=row.rounds)
    for g, (seed, data) in enumerate(zip(seeds, each, strict=True)):
        alone = loop(row, row.rounds, seed=seed)
        mine, own = slice(g * len(SIZES), (g + 1) * len(SIZES)), data.weight.shape[1]
        part = {k: v[mine] for k, v in together.private.items()}
        part |= {k: v[:, :own] for k, v in part.items() if v.shape[1:] == (n,)}  # by point
        assert_same_tree(part, alone.private, **TIGHT)
        assert_same_tree(together.servers[g], alone.servers[0], **TIGHT)
        assert_same_tree(together.updates[g].message, alone.updates[0].message, **TIGHT)
        torch.testing.assert_close(together.losses[-1][g], alone.losses[-1][0], rtol=1e-5, atol=0)


@every_method
def test_the_same_seed_gives_the_same_bits(row: Row) -> None:
    data, rounds = federation(dtype=torch.float32), row.rounds_float32
    first, second = (run(build(row), data, chunk=3, rounds=rounds) for _ in range(2))
    assert equal(first.private, second.private)
    assert equal(first.servers[0], second.servers[0])
    assert torch.equal(torch.stack(first.losses), torch.stack(second.losses))


@every_method
def test_another_seed_gives_other_results(row: Row) -> None:
    """In the start, and in what the clients draw from the same start."""
    method, data = build(row), federation()
    starts = [method.init_server(_server(seed)) for seed in (0, 1)]
    broadcast, private = _start(method, data)
    messages = [
        client_side.train(method, broadcast, private, data, _streams(seed), WORK).message
        for seed in (0, 1)
    ]
    for first, second in (starts, messages):
        parameters = [name for name in first if name in ("v", "theta", "w")]
        assert not any(torch.allclose(first[name], second[name]) for name in parameters)


# Purity and shapes


@every_method
def test_local_training_leaves_its_arguments_alone(row: Row) -> None:
    """`working` belongs to the call; broadcast, private state and data do not."""
    method, data = build(row), federation()
    broadcast, private = _start(method, data)
    private = client_side.train(method, broadcast, private, data, _streams(0), WORK).private
    given = {"broadcast": broadcast, "private": private, "data": data._asdict()}
    copies = {name: {k: v.clone() for k, v in tree.items()} for name, tree in given.items()}
    client_side.train(method, broadcast, private, data, _streams(0, 1), WORK)
    for name, tree in given.items():
        assert equal(tree, copies[name]), name


@every_method
@pytest.mark.parametrize("kind", ["classes", "targets"])
def test_every_tensor_has_the_client_axis(row: Row, kind: str) -> None:
    method, data = build(row, kind), federation(kind)
    broadcast, start = _start(method, data)
    trained = client_side.train(method, broadcast, start, data, _streams(0), WORK)
    assert set(trained.private) == set(start)  # a runtime stores by these names
    for tree in (trained.private, trained.message, client_side.report(method, trained.private)):
        assert all(v.shape[0] == len(SIZES) for v in tree.values())
    for name, value in start.items():
        assert trained.private[name].shape == value.shape
        assert trained.private[name].dtype == value.dtype
    assert trained.loss.shape == trained.examples.shape == (len(SIZES),)
    assert trained.loss.isfinite().all()
    most = WORK.steps * method.traits.passes * torch.tensor(SIZES).clamp_max(WORK.batch)
    assert (trained.examples > 0).all()
    assert (trained.examples <= most).all()

    noise = _streams(0).normal("evaluate", 3, *method.noise[1:]).double()
    models = method.models(broadcast, trained.private, data)
    assert models
    for model in models.values():
        prediction = method.predict(model, data.x, noise)
        assert prediction.shape[:2] == data.weight.shape
        assert prediction.isfinite().all()
        if kind == "classes":
            assert prediction.shape[2] == CLASSES
            assert (prediction >= 0).all()
            torch.testing.assert_close(prediction.sum(-1), torch.ones_like(data.weight))


def test_examples_of_training_on_all_data() -> None:
    """R steps of min(n, b) points for each client; a single-class client is no exception."""
    method, data = build(Row("pfedbayes")), federation()
    broadcast, private = _start(method, data)
    trained = client_side.train(method, broadcast, private, data, _streams(0), WORK)
    assert trained.examples.tolist() == [4 * min(n, 8) for n in SIZES]


def test_a_chunk_fits_the_memory_bound() -> None:
    data, server = federation(), {"v": torch.zeros(2, 1000)}
    assert chunk_for(server, data, 8192) == len(SIZES)
    assert chunk_for(server, data, 0) == 1
    large = {"v": torch.zeros(2, 1 << 19)}  # 4 MiB: two of them stay in a CPU's cache
    assert chunk_for(large, data, 8192) == 2


# Aggregation


@every_method
def test_aggregation_does_not_depend_on_the_order_of_clients(row: Row) -> None:
    method = build(row)
    update = loop(row, 1).updates[0]
    order = [4, 0, 2, 1, 3]
    shuffled = Update(
        tuple(update.clients[i] for i in order),
        {k: v[order] for k, v in update.message.items()},
        update.examples[order],
    )
    server = {k: v.double() for k, v in method.init_server(_server(0)).items()}
    kept = {k: v.clone() for k, v in server.items()}
    assert_same_tree(method.aggregate(server, shuffled), method.aggregate(server, update), **TIGHT)
    assert equal(server, kept)
    assert set(method.aggregate(server, update)) == set(server)


SERVER_V = torch.tensor([[1.0, -2.0], [0.0, 1.0]], dtype=torch.float64)
UPLOADS = torch.tensor(
    [[[2.0, 0.0], [-1.0, 0.5]], [[4.0, 1.0], [2.0, 0.5]], [[0.0, 2.0], [0.0, -3.0]]],
    dtype=torch.float64,
)


def aggregated(**settings: Any) -> Tensor:
    update = Update((0, 1, 2), {"v": UPLOADS}, torch.tensor([1, 2, 3]))
    return pfedbayes.aggregate(pfedbayes.Config(**settings), {"v": SERVER_V}, update)["v"]


def test_average_by_hand() -> None:
    """v = (1 - beta) v + (beta / 3) sum of uploads, in (mu, rho), clients of any size alike."""
    mean = torch.tensor([[2.0, 1.0], [1 / 3, -2 / 3]], dtype=torch.float64)
    torch.testing.assert_close(aggregated(beta=1.0), mean)
    half = torch.tensor([[1.5, -0.5], [1 / 6, 1 / 6]], dtype=torch.float64)
    torch.testing.assert_close(aggregated(beta=0.5), half)
    torch.testing.assert_close(aggregated(beta=0.0), SERVER_V)
    torch.testing.assert_close(aggregated(beta=2.0), 2 * mean - SERVER_V)  # over-relaxed


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_precision_fusion_by_hand(beta: float) -> None:
    """Natural parameters, precision and precision times mean, averaged and mixed by beta."""
    expected = torch.empty(2, 2, dtype=torch.float64)
    for p in range(2):
        precisions = [float((1 + u[1, p].exp()).log()) ** -2 for u in UPLOADS]
        shifts = [a * float(u[0, p]) for a, u in zip(precisions, UPLOADS, strict=True)]
        own = float((1 + SERVER_V[1, p].exp()).log()) ** -2
        precision = (1 - beta) * own + beta * sum(precisions) / 3
        shift = (1 - beta) * own * float(SERVER_V[0, p]) + beta * sum(shifts) / 3
        std = torch.tensor(precision, dtype=torch.float64) ** -0.5
        expected[:, p] = torch.stack([shift / torch.tensor(precision), (std.exp() - 1).log()])
    torch.testing.assert_close(aggregated(beta=beta, fusion="precision"), expected)


def test_fusing_equal_posteriors_changes_nothing() -> None:
    update = Update((0, 1), {"v": torch.stack([UPLOADS[0], UPLOADS[0]])}, torch.tensor([1, 9]))
    for fusion in ("average", "precision"):
        settings = pfedbayes.Config(fusion=fusion)  # type: ignore[arg-type]
        found = pfedbayes.aggregate(settings, {"v": SERVER_V}, update)["v"]
        torch.testing.assert_close(found, UPLOADS[0])


# CUDA


@cuda
@every_row
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_loop_and_vmap_agree_on_cuda(row: Row, dtype: torch.dtype) -> None:
    method, data = build(row), on("cuda", federation(dtype=dtype))
    double = dtype is torch.float64
    rounds = row.rounds if double else 1
    single = PAPER_CUDA if ("preset", "paper") in row.settings else SINGLE_CUDA
    with proper_float32():
        expected, *stacked = (
            run(method, data, chunk=chunk, rounds=rounds) for chunk in (1, 2, len(SIZES))
        )
    for found in stacked:
        assert_same(found, expected, **(TIGHT if double else single))


@cuda
@every_row
def test_graphs_are_the_steps_on_cuda(row: Row) -> None:
    """A graph, replayed with other minibatches, noise and clients, in chunks of unequal size."""
    if not build(row).traits.stackable:
        pytest.skip("is not compiled: its settings cannot be tensors")
    data = on("cuda", federation())
    for chunk in (2, len(SIZES)):
        compiled = compile_steps(row)
        found = run(build(row), data, chunk=chunk, rounds=row.rounds, compiled=compiled)
        assert not compiled.steps.given_up
        assert_same(found, run(build(row), data, chunk=1, rounds=row.rounds), **TIGHT)


SGD = ("optimizer", "sgd")
"""Adam makes a whole step of a gradient that is all rounding: an input that is always 0 leaves its
weights with a KL term whose derivative vanishes at the start. In float64 a change of 1e-16 there
grew to 8e-3 within four steps. A compiler rounds in other places, so SGD compares whole rounds."""


@cuda
@pytest.mark.parametrize("name", ["pfedbayes", "fedavg", "per-fedavg"])
def test_compiled_steps_are_the_steps_on_cuda(name: str) -> None:
    rows = [p.values[0] for p in ROWS if p.values[0].name == name]
    row = next((row for row in rows if SGD in row.settings), rows[0])
    data, compiled = on("cuda", federation()), compile_steps(row, fuse=True)
    found = run(build(row), data, rounds=row.rounds, compiled=compiled)
    assert not compiled.steps.given_up
    assert_same(found, run(build(row), data, chunk=1, rounds=row.rounds), **TIGHT)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=cuda)])
def test_a_compiled_step_of_adam_is_the_traced_one(device: str) -> None:
    """Step by step from the same state, which is where rounding has not grown yet.

    Adam divides a gradient by its own size. Where the gradient vanishes, the step is that of its
    rounding, which a fused program rounds otherwise. So moments are compared in full, up to
    rounding of their largest, and weights where their gradient is more than rounding.
    """
    if missing_for(torch.device(device)):
        pytest.skip(f"needs {missing_for(torch.device(device))}")
    row = next(p.values[0] for p in ROWS if p.values[0].name == "pfedbayes")
    programs = []
    for fuse in (False, True):
        compiled = compile_steps(row, fuse=fuse)
        run(build(row), on(device, federation()), rounds=1, compiled=compiled)
        assert not compiled.steps.given_up
        programs.append(next(iter(compiled.steps._programs.values())))
    traced, fused = programs
    state = traced.arguments()
    state[-3].zero_()  # the number of the step
    first_of = len(traced.settings)
    for _ in range(3):
        first, second = ([value.clone() for value in state] for _ in programs)
        with torch.no_grad():
            traced._call(*first)
            fused._call(*second)
        a, b = (
            dict(zip([*traced.working, "loss"], [*each[first_of:-7], each[-1]], strict=True))
            for each in (first, second)
        )
        steered = {name: a[f"{name}.m"].abs() > 1e-6 * a[f"{name}.m"].abs().max() for name in "qz"}
        steered["z"] &= steered["q"]  # the gradient of z follows q
        assert all(mask.float().mean() > 0.7 for mask in steered.values())
        for name, value in a.items():
            kept = steered["q"] if name.startswith("z.") else steered.get(name)
            if kept is None or value.shape != kept.shape:
                kept = torch.ones_like(value, dtype=torch.bool)
            largest = float(value.abs().max())
            torch.testing.assert_close(b[name][kept], value[kept], rtol=1e-9, atol=1e-12 * largest)
        state = first


@cuda
@every_row
def test_cuda_agrees_with_the_cpu_on_the_same_numbers(
    row: Row, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same numbers to the last bit; exp and log of the two devices differ in theirs."""
    draw = philox.normals

    def drawn_on_the_cpu(at: Places, count: int, size: int, device: Any, first: int = 0) -> Tensor:
        return draw(at, count, size, torch.device("cpu"), first).to(device)

    monkeypatch.setattr(philox, "normals", drawn_on_the_cpu)
    found = run(build(row), on("cuda", federation()), rounds=row.rounds)
    assert_same(found, loop(row, row.rounds), rtol=1e-6, atol=1e-6)


# Shared


def _server(seed: int) -> Streams:
    return Streams([Who(seed, SERVER)], 0)


def _streams(seed: int, round_: int = 0) -> Streams:
    return Streams([Who(seed, i) for i in EVERYONE], round_)


def _start(method: Method, data: ClientData) -> tuple[Tree, Tree]:
    """A broadcast to all clients and their first private state."""
    server = method.init_server(_server(0))
    broadcast = {k: v.to(data.x).expand(len(SIZES), *v.shape) for k, v in server.items()}
    return broadcast, client_side.start(method, broadcast, data)
