"""The whole contract: what data, state, messages and a method are.

One rule holds everywhere: **every tensor of client data, state or message carries a leading client
axis of length C**. The plain-loop runtime calls a method with C = 1, once a client; the vmap
runtime calls the same functions with all clients stacked; a Flower client is C = 1 on another
machine. A method is written once and cannot tell which runtime called it.

Symbols: C clients in the call, n padded number of points, P length of the flat parameter vector,
K Monte-Carlo draws a step, b batch size, R local steps a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from corefed.base.rng import Streams

Tree = dict[str, Tensor]
"""State and messages: a flat dictionary of tensors. On the wire it is one safetensors file."""


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

    @property
    def size(self) -> Tensor:
        """[C] number of real points a client has. Only meaningful before a subset is chosen."""
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


class Work(NamedTuple):
    """How much a client does in a round."""

    steps: int  # R
    batch: int  # b


class Method(NamedTuple):
    """A federated method as pure functions; hyper-parameters are bound once, in `build`.

    `working` belongs to the call: `step` may change it in place. `server`, `broadcast`, `private`
    and `message` are three different things and never mix: `server` has no client axis;
    `broadcast` is `server` repeated over clients; `private` never leaves the client.
    """

    name: str
    init_server: Callable[[Streams], Tree]
    init_client: Callable[[Tree, ClientData], Tree]  # (broadcast, data) -> private
    begin: Callable[[Tree, Tree, ClientData], Tree]  # (broadcast, private, data) -> working
    select: Callable[[Tree, ClientData, Streams, Work], Tree] | None  # choose, refresh the subset
    weights: Callable[[Tree, ClientData], Tensor]  # (working, data) -> [C, n] weights trained on
    step: Callable[[Tree, Batch, Tensor], tuple[Tree, Tree]]  # (working, batch, noise)
    end: Callable[[Tree, Tree], tuple[Tree, Tree]]  # (broadcast, working) -> (message, private)
    aggregate: Callable[[Tree, Update], Tree]
    models: Callable[[Tree, Tree, ClientData], dict[str, Tree]]  # (broadcast, private, training
    # data) -> models to evaluate: personal, global, localized; those that the method has
    predict: Callable[[Tree, Tensor, Tensor], Tensor]  # (model, x, noise) -> [C, n, out]
    noise: tuple[int, ...]  # shape, for one client, of the standard normals one step consumes;
    # its last entry is what a draw of the weights consumes at evaluation: (0,) for a point estimate
    report: Callable[[Tree], Tree] = lambda private: {}  # figures a client, [C] each, to record
    select_every: int = 0  # local steps between calls of `select` inside a round; 0: once a round
    batches: int = 1  # independent minibatches of a step, side by side along the batch axis
    passes: int = 1  # gradients of one minibatch's size in a step, to count examples by
    downlink: tuple[str, ...] | None = None  # what of the server's state is sent; None: all of it
    elsewhere: bool = False  # personal models are also tried on the other clients' test points
    posteriors: tuple[str, ...] = ()  # of the message: [2, P] mean-field Gaussians (mu, rho)
    aligned: bool = True  # what message[NAME] holds means what server[NAME] does, entry by entry
