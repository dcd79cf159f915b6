"""All positions in few bits, as a cache that is compressed as a whole sees them (KIVI, Liu et al. 2024, section 3).

Keys are rounded by channel over a group of positions, values by position over all channels, between the least and the
largest of each group. What is measured is what the rounding costs: entries lie in the model's own dtype here.
"""

from __future__ import annotations

import torch

from swiftbatch.worker.caches.full import CacheShape, FullKVCache
from swiftbatch.worker.caches.partial import Entries, NewEntries, PartialCache, Queries
from swiftbatch.worker.drawing.sequence import Sequence

GROUP = 64  # positions that are rounded together; the newest, which fill no group yet, are exact
MOST_BITS = 16


class QuantizedKVCache(PartialCache):
    """Every position of the sequence, with `num_bits` for each number."""

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
