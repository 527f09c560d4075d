"""Result files: JSON with a schema and a name, small enough to be committed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from corefed.base.errors import UserError


def read(path: Path, name: str, schema: int) -> dict[str, Any]:
    """The content of a result file of `bench NAME`; any other is refused."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"Cannot read {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path} is no result file: {error}.") from error
    if not isinstance(found, dict) or (found.get("schema"), found.get("name")) != (schema, name):
        raise UserError(f"{path} is no result file of bench {name}; give one that it wrote.")
    return found


def rounded(value: Any, digits: int) -> Any:
    """The same with a few digits of each finite number."""
    if isinstance(value, dict):
        return {key: rounded(each, digits) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{digits}g}")
    return value
