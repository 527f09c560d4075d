"""Why a client's update is unacceptable, in one sentence.

An average takes whatever it is given: one NaN makes the model NaN, a shape of (1,) is repeated to
any length, and a count of 10^12 examples is the whole average. So each update is first checked
against a `template`, found by what the method itself does with a client of one point (`refusal`).
Then all updates of a round are compared with each other (`outliers`).

What is compared is the length of the difference from the broadcast, in the metric of `metric.py`,
with the *lower* median of this round's lengths and those accepted in the last rounds. The lower
one, since of two clients the smaller update is the safer reference. This works while more than half
of what is compared is honest; a majority of bad clients defines what is usual.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from corefed.base.rng import Streams, Who
from corefed.base.types import ClientData, Method, Tree
from corefed.bayes import gaussian
from corefed.federation.trust import metric

ShapeAndType = tuple[torch.Size, torch.dtype]
Template = dict[str, ShapeAndType]
"""Name -> shape and type of one client's message, without the client axis."""

WIDEST = 1e6
"""A standard deviation beyond this is no posterior of a network's weight; rho = 1e6 is the same."""

Key = TypeVar("Key", bound=Hashable)


def template(method: Method, server: Tree, shape: Sequence[int], targets: int = 0) -> Template:
    """What a message of `method` looks like: that of a client with one point of zeros, untrained.

    `shape` is that of one point's features; `targets` the width of a regression target, 0 for
    classes.
    """
    one = next(iter(server.values())).new_zeros
    y = one(1, 1, targets) if targets else one(1, 1).long()
    data = ClientData(one(1, 1, *shape), y, one(1, 1) + 1)
    broadcast = {name: value.unsqueeze(0) for name, value in server.items()}
    streams = Streams([Who(0, 0)], 0)
    working = method.begin(broadcast, method.init_client(broadcast, data), data, streams)
    message, _ = method.end(broadcast, working)
    return {name: (value.shape[1:], value.dtype) for name, value in message.items()}


def refusal(
    message: Tree,
    template: Template,
    posteriors: Collection[str],
    claimed: Mapping[str, object],
    *,
    max_examples: int,
    dtypes: Collection[torch.dtype] = (torch.float32,),
) -> str | None:
    """Why one client's update cannot be used, or None.

    `claimed` is what the client says about itself: `examples`, its number of training points, and
    `loss` if it shares that. `dtypes` are the types that floating-point entries may have; other
    entries have the template's type. If nothing is refused, int(examples) is exact.
    """
    return (
        _names(message, template)
        or next((why for n in template if (why := _form(n, message[n], template[n], dtypes))), None)
        or next((why for n in template if (why := _values(n, message[n]))), None)
        or next((why for n in posteriors if n in message and (why := _sigma(n, message[n]))), None)
        or _examples(claimed.get("examples"), max_examples)
        or _loss(claimed.get("loss"))
    )


def widths(message: Tree, sent: Tree, posteriors: Collection[str], factor: float) -> str | None:
    """Why the standard deviations of an update cannot follow from those sent in one round, or None.

    An average of rho has no bound: one client's rho of -100 makes everybody's posterior a point,
    in whose unit every later update is endlessly long. Both sigmas are floored as in training.
    """
    for name in posteriors:
        if name not in message or name not in sent:
            continue
        own, before = (gaussian.sigma(each[name][1].double()) for each in (message, sent))
        ratio = own / before
        odd = int(((ratio > factor) | (ratio < 1 / factor)).sum())
        if odd:
            return (
                f"{name!r} has {odd} of {ratio.numel()} standard deviations that are {factor:g} "
                "times smaller or larger than they were sent (sigma_factor)."
            )
    return None


def outliers(
    sent: Tree,
    updates: Mapping[Key, Tree],
    posteriors: Collection[str],
    factor: float,
    history: Sequence[float] = (),
    *,
    aligned: bool = True,
) -> tuple[dict[Key, str], dict[Key, float]]:
    """Whose update is over `factor` times the usual length, and why; and the length of each.

    `history` holds the lengths that were accepted in the last rounds. Updates that are not aligned
    with what was sent have no difference from it, so their own lengths are compared. A factor of 0
    refuses none, and neither does a usual length of 0: where most clients send back what they were
    sent, there is nothing to compare the others with.
    """
    unit = metric.scale(sent, posteriors)
    lengths = {client: _length(update, sent, unit, aligned) for client, update in updates.items()}
    usual = statistics.median_low([*lengths.values(), *history]) if lengths else 0.0
    if factor <= 0 or usual == 0:
        return {}, lengths
    refused = {
        client: (
            f"The update is {length / usual:.3g} times as long as the usual one ({length:.3g} "
            f"against {usual:.3g}); at most {factor:g} times is accepted."
        )
        for client, length in lengths.items()
        if not length <= factor * usual
    }
    return refused, lengths


def _length(update: Tree, sent: Tree, unit: Tree, aligned: bool) -> float:
    if not aligned:
        return metric.length(update, metric.scale(update, ())).item()
    return metric.length({n: v.double() - sent[n] for n, v in update.items()}, unit).item()


def _names(message: Tree, template: Template) -> str | None:
    missing = [name for name in template if name not in message]
    unknown = [name for name in message if name not in template]
    if missing:
        return f"The update lacks {_listed(missing)}."
    if unknown:
        return f"The update has {_listed(unknown)}, which nobody asked for."
    return None


def _form(
    name: str, value: Tensor, wanted: ShapeAndType, dtypes: Collection[torch.dtype]
) -> str | None:
    shape, dtype = wanted
    if value.shape != shape:
        return f"{name!r} has the shape {_shape(value.shape)} and not {_shape(shape)}."
    allowed = list(dtypes) if dtype.is_floating_point else [dtype]
    if value.dtype not in allowed:
        words = " or ".join(str(each).removeprefix("torch.") for each in allowed)
        return f"{name!r} holds {str(value.dtype).removeprefix('torch.')} and not {words} numbers."
    return None


def _values(name: str, value: Tensor) -> str | None:
    bad = value.numel() - int(value.isfinite().sum())
    return f"{name!r} has {bad} of {value.numel()} values that are not finite." if bad else None


def _sigma(name: str, v: Tensor) -> str | None:
    """rho so low that softplus(rho) is 0 in float32, as all of training computes it, or too high.

    A sigma between 0 and the floor of `gaussian.sigma` counts as the floor everywhere, and is
    accepted: training may bring it there.
    """
    sigma = F.softplus(v[1].float())
    none, wide = int((sigma <= 0).sum()), int((sigma > WIDEST).sum())
    if none:
        return f"{name!r} has {none} of {sigma.numel()} standard deviations that are not above 0."
    if wide:
        return f"{name!r} has {wide} of {sigma.numel()} standard deviations above {WIDEST:g}."
    return None


def _examples(claimed: object, most: int) -> str | None:
    if isinstance(claimed, bool) or not isinstance(claimed, int | float):
        return f"The client claims {_quoted(claimed)} training examples, which is not a number."
    if isinstance(claimed, float) and not claimed.is_integer():
        return f"The client claims {claimed:g} training examples, which is not a whole number."
    if not 1 <= claimed <= most:
        return (
            f"The client claims {_quoted(claimed)} training examples; it must be at least 1 and at "
            f"most max_examples, {most}."
        )
    return None


def _loss(loss: object) -> str | None:
    """A loss that is not finite, even with finite weights: the training diverged."""
    if loss is None:
        return None
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        return f"The client's loss is {_quoted(loss)}, which is not a number."
    if isinstance(loss, float) and not math.isfinite(loss):
        return f"The client's training diverged: its loss is {loss}; use smaller learning rates."
    return None


def _listed(names: Sequence[str]) -> str:
    """The first few, since a client may make up as many as it likes."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(_quoted, names[:3])) + more


def _quoted(value: object) -> str:
    """Whatever a client sent, short and in one line."""
    if not isinstance(value, str | int | float | None):
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > 100:  # Python does not print the longest
        return "more than 1e30" if value > 0 else "less than -1e30"
    text = repr(value[:40] if isinstance(value, str) else value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _shape(shape: torch.Size) -> str:
    return f"({', '.join(map(str, shape))})"
