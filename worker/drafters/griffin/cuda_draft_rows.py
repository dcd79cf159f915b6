"""A draft model on a GPU: one graph runs a table of rows and ranks their candidates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import triton
from numpy.typing import NDArray

from swiftbatch.worker.drafters.griffin.draft_input import (
    NUM_ENTRIES,
    SPREAD,
    Candidates,
    DraftRows,
    Features,
    Room,
    of_each,
    regressed_place,
    tables,
    wanted_rows,
)
from swiftbatch.worker.forward.cuda.cuda_forwards import CudaForwards
from swiftbatch.worker.kernels.cuda.cuda_graph import Download, Upload
from swiftbatch.worker.kernels.cuda.cuda_row_table import TableLayout
from swiftbatch.worker.kernels.kernel_sizes import NUM_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.slot_arena import KVArena
from swiftbatch.worker.sampling.cuda.cuda_sampler import TokenCounts
from swiftbatch.worker.sampling.cuda.logits_kernels import update_counts
from swiftbatch.worker.sampling.cuda.sampling_rows import (
    SamplingRow,
    SamplingRowLayout,
    SlotBuffers,
    mask_rows,
    needs_slot,
)
from swiftbatch.worker.sampling.cuda.top_candidates import Ranking, RankingBuffers
from swiftbatch.worker.sampling.sequence import Sequence

NOWHERE = -1  # no place for a feature


class CudaDraftModel(Protocol):
    """A draft model with the target's head as CUDA kernels, over fixed buffers."""

    layout: TableLayout  # layout of its rows

    @property
    def logits(self) -> torch.Tensor:
        """Return those of the newest forward, `[NUM_ROWS, vocab] float32`."""

    def read_from(self, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Read the rows of every forward from a table `[layout.size] int32`.

        `places [NUM_ROWS, 2] int32`: indices of a row's input feature and of its regressed feature, or -1 for none.
        """

    def forward(self) -> None:
        """Run the rows: write the arena, the features and `logits`."""


class CudaRows:
    """A draft model over `NUM_ROWS` rows at a time, with one slot per target slot."""

    def __init__(
        self,
        model: CudaDraftModel,
        arena: KVArena,
        features: torch.Tensor,
        forwards: CudaForwards,
        num_candidates: int,
    ) -> None:
        """Use slots of `arena` and of `features [num_slots, num_places, hidden]` as rooms."""
        device, num_slots = forwards.device, arena.num_slots
        self._model, self._arena, self._features = model, arena, features
        self._num_candidates = num_candidates
        self._slots = SlotBuffers.empty(num_slots, NUM_ROWS, forwards.vocab_size, device)
        self._layout = DraftLayout(model.layout, SamplingRowLayout(num_slots), features.shape[1])
        table = torch.zeros(self._layout.size, dtype=torch.int32, device=device)
        self._upload = Upload(table)
        rows, places, self._draws = self._layout.parts(table)
        self._layout.fill(self._upload.buffer(), [], self._slots)
        self._upload.send()
        model.read_from(rows, places)
        self._rank_into(triton.next_power_of_2(num_candidates))
        self._graph = forwards.capture(self._work, device)

    def new_room(self, sequence: Sequence, num_entries: int = NUM_ENTRIES) -> Room:
        return CudaRoom.of(sequence, self._arena.new_cache(min(num_entries, self._arena.longest_job)), self._features)

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
        ids, confidences = self._download.wait().reshape(2, NUM_ROWS, -1)[:, wanted, : self._num_candidates]
        scores = confidences.copy().view(np.float32)
        pairs = zip(scores.tolist(), ids.tolist(), strict=True)
        return [[pair for pair in zip(*row, strict=True) if pair[0] > -np.inf] for row in pairs]


@dataclass(frozen=True)
class CudaRoom(Room):
    counts: TokenCounts  # token counts of the sequence's penalty window

    @classmethod
    def of(cls, sequence: Sequence, cache: FullKVCache, features: torch.Tensor) -> CudaRoom:
        """Use the cache's slot in `features [num_slots, num_places, hidden]`."""
        return cls(sequence, cache, Features(features[cache.slot]), TokenCounts(sequence, cache.slot))


@dataclass(frozen=True)
class DraftLayout:
    rows: TableLayout
    draws: SamplingRowLayout
    num_places: int  # places per slot's features

    @property
    def size(self) -> int:
        return self.rows.size + 2 * NUM_ROWS + self.draws.size

    def parts(self, buffer: Any) -> tuple[Any, Any, Any]:
        """Return views of a tensor or an array: rows `[rows.size]`, places `[NUM_ROWS, 2]`, draws `[draws.size]`."""
        start = self.rows.size
        end = start + 2 * NUM_ROWS
        return buffer[:start], buffer[start:end].reshape(NUM_ROWS, 2), buffer[end:]

    def fill(self, buffer: NDArray[np.int32], parts: list[DraftRows], slots: SlotBuffers) -> None:
        """Write at most `NUM_ROWS` rows to `buffer`, and their masks to `slots`, the draft model's device buffers.

        Raises ValueError if the parts have more rows, or values that the layout does not allow.
        """
        rows, places, draws = self.parts(buffer)
        self.rows.fill(rows, [(part.rows, part.room.cache.slot) for part in parts])
        places[:] = 0, NOWHERE
        ranked: list[SamplingRow | None] = []
        news: dict[int, tuple[Any, Any]] = {}
        for part in parts:
            slot, start = part.room.cache.slot, len(ranked)
            places[start : start + len(part), 0] = np.array(part.places) + slot * self.num_places
            ranked += [None] * part.num_known
            for row, path in enumerate(part.paths, part.first):
                places[len(ranked), 1] = slot * self.num_places + regressed_place(row)
                ranked.append(SamplingRow(part.room.sequence, slot, path))
            if part.paths and needs_slot(part.room.sequence.sampling):
                news[slot] = cast(CudaRoom, part.room).counts.news(slots)
        self.draws.fill(draws, ranked, news)
        mask_rows(slots, ranked)
