"""The whole contract: what data, state, messages and a method are.

One rule holds everywhere: **every tensor of client data, state or message carries a leading client
axis of length C**. The loop runtime calls a method with C = 1, once per client; the vmap runtime
calls the same functions with all clients stacked; a Flower client is C = 1 on another machine. A
method is written once and cannot tell which runtime called it.

Symbols: C clients in the call, n padded number of points, P length of the flat parameter vector,
K Monte-Carlo draws per step, b batch size, R local steps per round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from corefed.base.rng import Streams

Tree = dict[str, Tensor]
"""State and messages: a flat dictionary of tensors. On the wire it is one safetensors file."""


def places(rows: Sequence[int]) -> slice | list[int]:
    """An index of these rows of a tensor; one that makes a view where they follow one another."""
    if len(rows) and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[-1] + 1)
    return list(rows)


class ClientData(NamedTuple):
    """Points of C clients, padded to a common n.

    The weighted likelihood is sum_j weight_j log p(D_j): full data is weight 1, padding is
    weight 0, a random subset is n/k on k points, a coreset is the solver's w.
    """

    x: Tensor  # [C, n, ...]
    y: Tensor  # [C, n] class indices, or [C, n, d] regression targets
    weight: Tensor  # [C, n]

    def to(self, device: torch.device) -> ClientData:
        return ClientData(*(field.to(device) for field in self))

    def of(self, rows: Sequence[int]) -> ClientData:
        """Some of the clients: a view where they follow one another, else a copy."""
        return ClientData(*(field[places(rows)] for field in self))

    @property
    def size(self) -> Tensor:
        """[C] number of real points per client. Only meaningful before a subset is chosen."""
        return (self.weight > 0).sum(-1)


class Batch(NamedTuple):
    """A minibatch: `scale` makes sum_j scale_j nll_j unbiased for (1/n) sum_j w_j nll_j."""

    x: Tensor  # [C, b, ...]
    y: Tensor  # [C, b] or [C, b, d]
    scale: Tensor  # [C, b]; 0 on padding


class Update(NamedTuple):
    """What one cohort sends to the server: messages stacked over its C clients."""

    clients: tuple[int, ...]
    message: Tree
    examples: Tensor  # [C] training points each client has


class Augment(NamedTuple):
    """How the images of minibatches are changed at random."""

    image: tuple[int, int, int]  # channels, height, width
    crops: bool
    flips: bool


Body = Callable[[Tree, "Streams"], Tree]
"""A function of tensors that draws from streams; none of its shapes depends on values."""

Replay = Callable[[object, Body, Tree, Tree, "Streams"], Tree]
"""(key, body, given, fixed, streams) -> body({**given, **fixed}, streams).

The same body, by its key, is recorded once for tensors of a shape, and replayed. `fixed` are
tensors that stay where they are. What comes back is overwritten by the next call."""


class Work(NamedTuple):
    """How much a client does in a round, and on what."""

    steps: int  # R
    batch: int  # b
    augment: Augment | None = None  # None: points are trained on as they are
    replay: Replay | None = None  # for what is the same in every round, where that saves time
    counts: Tensor | None = None  # [C] steps of each client, at most R; None: all take R
    points: Tensor | None = None  # [C] points that its subset shall have; None: the method says it
    passes: Tensor | None = None  # [C] passes it has for its round, selection included; None: any


class Subset(NamedTuple):
    """How a method trains on a part of each client's points.

    The state of a subset is private to the client, beside that of the method: the runtime keeps
    it, and the method never sees it. One row per client in every tensor.
    """

    init: Callable[[Tree, ClientData], Tree]  # (private, data) -> state before the first selection
    select: Callable[[Tree, Tree, ClientData, Streams, Work], Tree]  # (state, working, data,
    # streams, work) -> state; reselects for the clients that are due
    weights: Callable[[Tree], Tensor]  # state -> [C, n] weights to train on; 0 leaves a point out
    after: Callable[[Tree, int | Tensor], Tree]  # (state, local steps that have passed, of all or
    # [C] of each) -> state
    every: int = 0  # local steps between calls of `select` inside a round; 0: once per round
    report: Callable[[Tree], Tree] = lambda state: {}  # numbers per client, [C] each, to record
    cost: Callable[[Tree], Tensor] | None = None  # state -> [C] forward passes of points spent on
    # selecting so far; None: not counted
    free: bool = False  # selecting takes no pass through the network
    look: float = 0.0  # forward passes per point that one selection takes at most
    sizes: Callable[[Sequence[int]], list[int]] | None = None  # numbers of points -> of those with
    # a weight, where one follows from the other; None: counted
    learn: Callable[[Tree, Tensor], Tree] | None = None  # (state, seen [C, 2, n + 1]) -> state: of
    # each point the sum of info["squares"] over local steps, and in how many it was; see `tally`
    batch: Callable[[Tree, int], list[int]] | None = None  # (state, b) -> points per step of each
    # client, at most b; None: b


class Traits(NamedTuple):
    """What a runtime, a federation or a report may have to know about a method."""

    batches: int = 1  # independent minibatches per step, side by side along the batch axis
    passes: int = 1  # gradients of one minibatch's size per step, to count examples by
    sent: tuple[str, ...] | None = None  # parts of the server's state that clients get; None: all,
    # (): nothing, so that clients share nothing
    posteriors: tuple[str, ...] = ()  # parts of the message: [2, P] mean-field Gaussians (mu, rho)
    aligned: bool = True  # entry i of message[NAME] and of server[NAME] is the same parameter
    report: Callable[[Tree], Tree] = lambda private: {}  # numbers per client, [C] each, to record
    mean: Literal["", "equal", "examples"] = ""  # `aggregate` needs no more than the mean of the
    # messages, of clients that count alike or by examples; "": it needs every message
    planned: bool = False  # `step` finds working["planned"], [C] the round's number of local steps
    restarts: bool = False  # personal models start anew from the broadcast in each round, so that a
    # newcomer takes all of its steps in one
    stackable: bool = True  # runs that are trained together may differ in settings marked PER_RUN


class Method(NamedTuple):
    """A federated method as pure functions; hyper-parameters are bound once, in `build`.

    Four kinds of state never mix. `server` is what the server keeps, without a client axis.
    `broadcast` is `server` repeated over clients. `private` never leaves the client. `working`
    lives for one round, and only it may be changed in place. Private tensors that `end` does not
    return keep their value.
    """

    name: str
    init_server: Callable[[Streams], Tree]
    init_client: Callable[[Tree, ClientData], Tree]  # (broadcast, data) -> private
    begin: Callable[[Tree, Tree, ClientData, Streams], Tree]  # (broadcast, private, data, streams)
    # -> working
    step: Callable[[Tree, Batch, Tensor], tuple[Tree, Tree]]  # (working, batch, noise) -> (working,
    # info); info["loss"] is [C], info["squares"] [C, b] where a subset learns from the steps
    end: Callable[[Tree, Tree], tuple[Tree, Tree]]  # (broadcast, working) -> (message, private)
    aggregate: Callable[[Tree, Update], Tree]  # (server, update) -> server
    models: Callable[[Tree, Tree, ClientData], dict[str, Tree]]  # (broadcast, private, training
    # data) -> models to evaluate: personal, global, localized; those that the method has
    predict: Callable[[Tree, Tensor, Tensor], Tensor]  # (model, x, noise) -> [C, n, out]
    noise: tuple[int, ...]  # shape, per client, of the standard normals that one step consumes; its
    # last entry is what a draw of the weights consumes at evaluation: (0,) for a point estimate
    subset: Subset | None = None  # None: trains on all points
    traits: Traits = Traits()
