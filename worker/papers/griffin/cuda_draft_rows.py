"""GRIFFIN's draft model on a GPU: a table goes up, one graph runs and ranks the rows, the candidates come down.

The table is the input of a forward in one buffer: its rows, their features' places, how to rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from swiftbatch.worker.caches.full_cache import CacheShape, FullKVCache
from swiftbatch.worker.caches.slot_arena import ArenaKVCache, KVArena
from swiftbatch.worker.drawing.cuda.buffers import SlotBuffers
from swiftbatch.worker.drawing.cuda.counts import update_counts
from swiftbatch.worker.drawing.cuda.cuda_drawing import TokenCounts
from swiftbatch.worker.drawing.cuda.draw_rows import DrawLayout, DrawRow, mask_rows
from swiftbatch.worker.drawing.cuda.ranked_tokens import Ranking, RankingBuffers
from swiftbatch.worker.drawing.cuda.row_words import needs_slot
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.cuda.upload import Download, Upload
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.papers.griffin.cuda_griffin import CudaGriffin, layout_of
from swiftbatch.worker.papers.griffin.draft_input import (
    NUM_ENTRIES,
    NUM_PLACES,
    Candidates,
    DraftRows,
    Features,
    Room,
    of_each,
    regressed_place,
    tables,
    wanted_rows,
)
from swiftbatch.worker.papers.griffin.griffin_weights import packed_weights
from swiftbatch.worker.papers.griffin.model import GriffinModel
from swiftbatch.worker.papers.griffin.native_griffin import GriffinWeights
from swiftbatch.worker.papers.griffin.torch_ranking import SPREAD
from swiftbatch.worker.target.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.target.forwards import Forwards

NOWHERE = -1  # as a feature's place


def cuda_rows(model: GriffinModel, forwards: Forwards, num_candidates: int) -> CudaRows:
    """Make rows for a target in a GPU's arena. Raises ValueError for sizes that the kernels do not take."""
    on_gpu = cast(CudaForwards, forwards)
    return CudaRows(packed_weights(model, on_gpu.vocab_size), on_gpu, num_candidates)


class CudaRows:
    """The draft model over all rows, `NUM_ROWS` at a time; a slot for each sequence that the target has one for."""

    def __init__(self, weights: GriffinWeights, forwards: CudaForwards, num_candidates: int) -> None:
        """Raises ValueError for sizes that the kernels do not take."""
        sizes, device, num_slots = weights.sizes, forwards.device, forwards.arena.num_slots
        self._num_candidates = num_candidates
        shape = CacheShape(1, sizes.num_kv_heads, sizes.head_dim, sizes.dtype, device)
        self._arena = KVArena(shape, num_slots, NUM_ENTRIES)
        self._features = torch.zeros(num_slots, NUM_PLACES, sizes.hidden, dtype=sizes.dtype, device=device)
        self._slots = SlotBuffers.empty(num_slots, NUM_ROWS, sizes.vocab, device)
        self._layout = GriffinLayout(layout_of(sizes, self._arena.buffer), DrawLayout(num_slots))
        table = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._upload = Upload(table)
        rows, places, self._draws = self._layout.parts(table)
        self._layout.fill(self._upload.buffer(), [], self._slots)
        self._upload.send()
        self._model = CudaGriffin(
            weights, forwards.surroundings, self._arena.buffer, self._features.flatten(0, 1),
            self._layout.rows.table(rows), places,
        )  # fmt: skip
        self._rank_into(triton.next_power_of_2(num_candidates))
        self._graph = forwards.capture(self._work, device)

    def new_room(self, sequence: Sequence) -> Room:
        return CudaRoom.of(sequence, self._arena.new_cache(NUM_ENTRIES), self._features)

    @torch.inference_mode()
    def run(self, parts: list[DraftRows]) -> list[list[Candidates]]:
        found: list[Candidates] = []
        for table in tables(parts, NUM_ROWS):
            self._layout.fill(self._upload.buffer(), table, self._slots)
            self._upload.send()
            self._graph.replay()
            if wanted := wanted_rows(table):
                found += self._candidates(wanted)
        return of_each(parts, found)

    def _rank_into(self, num_kept: int) -> None:
        """Make what ranks; the `num_kept` candidates of a row that it finds are at least those that are wanted."""
        words, ancestors, leaving, self._arriving, self._gone = self._layout.draws.parts(self._draws)
        out = torch.zeros(2 * NUM_ROWS * num_kept, dtype=torch.int32, device=self._draws.device)
        ids, confidences = out.view(2, NUM_ROWS, num_kept).unbind()
        buffers = RankingBuffers(
            self._model.logits, words, ancestors, self._slots, leaving, ids, confidences.view(torch.float32)
        )
        self._ranking = Ranking(buffers, SPREAD)
        self._download = Download(out)

    def _work(self) -> None:
        self._model.forward()
        update_counts(self._slots.counts, self._slots.output, self._arriving, self._gone)
        self._ranking.launch()

    def _candidates(self, wanted: list[int]) -> list[Candidates]:
        """Return the candidates of some rows; wait for them."""
        ids, confidences = self._download.wait().reshape(2, NUM_ROWS, -1)[:, wanted, : self._num_candidates]
        scores = confidences.copy().view(np.float32)
        pairs = zip(scores.tolist(), ids.tolist(), strict=True)
        return [[pair for pair in zip(*row, strict=True) if pair[0] > -np.inf] for row in pairs]


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
