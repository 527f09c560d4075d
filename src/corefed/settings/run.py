"""What every run has: the settings of `Run`, and the `Experiment` that they are a part of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from corefed.base.settings import (
    NotNegative,
    NotNegativeInt,
    Part,
    Positive,
    PositiveInt,
    Range,
    Unit,
    at_least,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


LOCAL = "local"
"""Value of `data` in a federation: each client has its own."""

MEMORY = "memory"
"""Value of `data` for arrays that were passed in Python, and of `model` for a network that was."""

OWN = ("table:", "npz:", MEMORY)
"""Prefixes of names of data whose regression targets are standardised."""


class Noise(NamedTuple):
    """The two settings of a regression's noise."""

    noise: float
    learn_noise: bool


OWN_NOISE = Noise(0.5, True)
"""Defaults for such data, if neither is given: learnt from a low start."""

Scaling = Literal["auto", "unit", "standard", "features", "client"]
Embedding = Literal["auto", "efficientnet-lite0", "resnet18", "none"]

CONVOLUTIONAL = ("cnn", "cnn-pfllib", "cnn-niid", "resnet")
"""Values of `model` for images."""

SERIES = ("lstm", "gru", "cnn1d", "transformer")
"""Values of `model` for series."""

MODELS = ("auto", "mlp", *CONVOLUTIONAL, *SERIES)
"""Values of `model` that are not the user's own code."""


def default_scale(model: str) -> Scaling:
    """What scale=auto means for points that are no rows of a table, by the network."""
    if model in SERIES:
        return "features"  # channels of a series have units of their own
    return "standard" if model in CONVOLUTIONAL else "unit"


CHANNELS = Range(lambda v: len(v) > 0 and min(v) >= 1, "one or more widths of at least 1")
WIDTHS = Range(lambda v: all(w >= 1 for w in v), "widths of at least 1")
SHARE = Range(lambda v: 0 <= v < 1, "0 or more and below 1")
SEEDS = Range(
    lambda v: len(v) > 0 and len(set(v)) == len(v) and min(v) >= 0,
    "one or more different whole numbers from 0 up",
)


@dataclass(frozen=True)
class Run:
    """What every run has, whatever its method."""

    method: str = "coreset-pfedbayes"
    """The method to train; `corefed methods` lists them."""
    data: str = "digits"
    """The data set; `corefed datasets` lists them."""
    classes: tuple[str, ...] = ()
    """Classes of the data to use, by name or number, in this order; empty takes all."""
    embedding: Embedding = "auto"
    """Image folders and MedMNIST: the frozen network whose features are learnt from; none takes
    raw pixels of 32 x 32, auto the first network that is installed."""
    bad_images: Literal["refuse", "skip"] = "refuse"
    """Image folders: stop at images that cannot be read, or leave them out and say so."""
    target: str = ""
    """Tables: the column to predict."""
    client_column: str = ""
    """Tables and .npz: the column or array whose values are the clients; empty: a partition splits
    the rows. Image folders: `folder` where the first folders are the clients, or a CSV file with
    the columns file and site."""
    categorical: tuple[str, ...] = ()
    """Tables: columns of numbers that are categories (codes); text always is."""
    ignore: tuple[str, ...] = ()
    """Tables: columns to leave out, such as patients' numbers."""
    missing: Literal["impute", "refuse"] = "impute"
    """Tables: fill in missing values and say so, or stop at them."""
    task: Literal["auto", "classification", "regression"] = "auto"
    """Tables and .npz: what is learnt; auto takes text and a few whole numbers for classes."""
    smallest_client: PositiveInt = 10
    """Clients of a column with fewer rows are left out: below ten, one test point or two say
    nothing about a model."""
    partition: str = ""
    """How data are split between clients; empty takes the usual partition for the data."""
    clients: PositiveInt = 10
    """Number of clients (N); a column of clients brings its own."""
    keep: Part = 1.0
    """Part of each client's training points that it has at all; the others are left out, drawn
    at random."""
    rounds: PositiveInt = 30
    """Communication rounds (T)."""
    local_steps: PositiveInt = 20
    """Gradient steps per client and round (R)."""
    local_epochs: NotNegativeInt = 0
    """Epochs per client and round over the points it trains on, in place of local_steps: a client
    with m of them takes epochs x ceil(m / batch_size) steps. 0 takes local_steps."""
    speeds: str = ""
    """Simulated devices: passes per simulated second (a pass is a point forward and backward; a
    forward pass alone, as in selection, counts a third). A number for all, one per client such as
    100,500,500, or drawn per client: uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA. Empty: time is not
    simulated."""
    deadline: Annotated[NotNegative, Unit("seconds")] = 0.0
    """Time that a client has for the local work of a round, selection included; 0: everybody is
    waited for. In a simulation these are simulated seconds (`speeds`). In a federation they are
    real ones, and each client measures its own speed."""
    late: Literal["drop", "partial", "fit"] = "partial"
    """What a client does that would miss the deadline: it takes no part (drop), takes as many steps
    as fit (partial), or trains on a coreset or random subset of the size that fits (fit)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How learning rates fall over the planned rounds: not at all, or along a line or a cosine to
    nearly 0."""
    planned_rounds: NotNegativeInt = 0
    """Rounds that a schedule, and the rise of zeta, are laid out for; 0 takes `rounds`. A resumed
    run may have more rounds, but keeps its plan."""
    warmup: Annotated[NotNegativeInt, Unit("rounds")] = 0
    """First rounds, in which learning rates rise to their values."""
    test_fraction: Annotated[float, SHARE] = 0.2
    """Share of each client's points that are held out for testing, where the data or the partition
    have no test points of their own; 0 trains on all, once settings are chosen, and tests nothing.
    """
    validation: Annotated[float, SHARE] = 0.0
    """Share of each client's training points that it does not train on, but is validated on:
    what settings are chosen by. Test points are never used for that."""
    patience: Annotated[NotNegativeInt, Unit("evaluations")] = 0
    """Stop early: a seed whose validation NLL was not lower than at its best in so many
    evaluations in a row has stopped, the run ends when all seeds have, and each keeps the models
    of its best round. 0 trains all rounds. It needs validation points. Schedules and the rise of
    zeta are laid out for all rounds (planned_rounds), so a run that ends early has not reached
    their end."""
    calibrate: Literal["auto", "off"] = "auto"
    """Fit a temperature per client on its validation points after the last round, so that
    predictions are right as often as they are confident: auto where there are such points."""
    batch_size: PositiveInt = 100
    """Points in a minibatch (b); a client with fewer uses all it has."""
    seeds: Annotated[tuple[int, ...], SEEDS] = (0,)
    """One repetition per seed, each with its own split and initial weights, trained together."""
    cohort: NotNegativeInt = 0
    """Clients drawn for each round (S); 0 takes all."""
    model: str = "auto"
    """The network: mlp (fully connected), cnn (convolutional, for images), resnet (residual, with
    group norm), cnn-pfllib or cnn-niid (those of the benchmarks, with their own sizes), lstm, gru,
    cnn1d or transformer (for series: columns are steps), or one of your own by
    package.module:factory; auto is cnn for CIFAR-10 and for folders of images that are not
    embedded, else mlp."""
    channels: Annotated[tuple[int, ...], CHANNELS] = (32, 64, 64)
    """Channels of the convolutions of a cnn or cnn1d, each followed by pooling; of a resnet, those
    of its blocks."""
    hidden: Annotated[tuple[int, ...], WIDTHS] = (100,)
    """Widths of the hidden layers, in a cnn or cnn1d those after the convolutions; empty: none.
    lstm, gru: one recurrent layer per width. transformer: one block per width, all the same. A
    resnet has none."""
    class_weights: str = "none"
    """Classification: weight of a point in the likelihood by its class. balanced: in inverse
    proportion to the number of training points of the class, over all clients; or numbers,
    such as 1,5, in the order of the classes. Probabilities shift with the weights."""
    noise: Positive = 1.0
    """Regression: standard deviation of the targets' noise, or where learning starts from; of
    tables and .npz, whose targets are standardised, in standard deviations of the target."""
    learn_noise: bool = False
    """Regression: learn the noise with the weights."""
    scale: Scaling = "auto"
    """Features as they are (unit), or centred and divided by the standard deviation of training
    points: one for all (standard), each feature's own (features), or each client's own (client).
    auto is features for tables and rows of numbers in .npz, standard for a cnn or resnet, unit
    otherwise."""
    augment: Literal["off", "crops", "flips", "crops+flips"] = "off"
    """Images of minibatches shifted by up to an eighth of a side (crops), mirrored from left to
    right (flips), or both, drawn anew for every step. Images are selected and tested as they are.
    """
    device: str = "auto"
    """Where to compute: auto, cpu, cuda or cuda:INDEX."""
    runtime: Literal["vmap", "loop"] = "vmap"
    """All clients stacked, as far as memory allows, or one after the other."""
    resident: Literal["all", "coreset"] = "all"
    """Training points in memory: all, or those alone that clients train on. The others stay in
    their file and are read when coresets are reselected; a method on all points then reads every
    minibatch. It takes npz:, table: or image-folder: (embedding=none), runtime=loop, a CPU and
    one seed."""
    compile: Literal["auto", "on", "graph", "off"] = "auto"
    """Local steps as one compiled program; `graph` replays them on a GPU without compiling."""
    memory_mb: Annotated[PositiveInt, Unit("MB")] = 4096
    """Bound on the memory that stacking clients may take."""
    client_state: Literal["auto", "device", "host", "file"] = "auto"
    """Where clients keep their state between rounds: stacked on the device, or only of those that
    took part, in the machine's memory or in a file. auto is the device, unless the state exceeds
    half of its free memory, or memory_mb in a run with small cohorts; then it is a file."""
    evaluate_every: Annotated[NotNegativeInt, Unit("rounds")] = 0
    """Rounds between evaluations; 0 makes about ten. The last round is always evaluated."""
    evaluate_clients: NotNegativeInt = 0
    """Clients that are evaluated, drawn once per seed; 0 takes all. Temperatures of the others are
    those of all evaluated clients together."""
    evaluate_draws: PositiveInt = 10
    """Draws of the weights that a prediction averages over."""
    checkpoint_every: Annotated[int, at_least(-1), Unit("rounds")] = -1
    """Rounds between checkpoints; -1 makes them as often as checkpoint_share allows, 0 writes
    none, and the run cannot be resumed."""
    checkpoint_share: Part = 0.1
    """With checkpoint_every = -1: share of the time that checkpoints may take."""
    checkpoint_minutes: Annotated[Positive, Unit("minutes")] = 5.0
    """With checkpoint_every = -1: time between checkpoints at most, whatever they take."""
    data_dir: str = ""
    """Folder to look for data in, before $COREFED_DATA and the user's cache."""


@dataclass(frozen=True)
class Experiment:
    """Everything that defines a run."""

    run: Run
    settings: DataclassInstance
    """The method's own Config."""
