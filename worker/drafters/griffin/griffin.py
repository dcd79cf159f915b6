"""GRIFFIN (Hu et al. 2025), tuned and as published: a trained layer drafts dynamic trees (EAGLE-2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swiftbatch.jobs.errors import ModelError
from swiftbatch.metrics.counters import timed
from swiftbatch.worker.drafters.choice.choosing_drafter import with_measured
from swiftbatch.worker.drafters.choice.tree_sizes import LEARNING_RATE, PRIOR_STEPS
from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest
from swiftbatch.worker.drafters.engine_options import GriffinOptions
from swiftbatch.worker.drafters.griffin.block_forwards import BlockForwards
from swiftbatch.worker.drafters.griffin.draft_forwards import DraftForwards, GriffinForwards, Level, rows_of
from swiftbatch.worker.drafters.griffin.draft_input import Candidates
from swiftbatch.worker.drafters.griffin.griffin_model import load_block, load_griffin
from swiftbatch.worker.forward.step_costs import Costs, StepCosts
from swiftbatch.worker.forward.target_model import TargetModel
from swiftbatch.worker.forward.tile_packing import max_tree_depth
from swiftbatch.worker.kv.full_cache import FullKVCache
from swiftbatch.worker.sampling.draft_tree import ROOT, DraftTree, Verification
from swiftbatch.worker.sampling.sequence import Sequence

PRIOR_MEANS = (2.5, 8.0, 3.0, 1.5)  # prior of tokens, nodes, levels and expected accepted nodes per step
MAX_TRUST = 4.0  # bound of the factor on a probability
STEP_OVERHEAD = 0.001  # seconds of a step beside its forwards
PRICED_ROWS = (1, 16)  # a row's price is the mean between these numbers of rows


class GrowingTree:
    """Candidate nodes of all levels of a sequence's tree, and which of them are expanded."""

    def __init__(self, sequence: Sequence, max_depth: int, num_expanded: int, prices: TreePrices) -> None:
        """Expand at most `num_expanded` nodes of a level, down to `max_depth`."""
        self.num_levels = 0
        self._sequence = sequence
        self._max_depth = max_depth
        self._width = num_expanded
        self._prices = prices
        self._candidates = DraftTree()
        self._scores: list[float] = []  # log-confidence of each candidate's path
        self._newest: list[int] = []  # candidates of the newest level
        self._expanded = DraftTree()  # candidates that went through the draft model
        self._expanded_as: dict[int, int] = {}  # candidate -> its node there
        self._parents: list[int] = []  # candidates above the next level

    def add_root(self, candidates: Candidates) -> None:
        self._parents = [ROOT]
        self.add_level([candidates])

    def next_level(self) -> Level | None:
        """Return the nodes to expand next, or None if another level would cost more than it brings."""
        if self.num_levels >= self._max_depth:
            return None
        best = sorted(self._newest, key=self._scores.__getitem__, reverse=True)[: self._width]
        self._parents = [node for node in best if self._prices.pays_row(math.exp(self._scores[node]))]
        if not self._prices.pays_level([math.exp(self._scores[node]) for node in self._parents]):
            return None
        first = len(self._expanded)
        for node in self._parents:
            above = self._candidates.parents[node]
            self._expanded_as[node] = len(self._expanded)
            self._expanded.token_ids.append(self._candidates.token_ids[node])
            self._expanded.parents.append(ROOT if above == ROOT else self._expanded_as[above])
        return Level(self._sequence, self._expanded, first)

    def add_level(self, ranked: list[Candidates]) -> None:
        self.num_levels += 1
        self._newest = []
        for parent, children in zip(self._parents, ranked, strict=True):
            above = 0.0 if parent == ROOT else self._scores[parent]
            for score, token_id in children:
                self._newest.append(len(self._scores))
                self._scores.append(above + score)
                self._candidates.token_ids.append(token_id)
                self._candidates.parents.append(parent)

    def best(self, max_nodes: int) -> tuple[DraftTree, float]:
        """Return the most profitable candidates as a tree, and how many of them should be accepted."""
        order = sorted(range(len(self._scores)), key=lambda node: -self._scores[node])[:max_nodes]
        paid = [node for node in order if self._prices.pays_row(math.exp(self._scores[node]))]
        kept = {node: number for number, node in enumerate(paid)}
        parents = [self._candidates.parents[node] for node in paid]
        tree = DraftTree(
            [self._candidates.token_ids[node] for node in paid],
            [ROOT if parent == ROOT else kept[parent] for parent in parents],
        )
        return tree, sum(math.exp(self._scores[node]) for node in paid)


@dataclass(frozen=True)
class TreePrices:
    """Prices of one step, in tokens."""

    row: float
    level: float
    coverage: float  # share of nodes of which a child is the next token
    trust: float = 1.0  # factor on the draft model's probabilities

    def pays_row(self, probability: float) -> bool:
        return self.trust * probability > self.row

    def pays_level(self, probabilities: list[float]) -> bool:
        gains = (self.trust * p * self.coverage - self.row for p in probabilities)
        return sum(max(0.0, gain) for gain in gains) > self.level


EVERYTHING_PAYS = TreePrices(row=-1.0, level=0.0, coverage=1.0)
"""Rows that cost less than nothing: trees are as large as their limits."""


class PricePlanner:
    """Computes prices from measured costs and from running means of the tokens per step."""

    def __init__(self, costs: StepCosts, level_seconds: float) -> None:
        self._costs = costs
        self._level_seconds = level_seconds
        self._means = np.array(PRIOR_MEANS)  # tokens, nodes, levels and expected accepted nodes per step
        self._num_steps = 0

    def prices(self, length: int, num_sequences: int) -> TreePrices:
        tokens, nodes, levels, expected = self._means.tolist()
        costs = self._costs.as_routed()
        forward = costs.forward_seconds(round(nodes) + 1, length, num_sequences)
        level = self._level_seconds / num_sequences  # sequences share the draft model's forwards
        rate = tokens / (forward / num_sequences + levels * level + STEP_OVERHEAD)
        few, many = (costs.forward_seconds(rows, length, num_sequences) for rows in PRICED_ROWS)
        row = (many - few) / (PRICED_ROWS[1] - PRICED_ROWS[0]) / num_sequences
        trust = min(MAX_TRUST, max(1 / MAX_TRUST, (tokens - 1.0) / max(expected, 1e-3)))
        return TreePrices(rate * row, rate * level, coverage=1.0 - 1.0 / tokens, trust=trust)

    def observe(self, num_tokens: int, num_nodes: int, num_levels: int, num_expected: float) -> None:
        """Learn from a step with drafts; `num_expected` nodes were expected to be accepted."""
        self._num_steps += 1
        weight = max(LEARNING_RATE, 1.0 / (PRIOR_STEPS + self._num_steps))
        self._means += weight * (np.array([num_tokens, num_nodes, num_levels, num_expected]) - self._means)

    def state(self) -> dict[str, np.ndarray]:
        return {"griffin_plan": np.array([*self._means, self._num_steps])}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        found = state.get("griffin_plan")
        if found is None or found.shape != (5,) or not (np.isfinite(found) & (found >= 0)).all() or found[0] < 1:
            raise ValueError(f"griffin's plan: found {found}, expected means of a step, steps")
        self._means, self._num_steps = found[:4].copy(), int(found[4])


@dataclass
class _Tracked:
    cache: FullKVCache
    num_levels: int = 0
    num_expected: float = 0.0  # nodes expected to be accepted


def griffin(target: TargetModel, costs: Costs, parts_folder: Path | None, options: GriffinOptions) -> Drafter:
    """Make GRIFFIN's drafter. Raises ModelError without a draft model for this target."""
    sees_all = options.context == "whole"
    if sees_all and target.forwards.arena is not None:
        raise ModelError("engine griffin: context=whole needs layers on a CPU; a GPU keeps a window of the draft layer")
    forwards = forwards_of(parts_folder, target, options.breadth, sees_all)
    planner = None if options.at_every_step else PricePlanner(costs(), forwards.level_seconds())
    drafter = GriffinDrafter(forwards, planner, options)
    return drafter if options.at_every_step else with_measured(drafter, costs)


def forwards_of(
    parts_folder: Path | None, target: TargetModel, breadth: int, sees_all: bool
) -> GriffinForwards | BlockForwards:
    if (block := load_block(parts_folder, target)) is not None:
        if target.forwards.arena is not None:
            raise ModelError("engine griffin: this part drafts whole blocks, which only CPUs do here; use --device cpu")
        return BlockForwards(block, target, breadth, sees_all)
    model = load_griffin(parts_folder, target)
    if target.forwards.arena is not None and model.projection is not None:
        target.read(target.new_cache(1), [0], model.projection.layers)  # graphs are captured before other threads copy
    return GriffinForwards(rows_of(model, target, breadth), target, sees_all, model.projection)


class GriffinDrafter(Drafter):
    """Draft model, planner and limits."""

    needs_hidden = True
    reads_caches = True
    phases = ("follow", "grow")

    def __init__(self, forwards: DraftForwards, planner: PricePlanner | None, options: GriffinOptions) -> None:
        """Without a planner, trees are as large as their limits (the paper's setting)."""
        self._forwards = forwards
        self.feature_layers = forwards.feature_layers
        self._planner = planner
        self._options = options
        self._tracked: dict[str, _Tracked] = {}

    def start(self, sequence: Sequence, cache: FullKVCache) -> None:
        self._forwards.start(sequence, cache)  # it may fail, so it comes first
        self._tracked[sequence.sequence_id] = _Tracked(cache)

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        wanted = [request for request in requests if request.max_nodes > 0 and request.max_depth > 0]
        if not wanted:
            return [self._close(request, None) for request in requests]
        trees = {request.sequence.sequence_id: self._tree(request, len(wanted)) for request in wanted}
        with timed(self.counters.seconds, "follow"):
            followed = self._forwards.follow([request.sequence for request in wanted])
            for tree, candidates in zip(trees.values(), followed, strict=True):
                tree.add_root(candidates)
        with timed(self.counters.seconds, "grow"):
            self._grow(list(trees.values()))
        return [self._close(request, trees.get(request.sequence.sequence_id)) for request in requests]

    def update(self, sequence: Sequence, verification: Verification) -> None:
        tracked, num_new = self._tracked[sequence.sequence_id], len(verification.committed_ids)
        if verification.hidden is not None:
            self._forwards.take(sequence.sequence_id, len(sequence) - num_new - 1, verification.hidden)
        if tracked.num_levels:
            self.counters.num_levels += tracked.num_levels
            if self._planner:
                nodes = verification.num_draft_tokens
                self._planner.observe(num_new, nodes, tracked.num_levels, tracked.num_expected)
        tracked.num_levels = 0

    def stop(self, sequence: Sequence) -> None:
        self._forwards.stop(sequence.sequence_id)
        del self._tracked[sequence.sequence_id]

    def state(self, sequence: Sequence) -> dict[str, np.ndarray]:
        return self._planner.state() if self._planner else {}

    def restore(self, sequence: Sequence, state: dict[str, np.ndarray]) -> None:
        if self._planner:
            self._planner.restore(state)

    def _tree(self, request: DraftRequest, num_sequences: int) -> GrowingTree:
        tracked = self._tracked[request.sequence.sequence_id]
        depth = min(request.max_depth, self._options.max_depth, 1 + max_tree_depth(tracked.cache.length))
        prices = self._planner.prices(tracked.cache.length, num_sequences) if self._planner else EVERYTHING_PAYS
        return GrowingTree(request.sequence, depth, self._options.breadth, prices)

    def _grow(self, trees: list[GrowingTree]) -> None:
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
