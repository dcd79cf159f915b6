"""Row-exact gated delta nets of `transformers` models: each row starts at its parent's state.

The recurrence goes position by position, in the order of a row's own path, and takes the same calls of the same shapes
for every row. So a row has the same bits in a tree, in a prompt and alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from swiftbatch.worker.caches.full import RecurrentShape
from swiftbatch.worker.caches.recurrent import RecurrentCache
from swiftbatch.worker.caches.recurrent_layer import RecurrentLayer
from swiftbatch.worker.kernels.sizes import TILE_ROWS
from swiftbatch.worker.model.causal_lm import decoder_of
from swiftbatch.worker.model.layer_needs import recurrent_layers
from swiftbatch.worker.target.attention import ExactRows
from swiftbatch.worker.target.tiles import SequenceRows

EPSILON = 1e-6  # of queries' and keys' lengths, in every kind


def take_over_recurrent_layers(model: Any) -> RecurrentShape | None:
    """Let the gated delta nets of a model run rows of caches; None where it has none."""
    nets = list(recurrent_layers(model).values())
    if not nets:
        return None
    for number, net in enumerate(nets):
        net.forward = functools.partial(_forward, net, number, net.forward)
    attending = [layer.self_attn for layer in decoder_of(model).layers if hasattr(layer, "self_attn")]
    for number, attention in enumerate(attending):
        attention.layer_idx = number  # of the layers that have keys and values
    net = nets[0]
    return RecurrentShape(
        num_layers=len(nets),
        num_heads=net.num_v_heads,
        num_key_heads=net.num_k_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
        num_channels=net.conv_dim,
        conv_width=net.conv_kernel_size,
    )


def _forward(
    net: Any,
    number: int,
    otherwise: Callable[..., Tensor],
    hidden_states: Tensor,
    *,
    row_groups: list[ExactRows] | None = None,
    **others: Any,
) -> Tensor:
    """A net's forward over the rows of several sequences, `[1, num_rows, hidden]`; padding rows give zeros.

    Without groups of rows it is `otherwise`, that of `transformers`.
    """
    if row_groups is None:
        return otherwise(hidden_states, **others)
    inputs, gates, betas, decays = _projected(net, hidden_states[0])
    mixed = torch.zeros_like(gates)
    start = 0
    for group in row_groups:
        rows = slice(start, start + len(group))
        mixed[rows] = _run_group(net, number, group.rows, inputs[rows], betas[rows], decays[rows])
        start = rows.stop
    normed = net.norm(mixed.flatten(0, 1), gates.flatten(0, 1))
    output: Tensor = net.out_proj(normed.view(1, len(mixed), -1))
    return output


def _projected(net: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of the convolution, gates `[num_rows, num_heads, value_dim]`, betas and decays in float32.

    A product with fewer than 16 columns has another order of sums for a few rows, so betas and decays have whole tiles.
    """
    if hasattr(net, "in_proj_qkv"):
        inputs = net.in_proj_qkv(hidden)
        b, a = _in_whole_tiles(lambda rows: (net.in_proj_b(rows), net.in_proj_a(rows)), hidden)
        gates = net.in_proj_z(hidden).unflatten(-1, (-1, net.head_v_dim))
    else:
        mixed = net.in_proj_qkvz(hidden)[None], net.in_proj_ba(hidden)[None]
        query, key, value, gates, b, a = (each[0] for each in net.fix_query_key_value_ordering(*mixed))
        inputs = torch.cat([each.flatten(1) for each in (query, key, value)], dim=-1)
    betas, decays = _in_whole_tiles(functools.partial(_betas_and_decays, net), b, a)
    return inputs, gates.contiguous(), betas, decays


def _betas_and_decays(net: Any, b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    rate = -net.A_log.float().exp() * softplus(a.float() + net.dt_bias)
    return b.sigmoid().float(), rate.exp()


def _run_group(net: Any, number: int, rows: SequenceRows, inputs: Tensor, betas: Tensor, decays: Tensor) -> Tensor:
    """The rows of one sequence through its state: `[num_rows, num_heads, value_dim]`."""
    cache = rows.cache
    assert isinstance(cache, RecurrentCache)
    layer, paths = cache.recurrent[number], paths_of(rows, cache.boundary)
    first = rows.first_entry - cache.boundary
    layer.write_inputs(first, inputs)
    convolved = _convolved(net, layer, paths, inputs)
    queries, keys, values = convolved.split([net.key_dim, net.key_dim, net.value_dim], dim=-1)
    (normed_queries,) = _in_whole_tiles(_of_length_one, queries.unflatten(-1, (-1, net.head_k_dim)))
    (normed_keys,) = _in_whole_tiles(_of_length_one, keys.unflatten(-1, (-1, net.head_k_dim)))
    walk = _Walk(layer, cache.length - cache.boundary, first)
    outputs = [
        walk.step(path, query, key, value, beta, decay)
        for path, query, key, value, beta, decay in zip(
            paths,
            normed_queries / net.head_k_dim**0.5,
            normed_keys,
            values.float().unflatten(-1, (-1, net.head_v_dim)),
            betas,
            decays,
            strict=True,
        )
    ]
    return torch.stack(outputs).to(inputs.dtype)


def paths_of(rows: SequenceRows, boundary: int) -> list[list[int]]:
    """The steps of each row's own path behind a cache's boundary, its own last."""
    before = list(range(rows.boundary - boundary))
    return [
        before + (rows.tail_entries[row, :length] - boundary).tolist() for row, length in enumerate(rows.tail_lengths)
    ]


def _convolved(net: Any, layer: RecurrentLayer, paths: list[list[int]], inputs: Tensor) -> Tensor:
    """The convolution over the last inputs of each path: `[num_rows, num_channels]`."""
    width = net.conv_kernel_size
    before = list(range(-(width - 1), 0))
    steps = torch.tensor([(before + path)[-width:] for path in paths], device=inputs.device)
    window, weight = layer.convolved(steps).float(), net.conv1d.weight[:, 0].float()

    def convolve(window: Tensor) -> tuple[Tensor]:
        total = window[:, 0] * weight[:, 0]
        for place in range(1, width):
            total = total + window[:, place] * weight[:, place]
        return (silu(total.to(inputs.dtype)),)

    return _in_whole_tiles(convolve, window)[0]


def _of_length_one(heads: Tensor) -> tuple[Tensor]:
    heads = heads.float()
    return (heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + EPSILON),)


class _Walk:
    """Goes through the rows of a sequence in order; the states of those that others may follow are at hand."""

    def __init__(self, layer: RecurrentLayer, root: int, first: int) -> None:
        """`root` is the step behind the committed ones, `first` that of the first row."""
        self._layer, self._root, self._first = layer, root, first
        self._states: list[Tensor] = []

    def step(self, path: list[int], query: Tensor, key: Tensor, value: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
        """Take a row's step, keep it, and read what its query finds: `[num_heads, value_dim]` float32."""
        keys = self._layer.heads_of(key)[:, :, None]
        state = self._before(path) * decay[:, None, None]
        update = (value - (state * keys).sum(dim=1)) * beta[:, None]
        state = state + keys * update[:, None]
        self._layer.write(path[-1], key, update, decay)
        self._states.append(state)
        found: Tensor = (state * self._layer.heads_of(query)[:, :, None]).sum(dim=1)
        return found

    def _before(self, path: list[int]) -> Tensor:
        """The state that a row starts from: its parent's."""
        open_steps = [step for step in path[:-1] if step >= self._root]
        if not open_steps:
            return self._layer.state
        if open_steps[-1] >= self._first:
            return self._states[open_steps[-1] - self._first]
        return self._layer.folded(self._layer.state, open_steps)  # an earlier forward had the parent


def _in_whole_tiles(function: Any, *rows: Tensor) -> tuple[Tensor, ...]:
    """Elementwise functions of `[num_rows, ...]` over `TILE_ROWS` rows: see `attention._on_whole_tiles`."""
    num_rows = len(rows[0])
    padded = [pad(each, (0, 0) * (each.ndim - 1) + (0, TILE_ROWS - num_rows)).contiguous() for each in rows]
    return tuple(each[:num_rows] for each in function(*padded))
