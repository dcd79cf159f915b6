"""A decoder's weights as its CUDA kernels read them: what shares its rows lies one below the other, in one product."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import (
    AnyLinear,
    DecoderSizes,
    DecoderWeights,
    LayerWeights,
    Linear,
    plain_linear,
)
from swiftbatch.worker.kernels.frequencies import Rotary


@dataclass(frozen=True)
class StackedLayer:
    """One layer; `query_key_value` and `gate_up` are stacked in this order."""

    query_key_value: Linear
    output: Linear
    gate_up: Linear  # or ups alone
    down: Linear
    input_norm: Tensor | None  # [hidden], as those that follow
    output_norm: Tensor | None
    mlp_norm: Tensor | None
    down_norm: Tensor | None
    head_norms: tuple[Tensor, Tensor] | None  # [head_dim] of queries and of keys
    joint_norms: Tensor | None  # of all queries of a row, behind them of all its keys
    is_still: bool = False


@dataclass(frozen=True)
class StackedWeights:
    """A dense decoder on a device: `embedding [vocab, hidden]`, layers, norm, head."""

    sizes: DecoderSizes
    embedding: Tensor
    layers: list[StackedLayer]
    final_norm: Tensor
    head: Linear
    rotary: Rotary


def handed_over(weights: DecoderWeights) -> Iterator[LayerWeights]:
    """Yield the layers one by one and take them from `weights`: none of them is there twice for long."""
    while weights.layers:
        yield weights.layers.pop(0)


def stacked_weights(
    weights: DecoderWeights, device: torch.device, layers: Iterable[LayerWeights] | None = None
) -> StackedWeights:
    """Copies of what is stacked; the rest only where it lies elsewhere. An embedding that is the head stays one.

    `layers`: those of `weights`, where they come one by one.
    """
    embedding = _moved(weights.embedding, device)
    is_tied = weights.head.weight is weights.embedding
    head = Linear(embedding, weights.head.bias) if is_tied else weights.head
    return StackedWeights(
        weights.sizes,
        embedding,
        [
            stacked_layer(layer, device, weights.sizes.joins_heads)
            for layer in (weights.layers if layers is None else layers)
        ],
        _moved(weights.final_norm, device),
        _stacked([head], device),
        weights.rotary,
    )


def stacked_layer(layer: LayerWeights, device: torch.device, joins_heads: bool = False) -> StackedLayer:
    """Copies of what is stacked. Raises ValueError where only some parts of a product have a bias."""
    norms = [_moved(norm, device) for norm in (layer.query_norm, layer.key_norm) if norm is not None]
    whole = (layer.input_norm, layer.output_norm, layer.mlp_norm, layer.down_norm)
    input_norm, output_norm, mlp_norm, down_norm = (None if norm is None else _moved(norm, device) for norm in whole)
    return StackedLayer(
        query_key_value=_stacked([layer.query, layer.key, layer.value], device),
        output=_stacked([layer.output], device),
        gate_up=_stacked([each for each in (layer.gate, layer.up) if each is not None], device),
        down=_stacked([layer.down], device),
        input_norm=input_norm,
        output_norm=output_norm,
        mlp_norm=mlp_norm,
        down_norm=down_norm,
        head_norms=(norms[0], norms[1]) if norms and not joins_heads else None,
        joint_norms=torch.cat(norms) if joins_heads else None,
        is_still=layer.is_still,
    )


def _stacked(linears: Sequence[AnyLinear], device: torch.device) -> Linear:
    """Raises ValueError where only some of the parts have a bias."""
    parts = [plain_linear(each) for each in linears]
    weights = [_moved(part.weight, device) for part in parts]
    biases = [_moved(part.bias, device) for part in parts if part.bias is not None]
    if biases and len(biases) < len(parts):
        raise ValueError(f"found {len(biases)} biases, expected {len(parts)} or none")
    weight = weights[0] if len(parts) == 1 else torch.cat(weights)
    if not biases:
        return Linear(weight)
    return Linear(weight, biases[0] if len(parts) == 1 else torch.cat(biases))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device, without its gradient, which products into given buffers refuse."""
    return tensor.detach().to(device)
