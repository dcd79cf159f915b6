"""Chains that the target itself draws while it scans keys instead of reading all: a way to draft after long texts."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

import numpy as np

from swiftbatch.worker.drafters.choice.tree_sizes import lengths_of
from swiftbatch.worker.drafters.choice.ways import DraftWay, TreeWay
from swiftbatch.worker.drafters.drafter_interface import DraftCounters, DraftRequest, Verified
from swiftbatch.worker.drafters.self_speculation.draft_chain import Chain, Proposer
from swiftbatch.worker.drafters.self_speculation.round_planner import RoundsChoice, RoundsPlanner
from swiftbatch.worker.drafters.self_speculation.self_speculation import SelfSpeculationDrafter
from swiftbatch.worker.drafters.tree_drafter import TreeDrafter
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import SHORTEST_SCANNED, ScanKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

ROUNDS_PER_PLAN = 8  # steps
CHUNKS_AT_ONCE = 128  # most chunks taken in per step, over all texts


class RecycledProposer(Proposer):
    """Small trees of a drafter that learns by itself."""

    def __init__(self, drafter: TreeDrafter) -> None:
        self._drafter = drafter

    def propose(self, chains: list[Chain], limits: list[tuple[int, int]]) -> list[DraftTree]:
        given = zip(chains, limits, strict=True)
        wanted = [(chain.sequence, *limit) for chain, limit in given if min(limit) > 0]
        trees = iter(self._drafter.trees(wanted) if wanted else ())
        return [next(trees) if min(limit) > 0 else DraftTree() for limit in limits]


class ChainWay(DraftWay):
    """Rounds with scanned keys draw a chain, and the whole cache verifies it."""

    draft_kind = "chain"
    wants_candidates = True
    needs_top_k = True

    def __init__(self, target: TargetModel, planner: RoundsPlanner, trees: TreeWay, num_best: int) -> None:
        """`num_best` is the number of keys that a query of a round reads exactly."""
        self._planner, self._trees = planner, trees
        self.chains = SelfSpeculationDrafter(target, RecycledProposer(trees.drafter), planner, ScanKVCache, num_best)
        arena = target.forwards.arena
        self._most_scanned = math.inf if arena is None else arena.num_drafted
        self._caches_outside: dict[str, FullKVCache] = {}  # caches of sequences without a chain so far
        self._rounds = RoundsChoice(0, 0, 0.0)
        self._num_steps = 0  # steps since the plan
        self._beside = 0.0

    @property
    def counters(self) -> DraftCounters:
        return self.chains.counters

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._caches_outside[sequence.sequence_id] = cache

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        """Return the expected tokens per second; the time to prepare scans is spread over all future tokens."""
        lengths = lengths_of(requests)
        if lengths.max() < SHORTEST_SCANNED or len(requests) > self._most_scanned:
            return 0.0
        self._beside = beside
        self._plan(requests, lengths)
        is_new = np.array([request.sequence.sequence_id in self._caches_outside for request in requests])
        taking_in = self._planner.taking_in_seconds(lengths[is_new]) if is_new.any() else 0.0
        num_tokens = sum(request.sequence.num_remaining_tokens for request in requests)
        return num_tokens / (num_tokens / self._rounds.rate + taking_in)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree] | None:
        if not self._are_scanned(requests):
            return None
        lengths = lengths_of(requests)
        if self._num_steps >= (1 if self._planner.is_new else ROUNDS_PER_PLAN):
            self._plan(requests, lengths)
        self._num_steps += 1
        verifying = self._planner.begin(self._rounds, lengths)
        trees = self.chains.propose(requests)
        drawing = (round_.seconds for request in requests for round_ in self.chains.rounds_of(request.sequence))
        self.expected_seconds = verifying + sum(drawing)
        return trees

    def update_all(self, verified: Many[Verified]) -> None:
        self._trees.hear(verified)
        for sequence, verification in verified:
            self.chains.update(sequence, verification)
            for round_ in self.chains.rounds_of(sequence):
                self._trees.sizes.learn(sequence, round_.num_nodes, round_.path)

    def stop(self, sequence: Sequence) -> None:
        if self._caches_outside.pop(sequence.sequence_id, None) is None:
            self.chains.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self._planner.state()

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self._planner.restore(state)

    def _plan(self, requests: list[DraftRequest], lengths: np.ndarray) -> None:
        self._rounds = self._planner.best(lengths, self._trees.sizes.tokens(requests), self._beside)
        self._num_steps = 0

    def _are_scanned(self, requests: list[DraftRequest]) -> bool:
        """Prepare a few more chunks of each text, so that no step waits long; return whether all texts are ready."""
        for request in requests:
            name = request.sequence.sequence_id
            if name in self._caches_outside:  # those that stay short never need room for a partial cache
                self.chains.start(request.sequence, self._caches_outside[name])
                del self._caches_outside[name]
        num_chunks = max(1, CHUNKS_AT_ONCE // len(requests))
        caught_up = [self.chains.catch_up(request.sequence, num_chunks) for request in requests]
        return all(caught_up)
