"""Dynamic draft trees (EAGLE-2; GRIFFIN, appendix C.2): level by level below the likeliest nodes, then the best of all.

A node's score is the log-confidence of its whole path, with the coupled noise in it: the noise of the coming positions
is known before anything is drafted.
"""

from __future__ import annotations

import math

import torch

from worker.drafters.griffin.forwards import GriffinOutputs
from worker.drafters.griffin.plan import TreePrices
from worker.drafters.ranking import CandidateRanker
from worker.sampling import TokenSampler
from worker.sequence import Sequence
from worker.tree import ROOT, DraftTree

SPREAD = 0.4  # in logits: the draft model's error, so that scores are about as likely as they say


class GrowingTree:
    """The tree of one sequence while it grows: candidates of all levels, and those that were expanded."""

    def __init__(
        self, sequence: Sequence, sampler: TokenSampler, max_depth: int, num_expanded: int, prices: TreePrices
    ) -> None:
        """At most `num_expanded` nodes of a level are expanded, by as many candidates each, down to `max_depth`."""
        self.sequence = sequence
        self.num_levels = 0
        self._sampler = sampler
        self._ranker = CandidateRanker(sequence, spread=SPREAD)
        self._max_depth = max_depth
        self._width = num_expanded
        self._prices = prices
        self._candidates = DraftTree()
        self._scores: list[float] = []  # log-confidence of each candidate's path
        self._newest: list[int] = []  # candidates of the newest level
        self._expanded = DraftTree()  # candidates that went through the draft model
        self._expanded_as: dict[int, int] = {}  # candidate to its node there
        self._parents: list[int] = []  # candidates that the coming level grows below
        self._regressed: list[torch.Tensor] = []  # [hidden] of each expanded node

    def add_root(self, outputs: GriffinOutputs) -> None:
        """The first level, below the newest token's row."""
        self._root_regressed = outputs.regressed[0]
        self._parents = [ROOT]
        self._grow(outputs)

    def next_level(self) -> tuple[Sequence, DraftTree, int, torch.Tensor] | None:
        """Nodes to expand next, as `GriffinForwards.expand` wants them; None where no further level pays."""
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
        features = [self._feature_above(node) for node in self._parents]
        return self.sequence, self._expanded, first, torch.stack(features)

    def add_level(self, outputs: GriffinOutputs) -> None:
        """Candidates below the nodes that `next_level` gave."""
        self._regressed += outputs.regressed.unbind()
        self._grow(outputs)

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

    def _grow(self, outputs: GriffinOutputs) -> None:
        """Rank what may follow `_parents`, and keep the best as the newest level."""
        self.num_levels += 1
        logits = self._sampler.penalised(outputs.logits)
        ranked = self._ranker.rank_logits(logits, [self.num_levels] * len(logits), self._width)
        self._newest = []
        for parent, children in zip(self._parents, ranked, strict=True):
            above = 0.0 if parent == ROOT else self._scores[parent]
            for score, token_id in children:
                self._newest.append(len(self._scores))
                self._scores.append(above + score)
                self._candidates.token_ids.append(token_id)
                self._candidates.parents.append(parent)

    def _feature_above(self, node: int) -> torch.Tensor:
        """The regressed feature `[hidden]` in front of a candidate's token: its parent's."""
        parent = self._candidates.parents[node]
        return self._root_regressed if parent == ROOT else self._regressed[self._expanded_as[parent]]
