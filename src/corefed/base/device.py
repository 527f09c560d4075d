"""The device a user names, checked."""

from __future__ import annotations

import torch

from corefed.base.errors import UserError


def device_for(name: str) -> torch.device:
    """auto is the GPU if there is one; a missing device is a UserError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"There is no device {name!r}; use auto, cpu, cuda or cuda:INDEX.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device is {name!r}, but this machine has no CUDA; use auto or cpu.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"device is {name!r}, but the last of {count} is cuda:{count - 1}.")
    return device
