"""Whether the local steps of a run are compiled, and what is missing where they are not.

The setting `compile`:

    on      traced, fused by PyTorch's compiler, and on a GPU replayed as a CUDA graph
    graph   replayed as a CUDA graph without being fused: nothing to compile
    off     one operation after the other, as the method writes them
    auto    a GPU: `on` if the run is long enough to pay for compiling, else `graph`
            a CPU: `off`: `on` saves a tenth of a round with 80,000 weights, and compiling takes 15
            seconds
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from typing import Literal

import torch

from corefed.base.errors import UserError
from corefed.settings.run import Run

COMPILING, LAUNCHES, PASSES = 8.0, 5e-4, 1.3e-10
"""Seconds: that compiling takes (6 if PyTorch finds its result in its cache, 13 else), and what it
saves per step and per step and weight of all clients. Measured on an H200."""

Compile = Literal["on", "graph", "off"]


def decide(run: Run, weights: int, *, stackable: bool, alike: bool = True) -> tuple[Compile, str]:
    """The concrete value of `compile` for a run, and a sentence to say where it is not obvious.

    The network has so many `weights`. `stackable` says whether the method's settings may be
    tensors, which compiled steps need, `alike` whether clients take the same number of steps.
    """
    device = torch.device(run.device)
    if run.compile == "off" or run.runtime == "loop":
        return "off", ""
    if not alike:
        if run.compile != "auto":
            raise UserError(
                f"compile={run.compile} is for clients that take the same number of steps; leave "
                "it out, or local_epochs, speeds and deadline."
            )
        return "off", ""
    if not stackable:
        if run.compile != "auto":
            raise UserError(f"compile={run.compile}: {run.method} with these settings cannot be.")
        return "off", ""
    missing = missing_for(device)
    if run.compile == "on":
        if missing:
            raise UserError(f"compile=on needs {missing}; install it, or use compile=off.")
        return "on", ""
    if device.type != "cuda":
        if run.compile == "graph":
            raise UserError("compile=graph is for a GPU; use compile=on or off on a CPU.")
        return "off", ""
    if run.compile == "graph":
        return "graph", ""
    clients = (run.cohort or run.clients) * len(run.seeds)
    saved = run.rounds * run.local_steps * (LAUNCHES + PASSES * clients * weights)
    if saved < COMPILING:
        return "graph", ""
    if missing:
        return "graph", f"local steps are not compiled, which needs {missing}."
    return "on", ""


def missing_for(device: torch.device) -> str:
    """What PyTorch's compiler lacks on this machine; empty if nothing."""
    if device.type == "cuda" and find_spec("triton") is None:
        return "Triton (pip install triton)"
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]  # Triton builds its launchers with it
    if device.type == "cpu":
        names = [os.environ.get("CXX"), "g++", "clang++"]
    if not any(name and shutil.which(name) for name in names):
        return "a C compiler (gcc)" if device.type == "cuda" else "a C++ compiler (g++)"
    return ""
