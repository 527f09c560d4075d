"""shared-start (`shared_start.py`) on coresets, which clients choose as in coreset-pfedbayes.

A client reselects its coreset around the posterior that it has at that moment, q. What is descended
is the free energy of the weighted points, sum_j w_ij E[ -log p(D_ij) ]. selector=random is
shared-start on random subsets that are redrawn as often.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from corefed import selectors
from corefed.base.errors import UserError
from corefed.base.settings import Part
from corefed.base.types import Method
from corefed.methods import shared_start
from corefed.methods.coreset_pfedbayes import SELECTOR_NAMES, check_coreset, on_coreset
from corefed.methods.shared_start import idle
from corefed.models.layer_masks import bayesian_entries
from corefed.models.network import Model
from corefed.selectors.settings import Renewal, Selection

__all__ = ["Config", "build", "check", "idle"]


@dataclass(frozen=True)
class Config(shared_start.Config):
    """Settings of shared-start on coresets, beside those of shared-start."""

    fraction: Part = 0.1
    """Size of a client's coreset: k = ceil(fraction n)."""
    selector: Annotated[str, SELECTOR_NAMES] = "calibrated"
    """How the coreset is chosen; `docs/selectors.md` compares selectors."""
    selection: Selection = field(default_factory=Selection)
    renewal: Renewal = field(default_factory=Renewal)


def check(config: Config) -> None:
    shared_start.check(config)
    check_coreset(config)
    if config.personal == "own" and selectors.look_up(config.selector).learns:
        raise UserError(
            f"selector {config.selector} learns from the steps of one posterior, and personal=own "
            "trains two; use personal=steps, or another selector."
        )


def build(config: Config, model: Model) -> Method:
    scored = selectors.look_up(config.selector).learns
    base = shared_start.build(config, model, scored=scored)._replace(name="coreset-shared-start")
    mask = bayesian_entries(model, config.bayesian)
    return on_coreset(config, model, base, shared_start.posteriors, mask=mask)
