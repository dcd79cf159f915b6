"""A layer's latent attention, from its stored products: heads in the kernels' order, and what absorbs their keys."""

from __future__ import annotations

from collections.abc import Mapping

from swiftbatch.worker.kernels.decoder_weights import AnyLinear, Linear, linear_from
from swiftbatch.worker.kernels.packed import plain
from swiftbatch.worker.model.latent_forms import UP, LatentConfig
from swiftbatch.worker.model.mixer_layers import of_rows


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
