"""Drafters of trees of any size, one per sequence."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Many

from swiftbatch.worker.drafters.drafter_interface import Drafter, DraftRequest, WantedTree
from swiftbatch.worker.sampling.draft_tree import DraftTree
from swiftbatch.worker.sampling.sequence import Sequence


class TreeDrafter(Drafter):
    """Proposer of trees up to the allowed size; `choice/` decides which size pays."""

    @abstractmethod
    def tree(self, sequence: Sequence, max_nodes: int, max_depth: int) -> DraftTree:
        """Grow a tree, perhaps empty."""

    def trees(self, wanted: Many[WantedTree]) -> list[DraftTree]:
        return [self.tree(*each) for each in wanted]

    def propose(self, requests: list[DraftRequest]) -> list[DraftTree]:
        return self.trees([(r.sequence, r.max_nodes, r.max_depth) for r in requests])

    def sized_trees(self, requests: list[DraftRequest], sizes: list[int]) -> list[DraftTree]:
        given = zip(requests, sizes, strict=True)
        wanted = [(request.sequence, size, request.max_depth) for request, size in given if size]
        trees = iter(self.trees(wanted) if wanted else ())
        return [next(trees) if size else DraftTree() for size in sizes]
