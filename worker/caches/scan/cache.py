"""Scanned key-value cache: every query sees the first and newest positions and its own best others, the rest in sum.

Which positions matter changes with every token. Whatever is chosen once for many tokens misses them, and where
attention is flat no choice of few is enough. Here all keys are scanned by short codes for each query, the best are read
from the full cache, and what the others bring follows from their moments (`worker/kernels/source/scan.c`).
"""

from __future__ import annotations

from swiftbatch.worker.caches.entries import Entries, Keys, NewEntries
from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial import NUM_PINNED, PartialCache, Queries
from swiftbatch.worker.caches.scan.keys import ScannedKeys
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.scan_coding import SCAN_CHUNK

NUM_RECENT = 256  # newest positions that are never scanned
MOST_ENTRIES = SHORTEST_SCANNED = NUM_PINNED + NUM_RECENT + SCAN_CHUNK


class ScanKVCache(PartialCache):
    """Pinned positions and all behind the last whole chunk; the chunks between them are scanned."""

    def __init__(
        self, shape: CacheShape, budget: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        """`budget` is the number of positions that each query reads of those that are scanned."""
        super().__init__(shape, min(MOST_ENTRIES, sequence.max_length), new_entries)
        self._budget, self._max_length = budget, sequence.max_length
        self.entries.expect_keys(NUM_PINNED, sequence.max_length - NUM_PINNED, budget)
        self._scannable: Keys | None = None
        self._scanned_to = NUM_PINNED  # as the entries know it
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
        if keys.end > self._scanned_to:  # what is scanned from now on leaves the entries
            self._scanned_to = keys.end
            self.scanned = keys if isinstance(keys, ScannedKeys) else None  # a GPU's kernels know their slots
            self._num_sequence_entries, self._num_fed = NUM_PINNED, keys.end
        self._copy(full, full.length)

    def _keys_of(self, full: FullKVCache) -> Keys:
        self._scannable = self._scannable or self.entries.new_keys(full) or self._own_keys(full)
        return self._scannable

    def _own_keys(self, full: FullKVCache) -> ScannedKeys:
        layers = [full.stored(layer) for layer in range(self.shape.num_layers)]
        return ScannedKeys(layers, NUM_PINNED, self._max_length, self._budget)

    def _copy(self, full: FullKVCache, end: int) -> None:
        """Append the positions that are not there yet, up to `end`."""
        self.entries.copy(full, slice(self._num_fed, end), self._num_sequence_entries)
        self._num_sequence_entries += end - self._num_fed
        self._num_fed = end
