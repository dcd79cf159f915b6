"""The windows of a dense decoder's layers, as each kind's config says them. Without torch: the driver asks, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Windows = tuple[int | None, ...]
"""For each layer the positions that a row sees, the last of them its own; None for all."""
WindowForm = Callable[[dict[str, Any]], Windows]
"""Reads them. Raises KeyError for what is left to a default, ValueError for what is not understood."""

IS_WINDOWED = {"full_attention": False, "attention": False, "sliding_attention": True}


def that_hide(windows: Windows, config: dict[str, Any]) -> Windows:
    """Leave out windows that hide nothing of the longest text: as long as that, they are none."""
    longest = config.get("max_position_embeddings") or math.inf
    return tuple(None if size is None or size >= longest else size for size in windows)


def in_all_layers(config: dict[str, Any]) -> Windows:
    """`sliding_window` is that of all layers, or null. With types of layers, `transformers` may take another class."""
    size = config["sliding_window"]
    if size is not None and config.get("layer_types"):
        raise ValueError("its sliding_window stands beside layer_types")
    return (None if size is None else _size(size),) * int(config["num_hidden_layers"])


def in_all_layers_if_said(config: dict[str, Any]) -> Windows:
    """Read `sliding_window`, which is that of all layers; there is none where the config does not say it."""
    return in_all_layers({"sliding_window": None} | config)


def never(config: dict[str, Any]) -> Windows:
    """None of the layers has one: `sliding_window` counts for nothing unless it is switched on, which is refused."""
    if config.get("use_sliding_window", False) is not False:
        raise ValueError(f"its use_sliding_window is {config['use_sliding_window']!r:.80}")
    return (None,) * int(config["num_hidden_layers"])


def by_layer_types(config: dict[str, Any]) -> Windows:
    """`layer_types` say which layers have the window."""
    types = config["layer_types"]
    if not isinstance(types, list) or len(types) != config["num_hidden_layers"] or set(types) - set(IS_WINDOWED):
        raise ValueError("its layer_types do not tell of each layer")
    return tuple(_size(config["sliding_window"]) if IS_WINDOWED[each] else None for each in types)


def by_layer_types_if_said(config: dict[str, Any]) -> Windows:
    """Read `layer_types`; without them, all layers from `max_window_layers` on have the window, if there is one."""
    if config.get("layer_types") is not None:
        return by_layer_types(config)
    if config.get("sliding_window") is None:
        return (None,) * int(config["num_hidden_layers"])
    size = _size(config["sliding_window"])
    return tuple(size if each >= config["max_window_layers"] else None for each in range(config["num_hidden_layers"]))


@dataclass(frozen=True)
class TypesOrPattern:
    """`layer_types` as above; without types, of each `pattern` layers all but the last have the window."""

    pattern: int
    key: str | None = "sliding_window_pattern"  # of another pattern; None: none is looked at

    def __call__(self, config: dict[str, Any]) -> Windows:
        if config.get("layer_types") is not None:
            return by_layer_types(config)
        pattern, size = config.get(self.key or "", self.pattern), _size(config["sliding_window"])
        if isinstance(pattern, bool) or not isinstance(pattern, int) or pattern < 1:
            raise ValueError(f"its {self.key} is {pattern!r:.80}")
        return tuple(None if (number + 1) % pattern == 0 else size for number in range(config["num_hidden_layers"]))


def where_switched_on(config: dict[str, Any]) -> Windows:
    """Windows of `layer_types`, or of all from `max_window_layers` on; none unless `use_sliding_window` is true."""
    num_layers = int(config["num_hidden_layers"])
    if config.get("use_sliding_window", False) not in (True, False):
        raise ValueError(f"its use_sliding_window is {config['use_sliding_window']!r:.80}")
    if not config.get("use_sliding_window") and not isinstance(config.get("sliding_window"), int | None):
        raise ValueError(f"its sliding_window is {config['sliding_window']!r:.80}")
    if config.get("layer_types"):
        windows = by_layer_types(config)
        if any(windows) and not config.get("use_sliding_window"):
            raise ValueError("its layer_types have windows that are switched off")
        return windows
    if not config.get("use_sliding_window"):
        return (None,) * num_layers
    size = _size(config["sliding_window"])
    return tuple(size if number >= config["max_window_layers"] else None for number in range(num_layers))


def looks_at_types(form: WindowForm | None) -> bool:
    """Tell whether the layers' types say which of them have windows."""
    return form in (by_layer_types, by_layer_types_if_said, where_switched_on) or isinstance(form, TypesOrPattern)


def _size(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"its sliding_window is {found!r:.80}")
    return found
