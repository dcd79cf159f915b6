"""The memory that scanned texts take of a GPU, known before anything is allocated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from swiftbatch.worker.caches.memory.memory_plan import NO_DRAFTS, DraftMemory
from swiftbatch.worker.caches.partial import NUM_PINNED, capacity_for
from swiftbatch.worker.caches.scan.cache import MOST_ENTRIES, SHORTEST_SCANNED
from swiftbatch.worker.kernels.cuda.scan.scanned_texts import ScannedTexts, ScanScratch, TextSizes
from swiftbatch.worker.kernels.scan_coding import most_chunks

if TYPE_CHECKING:
    from swiftbatch.worker.caches.memory.model_sizes import ModelSizes

NOWHERE = torch.device("meta")


def scan_memory(sizes: ModelSizes, longest: int, num_best: int, num_splits: int) -> DraftMemory:
    """Count the memory of texts of up to `longest` positions, in each slot and once; none if no text is scanned."""
    if longest < SHORTEST_SCANNED:
        return NO_DRAFTS
    num_layers = sizes.bytes_per_position // (2 * sizes.num_kv_heads * sizes.head_dim * sizes.item_size)
    chunks = most_chunks(longest - NUM_PINNED)
    texts = TextSizes(num_layers, 1, sizes.num_kv_heads, sizes.head_dim, chunks, num_best, NUM_PINNED)
    capacity = capacity_for(min(MOST_ENTRIES, longest))
    slot_bytes = _bytes_of(ScannedTexts.empty(texts, NOWHERE).tensors()) + capacity * sizes.bytes_per_position
    scratch = ScanScratch.empty(texts, sizes.num_heads, num_splits, NOWHERE)
    return DraftMemory(_bytes_of(scratch.tensors()), slot_bytes)


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
