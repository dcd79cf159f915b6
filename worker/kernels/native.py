"""The compiled kernels' Python face: a dense decoder, and attention alone. What would crash them is a ValueError."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from worker.kernels.angles import AngleTable
from worker.kernels.library import load_library
from worker.kernels.rows import CachePlace, CacheShape, RowTable
from worker.kernels.weights import HEAD_DIMS, DecoderWeights, Linear, shapes

if TYPE_CHECKING:
    from worker.kernels.rows import Rows

ELEMENTS = {torch.bfloat16: 0, torch.float32: 1}
EMBEDDING, FINAL_NORM, HEAD = range(3)
LAYER_ROLES = {  # in the order of `weight_role` in source/api.h
    name: 3 + number
    for number, name in enumerate(
        ("input_norm", "query", "key", "value", "query_norm", "key_norm", "output", "mlp_norm", "gate", "up", "down")
    )
}


class CAttentionSizes(ctypes.Structure):
    """`attention_sizes` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", "num_heads", "num_kv_heads", "head_dim")),
        ("scale", ctypes.c_float),
    )


class CDecoderSizes(ctypes.Structure):
    """`decoder_sizes` of source/api.h."""

    COUNTS = ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim", "intermediate", "vocab")
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("element", *COUNTS)),
        ("epsilon", ctypes.c_float),
        ("scale", ctypes.c_float),
    )


class CForwardCall(ctypes.Structure):
    """`forward_call` of source/api.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "angles", "groups")),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_groups", "first_layer", "end_layer")),
        *((name, ctypes.c_void_p) for name in ("state", "hidden", "logits", "queries")),
    )


class Team:
    """The threads that compute: the caller, and helpers that start when there is work for them."""

    def __init__(self, library: ctypes.CDLL, num_threads: int) -> None:
        if num_threads < 1:
            raise ValueError(f"found {num_threads} threads, expected 1 or more")
        self.library = library
        self.lock = threading.Lock()  # one call at a time
        self.handle: int = library.team_new(num_threads)
        self._held: list[Any] = []
        self._close = weakref.finalize(self, library.team_free, self.handle)

    def hold(self, caches: Any) -> None:
        """Keep caches alive while a helper that came too late may still read them."""
        is_busy = self.library.team_is_busy(self.handle)
        self._held = [*self._held, caches] if is_busy else []


class NativeDecoder:
    """Weights packed for the kernels, and forwards over the rows of any number of sequences."""

    def __init__(self, weights: DecoderWeights, num_threads: int, variant: str) -> None:
        """Raises ValueError for weights that do not fit together, KernelError where the library does not load."""
        _check_weights(weights)
        self.sizes = weights.sizes
        self.team = Team(load_library(variant), num_threads)
        self._library = self.team.library
        self._shape = CacheShape(self.sizes.num_kv_heads, self.sizes.head_dim, self.sizes.dtype)
        self._angles = AngleTable(weights.rotary, self.sizes.dtype)
        self.embedding = weights.embedding.contiguous()  # the kernels read it where it is
        self._places: weakref.WeakKeyDictionary[Any, dict[range, CachePlace]] = weakref.WeakKeyDictionary()
        counts = {name: getattr(self.sizes, name) for name in CDecoderSizes.COUNTS}
        sizes = CDecoderSizes(
            element=ELEMENTS[self.sizes.dtype], epsilon=self.sizes.epsilon, scale=self.sizes.scale, **counts
        )
        self._handle: int = self._library.decoder_new(ctypes.byref(sizes))
        self._close = weakref.finalize(self, _free, self.team, self._handle)
        self._load(weights)

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
        if layers.step != 1 or not 0 <= layers.start < layers.stop <= self.sizes.num_layers:
            raise ValueError(f"found layers {layers}, expected some of {self.sizes.num_layers}")
        table = RowTable.of(
            self._library, groups, [self._place(group.cache, layers) for group in groups], self.sizes.vocab
        )
        self._check_queries(queries, len(layers), table.num_rows)
        state = self._state(state, table.num_rows, len(layers) == self.sizes.num_layers)
        is_last = layers.stop == self.sizes.num_layers
        hidden = torch.empty(table.num_rows, self.sizes.hidden, dtype=self.sizes.dtype) if is_last else None
        logits = torch.empty(table.num_rows, self.sizes.vocab) if is_last and with_logits else None
        with self.team.lock:
            call = CForwardCall(
                token_ids=table.token_ids.ctypes.data if layers.start == 0 else None,
                positions=table.positions.ctypes.data,
                angles=self._angles.address(int(table.positions.max())),
                groups=ctypes.addressof(table.groups),
                num_rows=table.num_rows,
                num_groups=table.num_groups,
                first_layer=layers.start,
                end_layer=layers.stop,
                state=state.data_ptr(),
                hidden=None if hidden is None else hidden.data_ptr(),
                logits=None if logits is None else logits.data_ptr(),
                queries=None if queries is None else queries.data_ptr(),
            )
            self._library.decoder_forward(self._handle, self.team.handle, ctypes.byref(call))
            self.team.hold([group.cache for group in groups])
        return hidden, logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The head alone: hidden states `[num_rows, hidden]` to `[num_rows, vocab] float32`. Raises ValueError."""
        hidden = _checked("hidden states", hidden, (len(hidden), self.sizes.hidden), self.sizes.dtype)
        logits = torch.empty(len(hidden), self.sizes.vocab)
        with self.team.lock:
            self._library.decoder_head(
                self._handle,
                self.team.handle,
                len(hidden),
                hidden.data_ptr(),
                logits.data_ptr(),
            )
        return logits

    def _place(self, cache: Any, layers: range) -> CachePlace:
        if cache.comes_by_layer:
            return CachePlace.of([cache.layer(layer) for layer in layers], self._shape)
        known = self._places.setdefault(cache, {})
        if layers not in known:
            known[layers] = CachePlace.of([cache.layer(layer) for layer in layers], self._shape)
        return known[layers]

    def _state(self, state: Tensor | None, num_rows: int, is_whole: bool) -> Tensor:
        shape = (num_rows, self.sizes.hidden)
        if state is None:
            if not is_whole:
                raise ValueError("found no state, expected one in a call over some of the layers")
            return torch.empty(shape)
        if state.shape != shape or state.dtype != torch.float32 or not state.is_contiguous():
            raise ValueError(f"found a state of {state.dtype} {list(state.shape)}, expected float32 {list(shape)}")
        return state

    def _check_queries(self, queries: Tensor | None, num_layers: int, num_rows: int) -> None:
        shape = (num_layers, num_rows, self.sizes.num_heads, self.sizes.head_dim)
        if queries is not None:
            _checked("room for queries", queries, shape, self.sizes.dtype)
            if not queries.is_contiguous():
                raise ValueError(f"found room for queries with strides {queries.stride()}, expected it side by side")

    def _load(self, weights: DecoderWeights) -> None:
        self._load_one(0, EMBEDDING, self.embedding, None)
        self._load_one(0, FINAL_NORM, weights.final_norm, None)
        self._load_one(0, HEAD, weights.head.weight, weights.head.bias)
        for number, layer in enumerate(weights.layers):
            for name, role in LAYER_ROLES.items():
                part = getattr(layer, name)
                if isinstance(part, Linear):
                    self._load_one(number, role, part.weight, part.bias)
                elif part is not None:
                    self._load_one(number, role, part, None)

    def _load_one(self, layer: int, role: int, weight: Tensor, bias: Tensor | None) -> None:
        weight, bias = weight.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        self._library.decoder_load(
            self._handle, layer, role, weight.data_ptr(), None if bias is None else bias.data_ptr()
        )


def native_attention(
    team: Team,
    groups: Sequence[Rows],
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
) -> Tensor:
    """Keep keys and values `[num_rows, num_kv_heads, head_dim]` in the layer's cache and attend to what rows may see.

    `query` and result `[num_rows, num_heads, head_dim]`, all of the caches' dtype. Raises ValueError.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    if query.dtype not in ELEMENTS or head_dim not in HEAD_DIMS or num_heads % num_kv_heads:
        raise ValueError(f"found queries of {query.dtype} {list(query.shape)} for {num_kv_heads} heads of keys")
    query = _checked("queries", query, (num_rows, num_heads, head_dim), query.dtype)
    key = _checked("keys", key, (num_rows, num_kv_heads, head_dim), query.dtype)
    value = _checked("values", value, (num_rows, num_kv_heads, head_dim), query.dtype)
    shape = CacheShape(num_kv_heads, head_dim, query.dtype)
    table = RowTable.of(
        team.library, groups, [CachePlace.of([group.cache.layer(layer)], shape) for group in groups], 2**31 - 1
    )
    if table.num_rows != num_rows:
        raise ValueError(f"found {num_rows} queries for {table.num_rows} rows")
    output = torch.empty_like(query)
    sizes = CAttentionSizes(
        element=ELEMENTS[query.dtype], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=scale
    )
    tensors = (query, key, value, output)
    with team.lock:
        team.library.attend(
            team.handle,
            ctypes.byref(sizes),
            table.groups,
            table.num_groups,
            *(tensor.data_ptr() for tensor in tensors),
        )
        team.hold([group.cache for group in groups])
    return output


def _free(team: Team, handle: int) -> None:
    team._close()  # no helper may look at the weights any more
    team.library.decoder_free(handle)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
        found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        raise ValueError(f"found {name} of {found}, expected {dtype} {list(shape)} on cpu")
    return tensor.detach().contiguous()


def _check_weights(weights: DecoderWeights) -> None:
    sizes = weights.sizes
    table = (sizes.vocab, sizes.hidden)
    every = [("head", weights.head.weight, table), ("bias of head", weights.head.bias, (sizes.vocab,))]
    every += [("embedding", weights.embedding, table), ("final_norm", weights.final_norm, (sizes.hidden,))]
    if len(weights.layers) != sizes.num_layers:
        raise ValueError(f"found {len(weights.layers)} layers, expected {sizes.num_layers}")
    for layer in weights.layers:
        every += shapes(sizes, layer)
    for name, tensor, shape in every:
        if tensor is not None:
            _checked(name, tensor, shape, sizes.dtype)
