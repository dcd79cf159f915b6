"""Coded keys of long texts in a GPU's slots, as in `ScannedKeys`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from swiftbatch.worker.kernels.cuda.scanned_texts import ScannedTexts, ScanScratch, TextSizes
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kernels.kv_codes import (
    CLUSTER_CHUNKS,
    SCAN_CHUNK,
    add_to_cluster,
    centred,
    codes_of,
    flat_deviation,
    most_chunks,
)
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.gpu_memory_plan import NO_DRAFTS, DraftMemory
from swiftbatch.worker.kv.scan_cache import MOST_ENTRIES, SHORTEST_SCANNED
from swiftbatch.worker.kv.sparse_cache import NUM_PINNED, capacity_for

if TYPE_CHECKING:
    from swiftbatch.worker.kv.model_sizes import ModelSizes

NOWHERE = torch.device("meta")


class SlotKeys:
    """Coded keys of one sequence's cache in an arena."""

    def __init__(self, full: FullKVCache, texts: ScannedTexts, slot: int) -> None:
        self._full, self._texts, self._slot = full, texts, slot
        self._num_chunks = 0
        texts.addresses[:, slot] = torch.tensor([layer[0].data_ptr() for layer in full.rows.buffer])
        texts.full_slots[slot].fill_(full.slot)
        texts.num_chunks[slot].fill_(0)

    @property
    def end(self) -> int:
        return self._texts.sizes.first + self._num_chunks * SCAN_CHUNK

    def extend(self, length: int) -> None:
        """Encode every complete chunk that ends at or before position `length`; the cache must hold these positions."""
        sizes = self._texts.sizes
        while self.end + SCAN_CHUNK <= length and self._num_chunks < sizes.most_chunks:
            for layer in range(sizes.num_layers):  # keeps temporary memory small
                self._add_chunk(layer)
            self._num_chunks += 1
            self._texts.num_chunks[self._slot].fill_(self._num_chunks)
            flatness = flat_deviation(sizes.num_best, self._num_chunks * SCAN_CHUNK)
            self._texts.flat_deviations[self._slot].fill_(flatness)

    def _add_chunk(self, layer: int) -> None:
        texts, slot, chunk = self._texts, self._slot, self._num_chunks
        positions = slice(self.end, self.end + SCAN_CHUNK)
        device = texts.codes.device
        kept = (part.to(device) for part in self._full.stored_between(layer, positions))
        parts = (self._full.shape.numbers(rows) for rows in kept)
        (keys, mean_keys), (values, mean_values) = map(centred, parts)
        texts.means[layer, slot, :, chunk] = mean_keys
        if chunk == 0:
            texts.spreads[layer, slot] = keys.abs().mean(dim=1)
        cloud = texts.moments[layer, slot, :, chunk // CLUSTER_CHUNKS]
        if chunk % CLUSTER_CHUNKS == 0:
            cloud.zero_()  # the slot may hold another sequence's
        add_to_cluster(cloud, chunk, keys, values, torch.cat([mean_keys, mean_values], dim=1))
        codes = codes_of(keys, texts.spreads[layer, slot])
        texts.codes[layer, slot, :, chunk * codes.shape[1] : (chunk + 1) * codes.shape[1]] = codes


def scan_memory(
    sizes: ModelSizes, longest: int, num_best: int, num_splits: int, num_rows: int = NUM_ROWS
) -> DraftMemory:
    """Return the memory for scanned texts of up to `longest` positions."""
    if longest < SHORTEST_SCANNED:
        return NO_DRAFTS
    num_layers = sizes.bytes_per_position // (2 * sizes.num_kv_heads * sizes.head_dim * sizes.item_size)
    chunks = most_chunks(longest - NUM_PINNED)
    texts = TextSizes(num_layers, 1, sizes.num_kv_heads, sizes.head_dim, chunks, num_best, NUM_PINNED)
    capacity = capacity_for(min(MOST_ENTRIES, longest))
    slot_bytes = _bytes_of(ScannedTexts.empty(texts, NOWHERE).tensors()) + capacity * sizes.bytes_per_position
    scratch = ScanScratch.empty(texts, sizes.num_heads, num_splits, NOWHERE, num_rows)
    return DraftMemory(_bytes_of(scratch.tensors()), slot_bytes)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
