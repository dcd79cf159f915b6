"""Two levels of speculation: a cheap proposer drafts trees, the target with a partial cache checks them in rounds.

What those two agree on is the chain that the target with the full cache verifies (TokenSwift 3.1 to 3.3; algorithm 1 of
TriForce is the same machine with another proposer). Every level draws with the coupled noise
and compares, so nothing can be biased.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from metrics.counters import timed
from worker.caches.draft_cache import DraftCache
from worker.caches.full import FullKVCache
from worker.drafters.base import Drafter, DraftRequest, ReadRows
from worker.drafters.two_level.draft import Draft, Round
from worker.drafters.two_level.plan import Planner
from worker.drafters.two_level.proposer import Proposer
from worker.drafters.two_level.whole_draft import WholeDraft, assemble
from worker.sampling import TokenSampler
from worker.sequence import Sequence
from worker.target.target import TargetModel
from worker.target.tiles import tree_rows
from worker.tree import DraftTree
from worker.verification import Verification

NewDraftCache = Callable[[Sequence], DraftCache]


@dataclass
class _Tracked:
    """One sequence on its two levels."""

    cache: FullKVCache
    draft_cache: DraftCache
    sampler: TokenSampler  # has taken in what is committed
    hidden: torch.Tensor | None = None  # [hidden] of the last verified row
    whole: WholeDraft = field(default_factory=WholeDraft)


class TwoLevelDrafter(Drafter):
    """Proposer, target with partial caches, and a planner for the number of rounds and nodes."""

    phases = ("follow", "propose", "check")

    def __init__(
        self,
        target: TargetModel,
        proposer: Proposer,
        new_draft_cache: NewDraftCache,
        planner: Planner,
        num_alternatives: int = 1,
    ) -> None:
        """`num_alternatives` candidates for the last drawn token go to the full verification."""
        self.needs_top_k = proposer.needs_top_k
        self.needs_hidden = proposer.needs_hidden
        self._target = target
        self._proposer = proposer
        self._new_draft_cache = new_draft_cache
        self._planner = planner
        self._num_alternatives = num_alternatives
        self._tracked: dict[str, _Tracked] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        sampler = TokenSampler(sequence, self._target.vocab_size, self._target.device)
        tracked = _Tracked(cache, self._new_draft_cache(sequence), sampler)
        self._proposer.start(sequence)
        self._tracked[sequence.sequence_id] = tracked

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        drafts = [self._open(request, len(requests)) for request in requests]
        while active := [draft for draft in drafts if draft.wants_round]:
            self._round(active)
        return self._close(drafts)

    def learn(self, rows: ReadRows) -> None:
        self._proposer.learn(rows)

    def update(self, sequence: Sequence, verification: Verification) -> None:
        tracked = self._tracked[sequence.sequence_id]
        for token_id in verification.committed_ids:
            tracked.sampler.push(token_id)
        tracked.hidden = None if verification.hidden is None else verification.hidden[-1]
        self._proposer.update(sequence, verification)
        self._planner.observe(tracked.whole, verification.path)
        for round_ in tracked.whole.rounds:
            self.counters.num_rounds += 1
            self.counters.num_checked_nodes += round_.num_nodes
            self.counters.num_agreed_nodes += len(round_.path)

    def stop(self, sequence: Sequence) -> None:
        self._proposer.stop(sequence)
        del self._tracked[sequence.sequence_id]

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """What planner and proposer have learned; all else follows from the tokens and is rebuilt from them."""
        return self._planner.state() | self._proposer.state(sequence)

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = self._planner.state()
        self._planner.restore(state)
        try:
            self._proposer.restore(sequence, state)
        except ValueError:
            self._planner.restore(before)
            raise

    def _open(self, request: DraftRequest, num_sequences: int) -> Draft:
        """A draft without tokens; its partial cache follows the full one where rounds are to come."""
        sequence, tracked = request.sequence, self._tracked[request.sequence.sequence_id]
        plan = self._planner.plan(tracked.cache.length, num_sequences, request.max_depth)
        if plan.num_rounds:
            with timed(self.counters.seconds, "follow"):
                tracked.draft_cache.follow(tracked.cache, lambda position: self._queries(sequence, position))
        if self.needs_hidden and tracked.hidden is None and tracked.cache.length > 0:
            tracked.hidden = self._last_hidden(sequence, tracked.cache)
        max_nodes = min(request.max_nodes, self._planner.max_nodes)
        return Draft(sequence, tracked.sampler, tracked.draft_cache, tracked.hidden, plan, max_nodes, request.max_depth)

    def _round(self, drafts: list[Draft]) -> None:
        """Propose below every draft's newest token and let the target with the partial caches draw there."""
        started = time.perf_counter()
        limits = [(draft.num_round_nodes, draft.depth_left - 1) for draft in drafts]
        with timed(self.counters.seconds, "propose"):
            trees = self._proposer.propose(drafts, limits)
        with timed(self.counters.seconds, "check"):
            outputs = self._target.draft([draft.rows(tree) for draft, tree in zip(drafts, trees, strict=True)])
            paths = [draft.advance(tree, rows) for draft, tree, rows in zip(drafts, trees, outputs, strict=True)]
        seconds = (time.perf_counter() - started) / len(drafts)
        for draft, tree, path in zip(drafts, trees, paths, strict=True):
            draft.rounds.append(Round(len(tree), path, seconds))

    def _close(self, drafts: list[Draft]) -> list[DraftTree]:
        """The chains, and below them what the proposer has to say."""
        started = time.perf_counter()
        with timed(self.counters.seconds, "propose"):
            below = self._proposer.propose(drafts, [(self._num_below(draft), draft.depth_left) for draft in drafts])
        seconds = (time.perf_counter() - started) / len(drafts)
        for draft, tree in zip(drafts, below, strict=True):
            tracked = self._tracked[draft.sequence.sequence_id]
            tracked.whole = assemble(draft, tree, self._num_alternatives, seconds)
        return [self._tracked[draft.sequence.sequence_id].whole.tree for draft in drafts]

    def _num_below(self, draft: Draft) -> int:
        """Nodes of the tree below the newest token, and of the same one below every other candidate for it."""
        num_trees = self._num_alternatives if draft.num_tokens else 1
        return (draft.num_nodes - draft.num_tokens - (num_trees - 1)) // num_trees

    def _last_hidden(self, sequence: Sequence, cache: FullKVCache) -> torch.Tensor:
        """Hidden state `[hidden]` of the row in front of the newest token, where no verification left it."""
        last = cache.length - 1
        with cache.replayed(last) as before:
            rows = tree_rows(before, int(sequence.token_ids[last]), DraftTree())
            return self._target.verify([rows])[0].hidden[0]

    def _queries(self, sequence: Sequence, position: int) -> torch.Tensor:
        cache = self._tracked[sequence.sequence_id].cache
        with cache.replayed(position) as before:
            return self._target.queries(before, int(sequence.token_ids[position]))
