"""Dynamic draft trees (EAGLE-2; GRIFFIN, appendix C.2): level by level below the likeliest nodes, then the best of all.

A node's score is the log-confidence of its whole path, with the coupled noise in it: the noise of the coming positions
is known before anything is drafted.
"""

from __future__ import annotations

import math

from swiftbatch.worker.drawing.sequence import Sequence
from swiftbatch.worker.drawing.tree import ROOT, DraftTree
from swiftbatch.worker.papers.griffin.draft_forwards import Level
from swiftbatch.worker.papers.griffin.level import Candidates
from swiftbatch.worker.papers.griffin.tree_plan import TreePrices


class GrowingTree:
    """The tree of one sequence while it grows: candidates of all levels, and those that were expanded."""

    def __init__(self, sequence: Sequence, max_depth: int, num_expanded: int, prices: TreePrices) -> None:
        """At most `num_expanded` nodes of a level are expanded, down to `max_depth`."""
        self.num_levels = 0
        self._sequence = sequence
        self._max_depth = max_depth
        self._width = num_expanded
        self._prices = prices
        self._candidates = DraftTree()
        self._scores: list[float] = []  # log-confidence of each candidate's path
        self._newest: list[int] = []  # candidates of the newest level
        self._expanded = DraftTree()  # candidates that went through the draft model
        self._expanded_as: dict[int, int] = {}  # candidate to its node there
        self._parents: list[int] = []  # candidates that the coming level grows below

    def add_root(self, candidates: Candidates) -> None:
        """Add the first level: the candidates behind the newest token."""
        self._parents = [ROOT]
        self.add_level([candidates])

    def next_level(self) -> Level | None:
        """Nodes to expand next; None where no further level pays."""
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
        """Add the candidates behind each of the nodes that `next_level` gave."""
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
        """The candidates with the best paths, as a tree: those that pay, at most `max_nodes`.

        Also how many of them will be accepted, by their probabilities.
        """
        order = sorted(range(len(self._scores)), key=lambda node: -self._scores[node])[:max_nodes]
        paid = [node for node in order if self._prices.pays_row(math.exp(self._scores[node]))]
        kept = {node: number for number, node in enumerate(paid)}
        parents = [self._candidates.parents[node] for node in paid]
        tree = DraftTree(
            [self._candidates.token_ids[node] for node in paid],
            [ROOT if parent == ROOT else kept[parent] for parent in parents],
        )
        return tree, sum(math.exp(self._scores[node]) for node in paid)
