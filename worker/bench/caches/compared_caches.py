"""The partial caches that tables compare, by the names that their arms use; user's engines have the summarised one."""

from __future__ import annotations

import functools
from typing import Any

import torch

from swiftbatch.worker.bench.caches.importance import ImportanceKVCache
from swiftbatch.worker.bench.caches.retrieval import HeavyHitterKVCache, RetrievalKVCache, StreamingKVCache
from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial import Entries, NewEntries, PartialCache, PartialCacheFactory, Queries
from swiftbatch.worker.caches.summary import SummaryKVCache
from swiftbatch.worker.drawing.sequence import Sequence

GROUP = 64  # positions that are rounded together; the newest, which fill no group yet, are exact
MOST_BITS = 16


class QuantizedKVCache(PartialCache):
    """All positions in `num_bits`, as a cache sees them that is compressed as a whole (KIVI, Liu et al. 2024).

    Keys are rounded by channel over a group of positions, values by position over all channels, between the least and
    the largest of each group. What is measured is what the rounding costs: entries lie in the model's own dtype here.
    """

    def __init__(
        self, shape: CacheShape, num_bits: int, sequence: Sequence, new_entries: NewEntries = Entries, /
    ) -> None:
        super().__init__(shape, sequence.max_length, new_entries)
        self._num_steps = (1 << min(num_bits, MOST_BITS)) - 1  # from the least number of a group to its largest
        self._num_rounded = 0  # positions

    def _take_in(self, full: FullKVCache, queries: Queries) -> None:
        self.entries.copy(full, slice(self._num_sequence_entries, full.length), self._num_sequence_entries)
        self._num_sequence_entries = full.length
        end = full.length // GROUP * GROUP
        for layer in range(self.shape.num_layers if end > self._num_rounded else 0):
            keys, values = (part[:, self._num_rounded : end] for part in self.layer(layer))
            groups = keys.unflatten(1, (-1, GROUP))  # [num_kv_heads, num_groups, GROUP, head_dim]
            keys.copy_(rounded(groups, 2, self._num_steps).flatten(1, 2))
            values.copy_(rounded(values, 2, self._num_steps))
        self._num_rounded = end


def rounded(numbers: torch.Tensor, dim: int, num_steps: int) -> torch.Tensor:
    """The nearest numbers, float32, of those that `num_steps` equal steps lead to from the least to the largest."""
    exact = numbers.float()
    least, largest = exact.amin(dim, keepdim=True), exact.amax(dim, keepdim=True)
    step = ((largest - least) / num_steps).clamp_min(torch.finfo(torch.float32).tiny)
    return least + ((exact - least) / step).round() * step


PARTIAL_CACHES: dict[str, PartialCacheFactory] = {
    "summary": SummaryKVCache,  # the most important chunks, and the others as one entry each
    "dynamic": ImportanceKVCache,  # the most important positions, new ones in place of the least important
    "static": functools.partial(ImportanceKVCache, is_static=True),  # the same, built once, behind the prompt
    "full": lambda shape, _, sequence, *room: ImportanceKVCache(shape, sequence.max_length, sequence, *room),  # all
    "retrieval": RetrievalKVCache,  # the chunks that the newest query attends to most
    "streaming": StreamingKVCache,  # the newest positions
    "h2o": HeavyHitterKVCache,  # half the newest, half those that had most attention so far
    "quantized": QuantizedKVCache,  # all, in as many bits as the budget says
    "topk": functools.partial(ImportanceKVCache, period=1),  # as dynamic, chosen before every draft
}


def with_cache(options: dict[str, Any]) -> dict[str, Any]:
    """An arm's options with its partial cache in place of the cache's name or of a chunk size."""
    if "chunk_size" in options:
        cache = functools.partial(RetrievalKVCache, chunk_size=options["chunk_size"])
        return {name: value for name, value in options.items() if name != "chunk_size"} | {"cache": cache}
    return options | {"cache": PARTIAL_CACHES[options["cache"]]} if "cache" in options else options
