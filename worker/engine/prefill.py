"""Prefills caches with known tokens: prompts, and outputs that a resume replays.

Before a step, tiles of one sequence are prefilled for a bounded time. If all forwards have the same number of rows, as
on a GPU, known tokens also fill the unused rows of a step's forward.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.drafters.drafter_interface import Drafter, ReadRows
from swiftbatch.worker.engine.prefix_cache import PrefixSharing
from swiftbatch.worker.engine.slot import Slot
from swiftbatch.worker.forward.forward_interface import MOST_READ
from swiftbatch.worker.forward.target_model import StepOutputs, TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, known_rows
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.batch_sampler import BatchSampler

PREFILL_SECONDS = 0.2  # per sequence and step


@dataclass(frozen=True)
class PrefillChunk:
    """Known tokens in a forward of other sequences."""

    slot: Slot
    rows: list[SequenceRows]  # the rows behind the cached ones; one part per block of positions
    num_rows: int


class Prefiller:
    """Prefills all tokens of sequences except each sequence's last token."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        drawing: BatchSampler,
        sharing: PrefixSharing,
        counters: EngineCounters,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._batch_sampler = drawing
        self._sharing = sharing
        self._counters = counters
        self._rows_per_forward = target.forwards.rows_per_forward

    def prefill_ahead(self, slots: list[Slot]) -> None:
        """Prefill before a step for as long as decoding may wait; on a GPU, run one forward if nothing is decoding."""
        for slot in slots:
            if slot.num_to_prefill and not self._sharing.waits(slot):
                self._counters.num_copied_tokens += self._sharing.take_over(slot)
                if self._rows_per_forward == 1:
                    self._prefill_slot(slot)
        if self._rows_per_forward > 1 and slots and all(slot.num_to_prefill for slot in slots):
            prefill_chunks = self.prefill_chunks(slots, 0, 0)
            self.take(
                prefill_chunks,
                self._target.verify([rows for prefill_chunk in prefill_chunks for rows in prefill_chunk.rows]),
            )

    def prefill_chunks(self, slots: list[Slot], num_rows: int, num_decoding: int) -> list[PrefillChunk]:
        """Choose which of `slots` are prefilled beside `num_rows` rows of `num_decoding` sequences, with how many rows.

        The chunks get one more forward if waiting would cost a prefilling sequence more than all decoding ones.
        """
        if self._rows_per_forward == 1:
            return []
        num_free = -num_rows % self._rows_per_forward
        if num_free * (1 + num_decoding) < self._rows_per_forward:
            num_free += self._rows_per_forward
        prefill_chunks = []
        for slot in slots:
            if not (num_free and slot.num_to_prefill) or self._sharing.waits(slot):
                continue
            # the sequence that this slot waited for may have ended meanwhile
            self._counters.num_copied_tokens += self._sharing.take_over(slot)
            if num_read := slot.cache.num_readable(min(num_free, slot.num_to_prefill)):
                start = slot.cache.length
                token_ids = slot.sequence.token_ids[start : start + num_read].tolist()
                prefill_chunks.append(PrefillChunk(slot, known_rows(slot.cache, token_ids), num_read))
                num_free -= num_read
        return prefill_chunks

    def take(self, prefill_chunks: list[PrefillChunk], outputs: StepOutputs) -> None:
        """Commit the cache entries that a forward wrote for chunks; drafters learn from `outputs`."""
        if prefill_chunks and self._drafter.needs_top_k:
            self._drafter.learn(self._prefilled_rows(prefill_chunks, outputs))
        given = iter(outputs.hidden)
        for prefill_chunk in prefill_chunks:
            parts = [next(given) for _ in prefill_chunk.rows]
            if self._drafter.needs_hidden:
                self._drafter.read(prefill_chunk.slot.sequence, prefill_chunk.slot.cache.length, torch.cat(parts))
            prefill_chunk.slot.cache.advance(prefill_chunk.num_rows)
            self._counters.num_read_tokens += prefill_chunk.num_rows

    def _prefilled_rows(self, prefill_chunks: list[PrefillChunk], outputs: StepOutputs) -> ReadRows:
        ids, previous = [], []
        for prefill_chunk in prefill_chunks:
            positions = np.arange(
                prefill_chunk.slot.cache.length, prefill_chunk.slot.cache.length + prefill_chunk.num_rows
            )
            ids.append(prefill_chunk.slot.sequence.token_ids[positions])
            previous.append(prefill_chunk.slot.sequence.token_ids[np.maximum(positions - 1, 0)])
        candidates = self._batch_sampler.top_candidates(outputs.logits.together)
        return ReadRows(np.concatenate(previous), np.concatenate(ids), *candidates)

    def _prefill_slot(self, slot: Slot) -> None:
        """Prefill tiles for a bounded time, so that one long prompt does not hold up the other sequences."""
        deadline, num_before = time.perf_counter() + PREFILL_SECONDS, slot.cache.length
        while slot.num_to_prefill and time.perf_counter() < deadline:
            start, known = slot.cache.length, slot.sequence.token_ids[:-1]
            hidden = prefill_tile(self._target, slot.cache, known, [self._drafter], self._batch_sampler)
            if self._drafter.needs_hidden:
                self._drafter.read(slot.sequence, start, hidden)
            self._target.synchronize()
        self._counters.num_read_tokens += slot.cache.length - num_before


def prefill_tile(
    target: TargetModel, cache: FullKVCache, token_ids: np.ndarray, drafters: list[Drafter], drawing: BatchSampler
) -> torch.Tensor:
    """Prefill the next tile of known tokens; drafters learn from it.

    Returns the target's final hidden states, `[num_read, hidden]`.
    """
    start = cache.length
    hidden = target.read(cache, token_ids[start : start + MOST_READ].tolist())
    learners = [drafter for drafter in drafters if drafter.needs_top_k]
    if learners:
        positions = np.arange(start, cache.length)
        previous_ids = token_ids[np.maximum(positions - 1, 0)]
        rows = ReadRows(previous_ids, token_ids[positions], *drawing.top_candidates(target.logits(hidden)))
        for drafter in learners:
            drafter.learn(rows)
    return hidden
