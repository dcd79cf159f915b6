"""Positive numbers of a config, checked as they are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number_of(config: Mapping[str, Any], key: str) -> float:
    """Raises KeyError or ValueError for a number that is missing or is none."""
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"its {key} is {value!r}")
    return float(value)
