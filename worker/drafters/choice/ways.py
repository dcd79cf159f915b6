"""Ways to draft: no drafts, trees, chains of the target itself, and any drafter whose gain only trials can tell."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
import torch

from swiftbatch.worker.drafters.choice.rounds import RoundsChoice, RoundsPlanner
from swiftbatch.worker.drafters.choice.tree_sizes import TreeSizes, forward_seconds, lengths_of
from swiftbatch.worker.drafters.drafter_interface import (
    DraftCounters,
    Drafter,
    DraftRequest,
    Learner,
    ReadRows,
    TreeDrafter,
    Verified,
)
from swiftbatch.worker.drafters.self_speculation import Chain, Proposer, RoundPlan, SelfSpeculationDrafter
from swiftbatch.worker.forward.step_costs import StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.kernels.kernel_sizes import TILE_ROWS
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.kv.scan_cache import SHORTEST_SCANNED, ScanKVCache
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence

SAME_LENGTH = 1 / 16  # of a text: it changes a step's time by little
ROUNDS_PER_PLAN = 8  # steps
CHUNKS_AT_ONCE = 128  # most chunks taken in per step, over all texts


class DraftWay(Learner):
    """One way to draft. `update_all` gets the steps that it proposed for, `hear` all others."""

    draft_kind = "tree"
    reads_caches = False  # as `Drafter.reads_caches`
    wants_candidates = False  # it learns from the step that it proposed for
    expected_seconds: float | None = None  # forwards of that step; None if unknown

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        """Start a sequence, as `Drafter.start` does."""

    @abstractmethod
    def promise(self, requests: list[DraftRequest], beside: float) -> float | None:
        """Return the expected tokens per second, summed over sequences; `beside` is a step's time outside forwards.

        Returns 0 if the way can draft nothing now, and None if only a trial can tell.
        """

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[DraftTree] | None:
        """Propose for all sequences of the coming step, or return None if the way is not ready for them yet."""

    def hear(self, verified: Many[Verified]) -> None:
        """Learn from a step that another way proposed for, or from several plain steps."""


class PlainWay(DraftWay):
    """Plain decoding, where several steps may pass in one call."""

    draft_kind = "none"

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._known_for = (0, 0)  # sequences, and the length of the longest, that `expected_seconds` are for

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        self.propose(requests)
        assert self.expected_seconds is not None
        return len(requests) / max(self.expected_seconds + beside, self.expected_seconds / 2)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        number, longest = len(requests), max(len(request.sequence) for request in requests)
        if number != self._known_for[0] or abs(longest - self._known_for[1]) > SAME_LENGTH * longest:
            self._known_for = number, longest  # to ask for it takes a tenth of a short step
            self.expected_seconds = forward_seconds(self._costs.as_routed(), requests, [0] * number)
        return [DraftTree()] * len(requests)


class TreeWay(DraftWay):
    """Trees of a drafter, each of the size with the most tokens per second."""

    def __init__(self, drafter: TreeDrafter, costs: StepCosts) -> None:
        self.drafter, self.sizes = drafter, TreeSizes(costs)
        self.needs_top_k, self.learns_rows = drafter.needs_top_k, drafter.learns_rows
        self._beside = 0.0

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.drafter.start(sequence, cache)

    def promise(self, requests: list[DraftRequest], beside: float) -> float:
        self._beside = beside
        return self.sizes.plan(requests, beside)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.sized(requests, self.sizes.sizes(requests, self._beside))

    def sized(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        """Propose trees of at most these numbers of nodes."""
        self.wants_candidates = self.needs_top_k and any(sizes)
        self.expected_seconds = self.sizes.forward_seconds(requests, sizes)
        given = zip(requests, sizes, strict=True)
        wanted = [(request.sequence, size, request.max_depth) for request, size in given if size]
        trees = iter(self.drafter.trees(wanted) if wanted else ())
        return [next(trees) if size else DraftTree() for size in sizes]

    def update_all(self, verified: Many[Verified]) -> None:
        self.sizes.observe(verified)
        self.drafter.update_all(verified)

    def hear(self, verified: Many[Verified]) -> None:
        self.drafter.update_all(verified)

    def learn(self, rows: ReadRows) -> None:
        self.drafter.learn(rows)

    def stop(self, sequence: Sequence) -> None:
        self.sizes.forget(sequence)
        self.drafter.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.drafter.state(sequence) | {"tree_acceptance": self.sizes.state(sequence)}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        before = self.sizes.state(sequence)
        if "tree_acceptance" in state:
            self.sizes.restore(sequence, state["tree_acceptance"])
        try:
            self.drafter.restore(sequence, state)
        except ValueError:
            self.sizes.restore(sequence, before)
            raise


class MeasuredWay(DraftWay):
    """A drafter that sizes its own drafts; only trials show how much faster it is."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs_hidden, self.reads_caches = drafter.needs_hidden, drafter.reads_caches
        self.feature_layers = drafter.feature_layers
        self.needs_top_k = self.wants_candidates = drafter.needs_top_k
        self.learns_rows = drafter.learns_rows
        self.phases = drafter.phases

    @property
    def draft_kind(self) -> str:  # type: ignore[override]
        return self.drafter.draft_kind

    @property
    def counters(self) -> DraftCounters:
        return self.drafter.counters

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self.drafter.start(sequence, cache)

    def promise(self, requests: list[DraftRequest], beside: float) -> None:
        return None

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.drafter.propose(requests)

    def learn(self, rows: ReadRows) -> None:
        self.drafter.learn(rows)

    def read(self, sequence: Sequence, position: int, hidden: torch.Tensor) -> None:
        self.drafter.read(sequence, position, hidden)

    def update_all(self, verified: Many[Verified]) -> None:
        self.drafter.update_all(verified)

    hear = update_all

    def stop(self, sequence: Sequence) -> None:
        self.drafter.stop(sequence)

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self.drafter.state(sequence)

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        self.drafter.restore(sequence, state)


class PartialCacheWay(MeasuredWay):
    """Chains by one plan, drawn with a partial cache; in texts that this cache holds, trees as large without rounds."""

    def __init__(self, drafter: SelfSpeculationDrafter, plan: RoundPlan) -> None:
        super().__init__(drafter)
        self._drawing, self._plan = drafter, plan

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        budgets = (self._drawing.budget_of(request.sequence.num_prompt_tokens) for request in requests)
        is_short = all(length <= budget for length, budget in zip(lengths_of(requests), budgets, strict=True))
        self._drawing.plan = replace(self._plan, num_rounds=0) if is_short else self._plan
        return self._drawing.propose(requests)


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
    phases = SelfSpeculationDrafter.phases
    wants_candidates = True
    needs_top_k = True

    def __init__(self, target: TargetModel, planner: RoundsPlanner, trees: TreeWay, num_best: int) -> None:
        """`num_best` is the number of keys that a query of a round reads exactly."""
        self._planner, self._trees = planner, trees
        self.chains = SelfSpeculationDrafter(target, RecycledProposer(trees.drafter), ScanKVCache, num_best)
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
        if lengths.max() < SHORTEST_SCANNED:
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
        self.chains.plan = self._rounds.plan()
        trees = self.chains.propose([r._replace(max_nodes=min(r.max_nodes, TILE_ROWS - 1)) for r in requests])
        drawing = (each.seconds for request in requests for each in self.chains.proposed(request.sequence).rounds)
        self.expected_seconds = verifying + sum(drawing)
        return trees

    def update_all(self, verified: Many[Verified]) -> None:
        self._trees.hear(verified)
        for sequence, verification in verified:
            proposed = self.chains.proposed(sequence)
            self.chains.update(sequence, verification)
            self._planner.observe(proposed, verification.proposed_path)
            for round_ in proposed.rounds:
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
