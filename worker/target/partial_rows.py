"""Rows of a forward that attend to a partial cache: its entries, and behind them a draft tree. They steer drafts only.

Rows know their positions beside their entries, which are fewer. The prefix is all that the cache holds, filled up to
whole blocks with entries that a bias leaves out; a row's tail is the root, the row's ancestors and itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from swiftbatch.worker.caches.partial_cache import PartialCache, Scanned
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.kernels.kernel_sizes import BLOCK
from swiftbatch.worker.target.tiles import tails


@dataclass(frozen=True)
class PartialRows:
    """The newest token of a chain, row 0, and a tree below it, behind everything that a partial cache holds."""

    cache: PartialCache
    token_ids: list[int]  # [num_rows]
    positions: list[int]  # [num_rows] absolute ones, from the sequence's `first_angle` on
    first_entry: int  # cache entry of the first row; the others follow, and all entries before it are seen
    boundary: int  # that entry, rounded up to whole blocks
    tail_entries: np.ndarray  # [num_rows, BLOCK] cache entries of the root, the ancestors and the row itself
    tail_lengths: list[int]  # [num_rows] how many of them are real
    biases: np.ndarray | None  # [boundary] float32, added to the scores of entries; None where all would be 0
    scanned: Scanned | None  # what is seen beside them
    is_partial: ClassVar[bool] = True

    def __len__(self) -> int:
        return len(self.token_ids)

    def part(self, start: int, end: int) -> PartialRows:
        """Rows `start` to `end`, for a forward that has no room for all."""
        return replace(
            self,
            token_ids=self.token_ids[start:end],
            positions=self.positions[start:end],
            first_entry=self.first_entry + start,
            tail_entries=self.tail_entries[start:end],
            tail_lengths=self.tail_lengths[start:end],
        )


def partial_rows(cache: PartialCache, token_id: int, position: int, tree: DraftTree) -> PartialRows:
    """Rows of a token at an absolute position and of the tree below it, whose depth is at most `BLOCK - 1`."""
    first_entry = cache.num_entries
    boundary = -(-first_entry // BLOCK) * BLOCK
    entries, lengths = tails([first_entry], [first_entry], [tree])
    positions = [cache.first_angle + position + length - 1 for length in lengths]
    biases = _biases(cache, boundary)
    token_ids, scanned = [token_id, *tree.token_ids], cache.scanned
    return PartialRows(cache, token_ids, positions, first_entry, boundary, entries, lengths, biases, scanned)


def row_ahead(cache: PartialCache, token_id: int, position: int) -> PartialRows:
    """The row of a token alone; in its tail, not seen yet, the entries of those that are to be drawn behind it."""
    row = partial_rows(cache, token_id, position, DraftTree())
    return replace(row, tail_entries=row.first_entry + np.arange(BLOCK)[None])


def _biases(cache: PartialCache, boundary: int) -> np.ndarray | None:
    if cache.bias is None and cache.num_entries == boundary:
        return None
    biases = np.zeros(boundary, dtype=np.float32)
    if cache.bias is not None:
        biases[: len(cache.bias)] = cache.bias
    biases[cache.num_entries :] = -np.inf
    return biases
