"""Reads from configs which layers have windows, no rotary positions (NoPE) or latent attention (MLA). Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import BlockChoice, IndexerSizes, LayerHeads, MLASizes
from swiftbatch.worker.model.config_values import COUNT, SIZE, SWITCH, Config, KeyRule, list_of_layers

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

    def layers(self, config: Config, windows: Windows) -> frozenset[int]:
        return without_windows(config, windows)

    def rules(self) -> dict[str, KeyRule | None]:
        return {self.head_dim: SIZE, self.num_kv_heads: SIZE.or_null(), self.keys_are_values: SWITCH}


@dataclass(frozen=True)
class HeadsInWindows:
    """Heads of keys in layers with a window: a fixed multiple of other layers', which `num_kv_heads` may repeat.

    Keys with the prefix `swa_` repeat those of `same` sizes, or are absent.
    """

    num_kv_heads: str
    multiple: int
    same: tuple[str, ...]

    def read(self, config: Config) -> tuple[LayerHeads, bool]:
        """Return the heads, and whether keys are values. Raises KeyError or ValueError."""
        heads = LayerHeads(self.multiple * SIZE.of(config, "num_key_value_heads"), SIZE.of(config, "head_dim"))
        expected = {self.num_kv_heads: heads.num_kv_heads} | {f"swa_{key}": config[key] for key in self.same}
        if others := [key for key, size in expected.items() if config.get(key, size) != size]:
            raise ValueError(f"its {others[0]} is {config[others[0]]!r:.80}, and {expected[others[0]]} is expected")
        return heads, False

    def layers(self, config: Config, windows: Windows) -> frozenset[int]:
        return frozenset(range(len(windows))) - without_windows(config, windows)

    def rules(self) -> dict[str, KeyRule | None]:
        return {self.num_kv_heads: SIZE}


@dataclass(frozen=True)
class BlockHeads:
    """Heads of layers in which an indexer chooses blocks of keys for each head of keys."""

    layer_type: str

    def read(self, config: Config) -> tuple[LayerHeads, bool]:
        """Return the heads, and whether keys are values. Raises KeyError or ValueError."""
        num_kv_heads, head_dim = (SIZE.of(config, key) for key in ("num_key_value_heads", "head_dim"))
        same = {"index_n_heads": num_kv_heads, "index_head_dim": head_dim, "index_local_blocks": 1}
        if others := [key for key, size in same.items() if config[key] != size]:
            raise ValueError(f"its {others[0]} is {config[others[0]]!r:.80}, and {same[others[0]]} is expected")
        if self.layer_type not in (config["layer_types"] or ()):
            raise ValueError(f"none of its layers is {self.layer_type}")
        blocks = BlockChoice(*(SIZE.of(config, key) for key in ("index_block_size", "index_topk_blocks")))
        return LayerHeads(num_kv_heads, head_dim, blocks), False

    def layers(self, config: Config, windows: Windows) -> frozenset[int]:
        types = list_of_layers(config, "layer_types", ("full_attention", self.layer_type))
        return frozenset(number for number, each in enumerate(types) if each == self.layer_type)

    def rules(self) -> dict[str, KeyRule | None]:
        sizes = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks")
        return {**dict.fromkeys(sizes, SIZE), "index_local_blocks": COUNT}


BLOCK_LINEARS = {"index_query": "self_attn.index_q_proj", "index_key": "self_attn.index_k_proj"}
BLOCK_NORMS = {"index_query_norm": "self_attn.index_q_norm", "index_norm": "self_attn.index_k_norm"}


def layers_of_keys(config: Config, windows: Windows, key: str | None) -> dict[int, int]:
    """Return, for each of the last layers that share keys and values, the earlier layer that has them.

    `key` names their number. Raises KeyError or ValueError.
    """
    first = len(windows) - (0 if key is None else COUNT.of(config, key))
    last = {size is None: number for number, size in enumerate(windows[: max(first, 0)])}
    if any((size is None) not in last for size in windows[max(first, 0) :]):
        raise ValueError(f"its {key} is {config[key or '']}, and no layer before these has their keys")
    return {number: last[windows[number] is None] for number in range(first, len(windows))}


def all_layers(config: Config, windows: Windows) -> frozenset[int]:
    return frozenset(range(len(windows)))


# Latent attention (MLA): all heads share one latent vector per position.

LATENT_KEYS = ("kv_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
UP = "key_value_up"  # role of the projection from a latent vector to the keys and values of all heads
LATENT_LINEARS = {"key": "self_attn.kv_a_proj_with_mqa", UP: "self_attn.kv_b_proj", "output": "self_attn.o_proj"}
QUERIES_OF_VECTORS = {"query_down": "self_attn.q_a_proj", "query": "self_attn.q_b_proj"}
QUERIES_OF_ROWS = {"query": "self_attn.q_proj"}  # where queries have no latent vector of their own
INDEX_LINEARS = {
    "index_query": "self_attn.indexer.wq_b",
    "index_key": "self_attn.indexer.wk",
    "index_weight": "self_attn.indexer.weights_proj",
}
INDEX_NORM = "self_attn.indexer.k_norm"
CHOOSES = "attention to keys that an indexer chooses"
INDEXED = {"deepseek_sparse_attention", "indexed_attention"}  # types of layers that attend to chosen keys
INDEX_KEYS = ("index_n_heads", "index_head_dim", "index_topk")


@dataclass(frozen=True)
class IndexerSpec:
    """The config keys of indexers, which choose the keys that a row attends to (DeepSeek sparse attention)."""

    is_interleaved: bool  # adjacent dimensions of index queries and keys are rotated as a pair
    types_key: str | None = None  # key of which layers have an indexer; without it all have one

    def rules(self) -> dict[Any, KeyRule | None]:
        return dict.fromkeys(INDEX_KEYS, SIZE)

    def layers(self, config: Config) -> frozenset[int]:
        """Read the layers with an indexer. Raises ValueError if the first layer has none."""
        every = frozenset(range(config["num_hidden_layers"]))
        if self.types_key is None:
            return every
        if config.get(self.types_key) is None:
            if said := [key for key in ("index_topk_pattern", "index_topk_freq") if config.get(key) not in (None, 1)]:
                raise ValueError(f"its {said[0]} stands without {self.types_key}")
            return every
        types = list_of_layers(config, self.types_key, ("full", "shared"))
        if types[0] != "full":
            raise ValueError(f"its {self.types_key} begin with {types[0]}")
        return frozenset(number for number in every if types[number] == "full")


@dataclass(frozen=True)
class MLASpec:
    """The config keys of latent attention."""

    interleaving_key: str | None = None  # key of whether adjacent dimensions are rotated as a pair; without it they are
    indexer: IndexerSpec | None = None

    @property
    def types(self) -> frozenset[str]:
        """Return the types of layers that no other architecture has."""
        return frozenset(INDEXED if self.indexer else ())

    @property
    def needed(self) -> tuple[str, ...]:
        """Return the config keys that decide the size of caches."""
        return ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

    def read(self, config: Config) -> MLAConfig:
        """Read the latent attention of a config. Raises KeyError or ValueError for missing or impossible sizes."""
        return _read_mla(config, self)

    def rules(self) -> dict[Any, KeyRule | None]:
        """Return the rules for the config keys of latent attention."""
        rules: dict[Any, KeyRule | None] = dict.fromkeys(LATENT_KEYS, SIZE)
        rules |= self.indexer.rules() if self.indexer else {}
        return rules | {"q_lora_rank": SIZE.or_null(), self.interleaving_key: SWITCH}


@dataclass(frozen=True)
class MLAConfig:
    """The latent attention of a model's layers."""

    sizes: MLASizes
    scale: float  # factor on scores
    is_interleaved: bool
    indexer: IndexerSpec | None = None
    indexed_layers: frozenset[int] = frozenset()  # layers with an indexer

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
        return self._in_order(self.is_interleaved)

    @property
    def index_order(self) -> list[int]:
        """Return the stored index of each dimension of an indexer's heads. Rotary ones come first."""
        assert self.indexer is not None
        assert self.sizes.indexer is not None
        return [*self._in_order(self.indexer.is_interleaved), *range(self.sizes.rope_dim, self.sizes.indexer.dim)]

    def _in_order(self, is_interleaved: bool) -> list[int]:
        turned = range(self.sizes.rope_dim)
        return [*turned[::2], *turned[1::2]] if is_interleaved else [*turned]

    def index_tensors(self, number: int) -> list[str]:
        """Return the names of a layer's indexer tensors."""
        if number not in self.indexed_layers:
            return []
        return [*(f"{name}.weight" for name in INDEX_LINEARS.values()), f"{INDEX_NORM}.weight", f"{INDEX_NORM}.bias"]


def _read_mla(config: Config, spec: MLASpec) -> MLAConfig:
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError("it has other heads of keys than of queries")
    sizes = MLASizes(
        rank=config["kv_lora_rank"],
        query_rank=config["q_lora_rank"] or 0,
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        indexer=IndexerSizes(*(SIZE.of(config, key) for key in INDEX_KEYS)) if spec.indexer else None,
    )
    if spec.indexer is None and config.get("head_dim") not in (None, sizes.rope_dim):  # else its class does not read it
        raise ValueError(f"its head_dim is {config['head_dim']!r:.80}")
    is_interleaved = True if spec.interleaving_key is None else config.get(spec.interleaving_key, True)
    if not isinstance(is_interleaved, bool):
        raise ValueError(f"its {spec.interleaving_key} is {is_interleaved!r:.80}")
    layers = spec.indexer.layers(config) if spec.indexer else frozenset[int]()
    return MLAConfig(sizes, sizes.query_dim**-0.5 * _stretch(config) ** 2, is_interleaved, spec.indexer, layers)


def _stretch(config: Config) -> float:
    """Return YaRN's factor of queries and keys (Peng et al. 2023)."""
    angles: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by, factor = angles.get("mscale_all_dim") or 0.0, angles.get("factor") or 1.0
    is_plain = (angles.get("rope_type") or angles.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else 0.1 * by * math.log(factor) + 1.0
