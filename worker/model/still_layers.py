"""Finds the layers without rotary positions (NoPE), as each kind's config says them. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swiftbatch.worker.model.layer_windows import Windows

StillForm = Callable[[dict[str, Any], Windows], frozenset[int]]
"""Finds them, beside all windows. Raises KeyError or ValueError where the config does not tell them one by one."""


def by_no_rope_layers(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """`no_rope_layers` have a 1 for each layer that turns."""
    turns = config["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) != config["num_hidden_layers"] or set(turns) - {0, 1}:
        raise ValueError("its no_rope_layers do not tell of each layer")
    return frozenset(number for number, is_turned in enumerate(turns) if not is_turned)


def without_windows(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """Layers without a window are still."""
    return frozenset(number for number, size in enumerate(windows) if size is None)


def without_windows_if_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """As above, where the config says a window; where it says that there is none, all layers turn."""
    return frozenset() if config["sliding_window"] is None else without_windows(config, windows)


def where_no_rope_is_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """All layers are still, or none is."""
    return frozenset(range(len(windows))) if config["position_embedding_type"] == "nope" else frozenset()
