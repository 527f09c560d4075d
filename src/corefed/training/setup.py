"""From an `Experiment` to all that a run needs: data, model, method, clients, servers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from corefed.base import allocator
from corefed.base.device import device_for
from corefed.base.errors import UserError
from corefed.base.rng import SERVER, Streams, Who
from corefed.base.shown import say_note
from corefed.base.types import ClientData, Method, Tree, Work
from corefed.data import datasets, fingerprint, held_out, hints, partition, validation
from corefed.data.clients import FederatedData, federate, stack
from corefed.data.dataset import Dataset
from corefed.data.table import Settings
from corefed.methods import registry
from corefed.models import cnn, own, resnet
from corefed.models.likelihood import Categorical, Gaussian, Likelihood
from corefed.models.network import PIXELS, STANDARDISED, Model, mlp
from corefed.models.own import Factory
from corefed.models.series import SERIES, Series
from corefed.settings import class_weights
from corefed.settings.config import check_cohort, fit_rates
from corefed.settings.devices import check_simulated
from corefed.settings.run import CONVOLUTIONAL, MEMORY, OWN, Experiment, Run, default_scale
from corefed.training import compiling, devices, local, others, storing, variants
from corefed.training.augmenting import work_of
from corefed.training.compiled import Steps
from corefed.training.replayed import Replays
from corefed.training.store import Start, Store

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WHOLE = 1 << 30
"""Bytes of all clients' state above which only clients that took part are saved."""


class Setup(NamedTuple):
    """A run before its first round. Row g N + i is client `first` + i of the g-th seed."""

    experiment: Experiment  # with all defaults filled in
    data: FederatedData
    model: Model
    method: Method
    clients: local.LocalClients
    servers: list[Tree]  # one per seed
    first: int = 0  # number of the first client that is here

    def trees(self, servers: list[Tree], temperature: Tree | None = None) -> Trees:
        """The current state, to be saved."""
        clients, touched = self.clients, self.clients.store.touched
        large = clients.store.layout.content * len(touched) > WHOLE
        return Trees(
            self.experiment.run, self.data, self.method, servers, clients.take, clients.chunk,
            temperature, touched if large and not bool(touched.all()) else None, self.first,
        )  # fmt: skip


class Trees(NamedTuple):
    """A run's state without a runtime: enough to save it or to predict."""

    run: Run
    data: FederatedData
    method: Method
    servers: list[Tree]  # one per seed
    take: Callable[[Sequence[int]], Tree]  # rows -> private state
    chunk: int = 1  # clients per pass when models are made
    temperature: Tree | None = None  # what `calibration.stored` gives; None: not calibrated
    touched: Tensor | None = None  # [G N] bool: the clients to keep, which took part; None: all
    first: int = 0  # number of the first client that is here


def concrete(experiment: Experiment) -> Experiment:
    """Fill in the settings that depend on the machine or the data."""
    run = experiment.run
    arrays = datasets.look(run.data, _folder(run))
    client = run.client_column
    if arrays is not None and not client and run.partition in ("", "natural"):
        client = arrays.client
    embedding = datasets.embedding_for(run.data, run.embedding)
    model = run.model
    if model == "auto":
        model = "cnn" if datasets.has_images(run.data, embedding) else "mlp"
    # A convolutional network learns faster from centred pixels: four clients of CIFAR-10 had an
    # accuracy of 67 % after 15 rounds with pixels centred and scaled, 59 % without.
    scale = run.scale
    if scale == "auto":
        scale = default_scale(model)
        if run.data.startswith("table:") or (arrays is not None and len(arrays.shape) == 1):
            scale = "features"
    run = dataclasses.replace(
        run,
        device=str(device_for(run.device)),
        partition=run.partition or ("natural" if client else partition.default_for(run.data)),
        client_column=client,
        embedding=embedding,
        model=model,
        scale=scale,
    )
    return fit_rates(dataclasses.replace(experiment, run=run))


def prepare(
    experiment: Experiment,
    data: FederatedData | None = None,
    factory: Factory | None = None,
    *,
    folder: Path | None = None,
    share: Callable[[int], range] | None = None,
    beside: int = 1,
) -> Setup:
    """Load, check and split the data; build model, method and clients. Writes nothing.

    `data` and `factory`, if given, replace the data and the network that the run names. `folder`
    is where the run will be recorded. `share` says which of so many clients are here; the others'
    data do not go to the device. `beside` processes of this machine have as many each.
    """
    experiment = concrete(experiment)
    run = experiment.run
    refuse_unstreamable(run, data)
    check_simulated(run)
    device = torch.device(run.device)
    if data is None and run.data == MEMORY:
        raise UserError(
            "Data in memory are what corefed.Federation was given in Python: fit it again there, "
            "or name a data set."
        )
    if data is None:
        with allocator.lean(run.resident == "coreset"):
            data = load(run)
    clients = len(data.names) // len(run.seeds)
    if clients != run.clients:  # they come from a column
        run = dataclasses.replace(run, clients=clients)
        experiment = dataclasses.replace(experiment, run=run)
    if run.class_weights == class_weights.BALANCED and data.classes:
        of_real = data.train.y[data.train.weight > 0]
        balanced = class_weights.balance(of_real.bincount(minlength=data.classes).tolist())
        run = dataclasses.replace(run, class_weights=balanced)
        experiment = dataclasses.replace(experiment, run=run)
    here = share(clients) if share is not None else range(clients)
    data = (data if len(here) == clients else data.part(here)).to(device)
    model = network(run, data.train.x.shape[2:], data.classes, data.targets, factory)
    method = registry.build(run.method, experiment.settings, model)
    simulated = devices.plan(run, experiment.settings, method, data.train.size.tolist())
    how, remark = compiling.decide(
        run, model.size, stackable=method.traits.stackable, alike=simulated is None
    )
    run = dataclasses.replace(run, compile=how)
    experiment = dataclasses.replace(experiment, run=run)
    servers = [
        {k: v.to(device) for k, v in method.init_server(Streams([Who(seed, SERVER)], 0)).items()}
        for seed in run.seeds
    ]
    chunk = stacked_clients(run, model, method, servers[0], data.train)
    work = work_of(run, data.train.x.shape[2:])
    said = [*model.notes, *others.note(method, clients), *([remark] if remark else [])]

    def choose(start: Start, total: int) -> Store:
        store, note = storing.choose(run, start, total, folder, beside)
        said.extend([note] if note else [])
        return store

    trained = local.LocalClients(
        method, data.train, run.seeds, servers, work, chunk,
        method_at=variants.methods(run, [experiment.settings], model, device),
        choose=choose, first=here.start, devices=simulated,
        compiled=compiled_steps(run, [experiment.settings], model, work),
    )  # fmt: skip
    for note in said:
        say_note(note)
    data = data._replace(notes=(*data.notes, *said))
    return Setup(experiment, data, model, method, trained, servers, here.start)


def refuse_unstreamable(run: Run, data: FederatedData | None) -> None:
    """resident=coreset where points are not in a file, or clients not one after the other."""
    if run.resident == "all":
        return
    images = run.data.startswith("image-folder:") and run.embedding == "none"
    if data is not None or not (run.data.startswith(("npz:", "table:")) or images):
        raise UserError(
            f"resident is coreset, but {run.data} is in memory as a whole; it takes npz:PATH, "
            "table:PATH or image-folder:PATH with embedding=none."
        )
    for name, value, wanted in (
        ("runtime", run.runtime, "loop"),
        ("device", run.device, "cpu"),
        ("augment", run.augment, "off"),
    ):
        if value != wanted:
            raise UserError(
                f"resident is coreset, for which {name} must be {wanted}, and it is {value}; add "
                f"--set {name}={wanted}."
            )
    if run.compile in ("on", "graph"):
        raise UserError("resident is coreset, whose steps are not compiled; leave compile out.")
    if len(run.seeds) > 1:
        raise UserError("resident is coreset, which trains one seed; start a run for each.")


def compiled_steps(
    run: Run, many: Sequence[DataclassInstance], model: Model, work: Work
) -> local.Compiled | None:
    """Steps of runs with these settings as compiled programs; None: one by one."""
    if run.compile not in ("on", "graph"):
        return None
    replays = Replays() if run.device.startswith("cuda") else None
    steps = Steps(work, fuse=run.compile == "on", replays=replays)
    return local.Compiled(steps, variants.step_settings(run, many, model))


def stacked_clients(
    run: Run, model: Model, method: Method, server: Tree, data: ClientData, copies: int = 1
) -> int:
    """Clients to train at once: one, or as many of all `copies` of `data` as memory allows."""
    if run.runtime == "loop":
        return 1
    draws = math.prod(method.noise[:-1]) * method.traits.batches
    held = model.activation * run.batch_size * draws
    return local.chunk_for(server, data, run.memory_mb, held, copies)


def load(run: Run, *, download: bool = True) -> FederatedData:
    """The federations of all seeds of a concrete run, stacked along the client axis.

    Missing data sets are downloaded, unless `download` is off.
    """
    spec = run.partition or partition.default_for(run.data)
    bound = max(1, run.memory_mb // len(run.seeds))
    many: list[FederatedData] = []
    dataset: Dataset | None = None
    for seed in run.seeds:
        if dataset is None or run.data.startswith("synthetic-"):  # redrawn for each seed
            dataset = pool(run, spec, seed, download=download)
        count = partition.client_count(spec, dataset, run.clients)
        check_cohort(run.cohort, count)
        splits = split(run, spec, dataset, count, seed)
        names = partition.client_names(spec, dataset, count)
        # What looks at all rows comes before the clients' tensors, which take as much memory again.
        said = partition.notes(spec, splits, dataset)
        if seed == run.seeds[0]:
            said = [*said, *held_out.validation_notes(splits, dataset, names)]
        if seed == run.seeds[0] and run.data.startswith(OWN):
            said = [*said, *validation.find_warnings(dataset), *hints.find(dataset, splits)]
        mark = None
        if seed == run.seeds[0] and run.data.startswith((*OWN, *datasets.IMAGES)):
            mark = fingerprint.of(dataset)
        data = federate(dataset, splits, scale=run.scale, memory_mb=bound, names=names)
        redrawn = run.data.startswith("synthetic-")
        data = data._replace(fingerprint=mark, source=None if redrawn else data.source)
        notes = (*data.notes, *said, *_test_share(run, spec, dataset)[1])
        if count != run.clients != Run.clients:
            notes = (*notes, f"clients is {run.clients}, but the data have {count}: all take part.")
        many.append(data._replace(notes=notes))
    data = many[0] if len(many) == 1 else stack(many)
    for note in data.notes:
        say_note(note)
    return data


def split(run: Run, spec: str, dataset: Dataset, count: int, seed: int) -> list[partition.Split]:
    """The training, test and validation points of each of `count` clients."""
    fraction, _ = _test_share(run, spec, dataset)
    splits = partition.split(spec, dataset, count, seed, fraction)
    splits = partition.thin(splits, run.keep, seed)
    return held_out.with_validation(dataset, splits, run.validation, seed)


def _test_share(run: Run, spec: str, dataset: Dataset) -> tuple[float, tuple[str, ...]]:
    """The share of points to hold out, and a note where that shall be none."""
    if run.test_fraction:
        return run.test_fraction, ()
    if partition.brings_test_points(spec, dataset):
        whose = f"the partition {spec}" if spec.startswith("shards-") else dataset.name
        note = f"test_fraction is 0, but {whose} has test points of its own; these are tested on."
        return Run.test_fraction, (note,)
    return 0.0, (
        "test_fraction is 0: all points are trained on, so nothing says how good these models are "
        "but the run that the settings were chosen by.",
    )


def pool(
    run: Run, spec: str, seed: int, *, download: bool = True, labels_only: bool = False
) -> Dataset:
    """The points of a run before they are split; with `labels_only`, images are not read."""
    natural, client = spec == "natural", run.client_column
    unused = client if not natural else ""
    in_table = unused and run.data.startswith("table:")
    reading = Settings(
        run.target,
        client if natural else "",
        run.categorical,
        (*run.ignore, unused) if in_table and unused not in run.ignore else run.ignore,
        run.missing,
        run.task,
        run.smallest_client if natural else 1,
        streamed=run.resident == "coreset",
    )
    dataset = datasets.load(
        run.data,
        _folder(run),
        download=download,
        seed=seed,
        clients=run.clients,
        classes=run.classes,
        embedding=run.embedding,
        bad_images=run.bad_images,
        memory_mb=run.memory_mb,
        labels_only=labels_only,
        reading=reading,
    )
    if not unused:
        return dataset
    note = (
        f"The partition {spec} makes the clients, so {unused!r} is neither the client nor a "
        f"feature; leave out --partition for one client per {unused!r}."
    )
    return dataset._replace(notes=(*dataset.notes, note))


def _folder(run: Run) -> Path | None:
    return Path(run.data_dir) if run.data_dir else None


def network(
    run: Run,
    shape: Sequence[int],
    classes: int,
    targets: int,
    factory: Factory | None = None,
) -> Model:
    """The network for points of a shape, to classes, or to targets where classes is 0.

    A user's own is made by `factory`; without it, code that the run names is refused.
    """
    noise = run.noise, run.learn_noise
    weights = class_weights.weights(run.class_weights, classes)
    likelihood: Likelihood = (
        Categorical(classes, weights=weights) if classes else Gaussian(targets, *noise)
    )
    if factory is None and run.model in SERIES:
        factory = Series(run.model, run.channels, run.hidden)
    if factory is None and own.is_own(run.model):
        own.refuse_unnamed(run.model)
    if factory is not None:
        return own.build(
            run.model,
            shape,
            likelihood,
            memory_mb=run.memory_mb,
            batch=run.batch_size,
            factory=factory,
        )
    if run.model in CONVOLUTIONAL:
        image = cnn.image_shape(torch.Size(shape), run.data)
        if run.model == resnet.NAME:
            return resnet.resnet(image, run.channels, likelihood)
        if run.model in cnn.PUBLISHED:
            return cnn.published(run.model, image, likelihood)
        return cnn.cnn(image, run.channels, run.hidden, likelihood)
    standardised = run.scale in ("standard", "features", "client")
    mean_square = STANDARDISED if standardised else PIXELS
    return mlp((math.prod(shape), *run.hidden, likelihood.outputs), likelihood, mean_square)
