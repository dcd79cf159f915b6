"""The part of a decoder's weights that one of several GPUs has: heads, columns of MLPs, experts, and tokens.

Norms, routers, shared experts, recurrent layers and latent vectors' projections are on every GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.cuda.stacked_weights import (
    SharedDepths,
    StackedLayer,
    StackedWeights,
    stacked_layer,
    stacked_weights,
)
from swiftbatch.worker.kernels.decoder_weights import DecoderSizes, DecoderWeights, ExpertWeights, LayerWeights
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, PackedMatrix, Weight, linear_from
from swiftbatch.worker.kernels.rank_shares import Rank, columns_of, kv_heads_of


def shared_weights(
    weights: DecoderWeights, devices: Sequence[torch.device], layers: Iterable[LayerWeights] | None = None
) -> list[StackedWeights]:
    """Copy each rank's part to its device. Raises ValueError for parts that have a bias only sometimes."""
    ranks = [Rank(number, len(devices)) for number in range(len(devices))]
    sizes, shared = weights.sizes, [list[StackedLayer]() for _ in ranks]
    for layer in weights.layers if layers is None else layers:
        for rank, device, own in zip(ranks, devices, shared, strict=True):
            own.append(_stacked_part(layer, sizes, rank, device))
    found = []
    for rank, device, own in zip(ranks, devices, shared, strict=True):
        tokens = head_of_rank(weights, rank)
        whole = stacked_weights(replace(weights, head=_columns(weights.head, tokens)), device, ())
        found.append(replace(whole, sizes=sizes_of_rank(sizes, rank), layers=own, first_token=tokens.start))
    return found


def _stacked_part(layer: LayerWeights, sizes: DecoderSizes, rank: Rank, device: torch.device) -> StackedLayer:
    part = stacked_layer(layer_of_rank(layer, sizes, rank), device, sizes.joins_heads)
    depths = (0 if each is None else each.weight.shape[1] for each in (layer.output, layer.down))
    experts = part.experts
    if experts is not None:
        experts = replace(experts, first=rank.share_of(experts.routing.num_experts).start)
    return replace(part, shared=SharedDepths(*depths), experts=experts)


def sizes_of_rank(sizes: DecoderSizes, rank: Rank) -> DecoderSizes:
    """Return the sizes with the rank's heads. Ranks share a head of keys if there are more ranks than such heads."""
    num_kv_heads = max(1, sizes.num_kv_heads // rank.num_ranks)
    return replace(sizes, num_heads=sizes.num_heads // rank.num_ranks, num_kv_heads=num_kv_heads)


def layer_of_rank(layer: LayerWeights, sizes: DecoderSizes, rank: Rank) -> LayerWeights:
    """Return the rank's part of a layer, which `ranks_fault` allows."""
    return replace(
        layer,
        **_attention_of(layer, sizes, rank),
        **({} if layer.down is None or layer.experts is not None else _mlp_of(layer, layer.down, rank)),
        experts=None if layer.experts is None else experts_of_rank(layer.experts, rank),
    )


def _attention_of(layer: LayerWeights, sizes: DecoderSizes, rank: Rank) -> dict[str, Any]:
    if layer.output is None:
        return {}
    names = ["query", "head_gate", "key_up", "value_up"]
    found: dict[str, Any] = {name: _rows_of(getattr(layer, name), rank.share_of, sizes.num_heads) for name in names}
    if sizes.latent is None:
        for name in ("key", "value"):
            found[name] = _rows_of(getattr(layer, name), lambda count: kv_heads_of(count, rank), sizes.num_kv_heads)
    if sizes.qk_norms_differ:
        found["query_norm"] = _heads_of(layer.query_norm, rank.share_of(sizes.num_heads), sizes.num_heads)
        found["key_norm"] = _heads_of(layer.key_norm, kv_heads_of(sizes.num_kv_heads, rank), sizes.num_kv_heads)
    sinks = None if layer.sinks is None else layer.sinks[rank.share_of(sizes.num_heads)]
    depth = layer.output.weight.shape[1]
    return found | {"output": _depth_of(layer.output, rank.share_of(depth), rank), "sinks": sinks}


def _mlp_of(layer: LayerWeights, down: AnyLinear, rank: Rank) -> dict[str, Any]:
    own = columns_of(down.weight.shape[1], rank)
    wide = {name: _columns_or_none(getattr(layer, name), own) for name in ("gate", "up")}
    return wide | {"down": _depth_of(down, own, rank)}


def experts_of_rank(experts: ExpertWeights, rank: Rank) -> ExpertWeights:
    own = rank.share_of(experts.routing.num_experts)
    lists = {name: getattr(experts, name)[own] for name in ("gates", "ups", "downs")}
    return replace(experts, **lists)


def head_of_rank(weights: DecoderWeights, rank: Rank) -> slice:
    """Return the tokens whose logits the rank computes."""
    most = -(-weights.sizes.vocab // rank.num_ranks)
    return slice(rank.number * most, min((rank.number + 1) * most, weights.sizes.vocab))


def _rows_of(linear: AnyLinear | None, share_of: Any, num_heads: int) -> AnyLinear | None:
    if linear is None:
        return None
    heads, width = share_of(num_heads), linear.weight.shape[0] // num_heads
    return _columns(linear, slice(heads.start * width, heads.stop * width))


def _heads_of(norm: Tensor | None, heads: slice, num_heads: int) -> Tensor | None:
    return None if norm is None else norm.unflatten(0, (num_heads, -1))[heads].flatten()


def _columns_or_none(linear: AnyLinear | None, own: slice) -> AnyLinear | None:
    return None if linear is None else _columns(linear, own)


def _columns(linear: AnyLinear, own: slice) -> AnyLinear:
    weight: Weight = linear.weight.rows(own) if isinstance(linear.weight, PackedMatrix) else linear.weight[own]
    return linear_from(weight, None if linear.bias is None else linear.bias[own])


def _depth_of(linear: AnyLinear, own: slice, rank: Rank) -> AnyLinear:
    """Return a part of the depth; the first rank adds the bias."""
    weight = linear.weight
    part: Weight = (
        weight.between(own.start, own.stop) if isinstance(weight, PackedMatrix) else weight[:, own].contiguous()
    )
    return linear_from(part, linear.bias if rank.number == 0 else None)
