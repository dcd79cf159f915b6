"""Rotary positions whose angles depend on the longest text of a forward: a row's bits would depend on its company.

Without torch, since the driver asks, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

SHIFTING = {"dynamic", "longrope", "su"}
FIXED_BY_ALPHA = ("hunyuan_v1_dense",)  # kinds whose `dynamic` angles are those of one base where an `alpha` is said


def shifting_rotary(config: dict[str, Any]) -> str | None:
    """Say which angles of a text model change with the length of the text; None where none do."""
    is_fixed_by_alpha = config.get("model_type") in FIXED_BY_ALPHA
    types = {
        kind
        for said in _rotary_parameters(config)
        for kind in (str(said.get("rope_type")), str(said.get("type")))
        if kind in SHIFTING and not (is_fixed_by_alpha and kind == "dynamic" and _is_number(said.get("alpha")))
    }
    return f"its rotary positions ({', '.join(sorted(types))}) change with the length of the text" if types else None


def _rotary_parameters(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is said of angles anywhere in a config: for all layers, or by the kind of layer."""
    yield config
    for value in config.values():
        if isinstance(value, dict):
            yield from _rotary_parameters(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
