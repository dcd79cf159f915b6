"""Finds the layers without rotary positions (NoPE), as each kind's config says them. Without torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swiftbatch.worker.model.expert_forms import SparseOr, behind_the_first, in_all_layers
from swiftbatch.worker.model.layer_windows import Windows

StillForm = Callable[[dict[str, Any], Windows], frozenset[int]]
"""Finds them, beside all windows. Raises KeyError or ValueError where the config does not tell them one by one."""


def by_no_rope_layers(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """`no_rope_layers` have a 1 for each layer that turns."""
    turns = config["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) != config["num_hidden_layers"] or set(turns) - {0, 1}:
        raise ValueError("its no_rope_layers do not tell of each layer")
    return frozenset(number for number, is_turned in enumerate(turns) if not is_turned)


def by_thetas(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """`layer_rope_theta` have a 0 for each layer that is still."""
    thetas = config["layer_rope_theta"]
    if thetas is not None and (not isinstance(thetas, list) or len(thetas) != len(windows)):
        raise ValueError("its layer_rope_theta do not tell of each layer")
    return frozenset(number for number, theta in enumerate(thetas or []) if not theta)


def without_windows(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """Layers without a window are still."""
    return frozenset(number for number, size in enumerate(windows) if size is None)


def without_windows_but_dense(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """Layers with experts and no window are still; with a pattern other than 1, so are others without a window."""
    with_experts = SparseOr(behind_the_first)({"first_k_dense_replace": 0} | config)
    is_turned = config.get("prefix_dense_sliding_window_pattern", 1) == 1
    return without_windows(config, windows) & (with_experts if is_turned else in_all_layers(config))


def without_windows_if_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """Layers without a window are still where the config says a window; where it says that there is none, all turn."""
    return frozenset() if config["sliding_window"] is None else without_windows(config, windows)


def always(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """The kind has no rotary positions."""
    return frozenset(range(len(windows)))


def where_no_rope_is_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """All layers are still, or none is."""
    return always(config, windows) if config["position_embedding_type"] == "nope" else frozenset()
