"""A client's coreset over time: chosen when it is due, looked at now and then, its state.

What is kept beside the method's own private state, a row a client:

    weight [C, n]     the coreset
    owed [C, n]       what the selector remembers of each point
    age               local steps since it was due to be chosen; -1: there is none yet
    checked           local steps since its error was looked at
    held_out_error    that error, on fresh draws of pi-hat
    over_uniform      the same over what a uniform subset of its size expects
    refreshes         times it was chosen
    looked            forward passes of points in choosing and in looking
    before [C, 2, P]  the posterior when it was chosen, where a setting needs it
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from corefed import selectors
from corefed.base.rng import Streams
from corefed.base.types import ClientData, Tree, Work
from corefed.models.network import Model
from corefed.selectors import renewal, selection, sketches
from corefed.selectors.frame import Look, trimmed
from corefed.selectors.settings import Renewal, Selection
from corefed.selectors.subset import subset_size, uniform


class Upkeep(NamedTuple):
    """How coresets are kept up."""

    model: Model
    selector: str
    settings: Selection
    rule: Renewal
    fraction: float
    monte_carlo: int

    @property
    def remembers(self) -> bool:
        """Whether the posterior at the last choice is kept."""
        return self.rule.moved > 0 or self.settings.around == "path"

    @property
    def passes(self) -> float:
        """Forward passes per point that a selection by the default selector costs."""
        return renewal.cost("calibrated", self.model, self.settings)

    def state(self, q: Tensor, data: ClientData) -> Tree:
        """That of clients who have no coreset yet."""
        never = torch.full_like(data.weight[:, 0], -1.0)
        return {
            "weight": torch.zeros_like(data.weight),
            "owed": torch.zeros_like(data.weight),
            "age": never,
            "checked": never.clone(),
            "held_out_error": torch.full_like(never, torch.nan),
            "over_uniform": torch.full_like(never, torch.nan),
            "refreshes": torch.zeros_like(never),
            "looked": torch.zeros_like(never),
            **({"before": q.clone()} if self.remembers else {}),
        }

    def select(
        self, state: Tree, working: Tree, data: ClientData, streams: Streams, work: Work
    ) -> Tree:
        """Choose anew for the clients that are due, and look how good coresets are."""
        rule, age = self.rule, state["age"]
        k = subset_size(data.size, self.fraction)
        whole = k >= data.size  # the coreset is the data
        often = renewal.interval(rule, self.passes, data.size, work, self.monte_carlo)
        old = (age < 0) | (age >= often)
        due = (old | renewal.has_moved(rule, state, working["q"])) & ~whole
        look = (age < 0) | (state["checked"] >= rule.check_every)
        if rule.stale > 0:
            kept = look & ~due & ~whole
            due |= self._judge(state, working, data, k, streams, kept).over_uniform > rule.stale
        owed = state["owed"].clone() if rule.stale > 0 else state["owed"]
        self._choose(state, working, data, k, streams, due.nonzero().squeeze(-1).tolist())
        fresh = due & (look | (rule.stale > 0))
        quality = self._judge(state, working, data, k, streams, fresh)
        worse = quality.error > quality.uniform
        if rule.stale > 0 and bool(worse.any()):
            plain = uniform(data, self.fraction, streams)
            state["weight"] = torch.where(worse.unsqueeze(-1), plain, state["weight"])
            state["owed"] = torch.where(worse.unsqueeze(-1), owed, state["owed"])
            state["over_uniform"] = state["over_uniform"].masked_fill(worse, 1.0)
        state["weight"] = torch.where(whole.unsqueeze(-1), data.weight, state["weight"])
        for figure in ("held_out_error", "over_uniform"):
            state[figure] = state[figure].masked_fill(whole, 0.0)
        # An early choice leaves the schedule as it is, so that clients stay in step and a GPU
        # chooses for all of them at once; no coreset gets older than the bound.
        state["age"] = age.masked_fill(old, 0.0)
        return state

    def _choose(
        self,
        state: Tree,
        working: Tree,
        data: ClientData,
        k: Tensor,
        streams: Streams,
        rows: list[int],
    ) -> None:
        if not rows:
            return
        part = ClientData(*(field[rows] for field in data))
        q, z, owed = working["q"][rows], working["z"][rows], state["owed"][rows]
        before = state["before"][rows] if self.remembers else None
        look = Look(
            self.model, q, z, part, k[rows], owed, streams.subset(rows), self.settings, before,
        )  # fmt: skip
        state["weight"][rows], state["owed"][rows] = selectors.get(self.selector)(look)
        state["refreshes"][rows] += 1
        state["looked"][rows] += self._passes(part, k[rows]) * part.size
        if self.remembers:
            state["before"][rows] = q

    def _passes(self, data: ClientData, k: Tensor) -> Tensor:
        """[C] forward passes of each point that a choice costs."""
        settings = [self.settings] * len(k)
        if self.selector == "matching":  # whose S follows k
            bound, asked = self.settings.selection_mb, self.settings.draws
            pairs = zip(k.tolist(), data.size.tolist(), strict=True)
            drawn = (selection.draws_for(kept, n, asked, bound) for kept, n in pairs)
            settings = [replace(self.settings, draws=draws) for draws in drawn]
        costs = [renewal.cost(self.selector, self.model, each) for each in settings]
        return torch.tensor(costs, device=k.device)

    def _judge(
        self,
        state: Tree,
        working: Tree,
        data: ClientData,
        k: Tensor,
        streams: Streams,
        due: Tensor,
    ) -> selection.Quality:
        """How well coresets stand in for all data on fresh draws; NaN for clients not due."""
        found = selection.Quality(*(torch.full_like(state["age"], torch.nan) for _ in range(2)))
        bound = self.settings.selection_mb
        for rows, _ in selection.groups(due, data, k, self.rule.check_draws, bound):
            part = trimmed(data, rows)
            w = state["weight"][rows][:, : part.weight.shape[1]]
            quality = self.quality(working["q"][rows], w, part, streams.subset(rows))
            found.error[rows], found.uniform[rows] = quality
        state["held_out_error"] = torch.where(due, found.error, state["held_out_error"])
        state["over_uniform"] = torch.where(due, found.over_uniform, state["over_uniform"])
        state["checked"] = state["checked"].masked_fill(due, 0.0)
        plain = replace(self.settings, around="posterior", match="potentials")
        asked = replace(plain, draws=self.rule.check_draws, feature_draws=self._check_features)
        passes = sketches.passes(self.model, asked)
        state["looked"] = state["looked"] + passes * due * data.size
        return found

    def quality(
        self, q: Tensor, w: Tensor, data: ClientData, streams: Streams
    ) -> selection.Quality:
        """How well w stands in for all data on fresh draws around q."""
        widths, draws = self.settings.widths, self.rule.check_draws
        sketch = selection.Sketch(widths, draws, self._check_features)
        g = selection.stacked_potentials(self.model, q, data, sketch, streams, "check")
        return selection.judge(g, w, subset_size(data.size, self.fraction), data.weight > 0)

    @property
    def _check_features(self) -> int:
        """Draws of the lower layers that a look shares: half of those of a choice."""
        return -(-self.settings.feature_draws // 2)


def after(state: Tree, steps: int) -> Tree:
    """The state when so many local steps have passed."""
    return {**state, "age": state["age"] + steps, "checked": state["checked"] + steps}


def report(state: Tree) -> Tree:
    """Numbers of each client's coreset, to record."""
    return {
        "held_out_error": state["held_out_error"],
        "over_uniform": state["over_uniform"],
        "size": (state["weight"] > 0).sum(-1),
        "refreshes": state["refreshes"],
    }
