"""Ours in place of a few names of Flower's modules: where Flower has no setting for what we need.

A name that this Flower does not have stops the program. Going on without the change would run code
that a server sent, or leave the control API open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

VERSION = "1.41"
"""Of Flower, whose modules were read; a newer one may have kept the names and changed the use."""


def replace(module: ModuleType, **ours: object) -> None:
    """Put `ours` in place of the module's own names."""
    for name, value in ours.items():
        if not hasattr(module, name):
            refuse(f"it has no {module.__name__}.{name}")
        setattr(module, name, value)


def default(function: Callable[..., Any], **ours: object) -> None:
    """Change what a function takes for keywords that it is not given."""
    defaults = function.__kwdefaults__ or {}
    for name, value in ours.items():
        if name not in defaults:
            refuse(f"its {function.__qualname__} takes no {name}")
        defaults[name] = value


def pull_sooner() -> None:
    """Flower waits a second before it looks again for a part of a message that is on its way."""
    from flwr.supercore.inflatable import inflatable_utils

    default(inflatable_utils.pull_objects, initial_backoff=0.05)
    default(inflatable_utils.pull_and_inflate_object_from_tree, initial_backoff=0.05)


def check_version() -> None:
    from flwr import __version__

    if not __version__.startswith(f"{VERSION}."):
        refuse(f"this is {__version__}")


def refuse(reason: str) -> NoReturn:
    sys.exit(f"error: corefed runs on flwr {VERSION}, and {reason}; pip install 'corefed[flower]'")
