"""The decoding loop: propose, verify, commit, update, for a set of sequences at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from metrics.counters import EngineCounters, timed
from worker.caches.full import MAX_TREE_NODES, FullKVCache
from worker.drafters.base import Drafter, DraftRequest, ReadRows
from worker.drawing import Drawing, Sampler
from worker.sequence import Sequence
from worker.stopping import ERROR, StopRule
from worker.target.finite import NotFiniteError, check_finite
from worker.target.forwards import MOST_READ
from worker.target.target import RowOutputs, TargetModel
from worker.target.tiles import max_tree_depth, tree_rows
from worker.tree import DraftTree
from worker.verification import Verification, Walk

Decode = Callable[[list[int]], str]

READ_SECONDS = 0.2  # per sequence and step


@dataclass
class Slot:
    """A sequence on the device: its cache holds every token but the last, which the next step's root row adds."""

    sequence: Sequence
    cache: FullKVCache
    sampler: Sampler
    stop_rule: StopRule

    def up_to_its_end(self, walk: Walk) -> Walk:
        """What of a walk comes before the sequence's end; sets its finish reason."""
        for num_tokens, token_id in enumerate(walk.drawn, 1):
            self.sequence.finish_reason = self.stop_rule.after(token_id)
            if self.sequence.finish_reason is not None:
                return walk.until(num_tokens)
        return walk


class Engine:
    """Runs sequences through one target and one drafter. The drafter changes the speed, never the tokens."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        decode: Decode | None = None,
        counters: EngineCounters | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.counters = counters or EngineCounters()
        self._decode = decode
        self._drawing = target.forwards.new_drawing()
        self._slots: dict[str, Slot] = {}

    @property
    def sequences(self) -> list[Sequence]:
        return [slot.sequence for slot in self._slots.values()]

    def start(self, sequence: Sequence, cache: FullKVCache | None = None) -> Slot:
        """Take a sequence in; what of it is not in `cache` yet is read by the next steps."""
        slot = Slot(
            sequence,
            cache or self.target.new_cache(sequence.max_length),
            self._drawing.sampler(sequence),
            StopRule(sequence, self.target.eos_token_ids, self._decode),
        )
        sequence.finish_reason = slot.stop_rule.now()  # a resumed sequence may have lost only its result
        if sequence.num_generated_tokens == 0:
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.drafter.start(sequence, slot.cache)  # first, since it may fail: then nothing of the sequence is kept
        self._slots[sequence.sequence_id] = slot
        return slot

    def stop(self, sequence: Sequence) -> None:
        """Drop a sequence that ended or is to move away."""
        del self._slots[sequence.sequence_id]
        self.drafter.stop(sequence)
        self._count_cached()

    def step(self) -> list[tuple[Sequence, Verification]]:
        """Advance every unfinished sequence; returns those that received tokens, with how.

        A sequence whose `finish_reason` is set afterwards is done, or its `error` says why it can't go on; `stop` it.
        """
        ready = self._read()
        if not ready:
            return []
        trees = self._propose(ready)
        outputs, walks = self._verify(ready, trees)
        results = self._commit(ready, trees, outputs, walks)
        self._update(results)
        return results

    def _read(self) -> list[Slot]:
        """Read what sequences have in front of their last tokens; returns the slots that are done with it."""
        unfinished = [slot for slot in self._slots.values() if slot.sequence.finish_reason is None]
        for slot in unfinished:
            self._read_slot(slot)
        return [slot for slot in unfinished if _num_missing(slot) == 1]

    def _read_slot(self, slot: Slot) -> None:
        """Run tiles of known tokens for a bounded time, so that one long prompt does not hold up the others."""
        deadline, num_before = time.perf_counter() + READ_SECONDS, slot.cache.length
        while _num_missing(slot) > 1 and time.perf_counter() < deadline:
            read_tile(self.target, slot.cache, slot.sequence.token_ids[:-1], [self.drafter], self._drawing)
            self.target.synchronize()
        self.counters.num_read_tokens += slot.cache.length - num_before

    def _propose(self, ready: list[Slot]) -> list[DraftTree]:
        with timed(self.counters.step_seconds, "propose"):
            return self.drafter.propose([self._request(slot) for slot in ready])

    def _request(self, slot: Slot) -> DraftRequest:
        max_depth = min(max_tree_depth(slot.cache.length), slot.sequence.num_remaining_tokens - 1)
        return DraftRequest(slot.sequence, MAX_TREE_NODES, max(0, max_depth), self._overhead())

    def _overhead(self) -> float:
        """Seconds that a step takes beside its forward and its drafts, so far."""
        return self.counters.step_seconds["commit"] / max(1, self.counters.num_steps)

    def _verify(self, ready: list[Slot], trees: list[DraftTree]) -> tuple[list[RowOutputs], list[Walk]]:
        """Run all rows and draw from them: the drawn tokens are what a step waits for."""
        with timed(self.counters.step_seconds, "verify"):
            pairs = zip(ready, trees, strict=True)
            outputs = self.target.verify(
                [tree_rows(slot.cache, int(slot.sequence.token_ids[-1]), tree) for slot, tree in pairs]
            )
            samplers, logits = [slot.sampler for slot in ready], [rows.logits for rows in outputs]
            walks = self._drawing.walks(samplers, trees, logits, self.drafter.needs_top_k)
        return outputs, walks

    def _commit(
        self, ready: list[Slot], trees: list[DraftTree], outputs: list[RowOutputs], walks: list[Walk]
    ) -> list[tuple[Sequence, Verification]]:
        results = []
        with timed(self.counters.step_seconds, "commit"):
            for slot, tree, rows, walk in zip(ready, trees, outputs, walks, strict=True):
                try:
                    results.append((slot.sequence, self._taken(slot, tree, rows, slot.up_to_its_end(walk))))
                except NotFiniteError as error:  # this sequence's fault alone
                    slot.sequence.finish_reason, slot.sequence.error = ERROR, str(error)
        return results

    def _taken(self, slot: Slot, tree: DraftTree, outputs: RowOutputs, walk: Walk) -> Verification:
        """Commit the accepted path and the bonus token. Raises NotFiniteError where one could not be drawn."""
        sequence = slot.sequence
        if walk.failed_row is not None:
            check_finite(outputs.logits[walk.failed_row], len(sequence) + len(walk.drawn))
        root_id = int(sequence.token_ids[-1])
        slot.cache.commit(walk.path)
        sequence.extend(walk.drawn)
        self.counters.num_generation_tokens += len(walk.drawn)
        self.counters.count_draft(len(tree), len(walk.path))
        row_token_ids = np.array([root_id, *tree.token_ids])
        top_ids, top_logprobs = walk.candidates or (None, None)
        hidden = rows_of_path(outputs.hidden, walk.path) if self.drafter.needs_hidden else None
        return Verification(tree, walk.path, walk.drawn, row_token_ids, top_ids, top_logprobs, hidden)

    def _update(self, results: list[tuple[Sequence, Verification]]) -> None:
        with timed(self.counters.step_seconds, "commit"):
            for sequence, verification in results:
                self.drafter.update(sequence, verification)
        self.counters.num_steps += 1
        self._count_cached()

    def _count_cached(self) -> None:
        self.counters.kv_cache_tokens = sum(slot.cache.length for slot in self._slots.values())


def read_tile(
    target: TargetModel, cache: FullKVCache, token_ids: np.ndarray, drafters: list[Drafter], drawing: Drawing
) -> None:
    """Read the next tile of known tokens into a cache; drafters learn from the target's candidates there."""
    start = cache.length
    hidden = target.read(cache, token_ids[start : start + MOST_READ].tolist())
    learners = [drafter for drafter in drafters if drafter.needs_top_k]
    if learners:
        positions = np.arange(start, cache.length)
        previous_ids = token_ids[np.maximum(positions - 1, 0)]
        rows = ReadRows(previous_ids, token_ids[positions], *drawing.top_candidates(target.logits(hidden)))
        for drafter in learners:
            drafter.learn(rows)


def rows_of_path(hidden: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Those of the root and the accepted nodes, `[1 + num_accepted, hidden]`, without a list that a GPU waits for."""
    return torch.stack([hidden[0], *(hidden[node + 1] for node in path)])


def _num_missing(slot: Slot) -> int:
    """Tokens of the sequence that its cache does not hold."""
    return len(slot.sequence) - slot.cache.length
