"""Reads from configs which layers have windows, no rotary positions (NoPE) or latent attention (MLA). Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import LayerHeads, MLASizes
from swiftbatch.worker.model.config_values import SIZE, SWITCH, Config, KeyRule, list_of_layers

Windows = tuple[int | None, ...]
"""For each layer the positions that a row sees, the last of them its own; None for all."""
WindowSpec = Callable[[Config], Windows]
"""Reads them. Raises KeyError for defaults, ValueError for unknown values."""
NoPESpec = Callable[[Config, Windows], frozenset[int]]
"""Finds the layers without rotary positions, beside all windows. Raises KeyError or ValueError."""

WINDOWED = "sliding_attention"
IS_WINDOWED = {"full_attention": False, "attention": False, WINDOWED: True}


def no_windows(config: Config) -> Windows:
    if WINDOWED in (config.get("layer_types") or ()):
        raise ValueError(f"its layers have {WINDOWED}")
    return (None,) * int(config["num_hidden_layers"])


def that_hide(windows: Windows, config: Config) -> Windows:
    """Replace windows by None if they are at least as long as the longest text."""
    longest = config.get("max_position_embeddings") or math.inf
    return tuple(None if size is None or size >= longest else size for size in windows)


def window_in_all_layers(config: Config) -> Windows:
    """Give all layers the config's window. Raises ValueError if the config also has `layer_types`."""
    without = no_windows(config)
    if config["sliding_window"] is None:
        return without
    if config.get("layer_types"):
        raise ValueError("its sliding_window stands beside layer_types")
    return (window_size(config),) * len(without)


def window_in_all_layers_if_said(config: Config) -> Windows:
    return window_in_all_layers({"sliding_window": None} | dict(config))


def by_layer_types(config: Config) -> Windows:
    types = list_of_layers(config, "layer_types", IS_WINDOWED)
    return tuple(window_size(config) if IS_WINDOWED[each] else None for each in types)


def from_max_window_layers(config: Config) -> Windows:
    size = window_size(config)
    return tuple(size if each >= config["max_window_layers"] else None for each in range(config["num_hidden_layers"]))


@dataclass(frozen=True)
class TypesOrPattern:
    """Windows of `layer_types`, or of all layers except every `pattern`-th one."""

    pattern: int
    key: str | None = "sliding_window_pattern"  # config key of the pattern's length; None if `pattern` is fixed

    def __call__(self, config: Config) -> Windows:
        if config.get("layer_types") is not None:
            return by_layer_types(config)
        pattern = SIZE.of({self.key: self.pattern} | dict(config), self.key) if self.key else self.pattern
        size = window_size(config)
        return tuple(None if (number + 1) % pattern == 0 else size for number in range(config["num_hidden_layers"]))


def window_size(config: Config) -> int:
    return int(SIZE.of(config, "sliding_window"))


def without_windows(config: Config, windows: Windows) -> frozenset[int]:
    return frozenset(number for number, size in enumerate(windows) if size is None)


def without_windows_if_said(config: Config, windows: Windows) -> frozenset[int]:
    """Return the layers without a window, or no layers if the config has no window."""
    return frozenset() if config["sliding_window"] is None else without_windows(config, windows)


@dataclass(frozen=True)
class OwnHeads:
    """Config keys of the heads in layers without a window, which differ from those of other layers."""

    head_dim: str
    num_kv_heads: str  # read only if keys are values
    keys_are_values: str  # whether the projection of keys gives values, too

    def read(self, config: Config) -> tuple[LayerHeads, bool]:
        """Return the heads, and whether keys are values. Raises KeyError or ValueError."""
        are_values = bool(SWITCH.of(config, self.keys_are_values))
        has_count = are_values and config[self.num_kv_heads] is not None
        num_kv_heads = SIZE.of(config, self.num_kv_heads if has_count else "num_key_value_heads")
        return LayerHeads(num_kv_heads, SIZE.of(config, self.head_dim)), are_values

    def rules(self) -> dict[str, KeyRule | None]:
        return {self.head_dim: SIZE, self.num_kv_heads: SIZE.or_null(), self.keys_are_values: SWITCH}


def all_layers(config: Config, windows: Windows) -> frozenset[int]:
    return frozenset(range(len(windows)))


# Latent attention (MLA): all heads share one latent vector per position.

LATENT_KEYS = ("kv_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
UP = "key_value_up"  # role of the projection from a latent vector to the keys and values of all heads
LATENT_LINEARS = {"key": "self_attn.kv_a_proj_with_mqa", UP: "self_attn.kv_b_proj", "output": "self_attn.o_proj"}
QUERIES_OF_VECTORS = {"query_down": "self_attn.q_a_proj", "query": "self_attn.q_b_proj"}
QUERIES_OF_ROWS = {"query": "self_attn.q_proj"}  # where queries have no latent vector of their own


@dataclass(frozen=True)
class MLASpec:
    """The config keys of latent attention."""

    interleaving_key: str | None = None  # key of whether adjacent dimensions are rotated as a pair; without it they are

    def rules(self) -> dict[Any, KeyRule | None]:
        """Return the rules for the config keys of latent attention."""
        rules: dict[Any, KeyRule | None] = dict.fromkeys(LATENT_KEYS, SIZE)
        return rules | {"q_lora_rank": SIZE.or_null(), self.interleaving_key: SWITCH}


@dataclass(frozen=True)
class MLAConfig:
    """The latent attention of a model's layers."""

    sizes: MLASizes
    scale: float  # factor on scores
    is_interleaved: bool

    @property
    def linears(self) -> dict[str, str]:
        """Names of stored projections by role."""
        return LATENT_LINEARS | (QUERIES_OF_VECTORS if self.sizes.query_rank else QUERIES_OF_ROWS)

    @property
    def norms(self) -> dict[str, str]:
        """Names of the norms of latent vectors, by role."""
        of_queries = {"query_norm": "self_attn.q_a_layernorm"} if self.sizes.query_rank else {}
        return of_queries | {"key_norm": "self_attn.kv_a_layernorm"}

    @property
    def turned_order(self) -> list[int]:
        """Return the stored index of each rotary dimension, in the order of the kernels."""
        turned = range(self.sizes.rope_dim)
        return [*turned[::2], *turned[1::2]] if self.is_interleaved else [*turned]


def read_mla(config: Config, spec: MLASpec) -> MLAConfig:
    """Read the latent attention of a config. Raises KeyError or ValueError for missing or impossible sizes."""
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError("it has other heads of keys than of queries")
    sizes = MLASizes(
        rank=config["kv_lora_rank"],
        query_rank=config["q_lora_rank"] or 0,
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    if config.get("head_dim") not in (None, sizes.rope_dim):
        raise ValueError(f"its head_dim is {config['head_dim']!r:.80}")
    is_interleaved = True if spec.interleaving_key is None else config.get(spec.interleaving_key, True)
    if not isinstance(is_interleaved, bool):
        raise ValueError(f"its {spec.interleaving_key} is {is_interleaved!r:.80}")
    return MLAConfig(sizes, sizes.query_dim**-0.5 * _stretch(config) ** 2, is_interleaved)


def _stretch(config: Config) -> float:
    """Return YaRN's factor of queries and keys (Peng et al. 2023)."""
    angles: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by, factor = angles.get("mscale_all_dim") or 0.0, angles.get("factor") or 1.0
    is_plain = (angles.get("rope_type") or angles.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else 0.1 * by * math.log(factor) + 1.0
