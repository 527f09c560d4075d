"""Client-level differential privacy of an upload: the mechanism, its accountant, its ledger.

**Mechanism.** What a client would send differs from the broadcast v by u = (message - v) / s in the
public units s of `metric.py`. u is shortened to length `clip` and given Gaussian noise, and goes
back into the message's own units:

    v + s (u min(1, clip / ||u||) + noise clip g),    g ~ N(0, I).

A message without a finite length, that of a training that diverged, counts as v itself: u = 0. So
whether training failed does not show in what is sent.

**Neighbours.** Two federations are neighbours if some client's difference is zero in every round of
one of them and all else is the same. Who takes part is no secret. The sensitivity is then `clip`.
If a client's data are exchanged for others it is 2 clip: every mu below doubles.

**Accountant.** One release is a Gaussian mechanism with mu = 1 / noise in the sense of Gaussian
differential privacy (Dong, Roth, Su, J. R. Stat. Soc. B 2022). Releases, each made in the light of
those before, compose to mu = sqrt(sum mu_t^2), also where their noise is chosen on the way (Smith,
Thakurta 2022, arXiv 2210.17520). This is exact, and says for every epsilon

    delta(epsilon) = Phi(-epsilon / mu + mu / 2) - e^epsilon Phi(-epsilon / mu - mu / 2).

Whoever sees uploads, the server above all, sees mu_t = 1 / noise. Whoever sees only averages
sum_i w_i m_i sees client i's difference at w_i times its length, under the noise of all, of
standard deviation noise clip sqrt(sum_j w_j^2), hence mu_t = max_i w_i / (noise sqrt(sum_j w_j^2)),
which is 1 / (noise sqrt(S)) where S clients count alike. (A client among them knows its own noise,
so the noise of S - 1 protects the others from it.) It holds while all of them add their noise and
none is left out for what it sent. It holds for averages alone: nothing is claimed for medians,
Krum, clipping by the server or fused precisions.

**Randomness** is the operating system's, number by number. It must not come from the run's seed,
which the server knows, nor from a torch.Generator on a CPU, which has 2^32 seeds to try. Noise in
floating point is not noise in real numbers: there is no defence against attacks on the last bits of
a result (Mironov, CCS 2012).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from corefed.base import digests, files
from corefed.base.errors import UserError
from corefed.base.types import Method, Tree, Update
from corefed.federation.trust import metric

Normals = Callable[[int], Tensor]
"""A number -> so many independent standard normals, in float64."""

# Mechanism


def check(method: Method) -> None:
    """Refuse, before a run, a method whose uploads cannot be made private."""
    if not method.traits.aligned:
        raise UserError(
            f"dp_clip bounds how far an upload is from what the server sent, and {method.name} has "
            "no such distance; set dp_clip to 0 or use another method."
        )


def system_normals(count: int) -> Tensor:
    """Standard normals from the operating system's random numbers, which have no seed to guess.

    The inverse distribution function is taken at the midpoints of 2^52 equal parts of (0, 1).
    """
    bits = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64)
    normals: Tensor = torch.special.ndtri(((bits & (2**52 - 1)).double() + 0.5) * 2.0**-52)
    return normals


def privatise(
    message: Tree,
    broadcast: Tree,
    posteriors: Collection[str],
    clip: float,
    noise: float,
    generator: Normals,
) -> tuple[Tree, float]:
    """One client's message (no client axis) as it may be sent, and its length before clipping.

    The length is not protected and must not be sent. An empty message releases nothing.
    """
    for name, value in (("clip", clip), ("noise", noise)):
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"dp_{name} is {value:g}; it must be a finite number above 0.")
    if any(n not in broadcast or v.shape != broadcast[n].shape for n, v in message.items()):
        raise UserError(
            "The upload differs in shape from what the server sent, so that it cannot be made "
            "private, and was not sent; set dp_clip to 0 or use another method."
        )
    unit = metric.scale({name: broadcast[name] for name in message}, posteriors)
    moved = {name: value.double() - broadcast[name] for name, value in message.items()}
    length = metric.length(moved, unit).item()
    if not math.isfinite(length):
        moved = {name: torch.zeros_like(value) for name, value in moved.items()}
    shrink = min(1.0, clip / length) if 0 < length < math.inf else 1.0

    def released(name: str, value: Tensor) -> Tensor:
        g = generator(value.numel()).view_as(value).to(value.device)
        noisy = moved[name] * shrink + unit[name] * (noise * clip * g)
        return (broadcast[name] + noisy).to(value.dtype)

    return {name: released(name, value) for name, value in message.items()}, length


# Accountant


def compose(mus: Iterable[float]) -> float:
    """mu of releases together."""
    return math.hypot(*mus)


def average_mu(noise: float, shares: Sequence[float]) -> float:
    """mu of one round against those who see only the average with weights `shares`.

    The client with the largest share has the largest mu.
    """
    return max(shares) / (noise * math.hypot(*shares))


def averaging_weights(method: Method, server: Tree) -> Literal["equal", "examples"] | None:
    """The weights by which a method's server averages updates; None if it does anything else.

    Found by trying it on three made-up clients: what is sent to clients must move by a multiple of
    their average difference from it.
    """
    if not method.traits.aligned or method.traits.sent == ():
        return None
    g, examples = torch.Generator().manual_seed(0), torch.tensor([1, 2, 5])
    start = {name: value.double().cpu() for name, value in server.items()}
    moved = {k: torch.randn(3, *v.shape, generator=g, dtype=v.dtype) for k, v in start.items()}
    rows = {name: start[name] + value for name, value in moved.items()}
    after = method.aggregate(start, Update((0, 1, 2), rows, examples))
    sent = start if method.traits.sent is None else method.traits.sent
    gone = torch.cat([(after[name] - start[name]).flatten() for name in sent])
    choices: dict[Literal["equal", "examples"], Tensor] = {
        "equal": torch.ones(3).double(),
        "examples": examples.double(),
    }
    for kind, weight in choices.items():
        means = [torch.einsum("s,s...->...", weight, moved[name]) for name in sent]
        mean = torch.cat([each.flatten() for each in means])
        beta = (gone @ mean) / (mean @ mean)
        if beta > 0 and torch.allclose(gone, beta * mean, rtol=1e-6, atol=1e-9):
            return kind
    return None


def log_delta(epsilon: float, mu: float) -> float:
    """log delta(epsilon), mu > 0. Both terms have a factor phi(a), since e^epsilon phi(b) = phi(a).

    So e^epsilon Phi(b) = exp(-a^2 / 2) erfcx(-b / sqrt 2) / 2, which neither overflows nor cancels.
    """
    from scipy.special import erfcx, ndtr  # scipy takes a tenth of a second

    a, b = mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu
    second = erfcx(-b / math.sqrt(2)) / 2
    if a >= 0:
        return math.log(max(TINY, ndtr(a) - math.exp(-a * a / 2) * second))
    return -a * a / 2 + math.log(max(TINY, erfcx(-a / math.sqrt(2)) / 2 - second))


TINY, VAST = 5e-324, 1e6
"""The least positive number; and a mu that protects nothing, with an epsilon above 10^11."""


def epsilon(mu: float, delta: float) -> float:
    """The least epsilon of a mu-GDP mechanism at `delta`; infinite where nothing is protected."""
    from scipy.optimize import brentq  # as above

    if not 0 < delta < 1:
        raise UserError(f"delta is {delta:g}; it must lie between 0 and 1.")
    if math.erf(mu / math.sqrt(8)) <= delta:  # delta(0)
        return 0.0
    if not mu < VAST:
        return math.inf
    most = mu * mu / 2 + mu * math.sqrt(-2 * math.log(delta))  # concentrated DP (Bun, Steinke 2016)
    return float(brentq(lambda e: log_delta(e, mu) - math.log(delta), 0.0, most, rtol=1e-12))


# Ledger

SCHEMA = 1
MARK = b"The ledger beside this file has a digest.\n"
"""Content of the lock's file, from the first entry on."""


class Release(NamedTuple):
    """One upload that left the client, or was about to."""

    run: str
    round: int
    noise: float
    clip: float


class SpentError(UserError):
    """Of a release that would spend too much; it speaks of the client's settings alone."""


class Ledger:
    """A client's own record of what it released, in all runs, since they share its data.

    A release is entered before its training begins, so that one that fails, or that a crash ends,
    is counted too. It is not sent if it cannot be entered. Sending a stored upload again is no
    release. Entries are added under a lock, so that two processes of one
    client do not lose each other's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.releases = _read(path)

    def spent(self, delta: float, *more: float) -> float:
        """epsilon against the server, of all releases together and `more` of this noise."""
        noises = (*(release.noise for release in self.releases), *more)
        return epsilon(compose(1 / noise for noise in noises), delta)

    def allows(self, noise: float, max_epsilon: float, delta: float) -> bool:
        """Whether epsilon stays within `max_epsilon` after one more release."""
        return noise > 0 and self.spent(delta, noise) <= max_epsilon

    def record(
        self,
        run: str,
        round_: int,
        noise: float,
        clip: float,
        most: float = math.inf,
        delta: float = 1e-5,
    ) -> None:
        """Enter a release, unless epsilon would exceed `most`; only then may it be sent."""
        release = Release(run, round_, float(noise), float(clip))
        if not _sound(release):
            raise UserError(f"{release} is no release that could be counted; nothing was sent.")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(_lock(self.path)) as handle:
                releases = [*_read(self.path), release]
                self._refuse_beyond(releases, most, delta)
                content = {"schema": SCHEMA, "releases": [each._asdict() for each in releases]}
                files.replace(self.path, digests.to_json(content), 0o600)
                os.write(handle, MARK)
        except OSError as error:
            raise UserError(
                f"Cannot write {self.path}: {error.strerror}; the upload was not sent, since it "
                "would not be counted."
            ) from error
        self.releases = releases

    def _refuse_beyond(self, releases: Sequence[Release], most: float, delta: float) -> None:
        if most < math.inf:
            spent = epsilon(compose(1 / release.noise for release in releases), delta)
            if not spent <= most:
                raise SpentError(
                    f"Another upload would spend more than the epsilon of {most:g} that this "
                    "client allows."
                )


def _read(path: Path) -> list[Release]:
    """The releases in a file; none if there is no file yet.

    A file with a digest is never followed by one without, nor by none: either would lower epsilon.
    """
    try:
        marked = _lock(path).exists() and _lock(path).stat().st_size > 0
        if marked and not path.exists():
            raise ValueError("it is missing, and had entries")
        if marked and not digests.has_digest(path):
            raise ValueError("it has no digest any more")
        content = digests.read_json(path)
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, not {SCHEMA}")
        releases = [Release(**each) for each in content["releases"]]
        if not all(map(_sound, releases)):
            raise ValueError("an entry has other fields than a release has")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}; nothing is sent.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); it says how much privacy was spent, so nothing is sent "
            "before it is restored from a copy."
        ) from error
    return releases


def _sound(release: Release) -> bool:
    kinds = tuple(map(type, release))
    return kinds == (str, int, float, float) and all(0 < x < math.inf for x in release[2:])


def _lock(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    import fcntl  # not on Windows

    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)  # which unlocks it
