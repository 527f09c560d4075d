"""The settings of a run, as lists and for scripts. `base/settings.py` says how one is declared."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

from corefed.base.settings import Setting, list_settings
from corefed.methods import registry
from corefed.settings.config import Run


def of_method(name: str) -> tuple[Setting, ...]:
    """The settings that only this method (or those built like it) has."""
    return list_settings(registry.config_class(name))


def of_run() -> tuple[Setting, ...]:
    """The settings every run has."""
    return list_settings(Run)


def to_json(setting: Setting) -> dict[str, Any]:
    """Everything about a setting, ready for JSON."""
    default = None if setting.default is MISSING else setting.default
    return {
        "name": setting.name,
        "group": setting.group,
        "type": "choice" if setting.choices else setting.type_words,
        "choices": list(setting.choices),
        "default": list(default) if isinstance(default, tuple) else default,
        "range": setting.range.words if setting.range else "",
        "unit": setting.unit,
        "help": setting.help,
        "ablation": setting.ablation,
    }
