"""What workers agree on, and their shares of the clients."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from corefed.base.errors import UserError
from corefed.base.place import Place, find_place, share
from corefed.settings.config import resolve, to_dict
from corefed.training import (
    checkpoint,
    distributed,
    parts,
    record,
    rounds,
    scoring,
    setup,
    world,
)
from corefed.training.shard_scores import totals_by_client
from corefed.training.sharded import rows_of


@pytest.mark.parametrize(("clients", "size"), [(5, 2), (7, 7), (100, 8), (3, 1)])
def test_shares_are_blocks_of_all_clients(clients: int, size: int) -> None:
    shares = [share(clients, size, rank) for rank in range(size)]
    assert [i for part in shares for i in part] == list(range(clients))
    sizes = {len(part) for part in shares}
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1


def test_places_of_torchrun_and_slurm() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert find_place(torchrun) == (3, 4, 1, False)
    assert find_place({**torchrun, "TORCHELASTIC_RESTART_COUNT": "2"}) == (3, 4, 1, True)
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    assert find_place(slurm) is None  # a job of several runs
    assert find_place({**slurm, "MASTER_ADDR": "node1"}) == (5, 8, 1, False)
    assert find_place({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert find_place({}) is None


HELLO = {"host": "a", "corefed": "1", "torch": "2"}


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({**HELLO, "host": "b", "corefed": "2"}, "Worker 1 on b has corefed 2 and worker 0 on a"),
        ({**HELLO, "gpu": "x"}, "has a GPU; use machines of one kind"),
    ],
)
def test_strangers_are_refused(second: dict[str, str], words: str) -> None:
    world._refuse_strangers([HELLO, HELLO])
    with pytest.raises(UserError, match=words):
        world._refuse_strangers([HELLO, second])


def test_fewer_gpus_than_workers() -> None:
    one, other = ({**HELLO, "gpu": gpu} for gpu in "xy")
    world._refuse_strangers([one, other, {**one, "host": "b"}])
    with pytest.raises(UserError, match="Workers 0 and 2 on a would share one GPU"):
        world._refuse_strangers([one, other, one])


def test_a_group_that_is_started_again_ignores_the_words_of_the_dead() -> None:
    """torchrun keeps its store: two groups, one after the other, and a dead worker's word."""
    store, found = HashStore(), []
    store.set("corefed/word/1", "a dead worker's")
    for number in range(2):
        places = [Place(rank, 2, rank, number > 0) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda place: world._fresh(store, place, 20.0), places))
        both[0].set("key", str(number))
        assert both[1].get("key").decode() == str(number)
        found.append(both[1])
    assert found[0].get("key").decode() == "0"
    with pytest.raises(RuntimeError, match="not all workers came"):
        world._fresh(store, Place(0, 2, 0, True), 0.1)


class Talk(world.World):
    """A first worker whose one companion says what it is told to."""

    def __init__(self, other: Any) -> None:
        super().__init__(0, 2)
        self.other = other

    def ask(self, mine: Any) -> list[Any]:
        return [mine, mine | self.other]


def test_other_settings_and_other_data_are_refused() -> None:
    experiment = resolve(None, {"clients": 3, "rounds": 2}, [])
    _, data = distributed._prepare(Talk({}), experiment)
    values = to_dict(experiment)
    distributed._compare(Talk({}), values, data)
    with pytest.raises(UserError, match="Worker 1 has other data than worker 0"):
        distributed._compare(Talk({"data": "0"}), values, data)
    with pytest.raises(UserError, match=r"other settings than worker 0: hidden \(\[1\] there"):
        distributed._compare(Talk({"settings": "0", "hidden": [1]}), values, data)
    with pytest.raises(UserError, match="There are 2 workers and 1 clients"):
        distributed._prepare(Talk({}), resolve(None, {"clients": 1}, []))


@pytest.mark.parametrize("classes", [0, 4])
def test_totals_of_every_client_are_those_of_each(classes: int) -> None:
    g = torch.Generator().manual_seed(0)
    real = torch.rand(3, 20, generator=g) < 0.7
    real[1] = False
    if classes:
        y = torch.randint(classes, (3, 20), generator=g)
        each = scoring.score_classes(torch.rand(3, 20, classes, generator=g).softmax(-1), y)
    else:
        y = torch.randn(3, 20, 1, generator=g)
        each = scoring.score_targets(torch.rand(3, 20, 2, generator=g), y)
    each = {name: value.masked_fill(~real, float("nan")) for name, value in each.items()}
    found = totals_by_client(each, y, real, classes)
    for client in range(3):
        mask = real[client]
        own = {name: value[client][mask] for name, value in each.items()}
        expected = scoring.totals(own, y[client][mask], classes)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name][client], value, check_dtype=False)


def test_a_part_keeps_its_clients_and_their_numbers() -> None:
    """A worker's clients have the numbers, and so the random streams, that they have alone."""
    experiment = resolve(None, {"clients": 5, "rounds": 2, "seeds": "0,1"}, [])
    whole = setup.prepare(experiment)
    part = setup.prepare(experiment, share=lambda n: share(n, 2, 1))
    mine = [row for row in range(10) if row % 5 >= 2]
    assert part.first == 2
    assert part.clients.who == [whole.clients.who[row] for row in mine]
    assert part.data.names == [whole.data.names[row] for row in mine]
    assert part.data.train.x.equal(whole.data.train.x[mine])
    assert part.experiment.run.clients == 5


class Alone(world.World):
    """A first worker whose companion does as it does."""

    def gather(self, mine: Tensor) -> Tensor:
        return torch.stack([mine, mine])


def test_workers_that_go_on_from_one_process_save_all_that_it_trained(tmp_path: Path) -> None:
    """An earlier attempt left a part that the others lack; nothing of it may come back."""
    settings = {"method": "fedavg", "clients": 5, "rounds": 3, "seeds": "0,1", "hidden": "4"}
    experiment = resolve(None, settings, [])
    left = iter([False, True])
    before = rounds.train(experiment, tmp_path, stop=lambda: next(left))
    me = Alone(0, 2)
    now, _ = distributed._prepare(me, experiment, tmp_path)
    values, mine = to_dict(now.experiment), rows_of(now.experiment.run, share(5, 2, 0))
    shard = parts.Shard(now.clients, mine)
    with checkpoint.Checkpoints(tmp_path, values, 1, 1.0, 1.0, part="0-of-2") as wrong:
        wrong.mark(mine)
        wrong.save(3, now.servers, shard.take)

    lines, servers = distributed._go_on(me, now, shard, record.Folder(tmp_path), values)
    assert [line["round"] for line in lines] == [1, 2]
    assert all(
        torch.equal(a["theta"], b["theta"]) for a, b in zip(servers, before.servers, strict=True)
    )
    saves = distributed._checkpoints(me, now, shard, tmp_path, values)
    assert saves is not None
    with saves:
        saves.save(2, servers, shard.take)
    found = checkpoint.load(tmp_path, values, "0-of-2")
    assert found is not None and found.round == 2
    (rows, tree), expected = next(found.pieces()), before.setup.clients.take(mine)
    assert rows == mine
    assert all(torch.equal(tree[name], value) for name, value in expected.items())
