"""The decoding loop: propose, verify, commit, update; several plain steps may run at once."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Many

import torch

from swiftbatch.jobs.run.run_records import LogprobsMode
from swiftbatch.metrics.counters import EngineCounters, timed
from swiftbatch.worker.constraints.constrained_tree import NOTHING_LEFT, ConstrainedTree, Constraints
from swiftbatch.worker.constraints.skeleton import Skeleton
from swiftbatch.worker.constraints.thinking import Thinking
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.engine.known_scores import KnownScores
from swiftbatch.worker.engine.prefill import KeptPrefixes, PrefillChunk, Prefiller, PrefixSharing, Slot
from swiftbatch.worker.engine.stopping import ERROR, StopRule, ending_tokens, rewind_distance
from swiftbatch.worker.forward.target_model import StepOutputs, TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth, row_ahead, rows_of_trees
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.kv_capacity import MAX_TREE_NODES, KVRoomError
from swiftbatch.worker.sampling.draft_tree import DraftTree, Verification, Walk
from swiftbatch.worker.sampling.sampler import NOT_FINITE, NotFiniteError, check_finite
from swiftbatch.worker.sampling.sequence import Sequence
from swiftbatch.worker.sampling.token_masks import ConstraintError
from swiftbatch.worker.text.output_text import OutputText

MOST_STEPS = 32  # so many per call that the work between calls hardly counts
FEW_STEPS = 8  # tokens drawn behind the end of a text or loop are wasted
MOST_SECONDS = 0.1  # longest call: requests to a worker wait for its end
MOST_SKELETONS = 16  # of the latest rules
FEW_POSITIONS = 1024  # fewer take little time beside all else in a step


class PlainRuns:
    """Runs several plain steps in one call if the kernels support this."""

    def __init__(self, target: TargetModel, counters: EngineCounters) -> None:
        forwards = target.forwards
        is_fit = target.cache_shape.recurrent is None and not forwards.has_experts and not target.is_offloaded
        self._draw_chains = forwards.draw_chains if is_fit else None
        self._counters = counters
        # of the latest steps, since a mean over all steps would lag behind growing jobs
        self._num_steps, self._seconds = 0, 0.0  # values at the last call of `_seconds_per_step`
        self._num_rows, self._num_positions = 1, FEW_POSITIONS  # values of the first step since then
        self._step_seconds = math.inf  # average since then

    def most_steps(self, slots: list[Slot]) -> int:
        """Return how many plain steps all sequences can take in one call."""
        if self._draw_chains is None:
            return 1
        if any(slot.sequence.logprobs is not None or slot.sequence.rules for slot in slots):
            return 1  # each step's logits or tokens are needed before the next step
        step_seconds = self._seconds_per_step(len(slots), sum(slot.cache.length for slot in slots))
        most = min(FEW_STEPS, MOST_STEPS) if any(slot.stop_rule.looks_back for slot in slots) else MOST_STEPS
        room = min(slot.sequence.num_remaining_tokens for slot in slots)
        return max(1, min(most, room, int(MOST_SECONDS / max(step_seconds, MOST_SECONDS / most))))

    def walks(self, slots: list[Slot], num_steps: int) -> list[Walk]:
        """Draw up to `num_steps` tokens of each sequence, or none for all if one sequence cannot draw any."""
        assert self._draw_chains is not None
        rows = [row_ahead(slot.cache, slot.sequence.last_token_id) for slot in slots]
        ends = [ending_tokens(slot.sequence) for slot in slots]
        drawn = self._draw_chains(rows, [slot.sampler for slot in slots], num_steps, ends)
        return [Walk([], each.token_ids) for each in drawn] if all(each.token_ids for each in drawn) else []

    def _seconds_per_step(self, num_rows: int, num_positions: int) -> float:
        """Return a step's measured seconds, scaled up at most in proportion to rows or positions."""
        num_steps, seconds = self._counters.num_steps, self._counters.step_seconds["verify"]
        if num_new := num_steps - self._num_steps:
            growth = max(1.0, num_rows / self._num_rows, num_positions / self._num_positions)
            self._step_seconds = growth * (seconds - self._seconds) / num_new
            self._num_steps, self._seconds = num_steps, seconds
            self._num_rows, self._num_positions = num_rows, max(FEW_POSITIONS, num_positions)
        return self._step_seconds


# The decoding loop: propose, verify, commit, update, for a set of sequences at once.


class Engine:
    """Runs sequences through one target and one drafter."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        output_text: OutputText | None = None,
        counters: EngineCounters | None = None,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        sharing: PrefixSharing | None = None,
    ) -> None:
        """Only stop strings need `output_text`; `logprobs_mode` says which logits give the log-probabilities."""
        self.target = target
        self.drafter = drafter
        self.counters = counters or EngineCounters()
        self._output_text = output_text
        self._logprobs_mode = logprobs_mode
        self._batch_sampler = target.forwards.new_batch_sampler()
        self.sharing = sharing or PrefixSharing(KeptPrefixes(target.cache_shape.bytes_per_position()))
        self._prefiller = Prefiller(target, drafter, self._batch_sampler, self.sharing, self.counters)
        self._plain = PlainRuns(target, self.counters)
        self._skeleton_of = functools.lru_cache(MOST_SKELETONS)(lambda rules: Skeleton())
        self._slots: dict[str, Slot] = {}
        self.is_torn = False  # True: a step failed while it changed sequences and caches, so none may follow

    @property
    def sequences(self) -> list[Sequence]:
        return [slot.sequence for slot in self._slots.values()]

    def new_cache(self, max_length: int, lora: str | None = None) -> FullKVCache:
        """Make a cache for the target and an adapter; if there is no room, drop kept prefixes and try again."""
        self.sharing.kept.trim()
        self.counters.kept_prefix_bytes = self.sharing.kept.num_bytes
        num_held, forgets = sum(slot.cache.num_held for slot in self._slots.values()), not self.drafter.reads_caches
        try:
            return self.target.new_cache(max_length, num_held, forgets, lora)
        except KVRoomError:
            if not self.sharing.kept.clear():
                raise
            self.counters.kept_prefix_bytes = 0
        return self.target.new_cache(max_length, num_held, forgets, lora)

    def start(
        self,
        sequence: Sequence,
        cache: FullKVCache | None = None,
        num_shared_tokens: int = 0,
        thinking: Thinking | None = None,
        scores: KnownScores | None = None,
    ) -> Slot:
        """Add a sequence; the next steps prefill the tokens that its `cache` lacks.

        The first `num_shared_tokens` are kept for later sequences. With `thinking`, stop strings in a thought do not
        count. The prefill completes the `scores` of the prompt; then the cache must be empty.
        """
        sequence.eos_token_ids = self.target.eos_token_ids
        slot = Slot(
            sequence,
            cache or self.new_cache(sequence.max_length, sequence.lora),
            self._batch_sampler.sampler(sequence),
            StopRule(sequence, self._output_text, thinking),
            Constraints(sequence, self._skeleton_of(sequence.rules)),
            num_shared_tokens,
            scores,
        )
        sequence.finish_reason = slot.stop_rule.now()  # a resumed sequence may have lost only its result
        if sequence.num_generated_tokens == 0:
            self.counters.num_prompt_tokens += sequence.num_prompt_tokens
        self.drafter.start(sequence, slot.cache)  # it may fail, so it comes first
        if distance := rewind_distance(sequence):
            slot.cache.retain(-distance)
        self._slots[sequence.sequence_id] = slot
        self.sharing.join(slot)
        return slot

    def stop(self, sequence: Sequence) -> None:
        if sequence.error is None:
            with contextlib.suppress(torch.OutOfMemoryError):  # other jobs can read the prefix again
                self.sharing.keep(self._slots[sequence.sequence_id])
        self._drop(sequence)

    def discard(self, sequence_id: str) -> None:
        """Forget a sequence whose start may have failed."""
        if slot := self._slots.get(sequence_id):
            self._drop(slot.sequence)

    def replace(self, again: Sequence) -> None:
        """Replace a sequence by one of the same id, rewound or with another output."""
        slot = self._slots[again.sequence_id]
        replaced, cache, num_shared_tokens = slot.sequence, slot.cache, slot.num_shared_tokens
        thinking, scores = slot.stop_rule.thinking, slot.scores
        del slot  # frees a GPU's room for its counts
        self._drop(replaced)
        cache.roll_back(min(cache.length, len(again) - 1))
        self.start(again, cache, num_shared_tokens, thinking, scores)

    def step(self) -> list[tuple[Sequence, Verification]]:
        """Advance every unfinished sequence; return those that received tokens.

        Afterwards a finished sequence has a `finish_reason` and a failed one an `error`; call `stop` for both. A step
        that raised torch.OutOfMemoryError may be taken again with the same result, unless the engine `is_torn`.
        """
        unfinished = [slot for slot in self._slots.values() if slot.sequence.finish_reason is None]
        unread = [slot for slot in unfinished if slot.num_to_prefill]
        if unread:
            self._prefiller.prefill_ahead(unfinished)
            ready = [slot for slot in unfinished if not slot.num_to_prefill]
        else:
            ready = unfinished
        if not ready:
            return []
        # a row of a prompt is worth more than a draft's, which may be refused
        has_room = len(ready) == len(unfinished) or not self._prefiller.fills_rows
        trees = self._propose(ready, MAX_TREE_NODES if has_room else 0)
        if len(ready) == len(unfinished) and (run := self._run_plain(ready)):
            results = [(slot.sequence, self._extended(slot, walk)) for slot, walk in zip(ready, run, strict=True)]
            self._update(results)
            return results
        prefill_chunks = list[PrefillChunk]()
        if unread:
            num_rows = sum(1 + len(each.tree.token_ids) for each in trees)
            prefill_chunks = self._prefiller.prefill_chunks(unread, num_rows, len(ready))
        outputs, walks = self._verify(ready, trees, prefill_chunks)
        results = self._commit(ready, trees, outputs, walks)
        self._update(results)
        return results

    def _drop(self, sequence: Sequence) -> None:
        self.sharing.leave(self._slots.pop(sequence.sequence_id))
        self.drafter.stop(sequence)
        self._count_cached()
        self.counters.kept_prefix_bytes = self.sharing.kept.num_bytes

    def _propose(self, ready: list[Slot], most_nodes: int) -> list[ConstrainedTree]:
        with timed(self.counters.step_seconds, "propose"):
            overhead = self.counters.step_seconds["commit"] / max(1, self.counters.num_steps)
            requests = [_request(slot, most_nodes, overhead) for slot in ready]
            trees = self.drafter.propose(requests)
            prices: Many[float] = ()
            if any(slot.sequence.rules for slot in ready):
                longest = max(len(slot.sequence) for slot in ready)
                prices = self.drafter.row_prices(len(ready) + sum(map(len, trees)), longest)
            given = zip(ready, requests, trees, strict=True)
            return [
                slot.constraints.of_tree(tree, request.max_nodes, request.max_depth, prices)
                for slot, request, tree in given
            ]

    def _verify(
        self, ready: list[Slot], trees: list[ConstrainedTree], prefill_chunks: list[PrefillChunk]
    ) -> tuple[StepOutputs, list[Walk]]:
        """Run all rows and draw tokens; the device has finished once the drawn tokens are on the host."""
        with timed(self.counters.step_seconds, "verify"):
            proposed = [each.tree for each in trees]
            rows = rows_of_trees(
                [slot.cache for slot in ready], [slot.sequence.last_token_id for slot in ready], proposed
            )
            outputs = self.target.verify(
                rows + [part for prefill_chunk in prefill_chunks for part in prefill_chunk.rows],
                self.drafter.feature_layers if self.drafter.wants_hidden else (),
            )
            samplers, logits = [slot.sampler for slot in ready], outputs.logits[: len(ready)]
            masks = [None if each.masks is None else each.masks.words for each in trees]
            walks = self._batch_sampler.walks(
                samplers, proposed, logits, self.drafter.wants_candidates, masks, self._logprobs_mode
            )
            if prefill_chunks:
                read = StepOutputs(outputs.hidden[len(ready) :], outputs.logits[len(ready) :])
                self._prefiller.take(prefill_chunks, read)
        found = zip(trees, walks, strict=True)
        return outputs, [walk if each.masks is None else each.in_front_of_the_dead(walk) for each, walk in found]

    def _run_plain(self, ready: list[Slot]) -> list[Walk]:
        """Take several plain steps in one call; return an empty list if only one is due or the next has drafts."""
        num_steps = self._plain.most_steps(ready)
        if num_steps == 1 or (num_more := self.drafter.pass_plain(num_steps - 1)) == 0:
            return []
        with timed(self.counters.step_seconds, "verify"):
            return self._plain.walks(ready, 1 + num_more)

    def _extended(self, slot: Slot, walk: Walk) -> Verification:
        row_token_ids = [slot.sequence.last_token_id]
        with self._committing():
            drawn = slot.up_to_its_end(walk).drawn
            slot.cache.advance(len(drawn))
            slot.sequence.extend(drawn)
        self.counters.num_generation_tokens += len(drawn)
        self.counters.num_tokens_by_draft["none"] += len(drawn)
        return Verification(DraftTree(), [], drawn, row_token_ids, None, None, draft_kind="none", num_steps=len(drawn))

    def _commit(
        self, ready: list[Slot], trees: list[ConstrainedTree], outputs: StepOutputs, walks: list[Walk]
    ) -> list[tuple[Sequence, Verification]]:
        results, kind = [], self.drafter.draft_kind
        with self._committing(), self.target.moving_together():
            for number, (slot, tree, walk) in enumerate(zip(ready, trees, walks, strict=True)):
                try:
                    walked = slot.up_to_its_end(walk)
                    results.append((slot.sequence, self._taken(slot, tree, outputs, number, walked, kind)))
                except (NotFiniteError, ConstraintError) as error:  # this sequence's fault alone
                    slot.sequence.finish_reason, slot.sequence.error = ERROR, str(error)
                    slot.sequence.error_code = NOT_FINITE if isinstance(error, NotFiniteError) else NOTHING_LEFT
            self._count(results, kind)
        return results

    @contextlib.contextmanager
    def _committing(self) -> Iterator[None]:
        self.is_torn = True
        with timed(self.counters.step_seconds, "commit"):
            yield
        self.is_torn = False

    def _taken(
        self, slot: Slot, given: ConstrainedTree, outputs: StepOutputs, number: int, walk: Walk, draft_kind: str
    ) -> Verification:
        """Commit an accepted path and its bonus token.

        Raises NotFiniteError or ConstraintError if a token could not be drawn.
        """
        sequence, tree = slot.sequence, given.tree
        if walk.failed_row is not None:
            given.check_alive(walk.failed_row, len(sequence) + len(walk.drawn))
            check_finite(outputs.logits[number][walk.failed_row], len(sequence) + len(walk.drawn))
        if sequence.logprobs is not None:
            found, num_tokens = walk.logprobs, len(walk.drawn)
            assert found is not None
            sequence.logprobs.extend(found if len(found) == num_tokens else found.part(0, num_tokens))
        path, drawn, _, candidates, _ = walk
        row_token_ids = [sequence.last_token_id, *tree.token_ids]
        slot.cache.commit(path)
        sequence.extend(drawn)
        kind = draft_kind if tree.token_ids else "none"
        hidden = rows_of_path(outputs.hidden[number], path) if self.drafter.wants_hidden else None
        ids, logprobs = candidates or (None, None)
        return Verification(  # keyword arguments would take twice as long
            tree, path, drawn, row_token_ids, ids, logprobs, hidden, kind, given.numbers, given.num_left_out
        )

    def _count(self, results: list[tuple[Sequence, Verification]], kind: str) -> None:
        counters, num_drafted, num_plain = self.counters, 0, 0
        for _, verification in results:
            num_tokens, draft_ids = len(verification.committed_ids), verification.tree.token_ids
            if draft_ids:
                num_drafted += num_tokens
                counters.count_draft(len(draft_ids), len(verification.path))
            else:
                num_plain += num_tokens
        counters.num_generation_tokens += num_drafted + num_plain
        for name, num_tokens in ((kind, num_drafted), ("none", num_plain)):
            if num_tokens:
                counters.num_tokens_by_draft[name] += num_tokens

    def _update(self, results: list[tuple[Sequence, Verification]]) -> None:
        with timed(self.counters.step_seconds, "commit"):
            self.drafter.update_all(results)
        self.counters.num_steps += max((verification.num_steps for _, verification in results), default=1)
        self._count_cached()

    def _count_cached(self) -> None:
        self.counters.kv_cache_tokens = sum([slot.cache.length for slot in self._slots.values()])


def _request(slot: Slot, most_nodes: int, overhead: float) -> DraftRequest:
    sequence = slot.sequence
    max_depth = min(most_nodes, max_tree_depth(slot.cache.length), sequence.num_remaining_tokens - 1)
    return DraftRequest(sequence, most_nodes, max_depth if max_depth > 0 else 0, overhead)


def rows_of_path(hidden: torch.Tensor, path: list[int]) -> torch.Tensor:
    """Return hidden states of root and accepted nodes, `[1 + num_accepted, hidden]`, without waiting for the GPU."""
    if not path or path[-1] == len(path) - 1:  # nodes increase
        return hidden[: 1 + len(path)]
    return torch.stack([hidden[0], *(hidden[node + 1] for node in path)])
