"""The compiled kernels' Python face: a dense decoder, and attention alone. What would crash them is a ValueError."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftbatch.worker.kernels.decoder_weights import DecoderWeights
from swiftbatch.worker.kernels.forms import SEES_ALL, AttentionView
from swiftbatch.worker.kernels.instruction_sets import load_library
from swiftbatch.worker.kernels.layers import NativeLayers, check_weights, checked
from swiftbatch.worker.kernels.packed import Weight, plain
from swiftbatch.worker.kernels.quantized_rows import packed_rows
from swiftbatch.worker.kernels.row_tables import CachePlace, LayerCacheShape, Rows, RowTable
from swiftbatch.worker.kernels.sizes import HEAD_DIMS
from swiftbatch.worker.kernels.team import ELEMENTS, Team, shared_team

EMBEDDING, FINAL_NORM, HEAD = range(3)  # of `weight_role` in source/api.h


class CAttentionSizes(ctypes.Structure):
    """`attention_sizes` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class CAttentionView(ctypes.Structure):
    """`attention_view` of source/api.h."""

    _fields_ = (("window", ctypes.c_int32), ("softcap", ctypes.c_float), ("sinks", ctypes.c_void_p))


def _c_view(view: AttentionView, num_heads: int) -> tuple[CAttentionView, Tensor | None]:
    """A view as the kernels take it, and what keeps its memory alive. Raises ValueError for other sinks."""
    sinks = view.sinks
    if sinks is not None:
        sinks = checked("sinks", sinks.float(), (num_heads,), torch.float32)
    address = None if sinks is None else sinks.data_ptr()
    return CAttentionView(view.window or 0, view.softcap or 0.0, address), sinks


class NativeDecoder(NativeLayers):
    """A whole decoder: embedding, layers, norm, head."""

    def __init__(self, weights: DecoderWeights, num_threads: int, variant: str) -> None:
        """Take the layers out of `weights`, as `NativeLayers` does.

        Raises ValueError for weights that do not fit together, KernelError where the library does not load.
        """
        _check_ends(weights)
        super().__init__(weights.sizes, weights.layers, weights.rotary, shared_team(load_library(variant), num_threads))
        self.embedding, self._packed = weights.embedding, packed_rows(weights.embedding)
        if self._packed is None:  # the kernels read it where it is, as they do the parts of a packed one
            self.embedding = plain(weights.embedding).contiguous()
            self._load(0, EMBEDDING, self.embedding)
        else:
            self._library.decoder_load_quantized(self.handle, 0, EMBEDDING, self._packed.address, None)
        self._load(0, FINAL_NORM, weights.final_norm)
        self._load_linear(0, HEAD, weights.head)

    def forward(
        self,
        groups: Sequence[Rows],
        with_logits: bool = True,
        layers: range | None = None,
        state: Tensor | None = None,
        queries: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Final hidden states `[num_rows, hidden]` of the model's dtype and logits `[num_rows, vocab] float32`.

        Keys and values of the rows go to their slots. A call over some of the `layers` carries on in `state`
        `[num_rows, hidden] float32`; hidden states and logits come with the last layer. `queries [num_layers_of_call,
        num_rows, num_heads, head_dim]` of the model's dtype are filled as they meet the keys. Raises ValueError.
        """
        layers = range(self.sizes.num_layers) if layers is None else layers
        num_rows = sum(len(group) for group in groups)
        if state is None:
            if len(layers) != self.sizes.num_layers:
                raise ValueError("found no state, expected one in a call over some of the layers")
            state = torch.empty(num_rows, self.sizes.hidden)
        is_last = layers.stop == self.sizes.num_layers
        hidden = torch.empty(num_rows, self.sizes.hidden, dtype=self.sizes.dtype) if is_last else None
        logits = torch.empty(num_rows, self.sizes.vocab) if is_last and with_logits else None
        self.run(groups, layers, state, layers.start == 0, hidden, logits, queries)
        return hidden, logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """The embeddings `[..., hidden]` of the model's dtype of tokens."""
        if isinstance(self.embedding, Tensor):
            return self.embedding[token_ids]
        return self.embedding.rows(token_ids.flatten()).dequantized().view(*token_ids.shape, self.sizes.hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone: hidden states `[num_rows, hidden]` to `[num_rows, vocab] float32`. Raises ValueError."""
        hidden = checked("hidden states", hidden, (len(hidden), self.sizes.hidden), self.sizes.dtype)
        logits = torch.empty(len(hidden), self.sizes.vocab)
        with self.team.lock:
            self._library.decoder_head(
                self.handle,
                self.team.handle,
                len(hidden),
                hidden.data_ptr(),
                logits.data_ptr(),
            )
        return logits


def native_attention(
    team: Team,
    groups: Sequence[Rows],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    view: AttentionView = SEES_ALL,
) -> Tensor:
    """Keep keys and values `[num_rows, num_kv_heads, head_dim]` in the layer's cache and attend to what rows may see.

    `query` and result `[num_rows, num_heads, head_dim]`, all of the caches' dtype. Raises ValueError.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if query.dtype not in ELEMENTS or head_dim not in HEAD_DIMS or num_heads % num_kv_heads:
        raise ValueError(f"found queries of {query.dtype} {list(query.shape)} for {num_kv_heads} heads of keys")
    query = checked("queries", query, (num_rows, num_heads, head_dim), query.dtype)
    key = checked("keys", key, (num_rows, num_kv_heads, head_dim), query.dtype)
    value = checked("values", value, (num_rows, num_kv_heads, head_dim), query.dtype)
    shape = LayerCacheShape(num_kv_heads, head_dim, query.dtype)
    table = RowTable.of(
        team.library, groups, [CachePlace.of([group.cache.layer(layer)], shape) for group in groups], 2**31 - 1
    )
    if table.num_rows != num_rows:
        raise ValueError(f"found {num_rows} queries for {table.num_rows} rows")
    output = torch.empty_like(query)
    sizes = CAttentionSizes(
        element=ELEMENTS[query.dtype], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
    )
    c_view, _sinks = _c_view(view, num_heads)
    tensors = (query, key, value, output)
    with team.lock:
        team.library.attend(
            team.handle,
            ctypes.byref(sizes),
            ctypes.byref(c_view),
            table.groups,
            table.num_groups,
            *(tensor.data_ptr() for tensor in tensors),
        )
        team.hold(list(groups))
    return output


def _check_ends(weights: DecoderWeights) -> None:
    """Raises ValueError for an embedding, a norm or a head that does not fit."""
    sizes = weights.sizes
    table = (sizes.vocab, sizes.hidden)
    ends: list[tuple[str, Weight | None, tuple[int, ...]]] = [
        ("head", weights.head.weight, table),
        ("bias of head", weights.head.bias, (sizes.vocab,)),
        ("embedding", weights.embedding, table),
        ("final_norm", weights.final_norm, (sizes.norm_width,)),
    ]
    check_weights(ends, sizes.dtype)
