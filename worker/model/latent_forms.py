"""Latent attention, as configs and tensors say it: all heads share one latent vector per position. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swiftbatch.worker.kernels.kernel_sizes import LatentSizes

KEYS = ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
UP = "key_value_up"  # the role of the product from a latent vector to all heads' keys and values
LINEARS = {"key": "self_attn.kv_a_proj_with_mqa", UP: "self_attn.kv_b_proj", "output": "self_attn.o_proj"}
QUERY_OF_VECTORS = {"query_down": "self_attn.q_a_proj", "query": "self_attn.q_b_proj"}
QUERY_OF_ROWS = {"query": "self_attn.q_proj"}


@dataclass(frozen=True)
class LatentForm:
    """The differences between kinds with latent attention."""

    interleaving_key: str | None = None  # says whether neighbours are turned, as they are without it


@dataclass(frozen=True)
class LatentConfig:
    """The latent attention of a model's layers."""

    sizes: LatentSizes
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
        turned = range(self.sizes.turned_dim)
        return [*turned[::2], *turned[1::2]] if self.is_interleaved else [*turned]


def read_latent(config: Mapping[str, Any], form: LatentForm) -> LatentConfig:
    """Raises KeyError or ValueError for numbers left to a default, or that make no latent attention."""
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise ValueError("it has other heads of keys than of queries")
    sizes = LatentSizes(
        rank=config["kv_lora_rank"],
        query_rank=config["q_lora_rank"] or 0,
        still_dim=config["qk_nope_head_dim"],
        turned_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
    )
    if config.get("head_dim") not in (None, sizes.turned_dim):
        raise ValueError(f"its head_dim is {config['head_dim']!r:.80}")
    is_interleaved = True if form.interleaving_key is None else config.get(form.interleaving_key, True)
    if not isinstance(is_interleaved, bool):
        raise ValueError(f"its {form.interleaving_key} is {is_interleaved!r:.80}")
    return LatentConfig(sizes, sizes.query_dim**-0.5 * _stretch(config) ** 2, is_interleaved)


def _stretch(config: Mapping[str, Any]) -> float:
    """The factor by which queries and keys are longer where YaRN stretches positions (Peng et al. 2023)."""
    angles = config.get("rope_scaling") or config.get("rope_parameters") or {}
    by, factor = angles.get("mscale_all_dim") or 0.0, angles.get("factor") or 1.0
    is_plain = (angles.get("rope_type") or angles.get("type") or "default") == "default"
    return 1.0 if is_plain or factor <= 1 else 0.1 * by * math.log(factor) + 1.0
