"""The input of a draft model's forward on a GPU, in one buffer: its rows, their features' places, how to rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.worker.caches.arena import ArenaKVCache
from swiftbatch.worker.caches.full import FullKVCache
from swiftbatch.worker.drawing.cuda.cuda_drawing import TokenCounts
from swiftbatch.worker.drawing.cuda.draw_rows import DrawLayout, DrawRow, mask_rows
from swiftbatch.worker.drawing.cuda.row_words import needs_slot
from swiftbatch.worker.drawing.cuda.slots import SlotBuffers
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.cuda.cuda_row_table import NUM_ROWS, TableLayout
from swiftbatch.worker.papers.griffin.features import NUM_PLACES, Features, regressed_place
from swiftbatch.worker.papers.griffin.level import DraftRows, Room

NOWHERE = -1  # as a feature's place


@dataclass(frozen=True)
class CudaRoom(Room):
    """A room in a slot."""

    counts: TokenCounts  # token counts of the sequence's penalty window

    @classmethod
    def of(cls, sequence: Sequence, cache: ArenaKVCache, features: torch.Tensor) -> CudaRoom:
        """The slot is the cache's in all buffers; `features [num_slots, NUM_PLACES, hidden]`."""
        return cls(sequence, cache, Features(features[cache.slot]), TokenCounts(sequence, cache.slot))


def slot_of(cache: FullKVCache) -> int:
    """A room's slot in the buffers."""
    return cast(ArenaKVCache, cache).slot


@dataclass(frozen=True)
class GriffinLayout:
    """The layout of rows, places and draws in a buffer of int32."""

    rows: TableLayout
    draws: DrawLayout

    @property
    def size(self) -> int:
        return self.rows.size + 2 * NUM_ROWS + self.draws.size

    def parts(self, buffer: Any) -> tuple[Any, Any, Any]:
        """Return views of a tensor or an array: rows `[rows.size]`, places `[NUM_ROWS, 2]`, draws `[draws.size]`."""
        start = self.rows.size
        end = start + 2 * NUM_ROWS
        return buffer[:start], buffer[start:end].reshape(NUM_ROWS, 2), buffer[end:]

    def fill(self, buffer: NDArray[np.int32], parts: list[DraftRows], slots: SlotBuffers) -> None:
        """Fill in at most `NUM_ROWS` rows. `slots` are the draft model's, on the device: what is masked goes there.

        Raises ValueError for rows that do not fit the layout.
        """
        rows, places, draws = self.parts(buffer)
        self.rows.fill(rows, [(part.rows, slot_of(part.room.cache)) for part in parts])
        places[:] = 0, NOWHERE
        ranked: list[DrawRow | None] = []
        news: dict[int, tuple[Any, Any]] = {}
        for part in parts:
            slot, start = slot_of(part.room.cache), len(ranked)
            places[start : start + len(part), 0] = np.array(part.places) + slot * NUM_PLACES
            ranked += [None] * part.num_known
            for row, path in enumerate(part.paths, part.first):
                places[len(ranked), 1] = slot * NUM_PLACES + regressed_place(row)
                ranked.append(DrawRow(part.room.sequence, slot, path))
            if part.paths and needs_slot(part.room.sequence.sampling):
                news[slot] = cast(CudaRoom, part.room).counts.news(slots)
        self.draws.fill(draws, ranked, news)
        mask_rows(slots, ranked)
