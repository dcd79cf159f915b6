"""A long text's keys as drafts see them: codes of all, which are scanned, and moments of what is not read exactly."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from swiftbatch.worker.caches.huge_pages import ask_for_huge_pages
from swiftbatch.worker.kernels.instruction_sets import chosen_variant, load_library
from swiftbatch.worker.kernels.native import CAttentionSizes
from swiftbatch.worker.kernels.row_tables import CachePlace, LayerCacheShape
from swiftbatch.worker.kernels.scan_coding import CLOUD_CHUNKS, SCAN_CHUNK, flat_deviation, most_chunks
from swiftbatch.worker.kernels.team import ELEMENTS, shared_team

Layers = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of all layers, each `[num_kv_heads, capacity, head_dim]`."""


class CScannedKeys(ctypes.Structure):
    """`scanned_keys` of source/api.h."""

    _fields_ = (
        ("cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in ("codes", "means", "spreads", "moments")),
        *((name, ctypes.c_int32) for name in ("first", "num_chunks", "most_chunks", "most_clouds", "num_best")),
        ("flat_deviation", ctypes.c_float),
    )


class ScannedKeys:
    """Coded keys of one sequence's cache, from one position on, chunk by chunk as its positions are committed.

    Every query sees its `num_best` best keys exactly, by their codes of two bits a dimension. The others weigh
    what they would in a cloud of jointly normal keys and values, of which the part of the best keys is cut off.
    """

    def __init__(self, layers: Layers, first: int, length: int, num_best: int) -> None:
        """Make room for the keys of `layers` from position `first` up to `length`. Raises ValueError for others."""
        (keys, _), num_layers = layers[0], len(layers)
        num_kv_heads, _, head_dim = keys.shape
        self._team = shared_team(load_library(chosen_variant() or "portable"), torch.get_num_threads())
        self._layers, self._first = layers, first
        self._most_chunks = most_chunks(length - first)
        num_clouds = -(-self._most_chunks // CLOUD_CHUNKS)
        heads = (num_layers, num_kv_heads)
        self._codes = torch.empty(*heads, self._most_chunks * SCAN_CHUNK * head_dim // 4, dtype=torch.uint8)
        ask_for_huge_pages(self._codes)
        self._means = torch.zeros(*heads, self._most_chunks, head_dim)
        self._spreads = torch.zeros(*heads, head_dim)
        self._moments = torch.zeros(*heads, num_clouds, 2 * head_dim * (head_dim + 1))
        self._sizes = CAttentionSizes(
            element=ELEMENTS[keys.dtype], num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=0
        )
        place = CachePlace.of(layers, LayerCacheShape(num_kv_heads, head_dim, keys.dtype))
        self._struct = CScannedKeys(
            cache=place.address,
            layer_stride=place.layer_stride,
            value_stride=place.value_stride,
            head_stride=place.head_stride,
            **{name: getattr(self, f"_{name}").data_ptr() for name in ("codes", "means", "spreads", "moments")},
            first=first,
            num_chunks=0,
            most_chunks=self._most_chunks,
            most_clouds=num_clouds,
            num_best=num_best,
        )

    @property
    def address(self) -> int:
        """The address of the description that the kernels read."""
        return ctypes.addressof(self._struct)

    @property
    def end(self) -> int:
        """Position behind those that are scanned."""
        num_chunks: int = self._struct.num_chunks
        return self._first + num_chunks * SCAN_CHUNK

    def extend(self, length: int) -> None:
        """Take in all whole chunks in front of position `length`, which are in the cache."""
        while self.end + SCAN_CHUNK <= min(length, self._first + self._most_chunks * SCAN_CHUNK):
            self._add_chunk(self._struct.num_chunks)
            self._struct.num_chunks += 1
            self._struct.flat_deviation = flat_deviation(self._struct.num_best, self.end - self._first)

    def _add_chunk(self, chunk: int) -> None:
        with self._team.lock:
            sizes = ctypes.byref(self._sizes)
            self._team.library.scan_take_in(self._team.handle, sizes, self.address, len(self._layers), chunk)
            self._team.hold([self._layers, self._spreads, self._moments])  # what late helpers may still read
