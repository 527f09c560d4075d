"""The predictive as an ONNX program, checked in onnxruntime before it is written.

It is the same graph as `program.py` makes, for runtimes without torch. The extra `onnx` brings what
converts and checks it.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from corefed.base.errors import UserError, install
from corefed.models.attention import PlainAttention
from corefed.use.export.program import Predictive

TOLERANCE = 1e-4
"""Of float32 through a few layers with other kernels, relative to the largest number."""


def require() -> None:
    missing = [name for name in ("onnx", "onnxruntime", "onnxscript") if find_spec(name) is None]
    if missing:
        raise UserError(f"--onnx needs {', '.join(missing)}: {install('onnx')}.")


def converted(program: Predictive, example: Tensor) -> bytes:
    """The bytes of a .onnx file for any number of points, whose answers were compared."""
    require()
    with torch.no_grad():
        wanted = program(example)
    points = torch.export.Dim("points", min=1)
    try:
        with PlainAttention(), torch.no_grad(), _quiet():
            made = torch.onnx.export(
                program, (example,), dynamo=True, dynamic_shapes={"x": {0: points}},
                input_names=["x"], verbose=False,
            )  # fmt: skip
    except Exception as error:  # of many kinds; a user's network may raise anything
        words = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"torch.onnx cannot convert this network: {words[0]} Leave --onnx out."
        ) from error
    assert made is not None
    _name_outputs(made.model.graph, list(wanted))
    content: bytes = made.model_proto.SerializeToString()
    _compare(content, example, wanted)
    return content


def _name_outputs(graph: Any, names: list[str]) -> None:
    """The program's own names for its outputs; the converter may use one of them inside."""
    for node in graph:
        for value in node.outputs:
            value.name = f"inner_{value.name}"
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name


def _compare(content: bytes, example: Tensor, wanted: dict[str, Tensor]) -> None:
    """Refuse a program that answers otherwise than torch, for one point or several."""
    import onnxruntime  # half a second

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for n in (1, len(example)):
        found = session.run(list(wanted), {"x": example[:n].numpy()})
        for (name, value), other in zip(wanted.items(), found, strict=True):
            size = max(1.0, float(value.abs().max()))
            gap = float((torch.from_numpy(other) - value[:n]).abs().max()) / size
            if not gap <= TOLERANCE:
                raise UserError(
                    f"The ONNX program's {name} differs from torch's by {gap:.1g} on an example; "
                    "leave --onnx out, and use predictive.pt2."
                )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The converter prints and logs its steps."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
