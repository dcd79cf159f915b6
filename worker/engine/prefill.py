"""Running sequences, and the prefill of their caches: from shared prefixes, or tile by tile.

One sequence prefills a shared prefix, and the others copy its keys and values, bit for bit. The newest prompts'
prefixes are kept in the host's memory for later jobs. Before a step, tiles of one sequence are prefilled for a bounded
time. If all forwards have the same number of rows, as on a GPU, known tokens also fill the unused rows of a step's
forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from swiftbatch.jobs.checkpoints.kv_segments import LayerStates
from swiftbatch.metrics.counters import EngineCounters
from swiftbatch.worker.constraints.constrained_tree import Constraints
from swiftbatch.worker.drafters.drafter_interface import Drafter, ReadRows
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.engine.stopping import StopRule
from swiftbatch.worker.forward.forward_interface import MOST_READ
from swiftbatch.worker.forward.target_model import StepOutputs, TargetModel
from swiftbatch.worker.forward.tile_packing import SequenceRows, known_rows
from swiftbatch.worker.kv.full_cache import CacheSource, FullKVCache
from swiftbatch.worker.kv.kv_capacity import MEMORY, KVRoom
from swiftbatch.worker.sampling.batch_sampler import BatchSampler, Sampler
from swiftbatch.worker.sampling.draft_tree import Walk
from swiftbatch.worker.sampling.sequence import Sequence

PREFILL_SECONDS = 0.2  # per sequence and step
SHORTEST = 64  # tokens of a shared prefix; fewer are read as soon as copied
MEMORY_SHARE = 1 / 8  # share of the memory that is free without kept prefixes


@dataclass
class Slot:
    """A sequence and its cache of every token but the last, which the next step's root row adds."""

    sequence: Sequence
    cache: FullKVCache
    sampler: Sampler
    stop_rule: StopRule
    constraints: Constraints
    num_shared_tokens: int = 0  # first ones known to be shared with other, perhaps later, sequences
    scores: KnownScores | None = None  # of the prompt's tokens, if the job asks for them

    @property
    def reads_itself(self) -> bool:
        """Return whether a copy would not do: the prompt's logits are needed."""
        return self.scores is not None and not self.scores.are_complete

    @property
    def num_to_prefill(self) -> int:
        """Return how many tokens before the last one the cache lacks."""
        return len(self.sequence) - 1 - self.cache.length

    def up_to_its_end(self, walk: Walk) -> Walk:
        """Cut a walk off at the sequence's end, and set the sequence's finish reason."""
        for num_tokens, token_id in enumerate(walk.drawn, 1):
            self.sequence.finish_reason = self.stop_rule.after(token_id)
            if self.sequence.finish_reason is not None:
                return walk.until(num_tokens)
        return walk


@dataclass
class _Member:
    slot: Slot
    token_ids: NDArray[np.int64]  # its tokens on arrival, without the last
    num_alike: dict[str, int] = field(default_factory=dict)  # other sequence's id -> length of the common prefix


class PrefixSharing:
    """Copies between an engine's sequences and kept prefixes, and the waits for them.

    A sequence waits only for earlier ones, so the first always goes on.
    """

    def __init__(self, kept: KeptPrefixes) -> None:
        self.kept = kept
        self._members: dict[str, _Member] = {}  # sorted by arrival

    def join(self, slot: Slot) -> None:
        new = _Member(slot, slot.sequence.token_ids[:-1])
        for name, other in self._members.items():
            if other.slot.cache.origin != slot.cache.origin:
                continue  # the same tokens have other keys there
            if (num_tokens := num_alike(new.token_ids, other.token_ids)) >= SHORTEST:
                new.num_alike[name] = other.num_alike[slot.sequence.sequence_id] = num_tokens
                for cache in (slot.cache, other.slot.cache):
                    cache.retain(0, num_tokens)
        slot.cache.retain(0, slot.num_shared_tokens)
        self._members[slot.sequence.sequence_id] = new

    def leave(self, slot: Slot) -> None:
        del self._members[slot.sequence.sequence_id]
        for other in self._members.values():
            other.num_alike.pop(slot.sequence.sequence_id, None)

    def keep(self, slot: Slot) -> None:
        """Keep a leaving sequence's shared prefix if no other sequence of the engine has it."""
        own = self._members[slot.sequence.sequence_id]
        num_shared = min(slot.num_shared_tokens, slot.cache.length, len(own.token_ids))
        if num_shared < SHORTEST:
            return
        if any(self._holds(own, name, num_shared) for name in own.num_alike):
            return
        end = slot.cache.copyable_end(min(num_shared + SHORTEST, len(own.token_ids)))  # others may part a little later
        if end >= SHORTEST:
            self.kept.keep(own.token_ids[:end], min(num_shared, end), slot.cache)

    def waits(self, slot: Slot) -> bool:
        """Return whether an earlier sequence is still prefilling tokens that the slot lacks and may copy."""
        if slot.reads_itself:
            return False
        own, length = self._members[slot.sequence.sequence_id], slot.cache.length
        for name, other in self._members.items():
            if other is own:
                break
            num_tokens = own.num_alike.get(name, 0)
            is_reading = other.slot.sequence.finish_reason is None and other.slot.cache.length < num_tokens
            if is_reading and num_tokens - length >= SHORTEST:
                return True
        return False

    def take_over(self, slot: Slot) -> int:
        """Copy positions that the slot lacks from another sequence or a kept prefix; return how many were copied."""
        start = slot.cache.length
        if slot.num_to_prefill < SHORTEST or slot.reads_itself:
            return 0
        source, end = max(self._sources(slot), key=lambda pair: pair[1])
        if source is None or end - start < SHORTEST:
            return 0
        slot.cache.copy_from(source, end)
        if isinstance(source, KeptPrefix):
            self.kept.use(source)
        return slot.cache.length - start

    def _sources(self, slot: Slot) -> Iterator[tuple[CacheSource | None, int]]:
        """Yield each source of a sequence's first tokens, and how many of these tokens the source has."""
        own = self._members[slot.sequence.sequence_id]
        yield self.kept.longest(own.token_ids, slot.cache.origin)
        for name, num_tokens in own.num_alike.items():
            cache = self._members[name].slot.cache
            yield cache, cache.copyable_end(num_tokens)

    def _holds(self, own: _Member, name: str, num_tokens: int) -> bool:
        """Return whether another sequence's cache has and retains the first `num_tokens` tokens of `own`."""
        other = self._members[name].slot
        return min(own.num_alike[name], other.num_shared_tokens, other.cache.length) >= num_tokens


@dataclass(frozen=True, eq=False)
class KeptPrefix:
    """A prompt's first tokens and their cache entries, as a `CacheSource`."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    num_shared: int  # first ones that other jobs are known to have
    rows: NDArray[Any]  # [num_rows, num_tokens, head_dim], like `FullKVCache.kv`
    origin: tuple[int, int]  # the cache's: the same tokens have other keys elsewhere
    states: LayerStates | None = None  # states behind all tokens, if layers have some

    @property
    def num_bytes(self) -> int:
        return self.rows.nbytes + (self.states.num_bytes if self.states else 0)

    def kv(self, start: int, end: int) -> NDArray[Any]:
        return self.rows[:, start:end]

    def states_at(self, end: int) -> LayerStates | None:
        return self.states

    def copyable_end(self, limit: int) -> int:
        """Return the last position up to `limit` that can be copied: recurrent states are kept only for the end."""
        if self.states is None:
            return limit
        return len(self.token_ids) if limit >= len(self.token_ids) else 0


class KeptPrefixes:
    """A few prefixes, in at most an eighth of the otherwise free memory; the least recently used is evicted first."""

    def __init__(self, bytes_per_position: int, free_bytes: Callable[[], float] | None = None) -> None:
        """`free_bytes` returns the free memory; if None, this machine's free memory is measured."""
        self._bytes_per_position = bytes_per_position
        self._free_bytes = free_bytes or KVRoom(MEMORY, bytes_per_position).free_bytes
        self._prefixes: list[KeptPrefix] = []  # the newest use last

    @property
    def num_bytes(self) -> int:
        return sum(prefix.num_bytes for prefix in self._prefixes)

    def longest(self, token_ids: NDArray[np.int64], origin: tuple[int, int] = (0, 0)) -> tuple[KeptPrefix | None, int]:
        """Return the prefix with the most of these first tokens in caches of this origin, and how many it has."""
        alike = (prefix for prefix in self._prefixes if prefix.origin == origin)
        found = [(prefix.copyable_end(num_alike(prefix.token_ids, token_ids)), prefix) for prefix in alike]
        num_tokens, best = max(found, key=lambda pair: pair[0], default=(0, None))
        return best, num_tokens

    def use(self, prefix: KeptPrefix) -> None:
        self._prefixes.remove(prefix)
        self._prefixes.append(prefix)

    def keep(self, token_ids: NDArray[np.int64], num_shared: int, cache: FullKVCache) -> None:
        """Keep a cache's entries of `token_ids` if they fit and no kept prefix has the first `num_shared` of them."""
        best, num_known = self.longest(token_ids, cache.origin)
        if best is not None and num_known >= num_shared:
            self.use(best)
            return
        self._prefixes = [each for each in self._prefixes if not _is_within(each, token_ids, cache.origin)]
        states = None if cache.is_by_position else cache.states_at(len(token_ids))
        num_bytes = len(token_ids) * self._bytes_per_position + (states.num_bytes if states else 0)
        if num_bytes <= self._limit():
            self._drop_down_to(self._limit() - num_bytes)
            rows = np.array(cache.kv(0, len(token_ids)))
            self._prefixes.append(KeptPrefix(token_ids.copy(), num_shared, rows, cache.origin, states))

    def trim(self) -> None:
        """Drop prefixes until the others fit into the memory that is free now."""
        self._drop_down_to(self._limit())

    def clear(self) -> bool:
        """Drop all prefixes; return whether there were any."""
        had_some = bool(self._prefixes)
        self._prefixes.clear()
        return had_some

    def _limit(self) -> float:
        return MEMORY_SHARE * (self._free_bytes() + self.num_bytes)

    def _drop_down_to(self, num_bytes: float) -> None:
        while self._prefixes and self.num_bytes > num_bytes:
            del self._prefixes[0]


def _is_within(prefix: KeptPrefix, token_ids: NDArray[np.int64], origin: tuple[int, int]) -> bool:
    """Return whether `token_ids`, in a cache of this origin, begin with the shared part of a kept prefix."""
    return prefix.origin == origin and num_alike(prefix.token_ids, token_ids) >= prefix.num_shared


def num_alike(one: NDArray[np.int64], other: NDArray[np.int64]) -> int:
    """Return the length of the common prefix of both token arrays."""
    num_tokens = min(len(one), len(other))
    differs = one[:num_tokens] != other[:num_tokens]
    first = int(differs.argmax()) if num_tokens else 0
    return first if num_tokens and differs[first] else num_tokens


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

    @property
    def fills_rows(self) -> bool:
        """Return whether prompts are read in the rows that a step leaves free."""
        return self._rows_per_forward > 1

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
        if prefill_chunks and self._drafter.learns_rows:
            self._drafter.learn(self._prefilled_rows(prefill_chunks, outputs))
        end = 0
        for prefill_chunk in prefill_chunks:
            slot, start, end = prefill_chunk.slot, end, end + len(prefill_chunk.rows)
            if self._drafter.needs_hidden:
                self._drafter.read(slot.sequence, slot.cache.length, torch.cat(list(outputs.hidden[start:end])))
            if slot.scores is not None:  # in place: copies to a GPU's sampler would overwrite logits of other rows
                slot.scores.take(slot.cache.length, outputs.logits[start:end].together)
            slot.cache.advance(prefill_chunk.num_rows)
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
            scores = slot.scores if slot.reads_itself else None
            hidden = prefill_tile(self._target, slot.cache, known, [self._drafter], self._batch_sampler, scores)
            if self._drafter.needs_hidden:
                self._drafter.read(slot.sequence, start, hidden)
            self._target.synchronize()
        self._counters.num_read_tokens += slot.cache.length - num_before


def prefill_tile(
    target: TargetModel,
    cache: FullKVCache,
    token_ids: np.ndarray,
    drafters: list[Drafter],
    drawing: BatchSampler,
    scores: KnownScores | None = None,
) -> torch.Tensor:
    """Prefill the next tile of known tokens; drafters learn from it, and `scores` takes its logits.

    Returns the target's final hidden states, `[num_read, hidden]`.
    """
    start, logits = cache.length, None
    tile = token_ids[start : start + MOST_READ].tolist()
    if scores is None:
        hidden = target.read(cache, tile)
    else:
        hidden, logits = scores.read_tile(cache, tile)
    learners = [drafter for drafter in drafters if drafter.learns_rows]
    if learners:
        positions = np.arange(start, cache.length)
        previous_ids = token_ids[np.maximum(positions - 1, 0)]
        read = target.logits(hidden) if logits is None else logits
        rows = ReadRows(previous_ids, token_ids[positions], *drawing.top_candidates(read))
        for drafter in learners:
            drafter.learn(rows)
    return hidden
