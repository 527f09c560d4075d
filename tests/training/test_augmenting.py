"""Crops and flips: images are only moved, the same under every runtime, and off changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corefed.base.errors import UserError
from corefed.base.rng import Streams, Who
from corefed.base.types import Augment, ClientData, Work
from corefed.bayes import augment as augmenting
from corefed.bayes.batches import changing, gather, plan
from corefed.settings.config import resolve
from corefed.training import local, rounds, variants
from corefed.training.augmenting import work_of
from corefed.training.compiled import Steps
from corefed.training.setup import prepare

IMAGE = (2, 16, 24)
BOTH = Augment(IMAGE, crops=True, flips=True)
FLAGS: dict[str, Any] = {
    "method": "pfedbayes", "clients": 3, "rounds": 2, "local_steps": 3, "batch_size": 20,
    "hidden": "5", "device": "cpu",
}  # fmt: skip


def streams(clients: int = 3, round_: int = 0, first: int = 0) -> Streams:
    return Streams([Who(7, first + client) for client in range(clients)], round_)


def images(clients: int = 3, points: int = 50) -> Tensor:
    """Every pixel has a number of its own."""
    count = clients * points * torch.Size(IMAGE).numel()
    return torch.arange(count, dtype=torch.float64).view(clients, points, *IMAGE)


def by_hand(image: Tensor, dy: int, dx: int, flip: bool) -> Tensor:
    """One image [channels, height, width], mirrored, padded by its reflection, cut."""
    image = image.flip(-1) if flip else image
    up, left = image.shape[1] // 8, image.shape[2] // 8
    wide = torch.nn.functional.pad(image, (left, left, up, up), mode="reflect")
    return wide[:, dy : dy + image.shape[1], dx : dx + image.shape[2]]


def test_images_are_only_shifted_and_mirrored() -> None:
    x, words = images(), augmenting.draw(streams(), 1, 50)[:, 0]
    found = augmenting.apply(BOTH, x, words)
    seen = set()
    for client in range(3):
        for point in range(50):
            word = int(words[client, point])
            move = (word & 0xFFFF) % 5, ((word >> 16) & 0xFFFF) % 7, bool((word >> 32) & 1)
            seen.add(move)
            assert torch.equal(found[client, point], by_hand(x[client, point], *move))
    assert len(seen) > 50  # of 70 moves


def test_one_kind_alone() -> None:
    x, words = images(), augmenting.draw(streams(), 1, 50)[:, 0]
    mirrored = augmenting.apply(BOTH._replace(crops=False), x, words)
    same = (mirrored == x).flatten(2).all(-1)
    flipped = (mirrored == x.flip(-1)).flatten(2).all(-1)
    assert (same ^ flipped).all()
    # Of 150 images half are mirrored, within 5 deviations.
    assert abs(flipped.sum().item() - 75) < 5 * (150 / 4) ** 0.5
    shifted = augmenting.apply(BOTH._replace(flips=False), x, words)
    assert not torch.equal(shifted, x)
    flat = augmenting.apply(BOTH, x.flatten(2), words)
    assert torch.equal(flat, augmenting.apply(BOTH, x, words).flatten(2))


def test_a_draw_depends_on_seed_round_client_step_and_place_alone() -> None:
    whole = augmenting.draw(streams(3), 4, 20)
    assert whole.shape == (3, 4, 20)
    for client in range(3):
        alone = augmenting.draw(streams(1, first=client), 4, 12)  # fewer points, nobody beside it
        assert torch.equal(alone[0], whole[client, :, :12])
    later = streams(3)
    assert torch.equal(augmenting.draw(later, 1, 20), whole[:, :1])
    assert torch.equal(augmenting.draw(later, 3, 20), whole[:, 1:])
    assert not torch.equal(augmenting.draw(streams(3, round_=1), 4, 20), whole)
    assert len(whole.unique()) == whole.numel()


def test_minibatches_are_changed_and_labels_are_not() -> None:
    x, y = images(points=10), torch.arange(30).view(3, 10)
    data = ClientData(x, y, torch.ones(3, 10))
    for each in (1, 2):
        plain = plan(data, data.weight, streams(), 3, 4, each)
        chosen = changing(plain, BOTH, streams())
        assert changing(plain, None, streams()) is plain
        assert chosen.words is not None
        for step, (before, after) in enumerate(
            zip(gather(data, plain), gather(data, chosen, BOTH), strict=True)
        ):
            words = chosen.words[:, step * each : (step + 1) * each].flatten(1)
            assert torch.equal(after.x, augmenting.apply(BOTH, before.x, words))
            assert torch.equal(after.y, before.y)
            assert torch.equal(after.scale, before.scale)


def one_round(traced: bool = False, **flags: Any) -> tuple[Any, Tensor]:
    setup = prepare(resolve(flags={**FLAGS, **flags}))
    if traced:
        run = setup.experiment.run
        at = variants.step_settings(run, [setup.experiment.settings], setup.model)
        steps = Steps(setup.clients.work, fuse=False)
        setup.clients.compiled = local.Compiled(steps, at)
    updates, loss, _ = setup.clients.train(0, setup.servers, [[0, 1, 2]])
    if traced:
        assert not steps.given_up
    return updates[0].message, loss


@pytest.mark.parametrize("method", ["pfedbayes", "coreset-pfedbayes", "fedavg"])
def test_every_runtime_has_the_same_numbers(method: str) -> None:
    flags = {"method": method, "augment": "crops+flips"}
    expected = one_round(**flags)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(one_round(**flags, runtime="loop"), expected, **close)
    torch.testing.assert_close(one_round(traced=True, **flags), expected, **close)
    plain = one_round(method=method)
    assert not torch.equal(plain[1], expected[1])


def test_a_step_that_cannot_be_traced_is_taken_on_the_same_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler")

    flags = {"augment": "crops"}
    expected = one_round(**flags)
    monkeypatch.setattr("corefed.training.compiled._Program.traced", broken)
    setup = prepare(resolve(flags={**FLAGS, **flags}))
    at = variants.step_settings(setup.experiment.run, [setup.experiment.settings], setup.model)
    setup.clients.compiled = local.Compiled(Steps(setup.clients.work, fuse=False), at)
    updates, loss, _ = setup.clients.train(0, setup.servers, [[0, 1, 2]])
    torch.testing.assert_close((updates[0].message, loss), expected, rtol=0, atol=0)


def test_a_resumed_run_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    flags = {**FLAGS, "augment": "crops+flips", "rounds": 3, "checkpoint_every": 1}
    whole = rounds.train(resolve(flags=flags), tmp_path / "whole")
    part = tmp_path / "part"
    rounds.train(resolve(flags=flags), part, stop=lambda: True)
    again = rounds.train(resolve(flags=flags), part, resume=True)
    assert again.summary["metrics"] == whole.summary["metrics"]
    pairs = zip(again.servers, whole.servers, strict=True)
    assert all(torch.equal(a[k], b[k]) for a, b in pairs for k in a)


def test_off_is_what_it_was() -> None:
    """Nothing is drawn, and the work is that of a version without the option."""
    run = resolve(flags=FLAGS).run
    assert run.augment == "off"
    assert work_of(run, (64,)) == Work(3, 20)
    assert one_round(augment="off")[1].tolist() == one_round()[1].tolist()


def test_selection_and_evaluation_see_the_images_themselves() -> None:
    """The subset of the first round is chosen before any step: that of a run without changes."""
    kept = []
    for augment in ("off", "crops+flips"):
        flags = {**FLAGS, "method": "coreset-pfedbayes", "fraction": 0.3, "augment": augment}
        setup = prepare(resolve(flags=flags))
        before = setup.data.test.x.clone(), setup.data.train.x.clone()
        setup.clients.train(0, setup.servers, [[0, 1, 2]])
        assert torch.equal(setup.data.test.x, before[0])
        assert torch.equal(setup.data.train.x, before[1])
        method = setup.method
        assert method.subset is not None
        private = {
            k.removeprefix("subset."): v for k, v in setup.clients.private.items()
            if k.startswith("subset.")
        }  # fmt: skip
        kept.append(method.subset.weights(private))
    assert torch.equal(kept[0] > 0, kept[1] > 0)


@pytest.mark.parametrize(
    "flags",
    [
        {"data": "synthetic-linear"},
        {"data": "synthetic-linear", "model": "mlp", "augment": "flips"},
    ],
)
def test_what_are_no_images_is_refused(flags: dict[str, Any]) -> None:
    experiment = resolve(flags={**FLAGS, "augment": "crops", **flags})
    with pytest.raises(UserError, match="shifts or mirrors images; points of synthetic-linear"):
        prepare(experiment)


def test_rows_of_numbers_are_images_only_where_that_is_known() -> None:
    run = resolve(flags={**FLAGS, "data": "mnist", "augment": "flips"}).run
    assert work_of(run, (784,)).augment == Augment((1, 28, 28), crops=False, flips=True)
    for data in ("table:rows.csv", "npz:rows.npz"):
        with pytest.raises(UserError, match="no pixels"):
            work_of(run, (784,), data)
    assert work_of(run, (3, 32, 32), "npz:images.npz").augment == Augment((3, 32, 32), False, True)


def test_a_word_that_is_none() -> None:
    with pytest.raises(UserError, match="augment"):
        resolve(assignments=["augment=rotations"])
