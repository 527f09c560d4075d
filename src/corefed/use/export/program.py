"""The predictive as a program of torch.export, which runs where there is torch and no corefed.

    x as its owner has it -> encoded (tables) and scaled -> K networks theta_1 ... theta_K ->
    averaged, tempered, taken apart

The K draws of the weights are those that `corefed predict` makes for this client, kept in the
program, so that both give the same numbers to rounding. The K networks stand side by side in the
graph: under vmap torch.export fixed the number of points of a batch (torch 2.13, convolutions).
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from corefed.base.errors import UserError
from corefed.bayes import uncertainty
from corefed.bayes.temperature import temper_prediction
from corefed.data.preparation import Preparation
from corefed.models.attention import PlainAttention
from corefed.models.likelihood import Likelihood
from corefed.use.export.encoder import encode, input_shape
from corefed.use.export.network import ExportedNetwork


class Predictive(nn.Module):
    """From points to probabilities (or mean), total, aleatoric and epistemic.

    Points are [n, *shape]; of a table they are its columns (`encoder.py`).
    """

    def __init__(
        self,
        draws: Sequence[nn.Module],
        extra: Tensor,  # [K, e] the likelihood's part of theta
        likelihood: Likelihood,
        preparation: Preparation,
        client: str,
        temperature: float,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.draws = nn.ModuleList(draws)
        self.register_buffer("extra", extra)
        self.likelihood, self.preparation, self.client = likelihood, preparation, client

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.preparation.kind == "table":
            x = encode(self.preparation.columns, x)
        h = self.preparation.scale(x, self.client)
        own = self.get_buffer("extra").split(1)
        each = (
            self.likelihood.predictive(theta, network(h).unsqueeze(0)).double()
            for network, theta in zip(self.draws, own, strict=True)
        )
        classes = len(self.preparation.labels)
        found = uncertainty.combine(each, len(self.draws), classes)
        if self.temperature != 1:
            found = temper_prediction(found, self.temperature, classes)
        if self.preparation.target_mean:
            found = found.in_unit(*self.preparation.unit)
        return {
            "probabilities" if classes else "mean": found.mean.float(),
            "total": found.total.float(),
            "aleatoric": found.aleatoric.float(),
            "epistemic": found.epistemic.float(),
        }


def predictive(
    network: ExportedNetwork,
    theta: Tensor,
    likelihood: Likelihood,
    preparation: Preparation,
    client: str,
    temperature: float = 1.0,
) -> Predictive:
    """Of K posterior samples theta [K, P]; a point estimate is one sample."""
    draws = [network.with_weights(one) for one in theta]
    extra = theta[:, network.size :].clone()
    return Predictive(draws, extra, likelihood, preparation, client, temperature).eval()


def dtype_of(preparation: Preparation) -> torch.dtype:
    """Of the input: float64 for tables, else float32."""
    return torch.float64 if preparation.kind == "table" else torch.float32


def compiled(program: Predictive) -> bytes:
    """The bytes of a .pt2 file, for any number of points."""
    preparation = program.preparation
    x = torch.zeros(2, *input_shape(preparation), dtype=dtype_of(preparation))
    points = torch.export.Dim("points", min=1)
    try:
        with PlainAttention(), torch.no_grad():
            made = torch.export.export(program, (x,), dynamic_shapes={"x": {0: points}})
    except Exception as error:  # of many kinds; a user's network may raise anything
        words = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"torch.export cannot make a program of this network: {words[0]} The weights can be "
            "exported without it, by --no-program."
        ) from error
    content = io.BytesIO()
    torch.export.save(made, content)
    return content.getvalue()
