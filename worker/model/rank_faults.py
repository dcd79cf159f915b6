"""Kinds of models that several GPUs cannot share."""

from __future__ import annotations

from swiftbatch.worker.kernels.kernel_sizes import parts_of_depth
from swiftbatch.worker.kernels.rank_shares import RANK_CHOICES, Rank, columns_of
from swiftbatch.worker.model.architectures.deepseek_v4 import CompressedConfig
from swiftbatch.worker.model.decoder_config import DecoderConfig


def ranks_fault(config: DecoderConfig, num_ranks: int) -> str | None:
    """Return why `num_ranks` GPUs cannot share a decoder with the bits of one GPU, or None if they can."""
    if num_ranks not in RANK_CHOICES:
        return f"found {num_ranks} GPUs, expected {', '.join(map(str, RANK_CHOICES))}"
    if num_ranks == 1:
        return None
    return _fault_of_form(config) or _fault_of_sizes(config, num_ranks)


def _fault_of_form(config: DecoderConfig) -> str | None:
    if config.form.joins_heads:
        return "its norms of queries and keys span all heads"
    if isinstance(config.latent, CompressedConfig):
        return "its layers have compressed keys"
    if config.own_heads is not None:
        return "its layers have heads of two forms, or indexers of blocks"
    if config.mixer is not None and config.attending & set(config.mixer.layers):
        return "its layers add a state's result to that of attention"
    scaled = [name for name in ("attention_out_scale", "down_scale") if config.scales.get(name, 1.0) != 1.0]
    return f"its sums have a factor of their own ({scaled[0]})" if scaled else None


def _fault_of_sizes(config: DecoderConfig, num_ranks: int) -> str | None:
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if heads % num_ranks:
        return f"it has {heads} heads, expected a multiple of {num_ranks}"
    if config.latent is None and max(kv_heads, num_ranks) % min(kv_heads, num_ranks):
        return f"it has {kv_heads} heads of keys"
    if config.experts is not None and (count := config.experts.routing.num_experts) % num_ranks:
        return f"it has {count} experts, expected a multiple of {num_ranks}"
    width = config.head_dim if config.latent is None else config.latent.sizes.value_dim
    depth, last = heads * width, Rank(num_ranks - 1, num_ranks)
    if not _has_parts(depth, num_ranks) or columns_of(depth, last) != last.share_of(depth):
        return f"its heads have {depth:,} numbers, which {num_ranks} GPUs do not have in equal parts"
    with_experts = set() if config.experts is None else set(config.experts.layers)
    for number, depth in enumerate(config.mlp_widths):
        if depth and number not in with_experts and not _all_have_columns(depth, num_ranks):
            return f"its layer {number} has {depth:,} columns, of which {num_ranks} GPUs would not all have a part"
    return None


def _all_have_columns(depth: int, num_ranks: int) -> bool:
    own = columns_of(depth, Rank(num_ranks - 1, num_ranks))
    return _has_parts(depth, num_ranks) and own.stop > own.start


def _has_parts(depth: int, num_ranks: int) -> bool:
    return parts_of_depth(depth) % num_ranks == 0
