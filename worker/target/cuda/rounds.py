"""Forwards behind partial caches on a GPU: the target's decoder over their arena, as a graph of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch

from swiftbatch.worker.kernels.cuda.decoder import CudaDecoder
from swiftbatch.worker.kernels.cuda.graph import Capture
from swiftbatch.worker.kernels.cuda.upload import Upload
from swiftbatch.worker.target.cuda.partial_arena import PartialArena, SlotEntries
from swiftbatch.worker.target.partial_rows import PartialRows


class CudaRounds:
    """Rounds over one `PartialArena`. Captured at once: copies of other threads would disturb it later."""

    def __init__(self, decoder: CudaDecoder, arena: PartialArena, capture: Capture) -> None:
        """`decoder` is the target's, whose buffers serve both."""
        self._decoder = decoder.over(arena.buffer, arena.bias, arena.texts)
        self._table = Upload(self._decoder.table_buffer)
        self._graph = capture(self._decoder.forward, arena.shape.device)

    def check(self, groups: list[PartialRows]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and logits of all groups' rows, `[num_rows, hidden]` and `[num_rows, vocab] float32`."""
        num_rows, start = sum(map(len, groups)), 0
        hidden, logits = (
            each.new_empty(num_rows, each.shape[1]) for each in (self._decoder.hidden, self._decoder.logits)
        )
        for tile in _tiles(groups, self._decoder.layout.num_rows):
            self._decoder.layout.fill(self._table.buffer(), [(rows, entries_of(rows).slot) for rows in tile])
            self._table.send()
            self._graph.replay()
            part = slice(start, start + sum(map(len, tile)))
            hidden[part] = self._decoder.hidden[: part.stop - start]
            logits[part] = self._decoder.logits[: part.stop - start]
            start = part.stop
        return hidden, logits


def entries_of(rows: PartialRows) -> SlotEntries:
    """Return the entries in front of the rows."""
    return cast(SlotEntries, rows.cache.entries)


def _tiles(groups: list[PartialRows], tile_rows: int) -> Iterator[list[PartialRows]]:
    """Yield tiles of at most `tile_rows` rows, in order, whose prefixes end where the entries do."""
    tile: list[PartialRows] = []
    num_left = tile_rows
    for group in groups:
        rows = replace(group, boundary=group.first_entry)
        while len(rows) > num_left:
            yield [*tile, rows.part(0, num_left)] if num_left else tile
            rows = rows.part(num_left, len(rows))
            tile, num_left = [], tile_rows
        tile.append(rows)
        num_left -= len(rows)
    if tile:
        yield tile
