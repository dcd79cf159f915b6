"""A model's layers with a state, a convolution, latent or compressed attention, from their stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swiftbatch.worker.kernels.compressed_weights import PoolWeights, StreamWeights
from swiftbatch.worker.kernels.layer_specs import RecurrentForm, RecurrentWeights
from swiftbatch.worker.kernels.quantized_weights import AnyLinear, Linear, PackedMatrix, Weight, linear_from, plain
from swiftbatch.worker.model.architectures.attention_layers import INDEX_LINEARS, INDEX_NORM, UP, MLAConfig
from swiftbatch.worker.model.architectures.deepseek_v4 import INDEX_NAMES, POOL_NAMES, CompressedConfig
from swiftbatch.worker.model.architectures.recurrent_layers import RecurrentConfig
from swiftbatch.worker.model.architectures.spec import STREAM_PARTS


def recurrent_weights(
    tensors: Mapping[str, Weight], prefix: str, mixer: RecurrentConfig, dtype: torch.dtype
) -> RecurrentWeights:
    """Collect the weights of a layer's mixer. Raises ValueError for tensors of unexpected sizes."""
    linears = dict(_mixer_linears(tensors, f"{prefix}{mixer.spec.part}.", mixer))
    stored = {role: plain(tensors[prefix + name]) for role, name in mixer.numbers.items()}
    numbers = {role: _number(role, each.to(dtype).float(), mixer) for role, each in stored.items()}
    if mixer.part_scales is not None:
        numbers["scales"] = _scales(mixer.part_scales, mixer).to(dtype).float()
    return RecurrentWeights(mixer.sizes, linears, numbers)


def _mixer_linears(
    tensors: Mapping[str, Weight], prefix: str, mixer: RecurrentConfig
) -> Iterator[tuple[str, AnyLinear]]:
    columns = mixer.sizes.columns()
    for name, roles in mixer.spec.linears.items():
        weight, bias = tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias")
        if (order := mixer.spec.orders.get(name)) is not None:
            weight = of_rows(weight, order(mixer.shape))
        yield from split_rows(name, roles, (weight, bias), [columns[role] for role in roles if len(roles) > 1])


def of_rows(weight: Weight, rows: list[int]) -> Weight:
    """Return some rows of a stored matrix. Raises ValueError for rows that it does not have."""
    if len(rows) > weight.shape[0] or max(rows) >= weight.shape[0]:
        raise ValueError(f"found {weight.shape[0]} rows, expected {len(rows)}")
    chosen = torch.tensor(rows, device=weight.device)
    return weight.rows(chosen) if isinstance(weight, PackedMatrix) else weight[chosen]


def _scales(parts: tuple[float, ...], mixer: RecurrentConfig) -> Tensor:
    gates, values, keys, queries, steps = parts
    width, key_width = mixer.sizes.width, mixer.shape.num_key_heads * mixer.shape.key_dim
    runs = ((values, width), (keys, key_width), (queries, key_width), (gates, width), (steps, mixer.shape.num_heads))
    return torch.cat([torch.full((count,), scale) for scale, count in runs])


def _number(role: str, numbers: Tensor, mixer: RecurrentConfig) -> Tensor:
    """Arrange a float32 parameter for the kernels. Raises ValueError for an unexpected shape."""
    sizes = mixer.sizes
    if role == "taps":
        _refuse_shape(role, numbers, (sizes.num_channels, 1, sizes.conv_width), (sizes.num_channels, sizes.conv_width))
        return numbers.flatten(1).T.contiguous()
    if role == "norm" and sizes.form == RecurrentForm.DELTA_NET:
        _refuse_shape(role, numbers, (sizes.norm_width,))
        return numbers.repeat(sizes.width // sizes.norm_width)
    return numbers


def _refuse_shape(role: str, numbers: Tensor, *expected: tuple[int, ...]) -> None:
    if tuple(numbers.shape) not in expected:
        raise ValueError(f"found {role} of a mixer as {list(numbers.shape)}, expected {list(expected[0])}")


def latent_linears(linears: Mapping[str, AnyLinear], latent: MLAConfig) -> dict[str, AnyLinear]:
    """Arrange latent attention's projections for the kernels. Raises ValueError if rows are not whole heads.

    Each head's up-projection of keys is transposed, because the kernels apply it to the head's query.
    """
    sizes = latent.sizes
    heads = range(0, linears["query"].weight.shape[0], sizes.query_dim)
    of_queries = [*range(sizes.nope_dim), *(sizes.nope_dim + each for each in latent.turned_order)]
    of_key = [*range(sizes.rank), *(sizes.rank + each for each in latent.turned_order)]
    query, key = (linears[role].weight for role in ("query", "key"))
    if key.shape[0] != sizes.key_dim:
        raise ValueError(f"found {key.shape[0]} rows of latent vectors, expected {sizes.key_dim}")
    up, width = plain(linears[UP].weight), sizes.nope_dim + sizes.value_dim
    if up.shape[0] != len(heads) * width:
        raise ValueError(f"found {up.shape[0]} rows of keys and values, expected {len(heads)} heads of {width}")
    up = up.unflatten(0, (len(heads), width))
    keys, values = up.split([sizes.nope_dim, sizes.value_dim], dim=1)  # [num_heads, -, rank]
    return {role: linear for role, linear in linears.items() if role != UP} | {
        "query": linear_from(of_rows(query, [head + each for head in heads for each in of_queries])),
        "key": linear_from(of_rows(key, of_key)),
        "key_up": Linear(keys.transpose(1, 2).flatten(0, 1)),
        "value_up": Linear(values.flatten(0, 1)),
    }


def compressed_weights(
    tensors: Mapping[str, Weight],
    prefix: str,
    number: int,
    linears: Mapping[str, AnyLinear],
    compressed: CompressedConfig,
) -> dict[str, Any]:
    """Arrange a layer's compressed attention for the kernels. Raises ValueError for tensors of unexpected sizes."""
    width, indexer = compressed.sizes.rank, compressed.sizes.indexer
    assert indexer is not None
    of_head, of_index = compressed.order(width), compressed.order(indexer.dim)
    found: dict[str, Any] = {**linears, "pools": compressed.pools.get(number), "window": compressed.window}
    found |= {role: of_heads(linears[role], of_head, width) for role in ("query", "key")}
    for role, part in compressed.prefixes(number).items():
        found[role] = _pool(tensors, prefix + part, of_head if role == "pool" else of_index)
    if "index_pool" in found:
        query, weight = (linear_from(tensors[prefix + name]) for name in INDEX_NAMES.values())
        found |= {"index_query": of_heads(query, of_index, indexer.dim), "index_weight": weight}
    return found


def _pool(tensors: Mapping[str, Weight], prefix: str, order: list[int]) -> PoolWeights:
    stored = {role: tensors[prefix + name] for role, name in POOL_NAMES.items()}
    key, gate = (of_heads(linear_from(stored[role]), order, len(order)) for role in ("key", "gate"))
    bias, norm = plain(stored["bias"]).float(), plain(stored["norm"])
    if bias.shape[-1] % len(order) or norm.shape != (len(order),):
        raise ValueError(f"found {prefix} of widths {list(bias.shape)} and {list(norm.shape)}, expected {len(order)}")
    return PoolWeights(key, gate, bias.unflatten(-1, (-1, len(order)))[..., order].flatten(-2), norm[order])


def stream_weights(tensors: Mapping[str, Weight], prefix: str) -> StreamWeights:
    """Collect the weights of streams."""
    return StreamWeights(*(plain(tensors[prefix + part]).float() for part in STREAM_PARTS.values()))


def indexer_weights(tensors: Mapping[str, Weight], prefix: str, latent: MLAConfig) -> dict[str, Any]:
    """Arrange a layer's indexer for the kernels. Raises ValueError for tensors of unexpected sizes or damaged ones."""
    assert latent.sizes.indexer is not None
    order, dim = latent.index_order, latent.sizes.indexer.dim
    names = {role: f"{prefix}{name}.weight" for role, name in INDEX_LINEARS.items()}
    norms = [f"{prefix}{INDEX_NORM}.{part}" for part in ("weight", "bias")]
    found: dict[str, Any] = {role: linear_from(tensors[name]) for role, name in names.items()}
    norm = [plain(tensors[name]) for name in norms]
    if any(part.shape != (dim,) for part in norm):
        raise ValueError(f"found norms of indexers of {norm[0].numel()} and {norm[1].numel()}, expected {dim}")
    found |= {role: of_heads(found[role], order, dim) for role in ("index_query", "index_key")}
    return found | {"index_norm": torch.cat([part[order] for part in norm])}


def split_rows(
    name: str, roles: Sequence[str], stored: tuple[Weight, Weight | None], widths: list[int]
) -> Iterator[tuple[str, AnyLinear]]:
    """Split a stored linear layer among its roles. Raises ValueError for other `widths`, if any are given."""
    weight, bias = stored[0], None if stored[1] is None else plain(stored[1])
    if widths and any(each.shape[0] != sum(widths) for each in (weight, bias) if each is not None):
        raise ValueError(f"found rows of {name} that are not those of {roles}")
    if len(roles) == 1:
        yield roles[0], linear_from(weight, bias)
        return
    biases = [None] * len(roles) if bias is None else bias.split(widths)
    yield from zip(roles, map(linear_from, weight.split(widths), biases), strict=True)


def of_heads(linear: AnyLinear, dims: list[int], width: int) -> AnyLinear:
    """Return some dimensions of each head of `width` rows. Raises ValueError if rows are not whole heads."""
    rows = [head + dim for head in range(0, linear.weight.shape[0], width) for dim in dims]
    if not rows:
        raise ValueError("found 0 rows, expected those of heads")
    bias = None if linear.bias is None else linear.bias[torch.tensor(rows, device=linear.bias.device)]
    return linear_from(of_rows(linear.weight, rows), bias)
