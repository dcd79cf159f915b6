"""Scanned KV cache: each query reads the first and newest positions and its own best ones, and an estimate of the rest.

The rest is estimated from the moments of keys and values (`worker/kernels/source/scan.c`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from swiftbatch.worker.kernels.kernel_sizes import KV_SCALE_BYTES
from swiftbatch.worker.kernels.kv_codes import CLUSTER_CHUNKS, KV_CODES, SCAN_CHUNK, flat_deviation, most_chunks
from swiftbatch.worker.kernels.native_decoder import CAttentionSizes
from swiftbatch.worker.kernels.native_library import chosen_variant, load_library, shared_team
from swiftbatch.worker.kernels.native_weights import ELEMENTS
from swiftbatch.worker.kernels.row_tables import CachePlace, LayerCacheShape
from swiftbatch.worker.kv.cache_rows import CacheShape, ask_for_huge_pages
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED, Entries, NewEntries, Queries, SparseCache
from swiftbatch.worker.sampling.sequence import Sequence

NUM_RECENT = 256  # newest positions are never scanned
MOST_ENTRIES = SHORTEST_SCANNED = NUM_PINNED + NUM_RECENT + SCAN_CHUNK
Layers = Items[tuple[Tensor, Tensor]]
"""Keys and values of all layers, each `[num_kv_heads, capacity, row_width]`."""


class ScanKVCache(SparseCache):
    """Pinned positions and those after the last whole chunk; the chunks between them are scanned."""

    def __init__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        super().__init__(shape, min(MOST_ENTRIES, sequence.max_length), new_entries)
        self._budget, self._max_length = budget, sequence.max_length
        self._scannable: ScannedKeys | None = None
        self._scanned_to = NUM_PINNED  # scanned keys replaced entries up to here
        self._num_fed = 0

    def catch_up(self, full: FullKVCache, num_chunks: int) -> bool:
        length, keys = full.length - NUM_RECENT, self._keys_of(full)
        keys.extend(min(length, keys.end + num_chunks * SCAN_CHUNK))
        return keys.end + SCAN_CHUNK > length

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        if self._num_fed < NUM_PINNED:
            self._copy(full, min(NUM_PINNED, full.length))
        keys = self._keys_of(full)
        keys.extend(full.length - NUM_RECENT)
        if keys.end > self._scanned_to:  # drops entries that are now scanned
            self.scanned, self._scanned_to = keys, keys.end
            self._num_sequence_entries, self._num_fed = NUM_PINNED, keys.end
        self._copy(full, full.length)

    def _keys_of(self, full: FullKVCache) -> ScannedKeys:
        if self._scannable is None:
            layers = [full.stored(layer) for layer in range(self.shape.num_layers)]
            self._scannable = ScannedKeys(layers, NUM_PINNED, self._max_length, self._budget, self.shape.dtype)
        return self._scannable

    def _copy(self, full: FullKVCache, end: int) -> None:
        self.entries.copy(full, slice(self._num_fed, end), self._num_sequence_entries)
        self._num_sequence_entries += end - self._num_fed
        self._num_fed = end


class CScannedKeys(ctypes.Structure):
    _fields_ = (
        ("cache", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_stride", "value_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in ("codes", "means", "spreads", "moments")),
        *((name, ctypes.c_int32) for name in ("first", "num_chunks", "most_chunks", "most_clusters", "num_best")),
        ("flat_deviation", ctypes.c_float),
        ("kv_code", ctypes.c_int32),
    )


class ScannedKeys:
    """Coded keys of one sequence's cache.

    Codes of two bits per dimension find each query's `num_best` best keys, which are read exactly. The contribution of
    the others is estimated as if keys and values were jointly normal, without the upper tail.
    """

    def __init__(
        self, layers: Layers, first: int, length: int, num_best: int, dtype: torch.dtype | None = None
    ) -> None:
        """Make room for `length` positions. Raises ValueError for layers that do not fit together."""
        (keys, _), num_layers = layers[0], len(layers)
        num_kv_heads, head_dim = len(keys), keys.shape[-1] - (KV_SCALE_BYTES if keys.dtype in KV_CODES else 0)
        self._team = shared_team(load_library(chosen_variant() or "portable"), torch.get_num_threads())
        self._layers, self._first = layers, first
        self._most_chunks = most_chunks(length - first)
        num_clusters = -(-self._most_chunks // CLUSTER_CHUNKS)
        heads = (num_layers, num_kv_heads)
        self._codes = torch.empty(*heads, self._most_chunks * SCAN_CHUNK * head_dim // 4, dtype=torch.uint8)
        ask_for_huge_pages(self._codes)
        self._means = torch.zeros(*heads, self._most_chunks, head_dim)
        self._spreads = torch.zeros(*heads, head_dim)
        self._moments = torch.zeros(*heads, num_clusters, 2 * head_dim * (head_dim + 1))
        self._sizes = CAttentionSizes(
            element=ELEMENTS[dtype or keys.dtype],
            num_heads=num_kv_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=0,
        )
        place = CachePlace.of(layers, LayerCacheShape(num_kv_heads, head_dim, dtype or keys.dtype))
        self._struct = CScannedKeys(
            cache=place.address,
            layer_stride=place.layer_stride,
            value_stride=place.value_stride,
            head_stride=place.head_stride,
            **{name: getattr(self, f"_{name}").data_ptr() for name in ("codes", "means", "spreads", "moments")},
            first=first,
            num_chunks=0,
            most_chunks=self._most_chunks,
            most_clusters=num_clusters,
            num_best=num_best,
            kv_code=place.kv_code,
        )

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    @property
    def end(self) -> int:
        num_chunks: int = self._struct.num_chunks
        return self._first + num_chunks * SCAN_CHUNK

    def extend(self, length: int) -> None:
        """Encode every complete chunk that ends at or before position `length`; the cache must hold these positions."""
        while self.end + SCAN_CHUNK <= min(length, self._first + self._most_chunks * SCAN_CHUNK):
            self._add_chunk(self._struct.num_chunks)
            self._struct.num_chunks += 1
            self._struct.flat_deviation = flat_deviation(self._struct.num_best, self.end - self._first)

    def _add_chunk(self, chunk: int) -> None:
        with self._team.lock:
            sizes = ctypes.byref(self._sizes)
            self._team.library.scan_take_in(self._team.handle, sizes, self.address, len(self._layers), chunk)
            self._team.hold([self._layers, self._spreads, self._moments])  # late helper threads may still read these
