"""Attention of an architecture by layer: sliding windows, no rotary positions (NoPE), latents (MLA)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import MLASizes
from swiftbatch.worker.model.architectures.moe_layers import SparseOr, behind_the_first, experts_in_all_layers

Windows = tuple[int | None, ...]
"""For each layer the positions that a row sees, the last of them its own; None for all."""
WindowSpec = Callable[[dict[str, Any]], Windows]
"""Reads them. Raises KeyError for what is left to a default, ValueError for what is not understood."""

IS_WINDOWED = {"full_attention": False, "attention": False, "sliding_attention": True}


def that_hide(windows: Windows, config: dict[str, Any]) -> Windows:
    """Leave out windows that hide nothing of the longest text: as long as that, they are none."""
    longest = config.get("max_position_embeddings") or math.inf
    return tuple(None if size is None or size >= longest else size for size in windows)


def window_in_all_layers(config: dict[str, Any]) -> Windows:
    """`sliding_window` is that of all layers, or null. With types of layers, `transformers` may take another class."""
    size = config["sliding_window"]
    if size is not None and config.get("layer_types"):
        raise ValueError("its sliding_window stands beside layer_types")
    return (None if size is None else _size(size),) * int(config["num_hidden_layers"])


def window_in_all_layers_if_said(config: dict[str, Any]) -> Windows:
    """Read `sliding_window`, which is that of all layers; there is none where the config does not say it."""
    return window_in_all_layers({"sliding_window": None} | config)


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


def looks_at_types(form: WindowSpec | None) -> bool:
    """Tell whether the layers' types say which of them have windows."""
    return form in (by_layer_types, by_layer_types_if_said, where_switched_on) or isinstance(form, TypesOrPattern)


def _size(found: Any) -> int:
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ValueError(f"its sliding_window is {found!r:.80}")
    return found


# Finds the layers without rotary positions (NoPE), as each kind's config says them. Without torch.


NoPESpec = Callable[[dict[str, Any], Windows], frozenset[int]]
"""Finds them, beside all windows. Raises KeyError or ValueError where the config does not tell them one by one."""


def by_no_rope_layers(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """`no_rope_layers` have a 1 for each layer that turns."""
    turns = config["no_rope_layers"]
    if not isinstance(turns, list) or len(turns) != config["num_hidden_layers"] or set(turns) - {0, 1}:
        raise ValueError("its no_rope_layers do not tell of each layer")
    return frozenset(number for number, is_transposed in enumerate(turns) if not is_transposed)


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
    is_transposed = config.get("prefix_dense_sliding_window_pattern", 1) == 1
    return without_windows(config, windows) & (with_experts if is_transposed else experts_in_all_layers(config))


def without_windows_if_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """Layers without a window are still where the config says a window; where it says that there is none, all turn."""
    return frozenset() if config["sliding_window"] is None else without_windows(config, windows)


def always(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """The kind has no rotary positions."""
    return frozenset(range(len(windows)))


def where_no_rope_is_said(config: dict[str, Any], windows: Windows) -> frozenset[int]:
    """All layers are still, or none is."""
    return always(config, windows) if config["position_embedding_type"] == "nope" else frozenset()


# Latent attention, as configs and tensors say it: all heads share one latent vector per position. Without torch.


KEYS = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
UP = "key_value_up"  # the role of the product from a latent vector to all heads' keys and values
LINEARS = {"key": "self_attn.kv_a_proj_with_mqa", UP: "self_attn.kv_b_proj", "output": "self_attn.o_proj"}
QUERY_OF_VECTORS = {"query_down": "self_attn.q_a_proj", "query": "self_attn.q_b_proj"}
QUERY_OF_ROWS = {"query": "self_attn.q_proj"}


@dataclass(frozen=True)
class MLASpec:
    """The differences between kinds with latent attention."""

    interleaving_key: str | None = None  # says whether neighbours are turned, as they are without it


@dataclass(frozen=True)
class MLAConfig:
    """The latent attention of a model's layers."""

    sizes: MLASizes
    scale: float  # of scores
    is_interleaved: bool

    @property
    def linears(self) -> dict[str, str]:
        """The names of stored products by their roles."""
        return LINEARS | (QUERY_OF_VECTORS if self.sizes.query_rank else QUERY_OF_ROWS)

    @property
    def norms(self) -> dict[str, str]:
        """The names of norms of latent vectors, by what is made of these."""
        of_queries = {"query_norm": "self_attn.q_a_layernorm"} if self.sizes.query_rank else {}
        return of_queries | {"key_norm": "self_attn.kv_a_layernorm"}

    @property
    def turned_order(self) -> list[int]:
        """The places of the kernels' turned dimensions among the stored ones. Kernels turn pairs half of them apart."""
        turned = range(self.sizes.rope_dim)
        return [*turned[::2], *turned[1::2]] if self.is_interleaved else [*turned]


def read_mla(config: Mapping[str, Any], form: MLASpec) -> MLAConfig:
    """Raises KeyError or ValueError for numbers left to a default, or that make no latent attention."""
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
    is_interleaved = True if form.interleaving_key is None else config.get(form.interleaving_key, True)
    if not isinstance(is_interleaved, bool):
        raise ValueError(f"its {form.interleaving_key} is {is_interleaved!r:.80}")
    return MLAConfig(sizes, sizes.query_dim**-0.5 * _stretch(config) ** 2, is_interleaved)


def _stretch(config: Mapping[str, Any]) -> float:
    """The factor by which queries and keys are longer where YaRN stretches positions (Peng et al. 2023)."""
    angles = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by, factor = angles.get("mscale_all_dim") or 0.0, angles.get("factor") or 1.0
    is_plain = (angles.get("rope_type") or angles.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else 0.1 * by * math.log(factor) + 1.0
