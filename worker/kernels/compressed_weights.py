"""Weights of pooled keys and of streams, which layers of decoders with compressed attention have, and their shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swiftbatch.worker.kernels.kernel_sizes import MOST_POOLED, Pools, StreamSizes
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Weight


@dataclass(frozen=True)
class PoolWeights:
    """Weights of pooled keys: projections of all series, `bias [ratio, series * dim] float32`, `norm [dim]`."""

    key: AnyLinear
    gate: AnyLinear
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class StreamWeights:
    """Weights in front of a part of a layer, or of the head, all float32: source/streams.h."""

    mix: Tensor  # [columns, streams * hidden]
    bias: Tensor  # [columns]
    scale: Tensor  # [3], or [1] of the head


def pool_shapes(
    pools: Pools | None, pool: PoolWeights | None, name: str, dim: int, hidden: int
) -> Iterator[tuple[str, Weight | None, tuple[int, ...]]]:
    """Yield every tensor of a pool in the model's dtype, with its name and expected shape."""
    if pools is not None and pool is not None:
        yield f"keys of {name}", pool.key.weight, (pools.series * dim, hidden)
        yield f"gates of {name}", pool.gate.weight, (pools.series * dim, hidden)
        yield f"norm of {name}", pool.norm, (dim,)


def stream_shapes(
    streams: StreamSizes | None, hidden: int, of: str, weights: StreamWeights | None, is_head: bool = False
) -> Iterator[tuple[str, Tensor | None, tuple[int, ...]]]:
    """Yield every float32 tensor of streams' weights with its name and expected shape. Raises ValueError."""
    if (weights is None) != (streams is None):
        raise ValueError(f"found {of} {'without' if weights is None else 'with'} weights of streams")
    if weights is not None and streams is not None:
        columns = streams.count * (1 if is_head else 2 + streams.count)
        yield f"mix of streams of {of}", weights.mix, (columns, streams.count * hidden)
        yield f"bias of streams of {of}", weights.bias, (columns,)
        yield f"scale of streams of {of}", weights.scale, (1 if is_head else 3,)


def check_pools(pools: Pools | None, pool: PoolWeights | None, of_indexer: Sequence[object]) -> None:
    """Raise ValueError for missing or unexpected parts of a layer's pools, or of their indexer."""
    series, ratio = (0, 0) if pools is None else (pools.series, pools.ratio)
    if (pool is not None) != (series > 0) or {each is not None for each in of_indexer} != {series == 2} or series > 2:
        raise ValueError("found a layer with a part of its pools")
    if series and not 0 < ratio * series <= MOST_POOLED:
        raise ValueError(f"found pooled keys of {ratio * series} positions, expected at most {MOST_POOLED}")
