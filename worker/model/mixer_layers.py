"""A model's layers with a state, a convolution or latent attention, from their stored tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, Linear, linear_from
from swiftbatch.worker.kernels.mixer_sizes import MixerForm, MixerWeights
from swiftbatch.worker.kernels.packed import PackedMatrix, Weight, plain
from swiftbatch.worker.model.latent_forms import UP, LatentConfig
from swiftbatch.worker.model.mixer_forms import MixerConfig


def mixer_weights(tensors: Mapping[str, Weight], prefix: str, mixer: MixerConfig, dtype: torch.dtype) -> MixerWeights:
    """The mixer of one layer. Raises ValueError for tensors that are not of its sizes."""
    linears = dict(_linears(tensors, f"{prefix}{mixer.names.part}.", mixer))
    stored = {role: plain(tensors[prefix + name]) for role, name in mixer.numbers.items()}
    numbers = {role: _number(role, each.to(dtype).float(), mixer) for role, each in stored.items()}
    if mixer.part_scales is not None:
        numbers["scales"] = _scales(mixer.part_scales, mixer).to(dtype).float()
    return MixerWeights(mixer.sizes, linears, numbers)


def _linears(tensors: Mapping[str, Weight], prefix: str, mixer: MixerConfig) -> Iterator[tuple[str, AnyLinear]]:
    columns = mixer.sizes.columns()
    for name, roles in mixer.names.linears.items():
        weight, bias = tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias")
        if (order := mixer.names.orders.get(name)) is not None:
            weight = of_rows(weight, order(mixer.shape))
        if len(roles) == 1:
            yield roles[0], linear_from(weight, None if bias is None else plain(bias))
            continue
        widths = [columns[role] for role in roles]
        if any(each.shape[0] != sum(widths) for each in (weight, bias) if each is not None):
            raise ValueError(f"found rows of {name} that are not those of {roles}")
        biases = [None] * len(roles) if bias is None else plain(bias).split(widths)
        yield from zip(roles, map(linear_from, weight.split(widths), biases), strict=True)


def of_rows(weight: Weight, rows: list[int]) -> Weight:
    """Some rows of a stored matrix, in this order. Raises ValueError for more than it has."""
    if len(rows) > weight.shape[0] or max(rows) >= weight.shape[0]:
        raise ValueError(f"found {weight.shape[0]} rows, expected {len(rows)}")
    chosen = torch.tensor(rows, device=weight.device)
    return weight.rows(chosen) if isinstance(weight, PackedMatrix) else weight[chosen]


def _scales(parts: tuple[float, ...], mixer: MixerConfig) -> Tensor:
    """The scales of all columns in the order of the kernels' roles."""
    gates, values, keys, queries, steps = parts
    width, key_width = mixer.sizes.width, mixer.shape.num_key_heads * mixer.shape.key_dim
    runs = ((values, width), (keys, key_width), (queries, key_width), (gates, width), (steps, mixer.shape.num_heads))
    return torch.cat([torch.full((count,), scale) for scale, count in runs])


def _number(role: str, numbers: Tensor, mixer: MixerConfig) -> Tensor:
    """Float32 numbers as the kernels take them: taps by their places, norms of heads for each head.

    Raises ValueError for others than are stored, of these two.
    """
    sizes = mixer.sizes
    if role == "taps":
        _refuse_shape(role, numbers, (sizes.num_channels, 1, sizes.conv_width), (sizes.num_channels, sizes.conv_width))
        return numbers.flatten(1).T.contiguous()
    if role == "norm" and sizes.form == MixerForm.DELTA_NET:
        _refuse_shape(role, numbers, (sizes.norm_width,))
        return numbers.repeat(sizes.width // sizes.norm_width)
    return numbers


def _refuse_shape(role: str, numbers: Tensor, *expected: tuple[int, ...]) -> None:
    if tuple(numbers.shape) not in expected:
        raise ValueError(f"found {role} of a mixer as {list(numbers.shape)}, expected {list(expected[0])}")


def latent_linears(linears: Mapping[str, AnyLinear], latent: LatentConfig) -> dict[str, AnyLinear]:
    """The products of a layer by their roles in the kernels. Raises ValueError for rows that are no heads.

    The turned dimensions of queries and keys are brought where the kernels turn them. Of the product from the latent
    vector to keys and values each head's keys stand transposed: they lead from its query to the latent vector.
    """
    sizes = latent.sizes
    heads = range(0, linears["query"].weight.shape[0], sizes.query_dim)
    of_queries = [*range(sizes.still_dim), *(sizes.still_dim + each for each in latent.turned_order)]
    of_key = [*range(sizes.rank), *(sizes.rank + each for each in latent.turned_order)]
    query, key = (linears[role].weight for role in ("query", "key"))
    if key.shape[0] != sizes.entry_dim:
        raise ValueError(f"found {key.shape[0]} rows of latent vectors, expected {sizes.entry_dim}")
    up, width = plain(linears[UP].weight), sizes.still_dim + sizes.value_dim
    if up.shape[0] != len(heads) * width:
        raise ValueError(f"found {up.shape[0]} rows of keys and values, expected {len(heads)} heads of {width}")
    up = up.unflatten(0, (len(heads), width))
    keys, values = up.split([sizes.still_dim, sizes.value_dim], dim=1)  # [num_heads, -, rank]
    return {role: linear for role, linear in linears.items() if role != UP} | {
        "query": linear_from(of_rows(query, [head + each for head in heads for each in of_queries])),
        "key": linear_from(of_rows(key, of_key)),
        "key_up": Linear(keys.transpose(1, 2).flatten(0, 1)),
        "value_up": Linear(values.flatten(0, 1)),
    }
