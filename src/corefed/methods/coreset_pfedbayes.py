"""CoreSet-PFedBayes (Chanda, Modi, Ramakrishnan, ICLR 2024): Algorithm 1.

PFedBayes in which each client trains on its Bayesian coreset: at most k = ceil(fraction n) points
with weights w, whose weighted log-likelihood stands in for that of all its data. In a round a
client

    1. reselects its coreset, if that is due     `select`, or `select_as_printed`
    2. trains q and z on it, R steps             `pfedbayes.build`: begin, step, end
    3. uploads z; q, w and the coreset's age stay with it

The presets differ only in 1:

    fast      (default) whenever a budget of forward passes allows it, a selector chooses w around
              the current posterior q (`selectors/calibrated.py`); nothing is trained on all data
    matching  the same with weights that solve Eq. 4 (`selectors/matching.py`, A-IHT II), and
              earlier if the error on fresh draws has grown
    paper     in every round, as printed (Eqs. 3, 4 and 8): q on all data and q_w on the coreset are
              trained from the same start with the same draws, w from 0, and A-IHT (Algorithm 2,
              `coreset/aiht.py`) solves Eq. 8 again until its objective settles. It costs more than
              training on all data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import torch
from torch import Tensor

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.rng import Streams
from corefed.base.settings import ABLATION, NotNegative, OneOf, Part, PositiveInt
from corefed.base.types import ClientData, Method, Replay, Subset, Tree, Work, places
from corefed.bayes import gaussian
from corefed.bayes.batches import batches, noises
from corefed.methods import pfedbayes
from corefed.models.layer_masks import bayesian_entries
from corefed.models.network import Model
from corefed.selectors import gain, guard, quality, renewal, seen
from corefed.selectors.frame import Look, trim
from corefed.selectors.kl_rows import kl_term
from corefed.selectors.matching import groups, matched_potentials, solve
from corefed.selectors.quality import Quality
from corefed.selectors.settings import Renewal, Selection, refuse_unused
from corefed.selectors.subset import subset_size, subset_sizes, uniform

PRESET_NAMES = OneOf(lambda: PRESETS)
SELECTOR_NAMES = OneOf(lambda: selectors.SELECTORS)


@dataclass(frozen=True)
class Config(pfedbayes.Config):
    """Settings of CoreSet-PFedBayes, beside those of PFedBayes."""

    preset: Annotated[str, PRESET_NAMES] = "fast"
    """`fast`: train on the coreset alone, chosen by `selector`. `matching`: the same with
    weights that solve Eq. 4. `paper`: Algorithm 1, with the changes that docs/method.md lists."""
    fraction: Part = 0.1
    """Size of a client's coreset: k = ceil(fraction n)."""
    selector: Annotated[str, SELECTOR_NAMES] = "calibrated"
    """How the coreset is chosen (not by preset paper); `docs/selectors.md` compares selectors."""
    selection: Selection = field(default_factory=Selection)
    renewal: Renewal = field(default_factory=Renewal)
    kl_weight: Annotated[NotNegative, ABLATION] = 0.0
    """Weight of KL(q_w || q) in the coreset objective, Eq. 8 (preset paper)."""
    kl_rows: Annotated[PositiveInt, ABLATION] = 16
    """Rows that the KL term is sketched to (preset paper)."""
    kl_curvature: Annotated[Literal["exact", "diagonal"], ABLATION] = "exact"
    """H of the KL term: Gauss-Newton with conjugate gradients, or its diagonal (preset paper)."""
    outer: Annotated[PositiveInt, ABLATION] = 3
    """Most times that the coreset is solved for per round (preset paper)."""


SETTLED = 1e-3
"""Relative change of Eq. 8's objective at which preset paper stops solving again."""

PRESETS: dict[str, dict[str, object]] = {
    "fast": {},
    "matching": {
        "selector": "matching", "widths": (1.0, 4.0), "feature_draws": 16, "shrink": 0.01,
        "refresh_every": 100, "stale": 0.5, "check_every": 50,
    },
    "paper": {
        **pfedbayes.PAPER, "selector": "matching", "widths": (1.0,), "feature_draws": 16,
        "solver": "aiht", "max_iterations": 300, "shrink": 0.0, "kl_weight": 1.0,
        "calibrate": "off",  # of every run: the paper has no temperatures
    },
}  # fmt: skip


class OnCoreset(Protocol):
    """Settings of a method that is put on coresets."""

    @property
    def fraction(self) -> float: ...
    @property
    def selector(self) -> str: ...
    @property
    def selection(self) -> Selection: ...
    @property
    def renewal(self) -> Renewal: ...
    @property
    def monte_carlo(self) -> int: ...


Posteriors = Callable[[Tree], tuple[Tensor, Tensor]]
"""From a method's working state to q and z, [C, 2, P] each."""


def check(config: Config) -> None:
    pfedbayes.check(config)
    check_coreset(config)
    if config.preset == "paper" and config.kl_weight > 0 and config.zeta == 0:
        raise UserError(
            "zeta is 0, but the KL term of preset paper divides by it; give zeta a value, or leave "
            "the term out by kl_weight=0."
        )


def check_coreset(config: OnCoreset) -> None:
    """Refuse a coreset that is never reselected, and settings that the selector does not use."""
    selectors.look_up(config.selector)
    if config.renewal.refresh_every == 0 and config.renewal.budget == 0:
        raise UserError("refresh_every and budget are both 0: give one of them a value.")
    refuse_unused(config.selector, config.selection)


def build(config: Config, model: Model) -> Method:
    printed = config if config.preset == "paper" else None
    scored = printed is None and selectors.look_up(config.selector).learns
    base = pfedbayes.build(config, model, scored=scored)
    return on_coreset(
        config, model, base._replace(name="coreset-pfedbayes"), lambda w: (w["q"], w["z"]), printed,
        bayesian_entries(model, config.bayesian),
    )  # fmt: skip


def on_coreset(
    config: OnCoreset,
    model: Model,
    base: Method,
    posteriors: Posteriors,
    printed: Config | None = None,
    mask: Tensor | None = None,
) -> Method:
    """`base` on coresets that its clients choose around their posteriors.

    `printed` has the settings of preset paper, where it is that. The selector sees weights outside
    of `mask` as points.
    """
    how, when = config.selection, config.renewal
    cost = renewal.selection_cost("calibrated", model, how)
    remembers = when.moved > 0 or how.around == "path"  # the posterior at the last selection
    learns = not printed and selectors.look_up(config.selector).learns
    shrinks = learns and how.batch_by_gain
    # Has k points, never fewer.
    turns = not printed and config.selector == "calibrated" and how.in_turn and how.pool == 1
    recordable = turns and (  # no shape depends on values, and the system has a ridge
        how.match == "potentials" and how.around == "posterior" and how.shrink > 0
        and when.moved == when.stale == 0
    )  # fmt: skip

    # One that learns looks at each point once at the most.
    look = 1.0 if learns else renewal.selection_cost(config.selector, model, how)
    look += quality.passes(how, when) if when.stale > 0 else 0.0

    def init(private: Tree, data: ClientData) -> Tree:
        """One row per client; nobody has a coreset yet."""
        never = torch.full_like(data.weight[:, 0], -1.0)
        state = {
            "weight": torch.zeros_like(data.weight),  # [C, n] the coreset
            "owed": torch.zeros_like(data.weight),  # [C, n] what the selector remembers
            "age": never,  # local steps since it was due; -1: there is none yet
            "checked": never.clone(),  # local steps since its error was measured
            "held_out_error": torch.full_like(never, torch.nan),  # on fresh draws
            "over_uniform": torch.full_like(never, torch.nan),  # that over a uniform subset's
            "refreshes": torch.zeros_like(never),  # times it was selected
        }
        if not printed:  # where selecting costs forward passes only: how many, over points
            state["looked"] = torch.zeros_like(never)
        if remembers:
            state["before"] = private["q"].clone()
        if learns:
            state["unseen"] = torch.full_like(data.weight, -1.0)  # local steps; -1: never seen
            state["since"] = torch.zeros_like(never)  # local steps since points were last looked at
        if shrinks:
            state["share"] = torch.ones_like(never)  # of a batch that a step takes
        return state

    def select(state: Tree, working: Tree, data: ClientData, streams: Streams, work: Work) -> Tree:
        """Presets fast and matching: choose for the clients that are due, measure the error."""
        q, _ = posteriors(working)
        replay = work.replay if recordable else None
        asked = {"age": state["age"], "checked": state["checked"], "owed": state["owed"]}

        def ask(given: Tree, _: Streams) -> Tree:
            n = (given["points"] > 0).sum(-1)
            every = renewal.interval(when, cost, n, work, config.monte_carlo)
            check_every = renewal.check_interval(
                when, quality.passes(how, when), n, work, config.monte_carlo
            )
            size = subset_size(n, config.fraction, work.points)
            return renewal.ask(when, given, n, size, every, check_every)

        if replay is None:
            answer = ask({**asked, "points": data.weight}, streams)
            answer["due"] |= renewal.has_moved(when, state, q) & ~answer["whole"]
        else:
            answer = replay("due", ask, asked, {"points": data.weight}, streams)
        k, whole, old, due, check = (answer[x] for x in ("k", "whole", "old", "due", "check"))
        owed = state["owed"].clone() if when.stale > 0 else state["owed"]
        if when.stale > 0:
            found = measure(state, q, data, k, streams, check & ~due & ~whole)
            due = due | (found.over_uniform > when.stale)
        if work.passes is not None:  # short of time: nothing is measured that is only recorded
            check = check & work.passes.isinf()
        measured = due & (check | (when.stale > 0))
        if learns and when.stale == 0:  # a measurement is a pass over all points
            measured = torch.zeros_like(due)
        # One look at the device: all that the host has to know.
        told = torch.stack([due, measured, whole, answer["fresh"], k]).tolist()
        rows = [row for row, yes in enumerate(told[0]) if yes]
        together = len(rows) == len(q) and not any(told[3])
        if replay is not None and together and guard.fits_at_once(data):
            choose_again(state, q, data, streams, k, max(told[4]), replay)
        else:
            choose(state, working, data, k, streams, rows, work)
        if any(told[1]):
            found = measure(state, q, data, k, streams, measured)
            worse = found.error > found.uniform
            if when.stale > 0 and bool(worse.any()):  # weights that lose to uniform ones: given up
                plain = uniform(data, config.fraction, streams, work.points)
                state["weight"] = torch.where(worse.unsqueeze(-1), plain, state["weight"])
                state["owed"] = torch.where(worse.unsqueeze(-1), owed, state["owed"])
                state["over_uniform"] = state["over_uniform"].masked_fill(worse, 1.0)
        if any(told[2]):
            state["weight"] = torch.where(whole.unsqueeze(-1), data.weight, state["weight"])
            for name in ("held_out_error", "over_uniform"):
                state[name] = state[name].masked_fill(whole, 0.0)
            if shrinks:
                state["share"] = state["share"].masked_fill(whole, 1.0)
        # An early selection leaves the schedule as it is: clients stay in step, and a GPU selects
        # for all of them at once. No coreset gets older than the bound.
        state["age"] = state["age"].masked_fill(old, 0.0)
        return state

    def choose_again(
        state: Tree, q: Tensor, data: ClientData, streams: Streams, k: Tensor, most: int,
        replay: Replay,
    ) -> None:  # fmt: skip
        """The coresets of all clients, none of them its first, as one recorded program."""

        def body(given: Tree, draws: Streams) -> Tree:
            points = ClientData(given["x"], given["y"], given["points"])
            now, n = gaussian.narrowed(given["q"], mask), points.size
            look = Look(model, now, now, points, given["k"], given["owed"], draws, how, None, most)
            weight, owed = selectors.unguarded(config.selector)(look)
            looked = given["looked"] + renewal.selection_cost(config.selector, model, how) * n
            return {
                "weight": weight, "owed": owed, "looked": looked,
                "refreshes": given["refreshes"] + 1,
            }  # fmt: skip

        given = {name: state[name] for name in ("owed", "looked", "refreshes")}
        fixed = {"x": data.x, "y": data.y, "points": data.weight}
        found = replay(("select", most), body, {**given, "q": q, "k": k}, fixed, streams)
        state |= {name: value.clone() for name, value in found.items()}

    def choose(
        state: Tree, working: Tree, data: ClientData, k: Tensor, streams: Streams,
        rows: list[int], work: Work,
    ) -> None:  # fmt: skip
        """The coresets of some clients, by the selector."""
        if not rows:
            return
        part, here, own = data.of(rows), places(rows), streams.subset(rows)
        q, z = (v[here] for v in posteriors(working))
        before = state["before"][here] if remembers else None
        look = Look(
            model,
            gaussian.narrowed(q, mask),
            gaussian.narrowed(z, mask),
            part,
            k[here],
            state["owed"][here],
            own,
            how,
            before,
        )
        if learns:
            trained = k[here].clamp_max(work.batch)
            unseen, since = state["unseen"][here], state["since"][here]
            room = seen.room(since, trained, config.monte_carlo, unseen, look.mask)
            look = look._replace(unseen=unseen, room=room)
        weight, owed = selectors.get(config.selector)(look)
        if learns:  # a score that has changed is of a point that was looked at
            fresh = owed != state["owed"][here]
            state["unseen"][here] = unseen.masked_fill(fresh, 0.0)
            state["since"][here] = since.masked_fill(room > 0, 0.0)
            state["looked"][here] += room
        if shrinks and gain.pays(model, tuple(data.x.shape[2:])):
            state["share"][here] = seen.share(look, owed).to(state["share"])
        state["weight"][here], state["owed"][here] = weight, owed
        state["refreshes"][here] += 1
        passes = renewal.passes(config.selector, model, how, part.size, k[here])
        state["looked"][here] += passes * part.size
        if remembers:
            state["before"][here] = q

    def measure(
        state: Tree, q: Tensor, data: ClientData, k: Tensor, streams: Streams, due: Tensor
    ) -> Quality:
        """How well coresets stand in for all data on fresh draws; NaN for clients not due."""
        q = gaussian.narrowed(q, mask)
        found = quality.measure(model, q, state["weight"], data, k, streams, (how, when), due)
        state["held_out_error"] = torch.where(due, found.error, state["held_out_error"])
        state["over_uniform"] = torch.where(due, found.over_uniform, state["over_uniform"])
        if not printed:  # which measures in every round, and counts no passes
            state["checked"] = state["checked"].masked_fill(due, 0.0)
            state["looked"] = state["looked"] + quality.passes(how, when) * due * data.size
        return found

    def select_as_printed(
        state: Tree, working: Tree, data: ClientData, streams: Streams, work: Work
    ) -> Tree:
        """Preset paper: CoresetOptUpdate of every client in every round."""
        assert printed is not None
        k = subset_size(data.size, config.fraction)
        everyone = torch.ones_like(k, dtype=torch.bool)
        for rows, draws in groups(everyone, data, k, how.draws, how.selection_mb):
            part, own = trim(data, rows), streams.subset(rows)
            mine = {name: value[rows] for name, value in working.items()}
            w = coreset_opt_update(printed, model, base, mine, part, own, work, draws)
            state["weight"][rows, : w.shape[1]] = w
        measure(state, working["q"], data, k, streams, everyone)
        state["refreshes"] += 1
        return state

    def after(state: Tree, steps: int | Tensor) -> Tree:
        state = {**state, "age": state["age"] + steps, "checked": state["checked"] + steps}
        if learns:
            unseen = state["unseen"]
            passed = steps.unsqueeze(-1) if isinstance(steps, Tensor) else steps
            state["unseen"] = torch.where(unseen < 0, unseen, unseen + passed)
            state["since"] = state["since"] + steps * (state["share"] if shrinks else 1)
        return state

    def learn(state: Tree, passed: Tensor) -> Tree:
        """What the local steps have seen of their points (`selectors/seen.py`)."""
        owed, unseen = seen.learnt(state["owed"], state["unseen"], passed)
        return {**state, "owed": owed, "unseen": unseen}

    def report(state: Tree) -> Tree:
        shown = ("held_out_error", "over_uniform") if not learns or when.stale > 0 else ()
        numbers = {name: state[name] for name in (*shown, "refreshes")}
        return {**numbers, "size": (state["weight"] > 0).sum(-1)}

    subset = Subset(
        init,
        select_as_printed if printed else select,
        weights=lambda state: state["weight"],
        after=after,
        every=0 if printed else renewal.question_interval(when),
        report=report,
        cost=None if printed else lambda state: state["looked"],
        look=look,
        sizes=(lambda sizes: subset_sizes(sizes, config.fraction)) if turns or learns else None,
        learn=learn if learns else None,
        batch=(lambda state, most: gain.points(state["share"], most)) if shrinks else None,
    )
    # Preset paper trains some of the clients in a call again, where a setting per client is not.
    traits = base.traits._replace(stackable=not printed)
    return base._replace(subset=subset, traits=traits)


def coreset_opt_update(
    config: Config,
    model: Model,
    base: Method,
    working: Tree,
    data: ClientData,
    streams: Streams,
    work: Work,
    draws: int,
) -> Tensor:
    """CoresetOptUpdate of Algorithm 1: w minimising KL(q_w || q) + ||y - Phi w||^2 (Eq. 8)."""
    k = subset_size(data.size, config.fraction)
    g = matched_potentials(model, working["q"], data, config.selection, draws, streams)
    y = g.sum(1)

    def client_update(weight: Tensor) -> Tree:
        """R steps from the round's start, on fresh copies and with the same draws each time."""
        branch = {name: value.clone() for name, value in working.items()}
        own = streams.restart()
        noise = noises(own, base.noise, work.steps)
        for batch in batches(data, weight, own, work.steps, work.batch):
            branch, _ = base.step(branch, batch, next(noise))
        return branch

    full = client_update(data.weight)  # does not depend on w: trained once
    w = torch.zeros_like(data.weight)  # w_0 = 0
    previous = torch.full_like(y[:, 0], torch.inf)
    settled = torch.zeros_like(previous, dtype=torch.bool)
    for _ in range(config.outer):  # repeat
        coreset = client_update(w)
        misfit = (y - torch.bmm(w.unsqueeze(1), g).squeeze(1)).square().sum(-1)
        f = config.kl_weight * gaussian.kl(coreset["q"], full["q"]) + misfit
        settled |= previous.isfinite() & ((previous - f).abs() <= SETTLED * previous)
        if bool(settled.all()):  # until stop criteria met
            break
        previous = f
        rows, target = g, y
        if config.kl_weight > 0:
            a, b = kl_term(
                model, coreset["q"], full["q"], working["z"], data, w, streams, zeta=config.zeta,
                weight=config.kl_weight, rows=config.kl_rows, draws=config.monte_carlo,
                diagonal=config.kl_curvature == "diagonal",
            )  # fmt: skip
            rows, target = torch.cat([g, a.mT], 2), torch.cat([y, b], 1)
        # Accelerated-IHT(f(w))
        fresh = solve(config.selection, rows, target, k, data.weight > 0, streams)
        w = torch.where(settled.unsqueeze(-1), w, fresh)
    return w
