"""GRIFFIN (Hu et al. 2025): a trained draft model over the target's features, with dynamic trees."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from swiftbatch.metrics.worker_counters import timed
from swiftbatch.worker.caches.full_cache import FullKVCache
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drafters.tree_budget import LookRhythm
from swiftbatch.worker.drawing.draft_tree import DraftTree
from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.verification import Verification
from swiftbatch.worker.papers.griffin.draft_forwards import DraftForwards, GriffinForwards
from swiftbatch.worker.papers.griffin.griffin_tree import EVERYTHING_PAYS, GrowingTree, PricePlanner
from swiftbatch.worker.target.step_costs import Costs
from swiftbatch.worker.target.target import TargetModel
from swiftbatch.worker.target.tiles import max_tree_depth

LOOK_EVERY = 24  # steps, at first: each look takes in all that was not drafted behind


@dataclass(frozen=True)
class GriffinOptions:
    """Limits of a tree (appendix C.2), and whether they are also its size."""

    max_depth: int = 6
    max_nodes: int = 60
    num_expanded: int = 10  # nodes of a level, and candidates below each
    is_full: bool = False  # False: as many nodes and levels as pay


DEFAULTS = GriffinOptions()


@dataclass
class _Tracked:
    """One sequence, and what was drafted for it last."""

    cache: FullKVCache
    num_levels: int = 0
    num_expected: float = 0.0  # nodes that will be accepted, by their probabilities
    seconds: float = 0.0  # its part of the time that drafting took
    looks: LookRhythm = field(default_factory=lambda: LookRhythm(LOOK_EVERY))


def griffin(
    target: TargetModel, costs: Costs, parts_folder: Path | None, options: GriffinOptions = DEFAULTS
) -> GriffinDrafter:
    """A `DrafterFactory`. Raises ModelError where there is no draft model for this target."""
    from swiftbatch.worker.papers.griffin.draft_rows import rows_of  # needs transformers, whose import takes seconds
    from swiftbatch.worker.papers.griffin.griffin_weights import load_griffin

    rows = rows_of(load_griffin(parts_folder, target), target, options.num_expanded)
    forwards = GriffinForwards(rows, target)
    planner = None if options.is_full else PricePlanner(costs(), forwards.level_seconds())
    return GriffinDrafter(forwards, planner, options)


class GriffinDrafter(Drafter):
    """Draft model, planner and limits; sequences share the draft model's forwards."""

    needs_hidden = True
    reads_caches = True
    phases = ("follow", "grow")

    def __init__(self, forwards: DraftForwards, planner: PricePlanner | None, options: GriffinOptions) -> None:
        """Draft trees that `planner` plans; without one they are as large as their limits (the paper's setting)."""
        self._forwards = forwards
        self._planner = planner
        self._options = options
        self._tracked: dict[str, _Tracked] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._forwards.start(sequence, cache)  # first, since it may fail
        self._tracked[sequence.sequence_id] = _Tracked(cache)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        wanted = [request for request in requests if request.max_nodes > 0 and request.max_depth > 0]
        if not wanted or not self._pays(wanted):
            return [self._close(request, None) for request in requests]
        started = time.perf_counter()
        trees = {request.sequence.sequence_id: self._tree(request, len(wanted)) for request in wanted}
        with timed(self.counters.seconds, "follow"):
            followed = self._forwards.follow([request.sequence for request in wanted])
            for tree, candidates in zip(trees.values(), followed, strict=True):
                tree.add_root(candidates)
        with timed(self.counters.seconds, "grow"):
            self._grow(list(trees.values()))
        for request in wanted:
            tracked = self._tracked[request.sequence.sequence_id]
            tracked.seconds = (time.perf_counter() - started) / len(wanted)
        return [self._close(request, trees.get(request.sequence.sequence_id)) for request in requests]

    def update(self, sequence: Sequence, verification: Verification) -> None:
        tracked, num_new = self._tracked[sequence.sequence_id], len(verification.committed_ids)
        if verification.hidden is not None:
            self._forwards.take(sequence.sequence_id, len(sequence) - num_new - 1, verification.hidden)
        tracked.looks.observe(tracked.num_levels > 0, len(verification.path))
        if tracked.num_levels:
            self.counters.num_levels += tracked.num_levels
            if self._planner:
                nodes = verification.num_draft_tokens
                self._planner.observe(num_new, nodes, tracked.num_levels, tracked.num_expected, tracked.seconds)

    def stop(self, sequence: Sequence) -> None:
        self._forwards.stop(sequence.sequence_id)
        del self._tracked[sequence.sequence_id]

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        """Return what the planner has learned; all else follows from the tokens and is rebuilt from them."""
        tracked = self._tracked.get(sequence.sequence_id)  # None: it has left, and the next one takes its place
        looks = tracked.looks if tracked else LookRhythm(LOOK_EVERY)
        return self._planner.state() | {"griffin_looks": looks.state()} if self._planner else {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        if self._planner:
            looks = LookRhythm(LOOK_EVERY)
            looks.restore(state.get("griffin_looks", np.empty(0)))
            self._planner.restore(state)
            self._tracked[sequence.sequence_id].looks = looks

    def _pays(self, requests: list[DraftRequest]) -> bool:
        if self._planner is None or any(self._tracked[r.sequence.sequence_id].looks.is_due for r in requests):
            return True
        return self._planner.pays([len(request.sequence) - 1 for request in requests], requests[0].overhead)

    def _tree(self, request: DraftRequest, num_sequences: int) -> GrowingTree:
        tracked = self._tracked[request.sequence.sequence_id]
        depth = min(request.max_depth, self._options.max_depth, 1 + max_tree_depth(tracked.cache.length))
        prices = self._planner.prices(tracked.cache.length, num_sequences) if self._planner else EVERYTHING_PAYS
        return GrowingTree(request.sequence, depth, self._options.num_expanded, prices)

    def _grow(self, trees: list[GrowingTree]) -> None:
        """Grow trees level by level, in one forward for all trees that go on."""
        levels = [(tree, level) for tree in trees if (level := tree.next_level()) is not None]
        while levels:
            for (tree, _), ranked in zip(levels, self._forwards.expand([level for _, level in levels]), strict=True):
                tree.add_level(ranked)
            levels = [(tree, level) for tree, _ in levels if (level := tree.next_level()) is not None]

    def _close(self, request: DraftRequest, tree: GrowingTree | None) -> DraftTree:
        tracked = self._tracked[request.sequence.sequence_id]
        tracked.num_levels = 0 if tree is None else tree.num_levels
        if tree is None:
            return DraftTree()
        best, tracked.num_expected = tree.best(min(request.max_nodes, self._options.max_nodes))
        return best
