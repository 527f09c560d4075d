"""The tables of client.toml but [limits], which is in `limits.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from corefed.base.settings import NotNegative, PositiveInt, Probability, Range, Unit

HEARTBEAT = Range(lambda v: 10 <= v <= 1800, "between 10 and 1800")  # Flower's own


@dataclass(frozen=True)
class About:
    """What stands first in client.toml."""

    name: str
    """The client's name in the federation."""
    address: str
    """HOST:PORT of the server."""
    device: str = "cpu"
    """Where to train: auto, cpu, cuda or cuda:INDEX."""
    share_metrics: bool = True
    """Send losses, sums over this client's test points and its coreset's numbers to the server;
    never with noise of this client's own ([privacy])."""
    model: str = ""
    """A network of your own, package.module:factory, that this client runs if the server asks for
    exactly it; other code that the server names is refused unseen."""
    heartbeat: Annotated[int, HEARTBEAT, Unit("seconds")] = 10
    """Seconds between signs of life; the server counts this client as gone after twice as long."""


@dataclass(frozen=True)
class Privacy:
    """The table [privacy] of client.toml: what this client decides, whatever the server says.

    Where min_noise or max_epsilon is above 0, no exact number about its data leaves the client.
    """

    min_noise: NotNegative = 0.0
    """Least noise of an upload, in units of the clip; more where the server's rule dp_noise asks
    for more. 0 asks for none."""
    clip: NotNegative = 0.0
    """Length that the difference of an upload is clipped to; 0 takes the server's rule dp_clip."""
    max_epsilon: NotNegative = 0.0
    """Stop when the uploads have spent this epsilon; 0 sets no bound."""
    delta: Probability = 1e-5
    """Delta that goes with max_epsilon."""
    join: Literal["auto", "full", "shape"] = "auto"
    """What the server is told about the data before the first round: counts, names, means and
    deviations (full), or the shape of a point and the names of columns (shape); auto is full
    without noise and shape with it."""
    examples: PositiveInt = 100
    """With noise: the number of training points that the server is told in place of the true one.
    Some methods weigh clients by it."""


@dataclass(frozen=True)
class Data:
    """The table [data] of client.toml."""

    test_fraction: Annotated[float, Range(lambda v: 0 <= v < 1, "at least 0 and below 1")] = 0.2
    """Part kept for testing, of data without a test part of their own."""
    target: str = ""
    """Of a table: the column to predict. It must be named; other kinds of data do without."""
    classes: tuple[str, ...] = ()
    """Names of the classes that this client takes part with; points of others are left out. Empty
    takes all. With noise and classes it must be set, since the server is told these names."""
